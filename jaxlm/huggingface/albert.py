"""ALBERT in Transformers: AlbertForPreTraining, AlbertForMaskedLM (without sentence order), AlbertModel."""

from __future__ import annotations

from jaxlm.huggingface import bert
from jaxlm.huggingface.family import Family, Fields, Source, TransformersModel, token_id
from jaxlm.huggingface.table import Table, dense, norm
from jaxlm.models.albert import Albert
from jaxlm.objectives.base import Objective
from jaxlm.objectives.masked_lm import MaskedLM

# The defaults of the Transformers class are ALBERT-xxlarge.
FIELDS: Fields = bert.FIELDS | {
    "vocab_size": ("vocab_size", 30000),
    "hidden_size": ("hidden_size", 4096),
    "num_heads": ("num_attention_heads", 64),
    "intermediate_size": ("intermediate_size", 16384),
    "embedding_size": ("embedding_size", 128),
    "num_groups": ("num_hidden_groups", 1),
    "dropout": ("hidden_dropout_prob", 0.0),
    "attention_dropout": ("attention_probs_dropout_prob", 0.0),
    "activation": ("hidden_act", "gelu_new"),
}
OURS, THEIRS = "encoder/layers", "albert.encoder.albert_layer_groups.{layer}.albert_layers.0"
ENCODER = (
    *bert.embeddings("embeddings", "albert.embeddings"),
    *dense("projection", "albert.encoder.embedding_hidden_mapping_in"),
    *dense(f"{OURS}/attention/query", f"{THEIRS}.attention.query"),
    *dense(f"{OURS}/attention/key", f"{THEIRS}.attention.key"),
    *dense(f"{OURS}/attention/value", f"{THEIRS}.attention.value"),
    *dense(f"{OURS}/attention/out", f"{THEIRS}.attention.dense"),
    *norm(f"{OURS}/attention_norm", f"{THEIRS}.attention.LayerNorm"),
    *dense(f"{OURS}/mlp/wi", f"{THEIRS}.ffn"),
    *dense(f"{OURS}/mlp/wo", f"{THEIRS}.ffn_output"),
    *norm(f"{OURS}/mlp_norm", f"{THEIRS}.full_layer_layer_norm"),
)
MLM_HEAD = bert.mlm_head("predictions.dense", "predictions.LayerNorm", "predictions.bias")
PAIR_HEAD = (*dense("pooler", "albert.pooler"), *dense("sop_head", "sop_classifier.classifier"))


def table(sentence_order: bool) -> Table:
    """Return the table of AlbertForPreTraining, or of AlbertForMaskedLM without sentence order."""
    return Table(
        entries=(*ENCODER, *MLM_HEAD, *(PAIR_HEAD if sentence_order else ())),
        prefix="albert.",
        ties={
            "predictions.decoder.weight": "albert.embeddings.word_embeddings.weight",
            "predictions.decoder.bias": "predictions.bias",
        },
        # Older files of classes without a pooler have one.
        ignored=("albert.embeddings.position_ids", "albert.embeddings.token_type_ids",
                 *(() if sentence_order else ("albert.pooler.weight", "albert.pooler.bias"))),
        optional=("mlm_head", "pooler", "sop_head"),
    )


def models(objective: Objective) -> tuple[TransformersModel]:
    """Return the Transformers model that the objective's parameters fill."""
    m, v = objective.model, objective.vocabulary
    config = bert.encoder_config("albert", m, v, FIELDS) | {
        "inner_group_num": 1,
        "classifier_dropout_prob": m.dropout,
        "bos_token_id": token_id(v, "cls"),
        "eos_token_id": token_id(v, "sep"),
    }
    has_pairs = getattr(objective, "input_format", "") == "sentence-order"  # others than MaskedLM have none
    name = "ForPreTraining" if has_pairs else "ForMaskedLM"
    return (TransformersModel(f"Albert{name}", f"AutoModel{name}", config, table(has_pairs)),)


def read_objective(source: Source) -> MaskedLM:
    """Read masked language modelling with an ALBERT, and its sentence order if the folder has a pooler."""
    source.require(inner_group_num=1)
    sentence_order = source.has_tensor("pooler.weight") or source.has_tensor("sop_classifier.classifier.weight")
    return MaskedLM(
        model=Albert(**bert.read_encoder(source, FIELDS)),
        input_format="sentence-order" if sentence_order else "document", whole_word=True, longest_ngram=3,
        max_predictions=20,
    )


FAMILY = Family("albert", models, read_objective, bert.text_heads(
    "Albert", "albert.pooler", *["classifier_dropout_prob"] * 2))
