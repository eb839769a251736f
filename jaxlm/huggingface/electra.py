"""ELECTRA's names in Transformers: ElectraForPreTraining in the folder itself, ElectraForMaskedLM in `generator` below.

A folder of the discriminator alone, or of the generator alone, is read too; the other network is then initialized.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxlm.errors import UserError
from jaxlm.huggingface.bert import embeddings, encoder_config, layers, read_encoder
from jaxlm.huggingface.family import Family, Source, TransformersModel, read_config, symbol
from jaxlm.huggingface.table import Entry, Table, dense, norm
from jaxlm.huggingface.weights import Weights
from jaxlm.models.electra import PUBLISHED, Electra, ElectraEncoder, Network
from jaxlm.objectives.replaced_tokens import ReplacedTokens

GENERATOR = "generator"
# What the two networks must have in common: their embeddings' shapes, and what one configuration says for both.
COMMON = ("vocab_size", "embedding_size", "max_positions", "type_vocab_size", "activation", "norm_eps")
SHAPE = ("hidden_size", "num_layers", "num_heads", "intermediate_size")


RTD_HEAD = (
    *dense("rtd_head/dense", "discriminator_predictions.dense"),
    *dense("rtd_head/score", "discriminator_predictions.dense_prediction"),
)
MLM_HEAD = (
    *dense("generator/mlm_head/dense", "generator_predictions.dense"),
    *norm("generator/mlm_head/norm", "generator_predictions.LayerNorm"),
    Entry(("generator/mlm_head/bias",), "generator_lm_head.bias"),
)
IGNORED = ("electra.embeddings.position_ids", "electra.embeddings.token_type_ids")


def table(model: Electra, network: Network) -> Table:
    """The names of ElectraForPreTraining (the discriminator) or ElectraForMaskedLM (the generator)."""
    encoder = model.discriminator if network == "discriminator" else model.generator
    entries = layers(f"{network}/encoder", "electra.encoder")
    if encoder.embedding_width != encoder.hidden_size:
        entries = (*dense(f"{network}/projection", "electra.embeddings_project"), *entries)
    if network == "discriminator":
        entries = (*embeddings("embeddings", "electra.embeddings"), *entries, *RTD_HEAD)
        return Table(entries=entries, prefix="electra.", ignored=IGNORED, heads=("rtd_head",))
    own = "embeddings" if model.share_embeddings else "generator/embeddings"
    return Table(
        entries=(*embeddings(own, "electra.embeddings"), *entries, *MLM_HEAD),
        prefix="electra.",
        ties={"generator_lm_head.weight": "electra.embeddings.word_embeddings.weight"},
        ignored=IGNORED,
        heads=("generator/mlm_head",),
    )


def models(objective: ReplacedTokens) -> tuple[TransformersModel, TransformersModel]:
    m = objective.model

    def config(encoder: ElectraEncoder) -> dict[str, object]:
        return encoder_config(encoder) | {
            "model_type": "electra",
            "embedding_size": encoder.embedding_size,
            "pad_token_id": symbol(objective.vocabulary, "pad"),
        }

    return (
        TransformersModel(
            "ElectraForPreTraining", "AutoModelForPreTraining", config(m.discriminator), table(m, "discriminator"),
            pipeline_tag="feature-extraction",
        ),
        TransformersModel(
            "ElectraForMaskedLM", "AutoModelForMaskedLM", config(m.generator), table(m, "generator"), GENERATOR
        ),
    )


def is_generator(source: Source) -> bool:
    """Whether the folder itself holds a generator."""
    return source.holds("generator_lm_head.bias") or source.holds("generator_predictions.dense.weight")


def stored_models(objective: ReplacedTokens, source: Source) -> tuple[TransformersModel, ...]:
    """The models that a folder has: both, or the generator alone in the folder itself."""
    discriminator, generator = models(objective)
    return (dataclasses.replace(generator, folder=""),) if is_generator(source) else (discriminator, generator)


def read_objective(source: Source) -> ReplacedTokens:
    discriminator = read_network(source)
    if is_generator(source):  # its discriminator is initialized, in the same shape
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
    model = Electra(**discriminator, **shape, share_embeddings=share)
    # ELECTRA-large masks a quarter of the tokens; the configuration does not say it.
    large = (model.num_layers, model.embedding_size, model.hidden_size) == PUBLISHED["large"][:3]
    mask_rate = 0.25 if large else ReplacedTokens.mask_rate
    return ReplacedTokens(model=model, two_segments=model.type_vocab_size > 1, mask_rate=mask_rate)


def read_network(source: Source) -> dict[str, Any]:
    """The fields of Electra, as one network's config.json has them."""
    sizes = dict(
        embedding_size=source.number("embedding_size", 128),
        hidden_size=source.number("hidden_size", 256),
        num_heads=source.number("num_attention_heads", 4),
        intermediate_size=source.number("intermediate_size", 1024),
    )
    return read_encoder(source) | sizes


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
    names = [entry.theirs for entry in embeddings("", "electra.embeddings")]
    with Weights(source.folder) as ours, Weights(other.folder) as theirs:
        for name in names:
            first, second = (
                next((n for n in (name, name.removeprefix("electra.")) if n in weights.shapes), None)
                for weights in (ours, theirs)
            )
            if first is None or second is None or not np.array_equal(ours.read(first), theirs.read(second)):
                return False
    return True


FAMILY = Family(
    model_type="electra",
    template=ElectraEncoder.template,
    models=models,
    read_objective=read_objective,
    max_length=lambda objective: objective.model.max_positions,
    stored_models=stored_models,
)
