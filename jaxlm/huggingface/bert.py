"""BERT's names in Transformers: BertForPreTraining, BertForMaskedLM (without next-sentence prediction), BertModel."""

from __future__ import annotations

from jaxlm.huggingface.family import Family, Part, Source, activation, symbol
from jaxlm.huggingface.table import Entry, Table, dense, embedding, norm
from jaxlm.models.bert import BertConfig
from jaxlm.objectives.masked_lm import BertPretraining
from jaxlm.tokenizers.export import Template

ENCODER = (
    *embedding("embeddings/word", "bert.embeddings.word_embeddings"),
    *embedding("embeddings/position", "bert.embeddings.position_embeddings"),
    *embedding("embeddings/token_type", "bert.embeddings.token_type_embeddings"),
    *norm("embeddings/norm", "bert.embeddings.LayerNorm"),
    *dense("encoder/layers/attention/query", "bert.encoder.layer.{layer}.attention.self.query"),
    *dense("encoder/layers/attention/key", "bert.encoder.layer.{layer}.attention.self.key"),
    *dense("encoder/layers/attention/value", "bert.encoder.layer.{layer}.attention.self.value"),
    *dense("encoder/layers/attention/out", "bert.encoder.layer.{layer}.attention.output.dense"),
    *norm("encoder/layers/attention_norm", "bert.encoder.layer.{layer}.attention.output.LayerNorm"),
    *dense("encoder/layers/mlp/wi", "bert.encoder.layer.{layer}.intermediate.dense"),
    *dense("encoder/layers/mlp/wo", "bert.encoder.layer.{layer}.output.dense"),
    *norm("encoder/layers/mlp_norm", "bert.encoder.layer.{layer}.output.LayerNorm"),
)
MLM_HEAD = (
    *dense("mlm_head/dense", "cls.predictions.transform.dense"),
    *norm("mlm_head/norm", "cls.predictions.transform.LayerNorm"),
    Entry(("mlm_head/bias",), "cls.predictions.bias"),
)
POOLER = dense("pooler", "bert.pooler.dense")
NSP_HEAD = dense("nsp_head", "cls.seq_relationship")


def table(next_sentence: bool) -> Table:
    return Table(
        entries=(*ENCODER, *MLM_HEAD, *(POOLER + NSP_HEAD if next_sentence else ())),
        prefix="bert.",
        ties={
            "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
            "cls.predictions.decoder.bias": "cls.predictions.bias",
        },
        ignored=("bert.embeddings.position_ids", "bert.embeddings.token_type_ids"),
        # Checkpoints converted from TensorFlow before 2019 keep its names of LayerNorm's two vectors.
        old_endings={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
        heads=("mlm_head", "pooler", "nsp_head"),
    )


def parts(objective: BertPretraining) -> tuple[Part]:
    m = objective.model
    config = {
        "model_type": "bert",
        "vocab_size": m.vocab_size,
        "hidden_size": m.hidden_size,
        "num_hidden_layers": m.num_layers,
        "num_attention_heads": m.num_heads,
        "intermediate_size": m.intermediate_size,
        "max_position_embeddings": m.max_positions,
        "type_vocab_size": m.type_vocab_size,
        "hidden_act": m.activation,
        "hidden_dropout_prob": m.dropout,
        "attention_probs_dropout_prob": m.attention_dropout,
        "layer_norm_eps": m.norm_eps,
        "initializer_range": m.init_std,
        "position_embedding_type": "absolute",
        "tie_word_embeddings": True,
        "pad_token_id": symbol(objective.vocabulary, "pad"),
    }
    architecture, auto_class = (
        ("BertForPreTraining", "AutoModelForPreTraining") if objective.next_sentence
        else ("BertForMaskedLM", "AutoModelForMaskedLM")
    )
    return (Part(architecture, auto_class, config, table(objective.next_sentence)),)


def read_objective(source: Source) -> BertPretraining:
    source.refuse("position_embedding_type", "absolute")
    source.refuse("is_decoder", False)
    source.refuse("add_cross_attention", False)
    model = BertConfig(
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
    # A pooler without its head is worth keeping: sentence encoders have one, and next-sentence prediction trains it.
    next_sentence = source.holds("pooler.dense.weight") or source.holds("seq_relationship.weight")
    return BertPretraining(model=model, next_sentence=next_sentence)


TEMPLATE = Template(
    single="cls $A sep", pair="cls $A sep $B:1 sep:1", inputs=("input_ids", "token_type_ids", "attention_mask"),
    needs=("pad", "cls", "sep", "mask"),
)

BERT = Family(
    model_type="bert",
    objective=BertPretraining,
    template=TEMPLATE,
    parts=parts,
    read_objective=read_objective,
    max_length=lambda objective: objective.model.max_positions,
)
