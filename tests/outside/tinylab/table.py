"""The encoder's names in Transformers, whose classes are in `tinylab.modeling`."""

from __future__ import annotations

import dataclasses

from jaxlm.huggingface import bert
from jaxlm.huggingface.family import Family, Head, Source, TransformersModel
from jaxlm.huggingface.table import dense
from jaxlm.objectives.masked_lm import MaskedLM
from tinylab.gated import GatedBert

OURS, THEIRS = "encoder/layers/mlp", "bert.encoder.layer.{layer}.intermediate"
MASKED = bert.table(next_sentence=False)
TABLE = dataclasses.replace(MASKED, entries=(
    *(entry for entry in MASKED.entries if not entry.ours[0].startswith(f"{OURS}/wi/")),
    *dense(f"{OURS}/wi_0", f"{THEIRS}.gate"), *dense(f"{OURS}/wi_1", f"{THEIRS}.dense"),
))


def models(objective: MaskedLM) -> tuple[TransformersModel]:
    config = bert.encoder_config("gated-bert", objective.model, objective.vocabulary)
    names = "GatedBertForMaskedLM", "AutoModelForMaskedLM"
    return (TransformersModel(*names, config, TABLE, module="tinylab.modeling"),)


def read_objective(source: Source) -> MaskedLM:
    return MaskedLM(model=GatedBert(**bert.read_encoder(source)), input_format="document")


HEADS = {"SequenceClassification": Head("GatedBertForSequenceClassification", dense="bert.pooler.dense")}
FAMILY = Family("gated-bert", models, read_objective, HEADS)
