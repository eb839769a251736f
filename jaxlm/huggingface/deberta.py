"""DeBERTa v2 and v3 in Transformers: DebertaV2ForMaskedLM, and DebertaV2Model for a discriminator.

A folder with the head of replaced-token detection (`mask_predictions`), as published, holds a discriminator. It becomes
a pair of networks, with the generator of its subfolder `generator`, or else a generator with the same word embedding.
The masked-LM head is read by its published names and by those of the class (`legacy`), and written by the former.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np

from jaxlm.errors import UserError
from jaxlm.huggingface import bert
from jaxlm.huggingface.family import Family, Fields, Source, TransformersModel, read_config, to_config, token_id
from jaxlm.huggingface.table import Table, dense, embedding, norm
from jaxlm.models.deberta import Deberta, DebertaV3
from jaxlm.objectives.base import Objective
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.objectives.replaced_tokens import ReplacedTokens
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import Params

FIELDS: Fields = {key: theirs for key, theirs in bert.FIELDS.items() if key != "type_vocab_size"} | {
    "vocab_size": ("vocab_size", 128100),
    "hidden_size": ("hidden_size", 1536),
    "num_layers": ("num_hidden_layers", 24),
    "num_heads": ("num_attention_heads", 24),
    "intermediate_size": ("intermediate_size", 6144),
    "norm_eps": ("layer_norm_eps", 1e-7),
    "position_buckets": ("position_buckets", -1),
}
CHOICES = {
    "relative_attention": True, "position_biased_input": False, "share_att_key": True, "norm_rel_ebd": "layer_norm",
    "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0,
}
"""Values of config.json that make a DeBERTa v2 or v3."""
DEFAULTS = {
    "relative_attention": False, "position_biased_input": True, "share_att_key": False, "norm_rel_ebd": "none",
    "pos_att_type": "none",
}
"""Values of the class where config.json has none."""
GENERATOR = "generator"
HEADS = bert.text_heads("DebertaV2", "pooler.dense", "cls_dropout")
LEGACY = {r"cls\.predictions\.(transform\.|(?=bias$))": "lm_predictions.lm_head."}
RTD_HEAD = (
    *norm("rtd_head/norm", "mask_predictions.LayerNorm"),
    *dense("rtd_head/classifier/dense", "mask_predictions.dense"),
    *dense("rtd_head/classifier/score", "mask_predictions.classifier"),
)


def table(model: Deberta, network: str = "") -> Table:
    """Return the table of a network: "generator" or "discriminator" of a pair, or "" for one that stands alone."""
    root = f"{network}/" if network else ""
    theirs = "lm_predictions.lm_head"
    mlm_head = bert.mlm_head(f"{theirs}.dense", f"{theirs}.LayerNorm", f"{theirs}.bias", root)
    # The class ignores this table in a file.
    position = embedding(f"{root}position", "deberta.embeddings.position_embeddings")
    is_discriminator = network == "discriminator"
    unused = (*(mlm_head if is_discriminator else ()), *(() if model.mask_decoder else position))
    return Table(
        entries=(
            *embedding(f"{root}embeddings/word", "deberta.embeddings.word_embeddings"),
            *norm(f"{root}embeddings/norm", "deberta.embeddings.LayerNorm"),
            *embedding(f"{root}relative", "deberta.encoder.rel_embeddings"),
            *norm(f"{root}relative/norm", "deberta.encoder.LayerNorm"),
            *(dataclasses.replace(entry, theirs=re.sub(r"self\.\w+", r"\g<0>_proj", entry.theirs))
              for entry in bert.layers(f"{root}encoder", "deberta.encoder")),
            *(position if model.mask_decoder else ()),
            *(RTD_HEAD if is_discriminator else mlm_head),
        ),
        prefix="deberta.",
        ties={} if is_discriminator else {
            "cls.predictions.decoder.weight": "deberta.embeddings.word_embeddings.weight",
            "cls.predictions.decoder.bias": "lm_predictions.lm_head.bias",
        },
        ignored=("deberta.embeddings.position_ids", *(entry.theirs for entry in unused)),
        old_names=LEGACY,
        optional=("rtd_head",) if is_discriminator else (f"{root}mlm_head",),
    )


def models(objective: Objective) -> tuple[TransformersModel, ...]:
    """Return the Transformers model of a network that stands alone, or those of a discriminator and its generator."""
    m, v = objective.model, objective.vocabulary

    def predictor(model: Deberta, network: str = "") -> TransformersModel:
        return TransformersModel(
            "DebertaV2ForMaskedLM", "AutoModelForMaskedLM", _config(model, v), table(model, network), network,
            remark="Its probabilities of masked tokens differ from jaxlm's: the class leaves out the mask decoder's "
            "absolute positions.",
        )

    if m.text_model is m:
        return (predictor(m),)
    discriminator = TransformersModel(
        "DebertaV2Model", "AutoModel", _config(m.text_model, v), table(m.text_model, "discriminator"),
        pipeline_tag="feature-extraction",
    )
    return discriminator, predictor(m.generator, GENERATOR)


def _config(model: Deberta, vocabulary: Vocabulary | None) -> dict[str, Any]:
    return to_config(model, FIELDS) | CHOICES | {
        "model_type": "deberta-v2", "legacy": False, "tie_word_embeddings": True, "max_relative_positions": -1,
        "pad_token_id": token_id(vocabulary, "pad"), "pooler_dropout": 0, "pooler_hidden_act": "gelu",
    }


def read_network(source: Source) -> dict[str, Any]:
    """Read the fields of `Deberta` from config.json."""
    config = DEFAULTS | {key: value for key, value in source.config.items() if value is not None}
    fields, order = source.read(FIELDS), ["p2c|c2p", "c2p|p2c", ["c2p", "p2c"]]
    dataclasses.replace(source, config=config).require(**CHOICES | {
        "pos_att_type": (CHOICES["pos_att_type"], *order), "max_relative_positions": (-1, fields["max_positions"]),
        "conv_kernel_size": 0, "embedding_size": fields["hidden_size"], "pooler_hidden_size": fields["hidden_size"],
        "attention_head_size": fields["hidden_size"] // fields["num_heads"], "pooler_hidden_act": "gelu",
    })
    return fields


def read_objective(source: Source) -> Objective:
    """Read replaced-token detection from a folder of a discriminator, or masked language modelling from another one."""
    fields, folder = read_network(source), source.folder / GENERATOR
    if not source.has_tensor("mask_predictions.dense.weight"):
        has_decoder = source.has_tensor("position_embeddings.weight")
        return MaskedLM(model=Deberta(**fields, mask_decoder=has_decoder), input_format="document")
    depth = max(1, fields["num_layers"] // 2)
    if folder.is_dir():
        generator = read_network(Source(folder, read_config(folder), ()))
        depth = generator["num_layers"]
        if generator | {"num_layers": fields["num_layers"]} != fields:
            raise UserError(
                f"{folder / 'config.json'} differs from the discriminator's in more than num_hidden_layers, but both "
                "networks of a DeBERTa v3 have the same width; remove the folder to train a new generator."
            )
    model = DebertaV3(**fields, generator_num_layers=depth)
    return ReplacedTokens(model=model, mask_share=1.0, discriminator_weight=10.0, two_segments=False, short_rate=0.0)


def export_params(objective: Objective, params: Params) -> Params:
    """Return the parameters with the discriminator's whole word embedding in place of E_Δ."""
    m = objective.model
    return params if m.text_model is m else params | {"discriminator": m.text_params(params)}


def import_params(params: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the parameters of a pair, by path, with E_Δ; E_Δ = 0 if the folder has no generator."""
    whole, base = "discriminator/embeddings/word/embedding", "generator/embeddings/word/embedding"
    if whole not in params:
        return params
    params = {base: params[whole]} | params
    return params | {whole: params[whole] - params[base]}


FAMILY = Family("deberta-v2", models, read_objective, HEADS, export_params=export_params, import_params=import_params)
