"""ModernBERT and Ettin in Transformers: ModernBertForMaskedLM, ModernBertModel, ModernBertDecoderForCausalLM."""

from __future__ import annotations

from typing import Any

from jaxlm.errors import UserError
from jaxlm.huggingface import llama
from jaxlm.huggingface.family import Family, Fields, Head, Source, TransformersModel, to_config, token_id
from jaxlm.huggingface.table import Entry, Table, dense, embedding, norm
from jaxlm.models.modernbert import ModernBert, ModernBertDecoder
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.tokenizers.vocabulary import Vocabulary

FIELDS: Fields = {
    "vocab_size": ("vocab_size", 50368),
    "hidden_size": ("hidden_size", 768),
    "num_layers": ("num_hidden_layers", 22),
    "num_heads": ("num_attention_heads", 12),
    "intermediate_size": ("intermediate_size", 1152),
    "max_positions": ("max_position_embeddings", 8192),
    "activation": ("hidden_activation", "gelu"),
    "attention_dropout": ("attention_dropout", 0.0),
    "norm_eps": ("norm_eps", 1e-5),
    "init_std": ("initializer_range", 0.02),
    "local_attention": ("local_attention", 128),
}
"""Fields shared by encoder and decoder."""
FIXED = {
    "attention_bias": False, "mlp_bias": False, "norm_bias": False, "classifier_bias": False, "decoder_bias": True,
    "classifier_activation": "gelu", "embedding_dropout": 0.0, "mlp_dropout": 0.0, "tie_word_embeddings": True,
}
"""Keys of config.json with one supported value."""
KINDS = {"full_attention": "global", "sliding_attention": "local"}
"""Kind of a layer in Transformers → ours, as in the names of older keys."""


def table(attention: tuple[Entry, ...], head: str) -> Table:
    """Return the table of a class."""
    layers, theirs = "encoder/layers", "model.layers.{layer}"
    return Table(
        entries=(
            *embedding("embeddings/word", "model.embeddings.tok_embeddings"),
            *norm("embeddings/norm", "model.embeddings.norm", bias=False),
            Entry((f"{layers}/attention_norm/scale",), f"{theirs}.attn_norm.weight", first_layer=1),
            *attention,
            *dense(f"{layers}/attention/out", f"{theirs}.attn.Wo", bias=False),
            *norm(f"{layers}/mlp_norm", f"{theirs}.mlp_norm", bias=False),
            # The first rows of theirs are activated.
            Entry((f"{layers}/mlp/wi_0/kernel", f"{layers}/mlp/wi_1/kernel"), f"{theirs}.mlp.Wi.weight", True),
            *dense(f"{layers}/mlp/wo", f"{theirs}.mlp.Wo", bias=False),
            *norm("encoder/final_norm", "model.final_norm", bias=False),
            *dense("head/dense", f"{head}.dense", bias=False),
            *norm("head/norm", f"{head}.norm", bias=False),
            Entry(("mlm_head/bias",), "decoder.bias"),
        ),
        prefix="model.",
        ties={"decoder.weight": "model.embeddings.tok_embeddings.weight"},
        optional=("head", "mlm_head"),
    )


PROJECTIONS = tuple(f"encoder/layers/attention/{name}/kernel" for name in ("query", "key", "value"))
TABLE = table((Entry(PROJECTIONS, "model.layers.{layer}.attn.Wqkv.weight", transpose=True),), "head")
DECODER = table(tuple(
    Entry((path,), f"model.layers.{{layer}}.attn.{part}_proj.weight", transpose=True)
    for path, part in zip(PROJECTIONS, "qkv", strict=True)
), "lm_head")
HEADS = {
    name: Head(f"ModernBertFor{name}") for name in
    ("SequenceClassification", "MultipleChoice", "TokenClassification", "QuestionAnswering")
}


def layer_types(num_layers: int, period: int, full_layer: int = 0) -> list[str]:
    """Return the kinds of layers, of which number `full_layer` of each period attends to all tokens."""
    return ["full_attention" if i % period == full_layer else "sliding_attention" for i in range(num_layers)]


def read_period(source: Source, key: str, default: int, length: int, from_end: bool = False) -> int:
    """Read the period of layers with full attention, the first of each or the last one, from layer_types or a key."""
    period = source.value(key, default)
    types = source.config.get("layer_types") or (period and layer_types(length, period, (period - 1) * from_end))
    for n in (period, *range(1, length + 2)):
        if n > 0 and layer_types(length, n, (n - 1) * from_end) == types:
            return n
    raise UserError(
        f"{source.folder / 'config.json'}: by layer_types or {key}, the layers with full attention are not "
        f"{'n - 1, 2n - 1' if from_end else '0, n, 2n'}, …; jaxlm does not support another order."
    )


def config(model_type: str, model: ModernBert, vocabulary: Vocabulary | None) -> dict[str, Any]:
    """Return the config.json of a model, with the keys of Transformers 5 and those of version 4."""
    theta = {"global": model.global_theta, "local": model.local_theta}
    ids = {f"{role}_token_id": token_id(vocabulary, role) for role in ("pad", "bos", "eos", "cls", "sep")}
    return to_config(model, FIELDS) | FIXED | ids | {
        "model_type": model_type,
        "layer_types": layer_types(model.num_layers, model.global_period),
        "global_attn_every_n_layers": model.global_period,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": theta[ours]} for kind, ours in KINDS.items()},
        **{f"{ours}_rope_theta": value for ours, value in theta.items()},
    }


def read_model(source: Source) -> dict[str, Any]:
    """Read the fields of `ModernBert`, from new or old keys."""
    source.require(**FIXED, rope_scaling=None)
    fields = source.read(FIELDS)
    # A decoder stores both sizes and attends by this one, half of the other in what it writes by default.
    if "sliding_window" in source.config:
        fields["local_attention"] = 2 * source.value("sliding_window", fields["local_attention"] // 2)
    # Their attention dropout is that of the output too.
    fields["dropout"] = fields["attention_dropout"]
    fields["global_period"] = read_period(source, "global_attn_every_n_layers", 3, fields["num_layers"])
    # An old null is the other base.
    defaults = {"global": 160_000.0, "local": source.value("global_rope_theta", 160_000.0)}
    defaults["local"] = defaults["local"] if "local_rope_theta" in source.config else 10_000.0
    ropes = source.config.get("rope_parameters") or {}
    for kind, ours in KINDS.items():
        rope = ropes.get(kind) or {}
        is_default = rope.get("rope_type", "default") == "default" and not rope.keys() - {"rope_type", "rope_theta"}
        if ropes.keys() - KINDS.keys() or not is_default:
            raise UserError(
                f"{source.folder / 'config.json'}: rope_parameters is {ropes}; jaxlm supports a rope_theta for each of "
                f"{' and '.join(KINDS)}, and nothing else."
            )
        theta = source.value(f"{ours}_rope_theta", defaults[ours])
        fields[f"{ours}_theta"] = Source(source.folder, rope, ()).value("rope_theta", theta)
    return fields


def models(objective: MaskedLM) -> tuple[TransformersModel]:
    """Return the Transformers model that the objective's parameters fill."""
    m = objective.model
    values = config("modernbert", m, objective.vocabulary) | {"classifier_pooling": m.classifier_pooling}
    return (TransformersModel("ModernBertForMaskedLM", "AutoModelForMaskedLM", values, TABLE),)


def read_objective(source: Source) -> MaskedLM:
    """Read masked language modelling with a ModernBERT."""
    source.require(classifier_pooling=("cls", "mean"))
    pooling = source.config.get("classifier_pooling") or "cls"
    model = ModernBert(**read_model(source), classifier_pooling=pooling)
    return MaskedLM(model=model, mask_rate=0.3, input_format="document", short_rate=0.0)


def decoder_models(objective: llama.Pretraining) -> tuple[TransformersModel]:
    """Return the Transformers model that the objective's parameters fill."""
    values = config("modernbert-decoder", objective.model, objective.vocabulary)
    # The class wants an id for each role.
    end = token_id(objective.vocabulary, "eos") or 0
    values |= {name: end for name in values if name.endswith("_id") and values[name] is None}
    return llama.decoder(objective, "ModernBertDecoder", values, DECODER)


def read_decoder(source: Source) -> llama.Pretraining:
    """Read causal or masked language modelling with an Ettin decoder."""
    return llama.objective_of(source, ModernBertDecoder(**read_model(source)))


FAMILY = {
    ModernBert: Family("modernbert", models, read_objective, HEADS),
    ModernBertDecoder: Family("modernbert-decoder", decoder_models, read_decoder, {
        "SequenceClassification": Head("ModernBertDecoderForSequenceClassification")}),
}
