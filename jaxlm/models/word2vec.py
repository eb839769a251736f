"""word2vec (Mikolov et al. 2013): two tables of vectors."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxlm.fields import field
from jaxlm.models.base import Inputs, Model
from jaxlm.models.layers.config import HasDtype, check_sizes
from jaxlm.types import Params


@dataclasses.dataclass(frozen=True)
class Word2Vec(HasDtype, Model):
    """word2vec. The defaults are the size of the published Google News vectors.

    Parameters: `word/embedding`, the word vectors, and `output/embedding`.
    """

    vocab_size: int = field(3_000_000, vocabulary=True)
    """Vocabulary size (rows of both tables); a run takes it from its tokenizer."""
    hidden_size: int = 300
    """Width of the word vectors."""

    summary_token = "mean"
    output_params = ("output",)
    fine_tuning = None

    def __post_init__(self) -> None:
        check_sizes(self)

    def init(self, key: jax.Array) -> Params:
        """Return fresh parameters, float32: the first table uniform in ±0.5 / width, the second zero."""
        shape, limit = (self.vocab_size, self.hidden_size), 0.5 / self.hidden_size
        word = jax.random.uniform(key, shape, jnp.float32, -limit, limit)
        return {"word": {"embedding": word}, "output": {"embedding": jnp.zeros(shape, jnp.float32)}}

    def _hidden_states(self, params: Params, inputs: Inputs, key: jax.Array | None) -> jax.Array:
        return self.vectors(params)[inputs.ids]

    def vectors(self, params: Params) -> Float[Array, "vocab hidden"]:
        """Return the vectors of all words."""
        return jnp.asarray(params["word"]["embedding"])
