"""Llama, Qwen 3 and Mistral in Transformers: LlamaForCausalLM, …ForSequenceClassification, …ForTokenClassification.

`eurobert` and `gemma3` share the table and most keys of config.json.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxlm.errors import UserError
from jaxlm.huggingface.family import Family, Fields, Head, Source, TransformersModel, to_config, token_id
from jaxlm.huggingface.table import Table, dense, embedding, norm
from jaxlm.models.base import Model
from jaxlm.models.llama import Llama, LlamaEncoder, Mistral, Qwen3
from jaxlm.objectives.causal_lm import CausalLM
from jaxlm.objectives.masked_lm import MaskedLM

Pretraining = CausalLM | MaskedLM
ROPE_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
"""Keys of `LlamaEncoder.rope_scaling` in rope_parameters."""
PARTIAL = "partial_rotary_factor"
HEADS = ("SequenceClassification", "TokenClassification")


def fields(vocab: int, width: int, inner: int, layers: int, heads: int, positions: int, eps: float = 1e-6) -> Fields:
    """Return the fields that all families share, given the defaults of a class."""
    return {
        "vocab_size": ("vocab_size", vocab), "hidden_size": ("hidden_size", width),
        "intermediate_size": ("intermediate_size", inner), "num_layers": ("num_hidden_layers", layers),
        "num_heads": ("num_attention_heads", heads), "max_positions": ("max_position_embeddings", positions),
        "norm_eps": ("rms_norm_eps", eps), "activation": ("hidden_act", "silu"),
        "init_std": ("initializer_range", 0.02), "attention_dropout": ("attention_dropout", 0.0),
        "tied_head": ("tie_word_embeddings", False),
    }


BOTH = {"is_causal": False}
ATTENTION_BIAS: Fields = {"attention_bias": ("attention_bias", False)}
LLAMA = fields(32000, 4096, 11008, 32, 32, 2048) | ATTENTION_BIAS | {"mlp_bias": ("mlp_bias", False)}
QWEN3 = fields(151936, 4096, 22016, 32, 32, 32768) | ATTENTION_BIAS
MISTRAL = fields(32000, 4096, 14336, 32, 32, 131072) | {"window": ("sliding_window", 4096)}


def table(model: LlamaEncoder) -> Table:
    """Return the table of a class with Llama's layers."""
    layers, theirs, has_bias = "encoder/layers", "model.layers.{layer}", model.stack.has_bias
    attention = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "o_proj"}
    mlp = {"wi_0": "gate_proj", "wi_1": "up_proj", "wo": "down_proj"}  # the first one is activated
    head_norms = {"query_norm": "q_norm", "key_norm": "k_norm"} if model.has_query_norm else {}
    names = [(ours, f"attention/{ours}", f"self_attn.{name}") for ours, name in attention.items()]
    names += [(ours, f"mlp/{ours}", f"mlp.{name}") for ours, name in mlp.items()]
    norms = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    if model.stack.norm_placement == "both":
        norms |= {"attention_out_norm": "post_attention_layernorm", "mlp_norm": "pre_feedforward_layernorm",
                  "mlp_out_norm": "post_feedforward_layernorm"}
    norms |= {f"attention/{ours}": f"self_attn.{name}" for ours, name in head_norms.items()}
    return Table(
        entries=(
            *embedding("embeddings/word", "model.embed_tokens"),
            *(entry for name, ours, other in names
              for entry in dense(f"{layers}/{ours}", f"{theirs}.{other}", bias=has_bias(name))),
            *(entry for ours, other in norms.items()
              for entry in norm(f"{layers}/{ours}", f"{theirs}.{other}", bias=False)),
            *norm("encoder/final_norm", "model.norm", bias=False),
            *(() if model.tied_head else dense("lm_head", "lm_head", bias=False)),
        ),
        prefix="model.",
        ties={"lm_head.weight": "model.embed_tokens.weight"} if model.tied_head else {},
        # Stored by old versions.
        ignored=tuple(f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(model.num_layers)),
        optional=("lm_head",),
    )


def config(model_type: str, model: LlamaEncoder, own: Fields) -> dict[str, Any]:
    """Return the config.json of a model of a family, whose keys are those of the fields `own`."""
    for name in ("attention_bias", "mlp_bias"):
        if getattr(model, name) and name not in own:
            raise UserError(f"objective.model.{name} has no counterpart in Transformers' {model_type}; only a model "
                            "without it can be exported.")
    rope = dict(zip(ROPE_NUMBERS, model.rope_scaling, strict=False))
    if len(rope) > 1:
        rope["original_max_position_embeddings"] = int(rope["original_max_position_embeddings"])
    kind = {0: "default", 1: "linear", 4: "llama3"}[len(rope)]
    # `rope_theta` and `rope_scaling` are for Transformers 4, which reads no `rope_parameters`.
    return to_config(model, own) | {
        "model_type": model_type, "num_key_value_heads": model.num_kv_heads, "head_dim": model.head_dim,
        "rope_parameters": {"rope_type": kind, "rope_theta": model.rope_theta, **rope},
        "rope_theta": model.rope_theta, "rope_scaling": {"rope_type": kind, **rope} if rope else None,
    }


def read_model(source: Source, own: Fields, kv_heads: int | None = None, head_dim: int | None = None) -> dict[str, Any]:
    """Read the fields of `LlamaEncoder`; `kv_heads` and `head_dim` are the class's defaults for missing keys.

    Without them there are as many heads of each kind, which divide the width. A null means the same.
    """
    found = source.read(own)
    heads = {"num_key_value_heads": kv_heads, "head_dim": head_dim}
    ratio = {"num_key_value_heads": found["num_heads"], "head_dim": found["hidden_size"] // found["num_heads"]}
    missing = {key: number for key, number in heads.items() if number and key not in source.config}
    kv, width = (source.value(key, missing.get(key, ratio[key])) for key in heads)
    return found | {"num_kv_heads": kv, "head_dim": width} | _read_rope(source, found["max_positions"])


def _read_rope(source: Source, positions: int) -> dict[str, Any]:
    """Read base and scaling of rotary positions, from new or old keys; rope_scaling replaces rope_parameters."""
    key = "rope_scaling" if source.config.get("rope_scaling") else "rope_parameters"
    rope = source.config.get(key) or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    sizes = {"default": 0, "linear": 1, "llama3": 4}
    share = rope.get(PARTIAL, source.config.get(PARTIAL))
    # The classes ignore a share of the head without scaling.
    if kind not in sizes or any(isinstance(value, dict) for value in rope.values()) or (
            sizes[kind] and share not in (None, 1)):
        raise UserError(
            f"{source.folder / 'config.json'}: {key} is {rope}{f' and {PARTIAL} {share}' if share else ''}; jaxlm "
            f"supports one dictionary with the rope_type {', '.join(sizes)}, for whole heads."
        )
    numbers = Source(source.folder, rope | {
        name: source.config[name] for name in ROPE_NUMBERS[3:] if source.config.get(name)}, ())
    names = ROPE_NUMBERS[: sizes[kind]]
    if absent := [name for name in names[:3] if rope.get(name) is None]:
        raise UserError(f"{source.folder / 'config.json'}: {key} of type {kind} lacks {', '.join(absent)}; add it.")
    scaling = tuple(float(numbers.value(name, float(positions))) for name in names)
    return {"rope_theta": numbers.value("rope_theta", source.value("rope_theta", 10_000.0)), "rope_scaling": scaling}


def decoder(
    objective: Pretraining, name: str, values: Mapping[str, Any], table: Table, both: Mapping[str, Any] = BOTH
) -> tuple[TransformersModel]:
    """Return the Transformers model of a decoder with the class NAMEForCausalLM, whose config.json has `values`.

    With bidirectional attention it also has the keys `both`.
    """
    ids = {f"{role}_token_id": token_id(objective.vocabulary, role) for role in ("bos", "eos", "pad")}
    parts = f"{name}ForCausalLM", "AutoModelForCausalLM", ids | {**values}, table
    if objective.model.is_causal:
        return (TransformersModel(*parts, generation_config=ids, pipeline_tag="text-generation"),)
    remark = "Its attention is bidirectional, so that it generates no text, and predicts masked tokens."
    model = TransformersModel(*parts, pipeline_tag="feature-extraction", remark=remark)
    return (dataclasses.replace(model, config=model.config | both),)


def objective_of(source: Source, model: Model) -> Pretraining:
    """Return the objective of a decoder in the direction of its config.json, where a null means bidirectional."""
    model = dataclasses.replace(model, is_causal=bool(source.config.get("is_causal", True)))
    return CausalLM(model=model) if model.is_causal else MaskedLM(model=model, mask_rate=0.2, input_format="document")


def heads(name: str, classifier: str = "score") -> dict[str, Head]:
    """Return the heads of the fine-tuned classes of a decoder."""
    return {task: Head(f"{name}For{task}", classifier) for task in HEADS}


def _family(kind: type[LlamaEncoder], own: Fields, **defaults: int) -> Family:
    """Return the family of the decoders of a class, with its fields `own` and the defaults of `read_model`."""
    name = kind.__name__

    def models(objective: Pretraining) -> tuple[TransformersModel]:
        values = config(name.lower(), objective.model, own)
        return decoder(objective, name, values, table(objective.model))

    def read_objective(source: Source) -> Pretraining:
        found = read_model(source, own, **defaults)
        if kind is Qwen3:  # whose layers all attend to all tokens before
            source.require(use_sliding_window=False, layer_types=["full_attention"] * found["num_layers"])
        if kind is Mistral and source.config.get("sliding_window", 4096) is None:  # null: attention to all tokens
            found["window"] = None
        return objective_of(source, kind(**found))

    return Family(name.lower(), models, read_objective, heads(name))


FAMILY = {
    Llama: _family(Llama, LLAMA), Qwen3: _family(Qwen3, QWEN3, kv_heads=32, head_dim=128),
    Mistral: _family(Mistral, MISTRAL, kv_heads=8),
}
