"""XLM-R in Transformers: XLMRobertaForMaskedLM, XLMRobertaModel. Its tensors are named like RoBERTa's."""

from __future__ import annotations

import dataclasses

from jaxlm.huggingface import roberta
from jaxlm.huggingface.family import Family, Source, TransformersModel
from jaxlm.models.xlm_roberta import XlmRoberta
from jaxlm.objectives.masked_lm import MaskedLM


def models(objective: MaskedLM) -> tuple[TransformersModel]:
    """Return the Transformers model that the objective's parameters fill."""
    (model,) = roberta.models(objective)
    config = {**model.config, "model_type": "xlm-roberta"}
    return (dataclasses.replace(model, architecture="XLMRobertaForMaskedLM", config=config),)


def read_objective(source: Source) -> MaskedLM:
    """Read masked language modelling with an XLM-R."""
    objective = roberta.read_objective(source)
    return dataclasses.replace(objective, model=XlmRoberta(**vars(objective.model)))


FAMILY = Family("xlm-roberta", models, read_objective, roberta.successor_heads("XLMRoberta"))
