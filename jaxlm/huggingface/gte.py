"""GTE in Transformers: GteForMaskedLM, …ForSequenceClassification, …ForTokenClassification."""

from __future__ import annotations

from jaxlm.huggingface import bert, nomic_bert
from jaxlm.huggingface.family import Family, Fields, Source, TransformersModel
from jaxlm.models.rotary_bert import Gte
from jaxlm.objectives.masked_lm import MaskedLM

OF_FILE = nomic_bert.names("embeddings.LayerNorm", "encoder.layer", {
    nomic_bert.QKV: "attention.qkv_proj", "attention/out": "attention.o_proj", "attention_norm": "attn_ln",
    "mlp/wi_1 mlp/wi_0": "mlp.up_gate_proj", "mlp/wo": "mlp.down_proj", "mlp_norm": "mlp_ln",
})
FIELDS: Fields = bert.FIELDS | {
    "vocab_size": ("vocab_size", 250048), "max_positions": ("max_position_embeddings", 8192),
    "type_vocab_size": ("type_vocab_size", 1), "attention_dropout": ("attention_probs_dropout_prob", 0.0),
    "rope_theta": ("rope_theta", 160_000.0),
}


def models(objective: MaskedLM, source: Source | None = None) -> tuple[TransformersModel]:
    """Return the Transformers model that the objective's parameters fill, with the names in a folder."""
    return nomic_bert.masked_lm(
        objective, "gte", "Gte", FIELDS, nomic_bert.names_of(source, OF_FILE),
        {r"^new\.": "gte.", r"^lm_head\.layer_norm\.": "lm_head.norm."},
        bert.mlm_head("lm_head.dense", "lm_head.norm", "lm_head.decoder.bias"),
        {"lm_head.decoder.weight": "gte.embeddings.word_embeddings.weight"},
    )


def read_objective(source: Source) -> MaskedLM:
    """Read masked language modelling with a GTE; its class ignores these keys of the published code."""
    source.require(layer_norm_type="layer_norm", logn_attention_scale=False, position_embedding_type="rope")
    model = Gte(**nomic_bert.read_model(source, FIELDS))
    return MaskedLM(model=model, input_format="document", short_rate=0.0)


FAMILY = Family("gte", models, read_objective, nomic_bert.heads("Gte", "gte"), stored_models=models)
