"""GPT-2, and GPT-3 without banded attention, in Transformers: GPT2LMHeadModel.

Its Conv1D matrices are [in, out] like ours, so none is transposed; query, key and value are one matrix.
"""

from __future__ import annotations

from typing import Any

from jaxlm.errors import UserError
from jaxlm.huggingface.family import Family, Fields, Head, Source, TransformersModel, to_config, token_id
from jaxlm.huggingface.table import Entry, Table, embedding, norm
from jaxlm.models.gpt2 import Gpt2
from jaxlm.objectives.causal_lm import CausalLM

FIELDS: Fields = {
    "vocab_size": ("vocab_size", 50257),
    "hidden_size": ("n_embd", 768),
    "num_layers": ("n_layer", 12),
    "num_heads": ("n_head", 12),
    "max_positions": ("n_positions", 1024),
    "dropout": ("resid_pdrop", 0.1),
    "attention_dropout": ("attn_pdrop", 0.1),
    "norm_eps": ("layer_norm_epsilon", 1e-5),
    "init_std": ("initializer_range", 0.02),
}
"""Fields shared with GPT-1."""
ACTIVATION: Fields = {"activation": ("activation_function", "gelu_new")}


def conv1d(ours: tuple[str, ...], theirs: str) -> tuple[Entry, ...]:
    """Return the entries of a Conv1D that joins several of our dense layers along their outputs."""
    return tuple(
        Entry(tuple(f"{path}/{mine}" for path in ours), f"{theirs}.{name}")
        for mine, name in (("kernel", "weight"), ("bias", "bias"))
    )


def layers(theirs: str) -> tuple[Entry, ...]:
    """Return the entries of the layers, shared with GPT-1."""
    attention = "decoder/layers/attention"
    return (
        *norm("decoder/layers/attention_norm", f"{theirs}.ln_1"),
        *conv1d((f"{attention}/query", f"{attention}/key", f"{attention}/value"), f"{theirs}.attn.c_attn"),
        *conv1d((f"{attention}/out",), f"{theirs}.attn.c_proj"),
        *norm("decoder/layers/mlp_norm", f"{theirs}.ln_2"),
        *conv1d(("decoder/layers/mlp/wi",), f"{theirs}.mlp.c_fc"),
        *conv1d(("decoder/layers/mlp/wo",), f"{theirs}.mlp.c_proj"),
    )


def table(num_layers: int) -> Table:
    """Return the table of GPT2LMHeadModel."""
    return Table(
        entries=(
            *embedding("embeddings/word", "transformer.wte"),
            *embedding("embeddings/position", "transformer.wpe"),
            *layers("transformer.h.{layer}"),
            *norm("decoder/final_norm", "transformer.ln_f"),
        ),
        prefix="transformer.",
        ties={"lm_head.weight": "transformer.wte.weight"},
        # Causal masks, stored as buffers in older files.
        ignored=tuple(f"transformer.h.{i}.attn.{name}" for i in range(num_layers) for name in ("bias", "masked_bias")),
    )


def special_token_ids(objective: CausalLM) -> dict[str, int | None]:
    """Return the ids of special tokens, for config.json and generation_config.json."""
    ids = {f"{role}_token_id": token_id(objective.vocabulary, role) for role in ("bos", "eos", "pad")}
    # With isolated documents no token is predicted from a begin token.
    return ids if getattr(objective, "plain_stream", False) else ids | {"bos_token_id": None}


def decoder(objective: CausalLM, architecture: str, table: Table, config: dict[str, Any]) -> TransformersModel:
    """Return the Transformers model of a GPT.

    `config` are the fields of config.json that GPT-1 and GPT-2 do not share.
    """
    ids = special_token_ids(objective)
    shared = to_config(objective.model, FIELDS) | {"embd_pdrop": objective.model.dropout, "tie_word_embeddings": True}
    return TransformersModel(
        architecture, "AutoModelForCausalLM", shared | ids | config, table, generation_config=ids,
        pipeline_tag="text-generation",
    )


def read_decoder(source: Source, fields: Fields) -> dict[str, Any]:
    """Read the fields of a GPT."""
    found = source.read(fields)
    # One rate here covers dropout after the embeddings and on the residual branches.
    source.require(tie_word_embeddings=True, embd_pdrop=found["dropout"])
    return found


def is_plain_stream(source: Source) -> bool:
    """Return whether a begin token stands before each text; see `special_token_ids`."""
    return source.config.get("bos_token_id") is not None


def models(objective: CausalLM) -> tuple[TransformersModel]:
    """Return the Transformers model that the objective's parameters fill."""
    m = objective.model
    if m.stack.band is not None:
        raise UserError(
            f"layers with banded attention over {m.stack.band} tokens have no class in Transformers; only a GPT-3 "
            "trained with objective.model.band 0 can be exported, as a GPT-2."
        )
    config = to_config(m, ACTIVATION) | {
        "model_type": "gpt2", "n_inner": m.intermediate_size, "scale_attn_weights": True,
    }
    return (decoder(objective, "GPT2LMHeadModel", table(m.num_layers), config),)


def read_objective(source: Source) -> CausalLM:
    """Read causal language modelling with a GPT-2."""
    source.require(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    fields = read_decoder(source, {**FIELDS, **ACTIVATION})
    model = Gpt2(**fields, intermediate_size=source.value("n_inner", 4 * fields["hidden_size"]))
    return CausalLM(model=model, plain_stream=is_plain_stream(source))


FAMILY = Family("gpt2", models, read_objective, heads={
    "SequenceClassification": Head("GPT2ForSequenceClassification", "score"),
    "TokenClassification": Head("GPT2ForTokenClassification"),
    "QuestionAnswering": Head("GPT2ForQuestionAnswering", "qa_outputs"),
})
