"""SpanBERT in Transformers: BertForMaskedLM, which has no span boundary head.

A folder of this model_type is imported as a BERT, from which `--init-from` can also initialize a SpanBERT.
"""

from __future__ import annotations

import dataclasses

from jaxlm.huggingface import bert
from jaxlm.huggingface.family import TransformersModel
from jaxlm.objectives.span_boundary import SpanBoundary

TABLE = dataclasses.replace(bert.table(next_sentence=False), private=("sbo_head",))


def models(objective: SpanBoundary) -> tuple[TransformersModel]:
    """Return the Transformers model that the objective's parameters fill."""
    config = bert.encoder_config("bert", objective.model, objective.vocabulary)
    return (TransformersModel("BertForMaskedLM", "AutoModelForMaskedLM", config, TABLE),)


FAMILY = dataclasses.replace(bert.FAMILY, models=models)
