"""BERT in Transformers: BertForPreTraining, BertForMaskedLM (without next-sentence prediction), BertModel.

SpanBERT and TinyBERT have the last two classes, and such a folder is imported as a BERT.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxlm.huggingface.family import Family, Fields, Head, Source, TransformersModel, to_config, token_id
from jaxlm.huggingface.table import Entry, Table, dense, embedding, norm
from jaxlm.models.bert import Bert
from jaxlm.models.encoder import Encoder
from jaxlm.objectives.base import Objective
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.tokenizers.vocabulary import Vocabulary

FIELDS: Fields = {
    "vocab_size": ("vocab_size", 30522),
    "hidden_size": ("hidden_size", 768),
    "num_layers": ("num_hidden_layers", 12),
    "num_heads": ("num_attention_heads", 12),
    "intermediate_size": ("intermediate_size", 3072),
    "max_positions": ("max_position_embeddings", 512),
    "type_vocab_size": ("type_vocab_size", 2),
    "activation": ("hidden_act", "gelu"),
    "dropout": ("hidden_dropout_prob", 0.1),
    "attention_dropout": ("attention_probs_dropout_prob", 0.1),
    "norm_eps": ("layer_norm_eps", 1e-12),
    "init_std": ("initializer_range", 0.02),
}
"""Fields shared by BERT and its successors."""


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


def mlm_head(transform: str, norm_name: str, bias: str, root: str = "") -> tuple[Entry, ...]:
    """Return the entries of the masked-LM head: dense layer, norm, and bias of the output matrix."""
    ours = f"{root}mlm_head"
    return *dense(f"{ours}/dense", transform), *norm(f"{ours}/norm", norm_name), Entry((f"{ours}/bias",), bias)


ENCODER = (*embeddings("embeddings", "bert.embeddings"), *layers("encoder", "bert.encoder"))
TRANSFORM = "cls.predictions.transform"
MLM_HEAD = mlm_head(f"{TRANSFORM}.dense", f"{TRANSFORM}.LayerNorm", "cls.predictions.bias")
NSP_HEAD = (*dense("pooler", "bert.pooler.dense"), *dense("nsp_head", "cls.seq_relationship"))


def table(next_sentence: bool) -> Table:
    """Return the table of BertForPreTraining, or of BertForMaskedLM without next-sentence prediction."""
    return Table(
        entries=(*ENCODER, *MLM_HEAD, *(NSP_HEAD if next_sentence else ())),
        prefix="bert.",
        ties={
            "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
            "cls.predictions.decoder.bias": "cls.predictions.bias",
        },
        ignored=("bert.embeddings.position_ids", "bert.embeddings.token_type_ids"),
        # Checkpoints converted from TensorFlow before 2019 have its names for LayerNorm's scale and bias.
        old_names={r"LayerNorm\.gamma$": "LayerNorm.weight", r"LayerNorm\.beta$": "LayerNorm.bias"},
        optional=("mlm_head", "pooler", "nsp_head"),
    )


def text_heads(
    name: str, pooler: str, dropout: str = "classifier_dropout", of_tokens: str = "classifier_dropout"
) -> dict[str, Head]:
    """Return the heads of classes like BERT's.

    `pooler` is the name of the dense layer before a classifier of texts, `dropout` and `of_tokens` the fields with the
    rate before a classifier of texts and of tokens.
    """
    return {
        "SequenceClassification": Head(f"{name}ForSequenceClassification", dense=pooler, dropout=dropout),
        "MultipleChoice": Head(f"{name}ForMultipleChoice", dense=pooler, dropout=dropout),
        "TokenClassification": Head(f"{name}ForTokenClassification", dropout=of_tokens),
        "QuestionAnswering": Head(f"{name}ForQuestionAnswering", "qa_outputs"),
    }


def encoder_config(
    model_type: str, model: Encoder, vocabulary: Vocabulary | None, fields: Fields = FIELDS
) -> dict[str, Any]:
    """Return the config.json of BERT or a successor."""
    return to_config(model, fields) | {
        "model_type": model_type,
        "pad_token_id": token_id(vocabulary, "pad"),
        "position_embedding_type": "absolute",
        "tie_word_embeddings": True,
    }


def models(objective: Objective) -> tuple[TransformersModel]:
    """Return the Transformers model that the objective's parameters fill."""
    config = encoder_config("bert", objective.model, objective.vocabulary)
    if "mlm_head" not in jax.eval_shape(objective.init, jax.random.key(0)):  # TinyBERT
        bare = Table(tuple(dataclasses.replace(each, theirs=each.theirs.removeprefix("bert.")) for each in ENCODER))
        return (TransformersModel("BertModel", "AutoModel", config, bare, pipeline_tag="feature-extraction"),)
    has_pairs = getattr(objective, "input_format", "") == "next-sentence"  # others than MaskedLM have none
    name = "ForPreTraining" if has_pairs else "ForMaskedLM"
    return (TransformersModel(f"Bert{name}", f"AutoModel{name}", config, table(has_pairs)),)


def read_encoder(source: Source, fields: Fields = FIELDS) -> dict[str, Any]:
    """Read the fields of `Encoder` from the config.json of BERT or a successor."""
    source.require(position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)
    if source.config.get("type_vocab_size") == 0:
        raise ValueError("type_vocab_size is 0, but the models of this family have at least one type")
    return source.read(fields)


def read_objective(source: Source) -> MaskedLM:
    """Read masked language modelling with a BERT, and next-sentence prediction if the folder has a pooler."""
    # A pooler without its head is kept too: sentence encoders have one, and next-sentence prediction trains it.
    next_sentence = source.has_tensor("pooler.dense.weight") or source.has_tensor("seq_relationship.weight")
    model = Bert(**read_encoder(source))
    return MaskedLM(model=model, input_format="next-sentence" if next_sentence else "document")


FAMILY = Family("bert", models, read_objective, text_heads("Bert", "bert.pooler.dense"))
