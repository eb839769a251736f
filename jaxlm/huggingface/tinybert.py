"""TinyBERT in Transformers: BertModel. Such a folder is imported as a BERT."""

from __future__ import annotations

import dataclasses

from jaxlm.huggingface import bert
from jaxlm.huggingface.family import TransformersModel
from jaxlm.huggingface.table import Table
from jaxlm.objectives.layer_distillation import LayerDistillation

TABLE = Table(
    entries=tuple(dataclasses.replace(entry, theirs=entry.theirs.removeprefix("bert.")) for entry in bert.ENCODER),
    private=("projection",),
)


def models(objective: LayerDistillation) -> tuple[TransformersModel]:
    """Return the Transformers model that the objective's parameters fill."""
    config = bert.encoder_config("bert", objective.model, objective.vocabulary)
    return (TransformersModel("BertModel", "AutoModel", config, TABLE, pipeline_tag="feature-extraction"),)


FAMILY = dataclasses.replace(bert.FAMILY, models=models)
