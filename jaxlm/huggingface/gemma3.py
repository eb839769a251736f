"""Gemma 3 of text in Transformers: Gemma3ForCausalLM, Gemma3TextForSequenceClassification."""

from __future__ import annotations

import dataclasses

from jaxlm.errors import UserError
from jaxlm.huggingface import llama
from jaxlm.huggingface.family import Family, Fields, Head, Source, TransformersModel
from jaxlm.huggingface.modernbert import KINDS, read_period
from jaxlm.huggingface.modernbert import layer_types as layer_types_of
from jaxlm.models.llama import Gemma3

BOTH, WINDOW = "use_bidirectional_attention", "sliding_window"
FIELDS: Fields = llama.fields(262_208, 2304, 9216, 26, 8, 131_072) | llama.ATTENTION_BIAS | {
    "activation": ("hidden_activation", "gelu_new"), "tied_head": ("tie_word_embeddings", True),
    "score_width": ("query_pre_attn_scalar", 256), "window": (WINDOW, 4096),
}
FULL, LOCAL = KINDS
GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0


def models(objective: llama.Pretraining) -> tuple[TransformersModel]:
    """Return the Transformers model that the objective's parameters fill."""
    m = objective.model
    values = llama.config("gemma3_text", m, FIELDS)
    ropes = {FULL: values["rope_parameters"], LOCAL: {"rope_type": "default", "rope_theta": m.local_theta}}
    types = layer_types_of(m.num_layers, m.global_period, m.global_period - 1)
    values |= {"rope_parameters": ropes, "rope_local_base_freq": m.local_theta, "layer_types": types}
    if m.activation == "gelu_new":
        values["hidden_activation"] = "gelu_pytorch_tanh"  # the name that other readers of Gemma know
    # Other readers of Gemma know this key, too. It halves the window.
    return llama.decoder(objective, "Gemma3", values, llama.table(m), {BOTH: True, WINDOW: 2 * m.window})


def read_objective(source: Source) -> llama.Pretraining:
    """Read causal or masked language modelling with a Gemma 3, whose class ignores attn_logit_softcapping."""
    source.require(final_logit_softcapping=None, use_bidirectional_attention=(True, False))
    ropes = source.config.get("rope_parameters") or {}
    full, local = (Source(source.folder, ropes.get(kind) or {}, ()) for kind in KINDS)
    local.require(rope_type="default")
    # rope_scaling changes full attention only, and what it does not have stays.
    merged = {**full.config, **(source.config.get("rope_scaling") or {})}
    flat = {"rope_parameters": merged, "rope_scaling": None, "rope_theta": source.value("rope_theta", GLOBAL_THETA)}
    is_causal, is_halved = source.config.get("is_causal", True), source.config.get(BOTH)
    flat |= {"is_causal": is_causal and not is_halved}
    flat_source = dataclasses.replace(source, config={**source.config, **flat})
    fields = llama.read_model(flat_source, FIELDS, kv_heads=4, head_dim=256)
    if is_halved and fields["window"] % 2:
        raise UserError(f"{source.folder / 'config.json'}: {WINDOW} is {fields['window']}, which {BOTH} halves; give "
                        "an even number.")
    if is_halved:  # distances stay below half of it and 1; with `is_causal` false, too, they may reach that
        fields["window"] = fields["window"] // 2 + (not is_causal)
    theta = local.value("rope_theta", source.value("rope_local_base_freq", LOCAL_THETA))
    period = read_period(source, "sliding_window_pattern", 6, fields["num_layers"], from_end=True)
    return llama.objective_of(flat_source, Gemma3(**fields, local_theta=theta, global_period=period))


FAMILY = Family("gemma3_text", models, read_objective, {
    "SequenceClassification": Head("Gemma3TextForSequenceClassification", "score"),
})
