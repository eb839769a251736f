"""Reading order of bidirectional streams (jaxlm.data.batches): odd rows read backward."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxlm.types import TokenBatch


def reads_backward(batch: TokenBatch) -> Int[Array, " batch"]:
    """Return 1 for the odd rows, which read backward, and 0 for the others."""
    return jnp.arange(batch.tokens.shape[0], dtype=jnp.int32) % 2


def in_reading_order(batch: TokenBatch) -> TokenBatch:
    """Return the batch with its odd rows reversed."""
    backward = reads_backward(batch)[:, None] > 0
    return jax.tree.map(lambda x: jnp.where(backward, x[:, ::-1], x), jax.tree.map(jnp.asarray, batch))
