"""ELECTRA's names in Transformers: ElectraForPreTraining in the folder itself, ElectraForMaskedLM in `generator` below.

A folder of the discriminator alone, or of the generator alone, is read too; the other network then starts fresh.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxlm.errors import UserError
from jaxlm.huggingface.bert import TEMPLATE
from jaxlm.huggingface.family import Family, Part, Source, activation, read_config, symbol
from jaxlm.huggingface.table import Entry, Table, dense, embedding, norm
from jaxlm.huggingface.weights import Weights
from jaxlm.models.electra import PUBLISHED, ElectraConfig, Network
from jaxlm.objectives.replaced_tokens import Electra

GENERATOR = "generator"
# What the two networks must have in common: their embeddings' shapes, and what one configuration says for both.
COMMON = ("vocab_size", "embedding_size", "max_positions", "type_vocab_size", "activation", "norm_eps")
SHAPE = ("hidden_size", "num_layers", "num_heads", "intermediate_size")


def embeddings(ours: str) -> tuple[Entry, ...]:
    return (
        *embedding(f"{ours}/word", "electra.embeddings.word_embeddings"),
        *embedding(f"{ours}/position", "electra.embeddings.position_embeddings"),
        *embedding(f"{ours}/token_type", "electra.embeddings.token_type_embeddings"),
        *norm(f"{ours}/norm", "electra.embeddings.LayerNorm"),
    )


def encoder(ours: str, projection: bool) -> tuple[Entry, ...]:
    layer, theirs = f"{ours}/encoder/layers", "electra.encoder.layer.{layer}"
    return (
        *(dense(f"{ours}/projection", "electra.embeddings_project") if projection else ()),
        *dense(f"{layer}/attention/query", f"{theirs}.attention.self.query"),
        *dense(f"{layer}/attention/key", f"{theirs}.attention.self.key"),
        *dense(f"{layer}/attention/value", f"{theirs}.attention.self.value"),
        *dense(f"{layer}/attention/out", f"{theirs}.attention.output.dense"),
        *norm(f"{layer}/attention_norm", f"{theirs}.attention.output.LayerNorm"),
        *dense(f"{layer}/mlp/wi", f"{theirs}.intermediate.dense"),
        *dense(f"{layer}/mlp/wo", f"{theirs}.output.dense"),
        *norm(f"{layer}/mlp_norm", f"{theirs}.output.LayerNorm"),
    )


RTD_HEAD = (
    *dense("rtd_head/dense", "discriminator_predictions.dense"),
    *dense("rtd_head/score", "discriminator_predictions.dense_prediction"),
)
MLM_HEAD = (
    *dense("mlm_head/dense", "generator_predictions.dense"),
    *norm("mlm_head/norm", "generator_predictions.LayerNorm"),
    Entry(("mlm_head/bias",), "generator_lm_head.bias"),
)
IGNORED = ("electra.embeddings.position_ids", "electra.embeddings.token_type_ids")


def table(model: ElectraConfig, network: Network) -> Table:
    projection = model.stack(network).hidden_size != model.embedding_size
    if network == "discriminator":
        entries = (*embeddings("embeddings"), *encoder(network, projection), *RTD_HEAD)
        return Table(entries=entries, prefix="electra.", ignored=IGNORED, heads=("rtd_head",))
    own = "embeddings" if model.share_embeddings else "generator_embeddings"
    return Table(
        entries=(*embeddings(own), *encoder(network, projection), *MLM_HEAD),
        prefix="electra.",
        ties={"generator_lm_head.weight": "electra.embeddings.word_embeddings.weight"},
        ignored=IGNORED,
        heads=("mlm_head",),
    )


def parts(objective: Electra) -> tuple[Part, Part]:
    m = objective.model

    def config(network: Network) -> dict[str, object]:
        s = m.stack(network)
        return {
            "model_type": "electra",
            "vocab_size": m.vocab_size,
            "embedding_size": m.embedding_size,
            "hidden_size": s.hidden_size,
            "num_hidden_layers": s.num_layers,
            "num_attention_heads": s.num_heads,
            "intermediate_size": s.intermediate_size,
            "max_position_embeddings": m.max_positions,
            "type_vocab_size": m.type_vocab_size,
            "hidden_act": m.activation,
            "hidden_dropout_prob": m.dropout,
            "attention_probs_dropout_prob": m.attention_dropout,
            "layer_norm_eps": m.norm_eps,
            "initializer_range": m.init_std,
            "position_embedding_type": "absolute",
            "tie_word_embeddings": True,
            "pad_token_id": symbol(objective.vocabulary, "pad"),
        }

    return (
        Part("ElectraForPreTraining", "AutoModelForPreTraining", config("discriminator"), table(m, "discriminator"),
             pipeline_tag="feature-extraction"),
        Part("ElectraForMaskedLM", "AutoModelForMaskedLM", config("generator"), table(m, "generator"), GENERATOR),
    )


def is_generator(source: Source) -> bool:
    return source.holds("generator_lm_head.bias") or source.holds("generator_predictions.dense.weight")


def stored_parts(objective: Electra, source: Source) -> tuple[Part, ...]:
    """The parts that a folder has: both, or the generator alone in the folder itself."""
    discriminator, generator = parts(objective)
    return (dataclasses.replace(generator, folder=""),) if is_generator(source) else (discriminator, generator)


def read_objective(source: Source) -> Electra:
    discriminator = read_network(source)
    if is_generator(source):  # its discriminator starts fresh, in the same shape
        generator, share = discriminator, True
    elif (source.folder / GENERATOR).is_dir():
        below = source.folder / GENERATOR
        with Weights(below) as weights:
            other = Source(below, read_config(below), weights.shapes)
        other.refuse("model_type", "electra")
        generator = read_network(other)
        for key in COMMON:
            if discriminator[key] != generator[key]:
                raise UserError(
                    f"{below} holds a generator whose {key} is {generator[key]!r}, but the discriminator's is "
                    f"{discriminator[key]!r}; the two must share it to train together."
                )
        share = same_embeddings(source, other)
    else:
        generator, share = default_generator(discriminator), True
    shape = {f"generator_{key}": generator[key] for key in SHAPE}
    model = ElectraConfig(**discriminator, **shape, share_embeddings=share)
    # ELECTRA-large masks a quarter of the tokens; the configuration does not say it.
    large = (model.num_layers, model.embedding_size, model.hidden_size) == PUBLISHED["large"][:3]
    return Electra(model=model, two_segments=model.type_vocab_size > 1, mask_rate=0.25 if large else Electra.mask_rate)


def read_network(source: Source) -> dict[str, object]:
    """The fields of ElectraConfig, as one network's config.json has them."""
    source.refuse("position_embedding_type", "absolute")
    source.refuse("is_decoder", False)
    source.refuse("add_cross_attention", False)
    return dict(
        vocab_size=source.number("vocab_size", 30522),
        embedding_size=source.number("embedding_size", 128),
        hidden_size=source.number("hidden_size", 256),
        num_layers=source.number("num_hidden_layers", 12),
        num_heads=source.number("num_attention_heads", 4),
        intermediate_size=source.number("intermediate_size", 1024),
        max_positions=source.number("max_position_embeddings", 512),
        type_vocab_size=source.number("type_vocab_size", 2),
        activation=activation(source),
        dropout=source.number("hidden_dropout_prob", 0.1),
        attention_dropout=source.number("attention_probs_dropout_prob", 0.1),
        norm_eps=source.number("layer_norm_eps", 1e-12),
        init_std=source.number("initializer_range", 0.02),
    )


def default_generator(discriminator: dict[str, object]) -> dict[str, int]:
    """The published generator of a discriminator of this shape, or else one a quarter as wide and as deep as it."""
    layers, width = int(discriminator["num_layers"]), int(discriminator["hidden_size"])
    embedding = discriminator["embedding_size"]
    published = [g for n, e, h, g in PUBLISHED.values() if (n, e, h) == (layers, embedding, width)]
    quarter = max(1, width // 4)
    hidden = published[0] if published else quarter // 64 * 64 or quarter
    return dict(num_layers=layers, hidden_size=hidden, num_heads=max(1, hidden // 64), intermediate_size=4 * hidden)


def same_embeddings(source: Source, other: Source) -> bool:
    """Whether two networks have one embedding module, as those have that were trained together by default."""
    names = [entry.theirs for entry in embeddings("embeddings")]
    with Weights(source.folder) as ours, Weights(other.folder) as theirs:
        for name in names:
            first, second = (
                next((n for n in (name, name.removeprefix("electra.")) if n in weights.shapes), None)
                for weights in (ours, theirs)
            )
            if first is None or second is None or not np.array_equal(ours.read(first), theirs.read(second)):
                return False
    return True


ELECTRA = Family(
    model_type="electra",
    objective=Electra,
    template=TEMPLATE,
    parts=parts,
    read_objective=read_objective,
    max_length=lambda objective: objective.model.max_positions,
    stored_parts=stored_parts,
)
