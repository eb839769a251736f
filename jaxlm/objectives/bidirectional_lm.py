"""Bidirectional language modelling over a stream (ELMo, Peters et al. 2018, section 3.1).

The LSTM states are carried from window to window.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxlm.corruption.sampled import draw_words, expected_counts, log_uniform
from jaxlm.corruption.streams import in_reading_order
from jaxlm.data.base import RowFormat
from jaxlm.errors import UserError
from jaxlm.fields import field
from jaxlm.models.elmo import Elmo, spell
from jaxlm.models.layers.embeddings import logits
from jaxlm.objectives.base import Constants, Example, Line, Memory, Objective, Term, Terms
from jaxlm.objectives.chunked_loss import chunked_cross_entropy
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import Params, TokenBatch

DIRECTIONS = ("forward", "backward")


@dataclasses.dataclass(frozen=True)
class BidirectionalLM(Objective):
    """Language modelling in both directions with shared word vectors and a shared softmax.

    Loss: the mean of -log p(word | previous words) over the rows that read forward and of -log p(word | following
    words) over those that read backward.

    Rows are windows of the stream of documents, which are sentences with `--data.sentences`. Every second row reads the
    text backward. The final state of a row is the initial state of its next window. As in the original code, the
    forward LSTMs read <s> before each sentence and predict </s> after it, and the backward ones read </s> and predict
    <s>. The original shuffles its sentences; here they keep the order of the text.
    """

    model: Elmo = field(Elmo(), weights=True)
    """The network."""
    noise_words: int = field(8192, range="[0, inf)")
    """Number of noise words in the sampled softmax, drawn per training batch and direction.

    0 trains with the full softmax, which evaluation always uses.
    """

    row_group = 2  # one row per direction
    primary_metric = "lm_loss"
    token_losses = ("lm_loss", "forward_loss", "backward_loss")

    def check(self, vocabulary: Vocabulary, length: int) -> None:
        vocabulary.require("bos", "eos", purpose="a language model in both directions")
        if self.noise_words >= (words := self.model.for_vocabulary(vocabulary).vocab_size):
            raise UserError(
                f"objective.noise_words is {self.noise_words}, but the vocabulary has only {words} words; lower it, or "
                "set it to 0 for the full softmax."
            )

    def row_format(self, length: int) -> RowFormat:
        return RowFormat("stream-both-ways", length + 1, stride=length)

    def load_constants(self, vocabulary: Vocabulary, load: Any) -> Constants:
        """Return the characters of every word, int32 [vocab, characters]."""
        return {"characters": spell(vocabulary)}

    def _noise_distribution(self) -> Float[np.ndarray, " vocab"]:
        """Return the probability of each id as noise, by its rank in the corpus after the symbols <s> and </s>.

        Without a corpus, the rank is the id.
        """
        v, rows = self.vocabulary, self.model.vocab_size
        counts = np.zeros(rows)
        if self.statistics is not None:
            counts[: len(self.statistics.token_counts)] = self.statistics.token_counts[:rows]
        counts[[v.bos, v.eos]] = np.inf
        shares = np.empty(rows)
        shares[np.argsort(-counts, kind="stable")] = log_uniform(rows)
        return shares

    def corrupt(self, key: jax.Array, batch: TokenBatch) -> Example:
        """Split the rows by direction and draw noise words.

        Returns:
            For each direction, in reading order: `ids` and `labels` int32 and `weights` float32 [batch / 2, length],
            and `noise` int32 [batch / 2, noise words], equal in all rows. Names have the direction as prefix
            ("forward_ids").
        """
        v = self.vocabulary
        batch, example = in_reading_order(batch), {}
        for number, (name, first, last) in enumerate((("forward", v.bos, v.eos), ("backward", v.eos, v.bos))):
            tokens, documents = batch.tokens[number::2], batch.segment_ids[number::2]
            # The stream has one </s> between sentences. As a label it ends a sentence, as an input it begins the next.
            is_end = tokens == v.eos
            example |= {
                f"{name}_ids": jnp.where(is_end, first, tokens)[:, :-1],
                f"{name}_labels": jnp.where(is_end, last, tokens)[:, 1:],
                f"{name}_weights": ((documents[:, :-1] > 0) & (documents[:, 1:] > 0)).astype(jnp.float32),
            }
            if self.noise_words:
                noise = draw_words(
                    jax.random.fold_in(key, number), jnp.asarray(self._noise_distribution()), self.noise_words
                )
                example[f"{name}_noise"] = jnp.broadcast_to(noise, (tokens.shape[0], self.noise_words))
        return example

    def initial_memory(self, rows: int) -> Memory:
        return {name: self.model.initial_memory(rows // 2) for name in DIRECTIONS}

    def stream_loss(
        self, params: Params, example: Example, memory: Memory, key: jax.Array, train: bool
    ) -> tuple[Terms, Memory]:
        terms, new_memory = {}, {}
        for number, name in enumerate(DIRECTIONS):
            words = self.model.word_vectors(params, self.constants["characters"][example[f"{name}_ids"]])
            direction_key = jax.random.fold_in(key, number) if train else None
            layers, state = self.model.run(params[name], words, memory[name], direction_key)
            new_memory[name] = jax.lax.stop_gradient(state)
            weights, labels = example[f"{name}_weights"], example[f"{name}_labels"]
            table, bias = params["softmax"]["embedding"], params["softmax"]["bias"]
            if train and self.noise_words:
                losses = self._sampled_losses(layers[-1], table, bias, labels, example[f"{name}_noise"][0])
                terms[f"{name}_loss"] = Term.of(losses, weights)
            else:
                tokens = chunked_cross_entropy(layers[-1], table, labels, weights, bias=bias)
                terms[f"{name}_loss"] = Term(tokens.total, jnp.sum(weights))
        total, weight = (sum(term[i] for term in terms.values()) for i in range(2))
        terms = {"lm_loss": Term(total, weight, 1.0)} | terms
        if not train:
            labels, weights = (
                jnp.concatenate([example[f"{name}_{part}"] for name in DIRECTIONS]) for part in ("labels", "weights")
            )
            terms |= self.bits_per_byte(total, labels, weights)
        return terms, new_memory

    def _sampled_losses(
        self, features: Float[Array, "batch length hidden"], table: Float[Array, "vocab hidden"],
        bias: Float[Array, " vocab"], labels: Int[Array, "batch length"], noise: Int[Array, " noise"],
    ) -> Float[Array, "batch length"]:
        """Return the cross-entropy over the label and the noise words (Jean et al. 2015, equation 8).

        The logarithm of each word's expected count is subtracted from its logit. Noise words that equal the label are
        masked.
        """
        offset = bias - jnp.log(jnp.asarray(expected_counts(self._noise_distribution(), self.noise_words), jnp.float32))
        label_logits = jnp.einsum(
            "blh,blh->bl", features, table[labels].astype(features.dtype), preferred_element_type=jnp.float32
        ) + offset[labels]
        noise_logits = logits(features, table[noise], offset[noise])
        noise_logits = jnp.where(noise == labels[..., None], -jnp.inf, noise_logits)
        return jnp.logaddexp(label_logits, jax.nn.logsumexp(noise_logits, axis=-1)) - label_logits

    def flops(self, length: int) -> float:
        predicted = 1 + self.noise_words if self.noise_words else self.model.vocab_size
        return self.model.direction_flops(length, predicted)

    def describe(self, batch: TokenBatch, example: Example, row: int) -> list[Line]:
        """Return the ids that a row reads, in reading order, its labels, and the first noise words."""
        name, index = DIRECTIONS[row % 2], row // 2
        is_used = np.asarray(example[f"{name}_weights"][index]) > 0
        ids, labels = (np.asarray(example[f"{name}_{part}"][index])[is_used].tolist() for part in ("ids", "labels"))
        special = self.vocabulary.special
        lines = [Line(f"read {name}", ids, ["special" if special[i] else "" for i in ids]),
                 Line(f"predict {len(labels)}", labels, ["target"] * len(labels))]
        if self.noise_words:
            noise = [int(i) for i in example[f"{name}_noise"][index][:20] if i < self.vocabulary.size]
            lines.append(Line("not", noise, ["random"] * len(noise)))
        return lines
