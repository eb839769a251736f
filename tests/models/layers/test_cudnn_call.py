"""The call of cuDNN's attention, answered on a CPU by jax's own implementation of the same function."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.layers.test_attention import TOLERANCE, masked, results
from tests.params import first_fast


@jax.custom_vjp
def unwritten(x: jax.Array, lengths: jax.Array) -> jax.Array:
    """Return `x`, whose gradients after the lengths are NaN."""
    return x


unwritten.defvjp(lambda x, lengths: (x, lengths), lambda lengths, gradient: (
    jnp.where((jnp.arange(gradient.shape[1]) < lengths[:, None])[..., None, None], gradient, jnp.nan), None))


@pytest.mark.parametrize("causal", first_fast([False, True]))
@pytest.mark.parametrize("kind", first_fast(["packed", "lengths", "padded", "left", "holes", "whole"], 2))
def test_cudnn_equals_scores_in_memory(kind, causal, monkeypatch):
    """The call of cuDNN, answered by jax's own implementation of the same function.

    It gets lengths, in place of a mask, only from a caller who knows that padding stands at the end; a causal row gets
    neither. As on a GPU, gradients of keys and values after the last key that a query sees come back unwritten.
    """
    asked, answer = [], jax.nn.dot_product_attention

    def stand_in(*arguments, implementation, **options):
        asked.append(implementation)
        lengths = options["key_value_seq_lengths"]
        assert (lengths is not None) == (kind == "lengths" and not causal)
        assert (arguments[4] is None) == (kind in ("lengths", "whole"))
        if lengths is not None:
            arguments = [arguments[0], *(unwritten(x, lengths) for x in arguments[1:3]), *arguments[3:]]
        return answer(*arguments, **options, implementation="xla")

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    real, arguments = masked(64, kind)
    expected = results("xla", monkeypatch, 64, real, causal=causal, **arguments)
    assert not asked
    found = results("cudnn", monkeypatch, 64, real, causal=causal, **arguments)
    assert set(asked) == {"cudnn"}
    for ours, theirs in zip(found, expected, strict=True):
        assert np.abs(theirs).max() > 0.5
        np.testing.assert_allclose(ours, theirs, **TOLERANCE)
