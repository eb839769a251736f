"""XLNet in Transformers: XLNetLMHeadModel.

Its attention matrices are [hidden, heads, head_dim], including the output's.
"""

from __future__ import annotations

from jaxlm.huggingface.family import Family, Fields, Head, Source, TransformersModel, to_config, token_id
from jaxlm.huggingface.table import Entry, Table, dense, embedding, norm
from jaxlm.models.xlnet import Xlnet
from jaxlm.objectives.permutation_lm import PermutationLM

FIELDS: Fields = {
    "vocab_size": ("vocab_size", 32000),
    "hidden_size": ("d_model", 1024),
    "num_layers": ("n_layer", 24),
    "num_heads": ("n_head", 16),
    "intermediate_size": ("d_inner", 4096),
    "activation": ("ff_activation", "gelu"),
    "dropout": ("dropout", 0.1),
    "norm_eps": ("layer_norm_eps", 1e-12),
    "init_std": ("initializer_range", 0.02),
}
FIXED = {"attn_type": "bi", "untie_r": True, "tie_word_embeddings": True}
OURS, THEIRS = "layers", "transformer.layer.{layer}"
VECTORS = {
    "content_bias": "r_w_bias", "position_bias": "r_r_bias", "segment_bias": "r_s_bias", "segment": "seg_embed",
}
MATRICES = {"query": "q", "key": "k", "value": "v", "position": "r", "out": "o"}
_SUMMARY = {"summary_type": "last", "summary_use_proj": True, "summary_activation": "tanh"}


def table(model: Xlnet) -> Table:
    """Return the table of XLNetLMHeadModel."""
    shape = (model.hidden_size, model.num_heads, model.stack.head_dim)
    return Table(
        entries=(
            *embedding("word", "transformer.word_embedding"),
            Entry(("query_start",), "transformer.mask_emb", shape=(1, 1, model.hidden_size)),
            *(Entry((f"{OURS}/attention/{ours}/kernel",), f"{THEIRS}.rel_attn.{theirs}", ours == "out", shape)
              for ours, theirs in MATRICES.items()),
            *(Entry((f"{OURS}/attention/{ours}",), f"{THEIRS}.rel_attn.{theirs}") for ours, theirs in VECTORS.items()),
            *norm(f"{OURS}/attention_norm", f"{THEIRS}.rel_attn.layer_norm"),
            *dense(f"{OURS}/mlp/wi", f"{THEIRS}.ff.layer_1"),
            *dense(f"{OURS}/mlp/wo", f"{THEIRS}.ff.layer_2"),
            *norm(f"{OURS}/mlp_norm", f"{THEIRS}.ff.layer_norm"),
            Entry(("bias",), "lm_loss.bias"),
        ),
        prefix="transformer.",
        ties={"lm_loss.weight": "transformer.word_embedding.weight"},
        optional=("bias",),
    )


def models(objective: PermutationLM) -> tuple[TransformersModel]:
    """Return the Transformers model that the objective's parameters fill."""
    ids = {f"{name}_token_id": token_id(objective.vocabulary, name) for name in ("pad", "bos", "eos")}
    config = to_config(objective.model, FIELDS) | FIXED | ids
    return (
        TransformersModel(
            "XLNetLMHeadModel", "AutoModelForCausalLM",
            config | {"model_type": "xlnet", "mem_len": objective.memory_length or None}, table(objective.model),
            # Their decoding with memory recomputes only the last two tokens, which gives different logits.
            generation_config=ids | {"use_mems": False}, pipeline_tag="text-generation",
        ),
    )


def read_objective(source: Source) -> PermutationLM:
    """Read permutation language modelling with an XLNet."""
    source.require(**FIXED, same_length=False, clamp_len=-1, bi_data=False, reuse_len=0)
    fields = source.read(FIELDS)
    source.require(d_head=fields["hidden_size"] // fields["num_heads"])
    model = Xlnet(**fields, attention_dropout=fields["dropout"])  # config.json has one rate
    return PermutationLM(model=model, memory_length=source.value("mem_len", PermutationLM.memory_length))


def _head(architecture: str, classifier: str, dense: str = "") -> Head:
    """Return the head of a fine-tuned class, whose texts have no memory."""
    return Head(architecture, classifier, dense, (_SUMMARY if dense else {}) | {"mem_len": None})


FAMILY = Family("xlnet", models, read_objective, heads={
    "SequenceClassification": _head("XLNetForSequenceClassification", "logits_proj", "sequence_summary.summary"),
    "MultipleChoice": _head("XLNetForMultipleChoice", "logits_proj", "sequence_summary.summary"),
    "TokenClassification": _head("XLNetForTokenClassification", "classifier"),
    "QuestionAnswering": _head("XLNetForQuestionAnsweringSimple", "qa_outputs"),
})
