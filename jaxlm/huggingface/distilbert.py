"""DistilBERT in Transformers: DistilBertForMaskedLM, DistilBertModel."""

from __future__ import annotations

from jaxlm.errors import UserError
from jaxlm.huggingface.bert import mlm_head, text_heads
from jaxlm.huggingface.family import Family, Fields, Source, TransformersModel, to_config, token_id
from jaxlm.huggingface.table import Table, dense, embedding, norm
from jaxlm.models.distilbert import Distilbert
from jaxlm.objectives.masked_lm import MaskedLM

FIELDS: Fields = {
    "vocab_size": ("vocab_size", 30522),
    "hidden_size": ("dim", 768),
    "num_layers": ("n_layers", 6),
    "num_heads": ("n_heads", 12),
    "intermediate_size": ("hidden_dim", 3072),
    "max_positions": ("max_position_embeddings", 512),
    "activation": ("activation", "gelu"),
    "dropout": ("dropout", 0.1),
    "attention_dropout": ("attention_dropout", 0.1),
    "init_std": ("initializer_range", 0.02),
}
OURS, THEIRS = "encoder/layers", "distilbert.transformer.layer.{layer}"
TABLE = Table(
    entries=(
        *embedding("embeddings/word", "distilbert.embeddings.word_embeddings"),
        *embedding("embeddings/position", "distilbert.embeddings.position_embeddings"),
        *norm("embeddings/norm", "distilbert.embeddings.LayerNorm"),
        *dense(f"{OURS}/attention/query", f"{THEIRS}.attention.q_lin"),
        *dense(f"{OURS}/attention/key", f"{THEIRS}.attention.k_lin"),
        *dense(f"{OURS}/attention/value", f"{THEIRS}.attention.v_lin"),
        *dense(f"{OURS}/attention/out", f"{THEIRS}.attention.out_lin"),
        *norm(f"{OURS}/attention_norm", f"{THEIRS}.sa_layer_norm"),
        *dense(f"{OURS}/mlp/wi", f"{THEIRS}.ffn.lin1"),
        *dense(f"{OURS}/mlp/wo", f"{THEIRS}.ffn.lin2"),
        *norm(f"{OURS}/mlp_norm", f"{THEIRS}.output_layer_norm"),
        *mlm_head("vocab_transform", "vocab_layer_norm", "vocab_projector.bias"),
    ),
    prefix="distilbert.",
    ties={"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"},
    ignored=("distilbert.embeddings.position_ids",),
    optional=("mlm_head",),
)
NORM_EPS = 1e-12  # fixed in the Transformers class


def models(objective: MaskedLM) -> tuple[TransformersModel]:
    """Return the Transformers model that the objective's parameters fill."""
    m = objective.model
    if m.norm_eps != NORM_EPS or m.type_vocab_size:
        raise UserError(
            f"DistilBERT's class in Transformers has norms with epsilon {NORM_EPS} and no segment types; a model with "
            "others cannot be exported."
        )
    config = to_config(m, FIELDS) | {
        "model_type": "distilbert",
        "sinusoidal_pos_embds": False,
        "pad_token_id": token_id(objective.vocabulary, "pad"),
        "tie_word_embeddings": True,
    }
    return (TransformersModel("DistilBertForMaskedLM", "AutoModelForMaskedLM", config, TABLE),)


def read_objective(source: Source) -> MaskedLM:
    """Read masked language modelling with a DistilBERT; the folder does not know its teacher.

    Its `sinusoidal_pos_embds` says how the stored positions began.
    """
    return MaskedLM(model=Distilbert(**source.read(FIELDS)), input_format="document")


FAMILY = Family("distilbert", models, read_objective, text_heads("DistilBert", "pre_classifier", "seq_classif_dropout"))
