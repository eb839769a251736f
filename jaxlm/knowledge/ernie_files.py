"""ERNIE of Tsinghua, with the names of its official PyTorch code; Transformers has no class of it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax

from jaxlm.huggingface.bert import ENCODER, FIELDS, MLM_HEAD, NSP_HEAD, read_encoder
from jaxlm.huggingface.family import Fields, Source, to_config
from jaxlm.huggingface.table import Entry, Table, dense, norm
from jaxlm.huggingface.weights import Weights, write_weights
from jaxlm.knowledge.entity_autoencoder import EntityAutoencoder
from jaxlm.knowledge.ernie import Ernie
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.paths import reading
from jaxlm.tokenizers.export import export as export_tokenizer
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.trees import nest
from jaxlm.types import Params

MARKER = "ernie_config.json"
"""File by which a folder of ERNIE is known."""
ENTITY_FIELDS: Fields = {"entity_hidden_size": ("entity_hidden_size", 100), "entity_num_heads": ("entity_num_heads", 4)}
"""Fields that are constants in the official code."""

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
`jaxlm finetune … --init-from` this folder reads them from `--objective.entities`.
"""


def write(folder: Path, objective: EntityAutoencoder, params: Params, tokenizer: Tokenizer) -> None:
    """Write weights, ernie_config.json, the tokenizer (with vocab.txt for a WordPiece one), and a README.md."""
    model = objective.model
    config = to_config(model, FIELDS) | to_config(model, ENTITY_FIELDS) | {"layer_types": layer_types(model)}
    (folder / MARKER).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_weights(folder, table(objective).to_transformers(params))
    export_tokenizer(tokenizer, folder, model.template, model.max_positions)
    if any(piece.startswith("##") for piece in tokenizer.vocabulary.pieces):
        (folder / "vocab.txt").write_text("\n".join(tokenizer.vocabulary.pieces) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(README.format(entities=objective.entities), encoding="utf-8")


def read(folder: Path) -> PretrainedModel:
    """Read a folder that `write` made."""
    weights = Weights(folder)
    with reading(folder / MARKER):
        source = Source(folder, json.loads((folder / MARKER).read_text(encoding="utf-8")), weights.shapes)
        num_text_layers = source.config["layer_types"].count("sim")
        model = Ernie(**read_encoder(source), **source.read(ENTITY_FIELDS), num_text_layers=num_text_layers)
    tokenizer = Tokenizer.load(folder)
    input_format = "next-sentence" if source.has_tensor("seq_relationship.weight") else "document"
    objective = EntityAutoencoder(model=model, input_format=input_format).bind_unchecked(tokenizer.vocabulary)
    shapes = jax.eval_shape(objective.init, jax.random.key(0))
    params = table(objective).from_transformers(weights.shapes, weights.read, shapes, str(folder))
    return PretrainedModel(objective, nest(params), tokenizer)


def layer_types(model: Ernie) -> list[str]:
    """Return the official name of each layer's kind."""
    return ["sim"] * model.num_text_layers + ["mix"] + ["norm"] * model.entity_stack.num_layers


def table(objective: EntityAutoencoder) -> Table:
    """Return the table of the official BertForPreTraining."""
    # Sentence order has no counterpart there.
    pair_head = NSP_HEAD if getattr(objective, "input_format", "") == "next-sentence" else ()
    model, entries = objective.model, [*ENCODER, *MLM_HEAD, *pair_head]
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
    return Table(
        entries=tuple(entries), ties={"cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight"}
    )


def _fusion(ours: str, number: int, layer: int | None) -> list[Entry]:
    """Return the entries of the fusion in layer `number`; `layer` is its index in a stack of ours."""
    theirs = f"bert.encoder.layer.{number}"
    entries = [
        *dense(f"{ours}/mlp/wi", f"{theirs}.intermediate.dense_ent"),
        *dense(f"{ours}/mlp/wo", f"{theirs}.output.dense_ent"),
        *norm(f"{ours}/mlp_norm", f"{theirs}.output.LayerNorm_ent"),
    ]
    return [dataclasses.replace(entry, layer=layer) for entry in entries]
