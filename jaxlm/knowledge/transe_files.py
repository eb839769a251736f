"""Vectors of a knowledge graph in the form of OpenKE: names, text and safetensors (`knowledge_graph`)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from jaxlm.errors import UserError
from jaxlm.knowledge.graph_tokenizer import graph_names, graph_tokenizer
from jaxlm.knowledge.knowledge_graph import Vectors, read_vectors, write_vectors
from jaxlm.knowledge.transe import TransE
from jaxlm.knowledge.triple_ranking import TripleRanking
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.paths import reading
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.types import Params

MARKER = "entity2id.txt"
"""File by which a folder of vectors is known."""
SETTINGS_FILE, SETTINGS = "transe.json", ("distance", "normalize")
"""File with fields of the model that the vectors do not show; a published folder lacks it."""
README = """# Vectors of a knowledge graph

{entities:,} entities and {relations:,} relations, {width} numbers each: head + relation is near tail by {distance}
distance. `entity2id.txt` and `relation2id.txt` have their names (the count, then name, tab, id), `entity2vec.vec` and
`relation2vec.vec` their vectors as text, one a line, and `vectors.safetensors` the same in binary:

```python
from safetensors.numpy import load_file
vectors = load_file("vectors.safetensors")["entity"]
```

`transe.json` has the distance, and which vectors are scaled to length 1. `jaxlm pretrain configs/transe.py --init-from`
this folder begins from them.
"""


def write(folder: Path, objective: TripleRanking, params: Params, tokenizer: Tokenizer) -> None:
    """Write the vectors of entities and relations, scaled as the model reads them, and a README.md."""
    entities, relations = graph_names(tokenizer.vocabulary)
    model = objective.model
    write_vectors(folder, "entity", Vectors(entities, np.asarray(model.entities(params))))
    write_vectors(folder, "relation", Vectors(relations, np.asarray(model.relations(params))))
    settings = {name: getattr(model, name) for name in SETTINGS}
    (folder / SETTINGS_FILE).write_text(json.dumps(settings) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(README.format(
        entities=len(entities), relations=len(relations), width=model.width, distance=model.distance.upper(),
    ), encoding="utf-8")


def read(folder: Path) -> PretrainedModel:
    """Read a folder of vectors, published or written by `write`."""
    entities, relations = read_vectors(folder, "entity"), read_vectors(folder, "relation")
    width = entities.vectors.shape[1]
    if relations.vectors.shape[1] != width:
        raise UserError(
            f"{folder} has entities of width {width} and relations of width {relations.vectors.shape[1]}; TransE needs "
            "the same width for both."
        )
    settings = {}
    if (folder / SETTINGS_FILE).is_file():
        with reading(folder / SETTINGS_FILE):
            settings = {name: json.loads((folder / SETTINGS_FILE).read_text("utf-8"))[name] for name in SETTINGS}
    tokenizer = graph_tokenizer(entities.names, relations.names)
    model = TransE(
        num_entities=len(entities.names), num_relations=len(relations.names), hidden_size=width, **settings
    )
    params = {"entity": {"embedding": entities.vectors}, "relation": {"embedding": relations.vectors}}
    return PretrainedModel(TripleRanking(model).bind_unchecked(tokenizer.vocabulary), params, tokenizer)
