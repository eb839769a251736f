"""T5 in Transformers: T5ForConditionalGeneration (1.0 and 1.1), T5Model.

An mT5 is a T5 1.1 with another vocabulary; it is imported, and exported as a T5.
"""

from __future__ import annotations

import dataclasses

from jaxlm.errors import UserError
from jaxlm.huggingface.family import Family, Fields, Source, TransformersModel, to_config, token_id
from jaxlm.huggingface.table import Entry, Table, dense, embedding, norm
from jaxlm.models.t5 import T5
from jaxlm.objectives.span_corruption import EncoderDecoderLM, SpanCorruption

FIELDS: Fields = {
    "vocab_size": ("vocab_size", 32128),
    "hidden_size": ("d_model", 512),
    "num_layers": ("num_layers", 6),
    "num_heads": ("num_heads", 8),
    "head_dim": ("d_kv", 64),
    "intermediate_size": ("d_ff", 2048),
    "relative_buckets": ("relative_attention_num_buckets", 32),
    "relative_max_distance": ("relative_attention_max_distance", 128),
    "dropout": ("dropout_rate", 0.1),
    "norm_eps": ("layer_norm_epsilon", 1e-6),
}
MT5_DEFAULTS = {"vocab_size": 250112, "num_layers": 8, "num_heads": 6, "d_ff": 1024, "feed_forward_proj": "gated-gelu"}
"""Defaults of MT5Config that differ from those of T5Config."""
ACTIVATIONS = ("relu", "gelu", "gelu_new", "silu", "gated-gelu")


def _attention(ours: str, theirs: str) -> tuple[Entry, ...]:
    """Return the entries of an attention module."""
    names = {"query": "q", "key": "k", "value": "v", "out": "o"}
    return tuple(e for name, short in names.items() for e in dense(f"{ours}/{name}", f"{theirs}.{short}", bias=False))


def _stack(name: str, matrices: tuple[str, ...], cross: bool) -> tuple[Entry, ...]:
    """Return the entries of the encoder or the decoder."""
    ours, theirs, mlp = f"{name}/layers", f"{name}.block.{{layer}}.layer", 2 if cross else 1
    cross_attention = (
        *_attention(f"{ours}/cross_attention", f"{theirs}.1.EncDecAttention"),
        *norm(f"{ours}/cross_attention_norm", f"{theirs}.1.layer_norm", bias=False),
    )
    return (
        *_attention(f"{ours}/attention", f"{theirs}.0.SelfAttention"),
        *norm(f"{ours}/attention_norm", f"{theirs}.0.layer_norm", bias=False),
        *(cross_attention if cross else ()),
        *(entry for matrix in matrices
          for entry in dense(f"{ours}/mlp/{matrix}", f"{theirs}.{mlp}.DenseReluDense.{matrix}", bias=False)),
        *norm(f"{ours}/mlp_norm", f"{theirs}.{mlp}.layer_norm", bias=False),
        *embedding(f"{name}_bias", f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias"),
        *norm(f"{name}/final_norm", f"{name}.final_layer_norm", bias=False),
    )


def table(model: T5) -> Table:
    """Return the table of T5ForConditionalGeneration."""
    matrices = ("wi_0", "wi_1", "wo") if model.activation.startswith("gated") else ("wi", "wo")
    tied = ("encoder.embed_tokens", "decoder.embed_tokens", *(("lm_head",) if model.tied_head else ()))
    return Table(
        entries=(
            *embedding("shared", "shared"),
            *_stack("encoder", matrices, cross=False),
            *_stack("decoder", matrices, cross=True),
            *(() if model.tied_head else dense("lm_head", "lm_head", bias=False)),
        ),
        ties={f"{name}.weight": "shared.weight" for name in tied},
        # The first checkpoints have a relative bias of cross-attention that their own code never reads.
        ignored=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
        optional=("lm_head",),
    )


def models(objective: EncoderDecoderLM) -> tuple[TransformersModel]:
    """Return the Transformers model that the objective's parameters fill."""
    m, v = objective.model, objective.vocabulary
    ids = {"pad_token_id": token_id(v, "pad"), "eos_token_id": token_id(v, "eos"),
           "decoder_start_token_id": token_id(v, "pad") if m.start_id is None else m.start_id}
    config = to_config(m, FIELDS) | ids | {
        "model_type": "t5",
        "is_encoder_decoder": True,
        "num_decoder_layers": m.decoder_layers,
        "feed_forward_proj": m.activation,
        # Transformers reads this as "scale the decoder's output", and shares the head if the file has none.
        "tie_word_embeddings": m.scaled_head,
    }
    return (
        TransformersModel(
            "T5ForConditionalGeneration", "AutoModelForSeq2SeqLM", config, table(m), generation_config=ids,
            pipeline_tag="text2text-generation",
        ),
    )


def read_objective(source: Source) -> SpanCorruption:
    """Read span corruption with a T5."""
    source.require(feed_forward_proj=ACTIVATIONS)
    if not any("decoder." in name for name in source.names):
        raise UserError(f"{source.folder} has the encoder of a T5 alone, and jaxlm reads only a whole T5.")
    config, fields = source.config, source.read(FIELDS)
    # Transformers 5 saves this flag under its own name, and "tie_word_embeddings": true for any head.
    is_scaled = bool(config.get("scale_decoder_outputs", config.get("tie_word_embeddings") is not False))
    architecture = next(iter(config.get("architectures") or [""]))
    is_headless = architecture.removeprefix("M") == "T5Model"
    decoder_layers = source.value("num_decoder_layers", fields["num_layers"])
    padding = source.value("pad_token_id", 0)
    start = source.value("decoder_start_token_id", padding)
    return SpanCorruption(model=T5(
        **fields,
        num_decoder_layers=None if decoder_layers == fields["num_layers"] else decoder_layers,
        activation=config.get("feed_forward_proj") or "relu",
        tied_head=is_scaled or not (is_headless or source.has_tensor("lm_head.weight")),
        scaled_head=is_scaled,
        attention_dropout=fields["dropout"],
        start_id=None if start == padding else start,
    ))


def read_mt5(source: Source) -> SpanCorruption:
    """Read span corruption with an mT5, whose class never scales the decoder's output."""
    config = {**MT5_DEFAULTS, **source.config, "scale_decoder_outputs": False}
    return read_objective(dataclasses.replace(source, config=config))


FAMILY = Family("t5", models, read_objective)
IMPORT_ONLY = (Family("mt5", models, read_mt5),)
