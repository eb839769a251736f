"""Attention: the kernels are chosen and called as they want it, without the hardware."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from jaxlm.errors import UserError
from jaxlm.models.layers import attention
from jaxlm.models.layers.attention import attend


@pytest.mark.parametrize("mask", [None, (2, 1, 1, 16), (2, 1, 16, 16), (1, 1, 16, 16)])
@pytest.mark.parametrize("bias", [None, (1, 4, 16, 16)])
def test_cudnn_takes_our_masks_and_biases(mask, bias, monkeypatch):
    """Traced only: cuDNN's checks of shapes and types run, those of the machine are told that there is one."""
    monkeypatch.setattr(attention, "best_implementation", lambda *_: "cudnn")
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda _: True)
    monkeypatch.setattr(cudnn, "is_cuda_compute_capability_equal", lambda _: False, raising=False)

    def loss(x, bias):
        flags = None if mask is None else jnp.ones(mask, bool)
        y = attend(x, x, x, mask=flags, bias=bias, causal=True, implementation="cudnn")
        return jnp.sum(y.astype(jnp.float32))

    x = jax.ShapeDtypeStruct((2, 16, 4, 8), jnp.bfloat16)
    given = None if bias is None else jax.ShapeDtypeStruct(bias, jnp.float32)
    assert jax.eval_shape(jax.grad(loss), x, given).shape == x.shape


@pytest.mark.parametrize("dropout", [{}, dict(dropout_rate=0.1, dropout_key=jax.random.key(0))])
def test_cudnn_where_there_is_none_is_the_users_mistake(dropout):
    x = jnp.zeros((2, 16, 4, 8), jnp.bfloat16)
    with pytest.raises(UserError, match=r"no kernel here \(platform cpu, bfloat16, heads of width 8\); set it to auto"):
        attend(x, x, x, implementation="cudnn", **dropout)


def test_cudnn_does_not_give_way_to_dropout_silently(monkeypatch):
    monkeypatch.setattr(attention, "best_implementation", lambda *_: "cudnn")
    x = jnp.zeros((2, 16, 4, 8), jnp.bfloat16)
    with pytest.raises(UserError, match="attention_dropout to 0"):
        attend(x, x, x, implementation="cudnn", dropout_rate=0.1, dropout_key=jax.random.key(0))


def test_the_path_with_dropout_is_the_path_without():
    """At a rate that drops nothing both give softmax(q k / s) v."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, n, 4, 8)), jnp.float32) for n in (6, 9, 9))
    mask = jnp.asarray(rng.random((2, 1, 6, 9)) < 0.7).at[..., 0].set(True)
    bias = jnp.asarray(rng.standard_normal((1, 4, 6, 9)), jnp.float32)
    options = dict(mask=mask, bias=bias, scale=0.3)
    plain = attend(q, k, v, **options)
    np.testing.assert_allclose(
        attend(q, k, v, **options, dropout_rate=1e-9, dropout_key=jax.random.key(0)), plain, atol=1e-6
    )
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) * 0.3 + np.asarray(bias)
    weights = np.exp(np.where(mask, scores, -np.inf))
    weights /= weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(plain, np.einsum("bhqk,bkhd->bqhd", weights, v), atol=1e-5)
