"""Classification of segment pairs beside masked language modelling, by a head on the first token."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxlm.corruption.pairs import Pairs, at_source
from jaxlm.models.encoder import Encoder
from jaxlm.models.heads import LinearHead
from jaxlm.models.layers.stack import call
from jaxlm.objectives.base import Example, Term, Terms
from jaxlm.objectives.losses import cross_entropy
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import Params, TokenBatch


@dataclasses.dataclass(frozen=True)
class PairTask:
    """Binary task on rows `[CLS] A [SEP] B [SEP]`, with parameters `pooler` and `<abbreviation>_head`.

    Attributes:
        name: prefix of its arrays ("next_sentence").
        abbreviation: prefix of its terms and its head ("nsp").
        label_names: descriptions of the labels 0 and 1 for `jaxlm show`.
        make_pairs: corruption function, such as `sentence_pairs`.
    """

    name: str
    abbreviation: str
    label_names: tuple[str, str]
    make_pairs: Callable[..., Pairs]

    def init(self, model: Encoder, key: jax.Array) -> Params:
        """Return fresh parameters of the pooler and the head."""
        key_pooler, key_head = jax.random.split(key)
        head = self._head(model).init_params(key_head)
        return {"pooler": model.init_pooler(key_pooler), f"{self.abbreviation}_head": head}

    def corrupt(self, key: jax.Array, batch: TokenBatch, vocabulary: Vocabulary) -> Example:
        """Build rows of pairs, half of them with each label.

        Returns:
            `input_ids`, `token_type_ids`, `attention_mask` int32 [batch, length + 3]; `<name>_labels` int32 and
            `<name>_weights` float32 [batch]; `entities`, as in Inputs, if the batch has them.
        """
        v = vocabulary
        pairs = self.make_pairs(
            key, batch, jnp.asarray(v.word_start), jnp.asarray(v.sentence_end), cls=v.cls, sep=v.sep, pad=v.pad
        )
        entities = {} if batch.entities is None else {"entities": at_source(batch.entities, pairs.source)}
        return entities | {
            "input_ids": pairs.input_ids,
            "token_type_ids": pairs.token_type_ids,
            "attention_mask": pairs.attention_mask,
            f"{self.name}_labels": pairs.label,
            f"{self.name}_weights": pairs.has_pair.astype(jnp.float32),
        }

    def loss(
        self, model: Encoder, params: Params, hidden: Float[Array, "batch length hidden"], example: Example
    ) -> Terms:
        """Return cross-entropy and accuracy, given hidden states that begin with the first token."""
        logits = self.predict(model, params, hidden)
        labels, weights = example[f"{self.name}_labels"], example[f"{self.name}_weights"]
        correct = jnp.argmax(logits, axis=-1) == labels
        return {
            f"{self.abbreviation}_loss": Term.of(cross_entropy(logits, labels), weights, coefficient=1.0),
            f"{self.abbreviation}_accuracy": Term.of(correct, weights),
        }

    def predict(
        self, model: Encoder, params: Params, hidden: Float[Array, "batch length hidden"]
    ) -> Float[Array, "batch 2"]:
        """Return the logits of the two labels."""
        return call(self._head(model), params[f"{self.abbreviation}_head"], model.pool(params, hidden))

    def flops(self, model: Encoder) -> float:
        """Return the FLOPs of pooler and classifier for one sequence."""
        return 2.0 * model.hidden_size * model.hidden_size + 4.0 * model.hidden_size

    def _head(self, model: Encoder) -> LinearHead:
        return LinearHead(model.stack, 2)
