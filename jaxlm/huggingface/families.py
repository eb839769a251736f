"""The families that can be imported and exported: a new one is its own file and its name here."""

from __future__ import annotations

from typing import Any

from jaxlm.errors import UserError
from jaxlm.huggingface.bert import BERT
from jaxlm.huggingface.electra import ELECTRA
from jaxlm.huggingface.family import Family
from jaxlm.huggingface.gpt2 import GPT2
from jaxlm.huggingface.t5 import T5

FAMILIES: tuple[Family, ...] = (BERT, ELECTRA, GPT2, T5)


def family_of(objective: Any) -> Family:
    """The family that an objective pretrains."""
    for family in FAMILIES:
        if type(objective) is family.objective:
            return family
    raise UserError(f"{type(objective).__name__} has no model in Transformers, so it cannot be exported.")


def family_named(model_type: str, where: str) -> Family:
    """The family of a `model_type` in config.json."""
    for family in FAMILIES:
        if model_type == family.model_type:
            return family
    known = ", ".join(family.model_type for family in FAMILIES)
    raise UserError(f"{where} holds a model of the family {model_type!r}; jaxlm imports these families: {known}.")
