"""BERT in Transformers: BertForPreTraining, BertForMaskedLM (without next-sentence prediction), BertModel."""

from __future__ import annotations

from typing import Any

from jaxlm.huggingface.family import Family, Source, TransformersModel, activation, symbol
from jaxlm.huggingface.table import Entry, Table, dense, embedding, norm
from jaxlm.models.bert import Bert
from jaxlm.models.encoder import Encoder
from jaxlm.objectives.masked_lm import MaskedLM


def embeddings(ours: str, theirs: str) -> tuple[Entry, ...]:
    """Return the entries of the embedding module, shared with RoBERTa and ELECTRA."""
    return (
        *embedding(f"{ours}/word", f"{theirs}.word_embeddings"),
        *embedding(f"{ours}/position", f"{theirs}.position_embeddings"),
        *embedding(f"{ours}/token_type", f"{theirs}.token_type_embeddings"),
        *norm(f"{ours}/norm", f"{theirs}.LayerNorm"),
    )


def layers(ours: str, theirs: str) -> tuple[Entry, ...]:
    """Return the entries of the encoder layers, shared with RoBERTa and ELECTRA."""
    ours, theirs = f"{ours}/layers", f"{theirs}.layer.{{layer}}"
    return (
        *dense(f"{ours}/attention/query", f"{theirs}.attention.self.query"),
        *dense(f"{ours}/attention/key", f"{theirs}.attention.self.key"),
        *dense(f"{ours}/attention/value", f"{theirs}.attention.self.value"),
        *dense(f"{ours}/attention/out", f"{theirs}.attention.output.dense"),
        *norm(f"{ours}/attention_norm", f"{theirs}.attention.output.LayerNorm"),
        *dense(f"{ours}/mlp/wi", f"{theirs}.intermediate.dense"),
        *dense(f"{ours}/mlp/wo", f"{theirs}.output.dense"),
        *norm(f"{ours}/mlp_norm", f"{theirs}.output.LayerNorm"),
    )


ENCODER = (*embeddings("embeddings", "bert.embeddings"), *layers("encoder", "bert.encoder"))
MLM_HEAD = (
    *dense("mlm_head/dense", "cls.predictions.transform.dense"),
    *norm("mlm_head/norm", "cls.predictions.transform.LayerNorm"),
    Entry(("mlm_head/bias",), "cls.predictions.bias"),
)
POOLER = dense("pooler", "bert.pooler.dense")
NSP_HEAD = dense("nsp_head", "cls.seq_relationship")


def table(next_sentence: bool) -> Table:
    """Return the table of BertForPreTraining, or of BertForMaskedLM without next-sentence prediction."""
    return Table(
        entries=(*ENCODER, *MLM_HEAD, *(POOLER + NSP_HEAD if next_sentence else ())),
        prefix="bert.",
        ties={
            "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
            "cls.predictions.decoder.bias": "cls.predictions.bias",
        },
        ignored=("bert.embeddings.position_ids", "bert.embeddings.token_type_ids"),
        # Checkpoints converted from TensorFlow before 2019 have its names for LayerNorm's scale and bias.
        old_endings={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
        heads=("mlm_head", "pooler", "nsp_head"),
        # Sentence-order prediction has no counterpart in the classes.
        private=() if next_sentence else ("pooler", "sop_head"),
    )


def encoder_config(model: Encoder) -> dict[str, object]:
    """Return the fields of config.json shared by BERT and its successors."""
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "intermediate_size": model.intermediate_size,
        "max_position_embeddings": model.max_positions,
        "type_vocab_size": model.type_vocab_size,
        "hidden_act": model.activation,
        "hidden_dropout_prob": model.dropout,
        "attention_probs_dropout_prob": model.attention_dropout,
        "layer_norm_eps": model.norm_eps,
        "initializer_range": model.init_std,
        "position_embedding_type": "absolute",
        "tie_word_embeddings": True,
    }


def models(objective: MaskedLM) -> tuple[TransformersModel]:
    """Return the Transformers model that the objective's parameters fill."""
    config = encoder_config(objective.model) | {
        "model_type": "bert",
        "pad_token_id": symbol(objective.vocabulary, "pad"),
    }
    architecture, auto_class = (
        ("BertForPreTraining", "AutoModelForPreTraining") if objective.input_format == "next-sentence"
        else ("BertForMaskedLM", "AutoModelForMaskedLM")
    )
    return (TransformersModel(architecture, auto_class, config, table(objective.input_format == "next-sentence")),)


def read_encoder(source: Source) -> dict[str, Any]:
    """Read the fields of `Encoder` from the config.json of BERT or a successor.

    Missing fields default to bert-base-uncased.
    """
    source.require("position_embedding_type", "absolute")
    source.require("is_decoder", False)
    source.require("add_cross_attention", False)
    return dict(
        vocab_size=source.number("vocab_size", 30522),
        hidden_size=source.number("hidden_size", 768),
        num_layers=source.number("num_hidden_layers", 12),
        num_heads=source.number("num_attention_heads", 12),
        intermediate_size=source.number("intermediate_size", 3072),
        max_positions=source.number("max_position_embeddings", 512),
        type_vocab_size=source.number("type_vocab_size", 2),
        activation=activation(source),
        dropout=source.number("hidden_dropout_prob", 0.1),
        attention_dropout=source.number("attention_probs_dropout_prob", 0.1),
        norm_eps=source.number("layer_norm_eps", 1e-12),
        init_std=source.number("initializer_range", 0.02),
    )


def read_objective(source: Source) -> MaskedLM:
    """Read masked language modelling with a BERT, and next-sentence prediction if the folder has a pooler."""
    # A pooler without its head is kept too: sentence encoders have one, and next-sentence prediction trains it.
    next_sentence = source.has_tensor("pooler.dense.weight") or source.has_tensor("seq_relationship.weight")
    model = Bert(**read_encoder(source))
    return MaskedLM(model=model, input_format="next-sentence" if next_sentence else "document")


FAMILY = Family(
    model_type="bert",
    template=Bert.template,
    models=models,
    read_objective=read_objective,
    max_length=lambda objective: objective.model.max_positions,
)
