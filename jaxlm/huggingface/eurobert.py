"""EuroBERT in Transformers: EuroBertForMaskedLM, …ForSequenceClassification, …ForTokenClassification."""

from __future__ import annotations

from jaxlm.huggingface import llama
from jaxlm.huggingface.family import Family, Head, Source, TransformersModel, token_id
from jaxlm.models.llama import EuroBert
from jaxlm.objectives.masked_lm import MaskedLM

FIELDS = llama.fields(128256, 768, 3072, 12, 12, 8192, 1e-5) | llama.ATTENTION_BIAS
POOLING = ("late", "mean", "bos")


def models(objective: MaskedLM) -> tuple[TransformersModel]:
    """Return the Transformers model that the objective's parameters fill."""
    m, v = objective.model, objective.vocabulary
    ids = {f"{role}_token_id": token_id(v, role) for role in ("pad", "bos", "eos", "mask")}
    values = llama.config("eurobert", m, FIELDS) | ids | {"classifier_pooling": m.classifier_pooling}
    return (TransformersModel("EuroBertForMaskedLM", "AutoModelForMaskedLM", values, llama.table(m)),)


def read_objective(source: Source) -> MaskedLM:
    """Read masked language modelling with a EuroBERT; its class ignores the published files' clf_pooling."""
    source.require(mlp_bias=False, classifier_pooling=POOLING)  # with mlp_bias its head has one, too
    pooling = source.config.get("classifier_pooling") or "late"
    model = EuroBert(**llama.read_model(source, FIELDS), classifier_pooling=pooling)
    return MaskedLM(model=model, mask_rate=0.5, mask_share=1.0, random_share=0.0, input_format="document",
                    short_rate=0.0)


FAMILY = Family("eurobert", models, read_objective, {
    "SequenceClassification": Head("EuroBertForSequenceClassification", "classifier", "dense"),
    "TokenClassification": Head("EuroBertForTokenClassification"),
})
