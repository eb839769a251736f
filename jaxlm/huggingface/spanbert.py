"""SpanBERT's names in Transformers: BertForMaskedLM's, which has no place for the head of the span boundary objective.

A folder of this model_type is imported as BERT, with which `--init-from` begins a SpanBERT, too.
"""

from __future__ import annotations

import dataclasses

from jaxlm.huggingface import bert
from jaxlm.huggingface.bert import encoder_config
from jaxlm.huggingface.family import TransformersModel, symbol
from jaxlm.objectives.span_boundary import SpanBoundary

TABLE = dataclasses.replace(bert.table(next_sentence=False), private=("sbo_head",))


def models(objective: SpanBoundary) -> tuple[TransformersModel]:
    config = encoder_config(objective.model) | {
        "model_type": "bert",
        "pad_token_id": symbol(objective.vocabulary, "pad"),
    }
    return (TransformersModel("BertForMaskedLM", "AutoModelForMaskedLM", config, TABLE),)


FAMILY = dataclasses.replace(bert.FAMILY, models=models)
