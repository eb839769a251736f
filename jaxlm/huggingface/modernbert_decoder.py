"""Ettin's decoders in Transformers: ModernBertDecoderForCausalLM and …ForSequenceClassification."""

from __future__ import annotations

from jaxlm.huggingface import llama, modernbert
from jaxlm.huggingface.family import Family, Head, Source, TransformersModel, token_id
from jaxlm.huggingface.table import dense
from jaxlm.models.modernbert import ModernBertDecoder

_ATTENTION = tuple(
    entry for name in ("query", "key", "value")
    for entry in dense(f"encoder/layers/attention/{name}", f"model.layers.{{layer}}.attn.{name[0]}_proj", bias=False)
)
TABLE = modernbert.table(_ATTENTION, "lm_head")


def models(objective: llama.Pretraining) -> tuple[TransformersModel]:
    """Return the Transformers model that the objective's parameters fill."""
    values = modernbert.config("modernbert-decoder", objective.model, objective.vocabulary)
    # The class wants an id for each role.
    end = token_id(objective.vocabulary, "eos") or 0
    values |= {name: end for name in values if name.endswith("_id") and values[name] is None}
    return llama.decoder(objective, "ModernBertDecoder", values, TABLE)


def read_objective(source: Source) -> llama.Pretraining:
    """Read causal or masked language modelling with an Ettin decoder."""
    return llama.objective_of(source, ModernBertDecoder(**modernbert.read_model(source)))


HEADS = {"SequenceClassification": Head("ModernBertDecoderForSequenceClassification")}
FAMILY = Family("modernbert-decoder", models, read_objective, HEADS)
