"""Next-sentence prediction (BERT, Devlin et al. 2018, section 3.1, Task #2): a classifier on the first token tells
whether the second segment of a row follows the first one in the text (0) or is of another document (1)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxlm.corruption.pairs import sentence_pairs
from jaxlm.models.encoder import Encoder
from jaxlm.models.heads import LinearHead
from jaxlm.objectives.base import Example, Params, Term, Terms
from jaxlm.objectives.losses import cross_entropy
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import TokenBatch


def head(model: Encoder) -> LinearHead:
    """Two logits: is next, is random."""
    return LinearHead(model.stack, 2)


def init(model: Encoder, key: jax.Array) -> Params:
    """Fresh parameters: `pooler` and `nsp_head`."""
    key_pooler, key_head = jax.random.split(key)
    return {"pooler": model.init_pooler(key_pooler), "nsp_head": head(model).init(key_head)}


def corrupt(key: jax.Array, batch: TokenBatch, vocabulary: Vocabulary) -> Example:
    """Rows `[CLS] A [SEP] B [SEP]`, half of them with another document's B: input_ids, token_type_ids, attention_mask
    int32 [batch, length + 3]; next_sentence_labels int32 and next_sentence_weights float32 [batch]."""
    v = vocabulary
    pairs = sentence_pairs(
        key, batch, jnp.asarray(v.word_start), jnp.asarray(v.sentence_end), cls=v.cls, sep=v.sep, pad=v.pad
    )
    return {
        "input_ids": pairs.input_ids,
        "token_type_ids": pairs.token_type_ids,
        "attention_mask": pairs.attention_mask,
        "next_sentence_labels": pairs.is_random,
        "next_sentence_weights": pairs.has_pair.astype(jnp.float32),
    }


def loss(model: Encoder, params: Params, hidden: Float[Array, "batch length hidden"], example: Example) -> Terms:
    """Cross-entropy and accuracy, from hidden states whose first place is the first token."""
    logits = predict(model, params, hidden)
    labels, weights = example["next_sentence_labels"], example["next_sentence_weights"]
    correct = jnp.argmax(logits, axis=-1) == labels
    return {
        "nsp_loss": Term.of(cross_entropy(logits, labels), weights, coefficient=1.0),
        "nsp_accuracy": Term.of(correct, weights),
    }


def predict(model: Encoder, params: Params, hidden: Float[Array, "batch length hidden"]) -> Float[Array, "batch 2"]:
    """Logits of (0 = is next, 1 = random)."""
    return head(model)(params["nsp_head"], model.pool(params, hidden))


def flops(model: Encoder) -> float:
    """FLOPs of pooler and classifier for one sequence."""
    return 2.0 * model.hidden_size * model.hidden_size + 4.0 * model.hidden_size
