"""Mistral in Transformers: MistralForCausalLM, …ForSequenceClassification, …ForTokenClassification."""

from __future__ import annotations

from jaxlm.huggingface import llama
from jaxlm.huggingface.family import Family, Source, TransformersModel
from jaxlm.models.llama import Mistral

FIELDS = llama.fields(32000, 4096, 14336, 32, 32, 131072)
WINDOW = "sliding_window"


def models(objective: llama.Pretraining) -> tuple[TransformersModel]:
    """Return the Transformers model that the objective's parameters fill."""
    m = objective.model
    values = llama.config("mistral", m, FIELDS) | {WINDOW: m.window}
    return llama.decoder(objective, "Mistral", values, llama.table(m))


def read_objective(source: Source) -> llama.Pretraining:
    """Read causal or masked language modelling with a Mistral; a null window means attention to all tokens."""
    has_window = source.config.get(WINDOW, 4096) is not None
    window = source.value(WINDOW, 4096) if has_window else None
    return llama.objective_of(source, Mistral(**llama.read_model(source, FIELDS, kv_heads=8), window=window))


FAMILY = Family("mistral", models, read_objective, llama.heads("Mistral"))
