"""TinyBERT in Transformers: BertModel. An import of such a folder is a BERT."""

from __future__ import annotations

import dataclasses

from jaxlm.huggingface import bert
from jaxlm.huggingface.family import TransformersModel, symbol
from jaxlm.huggingface.table import Table
from jaxlm.objectives.layer_distillation import LayerDistillation

TABLE = Table(
    entries=tuple(dataclasses.replace(entry, theirs=entry.theirs.removeprefix("bert.")) for entry in bert.ENCODER),
    private=("projection",),
)


def models(objective: LayerDistillation) -> tuple[TransformersModel]:
    config = bert.encoder_config(objective.model) | {
        "model_type": "bert",
        "pad_token_id": symbol(objective.vocabulary, "pad"),
    }
    return (TransformersModel("BertModel", "AutoModel", config, TABLE, pipeline_tag="feature-extraction"),)


FAMILY = dataclasses.replace(bert.FAMILY, models=models)
