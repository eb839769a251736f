"""ERNIE of Tsinghua, with the names of its official PyTorch code; Transformers has no class of it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from jaxlm.huggingface.bert import ENCODER, FIELDS, MLM_HEAD, NSP_HEAD
from jaxlm.huggingface.family import to_config
from jaxlm.huggingface.table import Entry, Table, dense, norm
from jaxlm.huggingface.weights import write_weights
from jaxlm.models.ernie import Ernie
from jaxlm.objectives.entity_autoencoder import EntityAutoencoder
from jaxlm.tokenizers.export import export as export_tokenizer
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.types import Params

README = """# ERNIE

The parameters have the names of `knowledge_bert/modeling.py` of thunlp/ERNIE, whose entity stream is 100 wide with 4
heads and whose token stream is 768 wide:

```python
from safetensors.torch import load_file
config = modeling.BertConfig.from_json_file("ernie_config.json")
model = modeling.BertForPreTraining(config)
model.load_state_dict(load_file("model.safetensors"), strict=False)  # the output matrix is the word embedding
```

The vectors of the entities are not among them: they are those of the folder `{entities}` of the run.
"""


def write(folder: Path, objective: EntityAutoencoder, params: Params, tokenizer: Tokenizer) -> None:
    """Write weights, ernie_config.json, the tokenizer (with vocab.txt for a WordPiece one), and a README.md."""
    model = objective.model
    config = {key: value for key, value in to_config(model, FIELDS).items() if key != "layer_norm_eps"}
    config["layer_types"] = layer_types(model)
    (folder / "ernie_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_weights(folder, table(objective).to_transformers(params))
    export_tokenizer(tokenizer, folder, model.template, model.max_positions)
    if any(piece.startswith("##") for piece in tokenizer.vocabulary.pieces):
        (folder / "vocab.txt").write_text("\n".join(tokenizer.vocabulary.pieces) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(README.format(entities=objective.entities), encoding="utf-8")


def layer_types(model: Ernie) -> list[str]:
    """Return the official name of each layer's kind."""
    return ["sim"] * model.num_text_layers + ["mix"] + ["norm"] * model.entity_stack.num_layers


def table(objective: EntityAutoencoder) -> Table:
    """Return the table of the official BertForPreTraining."""
    model, entries = objective.model, [*ENCODER, *MLM_HEAD, *(NSP_HEAD if objective.pair_task else ())]
    entries += _fusion("entity_encoder/first", model.num_text_layers, None)
    for layer in range(model.entity_stack.num_layers):
        number = model.num_text_layers + 1 + layer
        ours, theirs = "entity_encoder/layers", f"bert.encoder.layer.{number}.attention"
        attention = [
            *(entry for name in ("query", "key", "value")
              for entry in dense(f"{ours}/attention/{name}", f"{theirs}.self_ent.{name}")),
            *dense(f"{ours}/attention/out", f"{theirs}.output_ent.dense"),
            *norm(f"{ours}/attention_norm", f"{theirs}.output_ent.LayerNorm"),
        ]
        entries += [dataclasses.replace(entry, layer=layer) for entry in attention]
        entries += _fusion(ours, number, layer)
    entries += dense("entity_head/dense", "cls.predictions_ent.transform.dense")
    entries += norm("entity_head/norm", "cls.predictions_ent.transform.LayerNorm")
    return Table(entries=tuple(entries))


def _fusion(ours: str, number: int, layer: int | None) -> list[Entry]:
    """Return the entries of the fusion in layer `number`; `layer` is its index in a stack of ours."""
    theirs = f"bert.encoder.layer.{number}"
    entries = [
        *dense(f"{ours}/mlp/wi", f"{theirs}.intermediate.dense_ent"),
        *dense(f"{ours}/mlp/wo", f"{theirs}.output.dense_ent"),
        *norm(f"{ours}/mlp_norm", f"{theirs}.output.LayerNorm_ent"),
    ]
    return [dataclasses.replace(entry, layer=layer) for entry in entries]
