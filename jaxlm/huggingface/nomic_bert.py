"""Nomic BERT and GTE in Transformers: NomicBertForMaskedLM, …ForSequenceClassification, …ForTokenClassification.

Files have the names of the published code, which `save_pretrained` writes, or those of the classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxlm.huggingface import bert
from jaxlm.huggingface.family import Family, Fields, Head, Source, TransformersModel
from jaxlm.huggingface.table import Entry, Table, embedding
from jaxlm.models.rotary_bert import Gte, NomicBert
from jaxlm.objectives.masked_lm import MaskedLM

Names = Mapping[str, str]
"""Our paths, joined by spaces where one tensor holds several → theirs, below the root of the class."""
QKV = "attention/query attention/key attention/value"


def names(norm: str, layers: str, parts: Names) -> Names:
    """Return the names of the norm of the embeddings and of the parts of layers."""
    return {"embeddings/norm": norm} | {
        " ".join(f"encoder/layers/{path}" for path in ours.split()): f"{layers}.{{layer}}.{theirs}"
        for ours, theirs in parts.items()
    }


OF_CLASS = names("embeddings.LayerNorm", "layers", {
    "attention/query": "self_attn.q_proj", "attention/key": "self_attn.k_proj", "attention/value": "self_attn.v_proj",
    "attention/out": "self_attn.o_proj", "attention_norm": "post_attention_layernorm", "mlp/wi_0": "mlp.gate_proj",
    "mlp/wi_1": "mlp.up_proj", "mlp/wo": "mlp.down_proj", "mlp_norm": "post_mlp_layernorm",
})
OF_FILE = names("emb_ln", "encoder.layers", {
    QKV: "attn.Wqkv", "attention/out": "attn.out_proj", "attention_norm": "norm1", "mlp/wi_1": "mlp.fc11",
    "mlp/wi_0": "mlp.fc12", "mlp/wo": "mlp.fc2", "mlp_norm": "norm2",
})
OF_GTE = names("embeddings.LayerNorm", "encoder.layer", {
    QKV: "attention.qkv_proj", "attention/out": "attention.o_proj", "attention_norm": "attn_ln",
    "mlp/wi_1 mlp/wi_0": "mlp.up_gate_proj", "mlp/wo": "mlp.down_proj", "mlp_norm": "mlp_ln",
})
FIELDS: Fields = bert.FIELDS | {
    "vocab_size": ("vocab_size", 30528), "max_positions": ("max_position_embeddings", 2048),
    "activation": ("hidden_act", "silu"), "dropout": ("hidden_dropout_prob", 0.0),
    "attention_dropout": ("attention_probs_dropout_prob", 0.0), "rope_theta": ("rope_theta", 1000.0),
}
GTE: Fields = bert.FIELDS | {
    "vocab_size": ("vocab_size", 250048), "max_positions": ("max_position_embeddings", 8192),
    "type_vocab_size": ("type_vocab_size", 1), "attention_dropout": ("attention_probs_dropout_prob", 0.0),
    "rope_theta": ("rope_theta", 160_000.0),
}
OLD_KEYS = {
    "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
    "intermediate_size": "n_inner", "max_position_embeddings": "n_positions", "layer_norm_eps": "layer_norm_epsilon",
    "hidden_dropout_prob": "resid_pdrop", "attention_probs_dropout_prob": "attn_pdrop", "rope_theta": "rotary_emb_base",
}
"""Key of the class → that of the published code, which the class ignores."""
FIXED = {
    "activation_function": "swiglu", "num_experts": (None, 0), "prenorm": False, "causal": False, "use_rms_norm": False,
    "parallel_block": False, "qkv_proj_bias": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False,
    "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
}
"""Keys of the published code with one supported value."""


def masked_lm(
    objective: MaskedLM, model_type: str, name: str, fields: Fields, own: Names, old: Names, head: tuple[Entry, ...],
    ties: Names,
) -> tuple[TransformersModel]:
    """Return the Transformers model that the objective's parameters fill.

    Its classes are named `name`For…; `own` are the names of the encoder's tensors, `old` patterns in older names.
    """
    m, root = objective.model, f"{model_type}."

    def entries(ours: str, theirs: str) -> tuple[Entry, ...]:
        paths, part = ours.split(), ours.rpartition("/")[2]
        leaf = "scale" if part.endswith("norm") else "kernel"
        weight = Entry(tuple(f"{path}/{leaf}" for path in paths), f"{theirs}.weight", transpose=leaf == "kernel")
        bias = Entry(tuple(f"{path}/bias" for path in paths), f"{theirs}.bias")
        return (weight, bias) if leaf == "scale" or m.stack.has_bias(part) else (weight,)

    types = embedding("embeddings/token_type", f"{root}embeddings.token_type_embeddings") if m.type_vocab_size else ()
    table = Table(
        entries=(*embedding("embeddings/word", f"{root}embeddings.word_embeddings"), *types,
                 *(entry for ours, theirs in own.items() for entry in entries(ours, root + theirs)), *head),
        prefix=root, ties=ties, old_names=old, optional=("mlm_head",),
        ignored=(f"{root}pooler.dense.weight", f"{root}pooler.dense.bias"),  # in published encoders
    )
    rope = {"rope_type": "default", "rope_theta": m.rope_theta}
    config = bert.encoder_config(model_type, m, objective.vocabulary, fields) | {
        "position_embedding_type": "rope", "rope_parameters": rope}
    return (TransformersModel(f"{name}ForMaskedLM", "AutoModelForMaskedLM", config, table),)


def names_of(source: Source | None, of_file: Names) -> Names:
    """Return the names of the tensors in a folder, or those of an export."""
    return OF_CLASS if source and source.has_tensor("layers.0.self_attn.q_proj.weight") else of_file


def read_model(source: Source, fields: Fields) -> dict[str, Any]:
    """Read the fields of `RotaryBert`."""
    found, config = source.read(fields), source.config
    source.require(tie_word_embeddings=True, head_dim=found["hidden_size"] // found["num_heads"])
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    ropes = Source(source.folder, {"rope_type": rope.get("type"), **rope}, ())
    ropes.require(rope_type="default", full_attention=None, sliding_attention=None)
    return found | {"rope_theta": ropes.value("rope_theta", found["rope_theta"])}


def models(objective: MaskedLM, source: Source | None = None) -> tuple[TransformersModel]:
    """Return the Transformers model that the objective's parameters fill, with the names in a folder."""
    head = "cls.predictions"
    return masked_lm(
        objective, "nomic_bert", "NomicBert", FIELDS, names_of(source, OF_FILE), {r"^bert\.": "nomic_bert."},
        bert.mlm_head(f"{head}.transform.dense", f"{head}.transform.layer_norm", f"{head}.bias"),
        {f"{head}.decoder.weight": "nomic_bert.embeddings.word_embeddings.weight",
         f"{head}.decoder.bias": f"{head}.bias"},
    )


def read_objective(source: Source) -> MaskedLM:
    """Read masked language modelling with a Nomic BERT, from keys of its class or of the published code."""
    source.require(**FIXED)
    old = {key: source.config[name] for key, name in OLD_KEYS.items() if name in source.config}
    fields = read_model(Source(source.folder, old | dict(source.config), source.names), FIELDS)
    return MaskedLM(model=NomicBert(**fields), mask_rate=0.3, input_format="document", short_rate=0.0)


def gte_models(objective: MaskedLM, source: Source | None = None) -> tuple[TransformersModel]:
    """Return the Transformers model that the objective's parameters fill, with the names in a folder."""
    return masked_lm(
        objective, "gte", "Gte", GTE, names_of(source, OF_GTE),
        {r"^new\.": "gte.", r"^lm_head\.layer_norm\.": "lm_head.norm."},
        bert.mlm_head("lm_head.dense", "lm_head.norm", "lm_head.decoder.bias"),
        {"lm_head.decoder.weight": "gte.embeddings.word_embeddings.weight"},
    )


def read_gte(source: Source) -> MaskedLM:
    """Read masked language modelling with a GTE; its class ignores these keys of the published code."""
    source.require(layer_norm_type="layer_norm", logn_attention_scale=False, position_embedding_type="rope")
    return MaskedLM(model=Gte(**read_model(source, GTE)), input_format="document", short_rate=0.0)


def heads(name: str, root: str) -> dict[str, Head]:
    """Return the heads of the fine-tuned classes of a family; their names begin with `name`."""
    return {"SequenceClassification": Head(f"{name}ForSequenceClassification", dense=f"{root}.pooler.dense"),
            "TokenClassification": Head(f"{name}ForTokenClassification")}


FAMILY = {
    NomicBert: Family("nomic_bert", models, read_objective, heads("NomicBert", "nomic_bert"), stored_models=models),
    Gte: Family("gte", gte_models, read_gte, heads("Gte", "gte"), stored_models=gte_models),
}
