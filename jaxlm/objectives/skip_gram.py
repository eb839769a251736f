"""Skip-gram and continuous bag of words with negative sampling (word2vec, Mikolov et al. 2013)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.corruption.context import draw_noise, keep_probabilities, noise_table, sample_contexts, subsample
from jaxlm.fields import field
from jaxlm.models.word2vec import Word2Vec
from jaxlm.objectives.base import Example, Line, Objective, Term, Terms
from jaxlm.types import Params, TokenBatch


@dataclasses.dataclass(frozen=True)
class SkipGram(Objective):
    """Skip-gram with negative sampling.

    Loss: the mean over pairs of a word and a word of its context of -log σ(h·u) - Σ log σ(-h·n). h is the input vector
    of the context word, u the output vector of the word, n the output vectors of noise words. With `bag_of_words`, h is
    the mean over the whole context, and each word has one such term.
    """

    model: Word2Vec = field(Word2Vec(), weights=True)
    """The vectors."""
    bag_of_words: bool = False
    """Predict a word from the mean of its context (CBOW) instead of from each word of it."""
    window: int = field(5, range="[1, 65536]")
    """Maximum number of context words on each side; each word draws its radius from 1 to this."""
    negatives: int = field(5, range="[1, 65536]")
    """Number of noise words per prediction."""
    noise_power: float = field(0.75, range="[0, inf)")
    """Exponent of the noise distribution over word counts."""
    threshold: float = field(1e-3, range="[0, inf)")
    """Subsampling threshold: words with a larger share of the text are dropped at random; 0 keeps all words."""

    primary_metric = "noise_loss"

    def _counts(self) -> np.ndarray:
        """Return counts, int64 [vocab]; 0 for special symbols and [UNK], which are neither words nor context."""
        size = self.vocabulary.size
        counts = np.ones(size, np.int64) if self.statistics is None else self.statistics.token_counts[:size]
        is_word = ~self.vocabulary.special & (np.arange(size) != self.vocabulary.unk)
        return np.where(is_word, counts, 0)

    def corrupt(self, key: jax.Array, batch: TokenBatch) -> Example:
        """Subsample rows and draw contexts and noise words.

        Returns:
            `words` int32 [batch, length] after subsampling; `context` int32 and `weights` float32 [batch, length,
            neighbours]; `noise` int32 [batch, length, neighbours (1 for a bag of words), negatives]; `attention_mask`
            int32 [batch, length], 1 for kept tokens.
        """
        key_keep, key_window, key_noise = jax.random.split(key, 3)
        counts = self._counts()
        keep = np.where(counts > 0, keep_probabilities(counts, self.threshold), 0.0)
        tokens = jnp.asarray(batch.tokens)
        token_keep = jnp.where(batch.segment_ids > 0, jnp.asarray(keep)[tokens], 0.0)
        words, sizes = subsample(key_keep, tokens, token_keep)
        context, is_context = sample_contexts(key_window, words, sizes, self.window)
        shape = (*words.shape, 1 if self.bag_of_words else 2 * self.window, self.negatives)
        return {
            "words": words, "context": context, "weights": is_context.astype(jnp.float32),
            "noise": draw_noise(key_noise, noise_table(counts, self.noise_power), shape),
            "attention_mask": (jnp.arange(words.shape[1]) < sizes[:, None]).astype(jnp.int32),
        }

    def loss(self, params: Params, example: Example, key: jax.Array, train: bool) -> Terms:
        weights, words = example["weights"], example["words"]
        vectors = params["word"]["embedding"][example["context"]]
        if self.bag_of_words:
            total, count = jnp.einsum("blcd,blc->bld", vectors, weights), jnp.sum(weights, axis=2)
            mean = total / jnp.maximum(count, 1.0)[..., None]
            # As in the C code, each context word gets the full gradient of the mean instead of its share.
            vectors = (total + jax.lax.stop_gradient(mean - total))[:, :, None]
            weights = (count > 0).astype(jnp.float32)[..., None]
        output = params["output"]["embedding"]
        # Noise that equals the word itself is masked.
        is_noise = (example["noise"] != words[:, :, None, None]).astype(jnp.float32)
        positive = jnp.einsum("blcd,bld->blc", vectors, output[words])
        noise = jnp.einsum("blcd,blcnd->blcn", vectors, output[example["noise"]])
        losses = jax.nn.softplus(-positive) + jnp.sum(jax.nn.softplus(noise) * is_noise, axis=-1)
        return {
            "noise_loss": Term.of(losses, weights, 1.0),
            "rank_accuracy": Term.of(positive > jnp.max(jnp.where(is_noise > 0, noise, -jnp.inf), axis=-1), weights),
        }

    def flops(self, length: int) -> float:
        predictions = length * (1 if self.bag_of_words else self.window + 1)  # the mean size of a context
        return 2.0 * predictions * (1 + self.negatives) * self.model.hidden_size

    def describe(self, batch: TokenBatch, example: Example, row: int) -> list[Line]:
        """Return the row, the row after subsampling, and three words with their contexts and noise."""
        text = np.asarray(batch.tokens[row])[np.asarray(batch.segment_ids[row]) > 0].tolist()
        size = int(np.sum(example["attention_mask"][row]))
        words = np.asarray(example["words"][row])[:size].tolist()
        marks = ["special" if self.vocabulary.special[i] else "" for i in text]
        lines = [Line("text", text, marks), Line("kept", words, [""] * size)]
        for position in sorted({0, size // 2, size - 1} if size else ()):
            used_slots = np.flatnonzero(example["weights"][row, position])
            context = np.asarray(example["context"][row, position])[used_slots]
            noise = np.unique(np.asarray(example["noise"][row, position])[0 if self.bag_of_words else used_slots])
            lines.append(Line("word", [words[position], *context.tolist()], ["target"] + ["span"] * len(context)))
            lines.append(Line("not", noise.tolist(), ["random"] * len(noise)))
        return lines
