"""Qwen 3 in Transformers: Qwen3ForCausalLM, …ForSequenceClassification, …ForTokenClassification."""

from __future__ import annotations

from jaxlm.huggingface import llama
from jaxlm.huggingface.family import Family, Source, TransformersModel
from jaxlm.models.llama import Qwen3

FIELDS = llama.fields(151936, 4096, 22016, 32, 32, 32768) | llama.ATTENTION_BIAS


def models(objective: llama.Pretraining) -> tuple[TransformersModel]:
    """Return the Transformers model that the objective's parameters fill."""
    m = objective.model
    return llama.decoder(objective, "Qwen3", llama.config("qwen3", m, FIELDS), llama.table(m))


def read_objective(source: Source) -> llama.Pretraining:
    """Read causal or masked language modelling with a Qwen 3, whose layers all attend to all tokens before."""
    fields = llama.read_model(source, FIELDS, kv_heads=32, head_dim=128)
    source.require(use_sliding_window=False, layer_types=["full_attention"] * fields["num_layers"])
    return llama.objective_of(source, Qwen3(**fields))


FAMILY = Family("qwen3", models, read_objective, llama.heads("Qwen3"))
