"""ELECTRA in Transformers: ElectraForPreTraining in the folder itself, ElectraForMaskedLM in its subfolder `generator`.

A folder of only one of the networks can be imported too; the other network is then initialized.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.errors import UserError
from jaxlm.huggingface import bert
from jaxlm.huggingface.family import Family, Fields, Head, Source, TransformersModel, read_config
from jaxlm.huggingface.table import Table, dense
from jaxlm.huggingface.weights import Weights
from jaxlm.models.electra import PUBLISHED, Electra, Network
from jaxlm.objectives.replaced_tokens import ReplacedTokens

FIELDS: Fields = bert.FIELDS | {
    "embedding_size": ("embedding_size", 128),
    "hidden_size": ("hidden_size", 256),
    "num_heads": ("num_attention_heads", 4),
    "intermediate_size": ("intermediate_size", 1024),
}
"""Fields of one network."""
GENERATOR = "generator"
# Fields that both networks must share: the shapes of the embeddings, and those that Electra has only once.
COMMON = ("vocab_size", "embedding_size", "max_positions", "type_vocab_size", "activation", "norm_eps")
SHAPE = ("hidden_size", "num_layers", "num_heads", "intermediate_size")


RTD_HEAD = (
    *dense("rtd_head/dense", "discriminator_predictions.dense"),
    *dense("rtd_head/score", "discriminator_predictions.dense_prediction"),
)
MLM_HEAD = bert.mlm_head(
    "generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head.bias", "generator/"
)
_SUMMARY = {"summary_type": "first", "summary_use_proj": True, "summary_activation": "gelu"}
HEADS = bert.text_heads("Electra", "") | {
    "SequenceClassification": Head("ElectraForSequenceClassification", "classifier.out_proj", "classifier.dense"),
    "MultipleChoice": Head("ElectraForMultipleChoice", dense="sequence_summary.summary", config=_SUMMARY),
}


def table(model: Electra, network: Network) -> Table:
    """Return the table of ElectraForPreTraining (the discriminator) or ElectraForMaskedLM (the generator)."""
    is_generator = network == "generator"
    path = "generator/embeddings" if is_generator and not model.share_embeddings else "embeddings"
    projection = dense(f"{network}/projection", "electra.embeddings_project")
    return Table(
        entries=(
            *bert.embeddings(path, "electra.embeddings"),
            *(projection if getattr(model, network).has_projection else ()),
            *bert.layers(f"{network}/encoder", "electra.encoder"),
            *(MLM_HEAD if is_generator else RTD_HEAD),
        ),
        prefix="electra.",
        ties={"generator_lm_head.weight": "electra.embeddings.word_embeddings.weight"} if is_generator else {},
        ignored=("electra.embeddings.position_ids", "electra.embeddings.token_type_ids"),
        optional=("generator/mlm_head" if is_generator else "rtd_head",),
    )


def models(objective: ReplacedTokens) -> tuple[TransformersModel, TransformersModel]:
    """Return the Transformers models of the discriminator and the generator."""
    m, v = objective.model, objective.vocabulary
    return (
        TransformersModel(
            "ElectraForPreTraining", "AutoModelForPreTraining",
            bert.encoder_config("electra", m.discriminator, v, FIELDS), table(m, "discriminator"),
            pipeline_tag="feature-extraction",
        ),
        TransformersModel(
            "ElectraForMaskedLM", "AutoModelForMaskedLM", bert.encoder_config("electra", m.generator, v, FIELDS),
            table(m, "generator"), GENERATOR,
        ),
    )


def is_generator(source: Source) -> bool:
    """Return whether the folder itself holds a generator."""
    return source.has_tensor("generator_lm_head.bias") or source.has_tensor("generator_predictions.dense.weight")


def stored_models(objective: ReplacedTokens, source: Source) -> tuple[TransformersModel, ...]:
    """Return the models in a folder: both, or the generator alone in the folder itself."""
    discriminator, generator = models(objective)
    return (dataclasses.replace(generator, folder=""),) if is_generator(source) else (discriminator, generator)


def read_objective(source: Source) -> ReplacedTokens:
    """Read replaced-token detection from a folder of one or both networks."""
    discriminator, folder, share = bert.read_encoder(source, FIELDS), source.folder / GENERATOR, True
    if is_generator(source):  # the missing discriminator gets the same shape
        generator = discriminator
    elif folder.is_dir():
        other = Source(folder, read_config(folder), ())
        other.require(model_type="electra")
        generator = bert.read_encoder(other, FIELDS)
        for key in COMMON:
            if discriminator[key] != generator[key]:
                raise UserError(
                    f"{folder} holds a generator whose {key} is {generator[key]!r}, but the discriminator's is "
                    f"{discriminator[key]!r}; the two must share it to train together."
                )
        share = same_embeddings(source.folder, folder)
    else:
        generator = default_generator(discriminator)
    shape = {f"generator_{key}": generator[key] for key in SHAPE}
    model = Electra(**discriminator, **shape, share_embeddings=share)
    # ELECTRA-large masks a quarter of the tokens, which config.json does not record.
    is_large = (model.num_layers, model.embedding_size, model.hidden_size) == PUBLISHED["large"][:3]
    mask_rate = 0.25 if is_large else ReplacedTokens.mask_rate
    return ReplacedTokens(model=model, two_segments=model.type_vocab_size > 1, mask_rate=mask_rate)


def default_generator(discriminator: dict[str, Any]) -> dict[str, int]:
    """Return the published generator for a discriminator of this shape, or one of a quarter of its width."""
    layers, embedding, width = (discriminator[name] for name in ("num_layers", "embedding_size", "hidden_size"))
    quarter = max(1, width // 4)
    # Reversed, because small comes before small++, whose discriminator has the same shape.
    published = {sizes[:3]: sizes[3] for sizes in reversed(PUBLISHED.values())}
    hidden = published.get((layers, embedding, width), quarter // 64 * 64 or quarter)
    return dict(num_layers=layers, hidden_size=hidden, num_heads=max(1, hidden // 64), intermediate_size=4 * hidden)


def same_embeddings(*folders: Path) -> bool:
    """Return whether two networks have equal embeddings, as networks trained together have by default."""
    names = [entry.theirs for entry in bert.embeddings("", "embeddings")]
    first, second = (
        {name: weights.read(stored) for name in names for stored in weights.shapes if stored.endswith(name)}
        for weights in map(Weights, folders)
    )
    return len(first) == len(second) == len(names) and all(np.array_equal(first[name], second[name]) for name in names)


FAMILY = Family(
    "electra", models, read_objective, HEADS, text_params="discriminator", stored_models=stored_models
)
