"""RoBERTa and XLM-R in Transformers: RobertaForMaskedLM, RobertaModel. The names of their tensors are equal."""

from __future__ import annotations

import functools

from jaxlm.huggingface import bert
from jaxlm.huggingface.family import Family, Head, Source, TransformersModel, token_id
from jaxlm.huggingface.table import Table
from jaxlm.models.roberta import Roberta
from jaxlm.models.xlm_roberta import XlmRoberta
from jaxlm.objectives.masked_lm import MaskedLM

TABLE = Table(
    entries=(
        *bert.embeddings("embeddings", "roberta.embeddings"),
        *bert.layers("encoder", "roberta.encoder"),
        *bert.mlm_head("lm_head.dense", "lm_head.layer_norm", "lm_head.bias"),
    ),
    prefix="roberta.",
    ties={
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    },
    # Published checkpoints have an untrained pooler.
    ignored=(
        "roberta.embeddings.position_ids", "roberta.embeddings.token_type_ids", "roberta.pooler.dense.weight",
        "roberta.pooler.dense.bias",
    ),
    optional=("mlm_head",),
)
HEADS = bert.text_heads("Roberta", "roberta.pooler.dense") | {
    "SequenceClassification": Head("RobertaForSequenceClassification", "classifier.out_proj", "classifier.dense"),
}


def models(
    objective: MaskedLM, model_type: str = "roberta", architecture: str = "RobertaForMaskedLM"
) -> tuple[TransformersModel]:
    """Return the Transformers model that the objective's parameters fill."""
    m, v = objective.model, objective.vocabulary
    config = bert.encoder_config(model_type, m, v) | {
        "max_position_embeddings": m.max_positions + m.first_position,
        "pad_token_id": m.padding_id,
        "bos_token_id": token_id(v, "bos"),
        "eos_token_id": token_id(v, "eos"),
    }
    return (TransformersModel(architecture, "AutoModelForMaskedLM", config, TABLE),)


def read_objective(source: Source, kind: type[Roberta] = Roberta) -> MaskedLM:
    """Read masked language modelling with a RoBERTa or XLM-R."""
    padding = source.value("pad_token_id", 1)
    fields = bert.read_encoder(source, bert.FIELDS | {"vocab_size": ("vocab_size", 50265)})
    # Their table starts with a row for each id up to padding, which no position uses.
    fields["max_positions"] -= padding + 1
    model = kind(**fields, padding_id=padding)
    return MaskedLM(model=model, input_format="full-sentences", short_rate=0.0)


def successor_heads(prefix: str) -> dict[str, Head]:
    """Return the heads of a family whose classes differ from RoBERTa's in the beginning of their names."""
    return {task: head._replace(architecture=head.architecture.replace("Roberta", prefix))
            for task, head in HEADS.items()}


FAMILY = {
    Roberta: Family("roberta", models, read_objective, HEADS),
    XlmRoberta: Family(
        "xlm-roberta", functools.partial(models, model_type="xlm-roberta", architecture="XLMRobertaForMaskedLM"),
        functools.partial(read_objective, kind=XlmRoberta), successor_heads("XLMRoberta"),
    ),
}
IMPORT_ONLY = (Family("camembert", models, read_objective, successor_heads("Camembert")),)
"""CamemBERT is a RoBERTa with another vocabulary, and an export of it a RoBERTa."""
