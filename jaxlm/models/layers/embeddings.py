"""Input embeddings (words, learned positions, segment types) and the output logits."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxlm.models.layers.config import DType
from jaxlm.models.layers.dense import add_bias
from jaxlm.models.layers.dropout import dropout, module_key
from jaxlm.models.layers.norm import Norm


class EmbeddingTable(nn.Module):
    """Embedding table [rows, width] in float32, looked up in the compute type.

    It casts the result; flax's Embed casts the table, which is many times larger.
    """

    rows: int
    width: int
    init_values: nn.initializers.Initializer
    dtype: DType

    def setup(self) -> None:
        self.embedding = self.param("embedding", self.init_values, (self.rows, self.width), jnp.float32)

    def __call__(self, ids: Int[Array, "*shape"]) -> Float[Array, "*shape width"]:
        return jnp.take(self.embedding, ids, axis=0).astype(self.dtype)


class Embeddings(nn.Module):
    """Sum of word, position and segment embeddings, then LayerNorm, then dropout.

    With `num_positions` or `type_vocab_size` 0 there are no such embeddings, with `norm_eps` None no LayerNorm. Word
    embeddings are multiplied by `scale`.
    """

    vocab_size: int
    width: int
    num_positions: int
    type_vocab_size: int
    norm_eps: float | None
    dropout_rate: float
    word_init: nn.initializers.Initializer
    position_init: nn.initializers.Initializer
    dtype: DType
    use_bias: bool = True
    scale: float = 1.0

    def setup(self) -> None:
        self.word = EmbeddingTable(self.vocab_size, self.width, self.word_init, self.dtype)
        if self.num_positions:
            self.position = EmbeddingTable(self.num_positions, self.width, self.position_init, jnp.float32)
        if self.type_vocab_size:
            self.token_type = EmbeddingTable(self.type_vocab_size, self.width, self.word_init, self.dtype)
        if self.norm_eps is not None:
            self.norm = Norm("layer", self.norm_eps, self.dtype, self.use_bias)

    def __call__(
        self,
        input_ids: Int[Array, "batch length"],
        positions: Int[Array, "#batch length"],
        token_type_ids: Int[Array, "batch length"] | None = None,
        deterministic: bool = True,
    ) -> Float[Array, "batch length width"]:
        x = self.word(input_ids)
        x = x if self.scale == 1.0 else x * jnp.asarray(self.scale, x.dtype)
        if self.num_positions:
            x = add_positions(x, self.position(positions))
        if self.type_vocab_size:
            x = x + self.token_type(jnp.zeros_like(input_ids) if token_type_ids is None else token_type_ids)
        if self.norm_eps is not None:
            x = self.norm(x)
        return dropout(x, self.dropout_rate, module_key(self, self.dropout_rate, deterministic))


def add_positions(
    x: Float[Array, "batch length width"], rows: Float[Array, "#batch length width"]
) -> Float[Array, "batch length width"]:
    """Return x + rows, in the type of x; the gradient of rows, which are float32, is a float32 sum."""
    return add_bias(x, rows[0]) if len(rows) == 1 else x + rows.astype(x.dtype)


def logits(
    features: Float[Array, "*batch width"], table: Float[Array, "vocab width"], bias: jax.Array | None = None
) -> Float[Array, "*batch vocab"]:
    """Return vocabulary logits in float32 from features in the compute type.

    Training uses `objectives.chunked_loss`, which never holds all logits.
    """
    result = jnp.einsum("...h,vh->...v", features, table.astype(features.dtype), preferred_element_type=jnp.float32)
    return result if bias is None else result + bias
