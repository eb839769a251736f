"""Dropout of probabilities in the TPU's kernel for short rows: its mask, its gradients, the same on any mesh."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.models.layers import row_attention
from jaxlm.models.layers.attention import attend
from jaxlm.models.layers.dropout import dropout_seeds, keep_mask, keep_scale
from jaxlm.parallel.mesh import MeshConfig, make_mesh

ROWS, LENGTH, HEADS, HEAD_DIM = 4, 384, 4, 64


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    interpret(monkeypatch.setattr)


def interpret(replace) -> None:
    replace(row_attention.pl, "pallas_call", functools.partial(row_attention.pl.pallas_call, interpret=True))


def arrays(dtype=jnp.float32):
    """Return query, key, value and cotangent [batch, length, heads, head_dim]."""
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal((ROWS, LENGTH, HEADS, HEAD_DIM)), dtype) for _ in range(4)]


def drop(query, key, value, rate: float, **arguments):
    return attend(query, key, value, scale=0.125, kernel="rows", dropout_rate=rate, dropout_key=jax.random.key(7),
                  **arguments)


@pytest.mark.parametrize(("rate", "causal", "most_scores"), [
    (0.1, True, row_attention.MOST_SCORES),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (0.1, False, row_attention.MOST_SCORES), (0.03, False, row_attention.MOST_SCORES), (0.1, True, 0))),
])
def test_dropped_probabilities_equal_the_formula(rate, causal, most_scores, monkeypatch):
    """softmax(scale · q kᵀ) with dropped probabilities, times v, and its gradients by autodiff.

    In the last case the heads take turns, as in long rows.
    """
    monkeypatch.setattr(row_attention, "MOST_SCORES", most_scores)
    *inputs, cotangent = arrays()
    kept = keep_mask(dropout_seeds(jax.random.key(7), (ROWS, HEADS)), (LENGTH, LENGTH), rate)
    real = jnp.arange(LENGTH) < jnp.asarray([LENGTH, 300, 200, LENGTH])[:, None]

    def formula(query, key, value):
        scores = 0.125 * jnp.einsum("bqhd,bkhd->bhqk", query, key)
        visible = real[:, None, None] & (jnp.tri(LENGTH, dtype=bool) if causal else True)
        probabilities = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf)) * kept * keep_scale(rate)
        return jnp.einsum("bhqk,bkhd->bqhd", probabilities, value)

    def values(function, inputs, cotangent):
        y, pull = jax.vjp(function, *inputs)
        return y, *pull(cotangent)

    ours = functools.partial(drop, rate=rate, causal=causal, key_segments=real.astype(jnp.int32))
    run = jax.jit(values, static_argnums=0)
    for found, expected in zip(run(ours, inputs, cotangent), run(formula, inputs, cotangent), strict=True):
        assert np.abs(expected).max() > 0.5
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "is_exact"), [(jnp.bfloat16, False), (jnp.float32, True)])
def test_exact_products_of_float32_are_not_asked_of_bfloat16(dtype, is_exact):
    """A TPU's compiler refuses the kernel: "Bad lhs type"."""
    *inputs, cotangent = arrays(dtype)
    with jax.default_matmul_precision("highest"):
        jaxpr = str(jax.make_jaxpr(lambda: jax.vjp(functools.partial(drop, rate=0.0), *inputs)[1](cotangent))())
    assert jaxpr.count("dot_general") > 5
    assert ("HIGHEST" in jaxpr) == is_exact


@pytest.mark.slow
def test_queries_without_visible_keys_have_no_gradients():
    """In a row of padding; outputs are finite."""
    *inputs, cotangent = arrays()
    real = jnp.ones((ROWS, LENGTH), jnp.int32).at[1].set(0)
    y, pull = jax.vjp(functools.partial(drop, rate=0.1, key_segments=real), *inputs)
    assert np.isfinite(y).all()
    for gradient in pull(cotangent):
        assert not gradient[1].any() and gradient[0].any()


@pytest.mark.slow
def test_bfloat16_is_as_close_as_scores_in_memory():
    """Errors of both against float32."""
    *inputs, cotangent = arrays()

    def values(kernel, dtype):
        cast = [x.astype(dtype) for x in inputs]
        y, pull = jax.vjp(functools.partial(attend, scale=0.125, kernel=kernel), *cast)
        return [np.asarray(x, np.float32) for x in (y, *pull(cotangent.astype(dtype)))]

    exact, plain, ours = values("xla", jnp.float32), values("xla", jnp.bfloat16), values("rows", jnp.bfloat16)
    for truth, by_xla, by_kernel in zip(exact, plain, ours, strict=True):
        assert np.abs(by_kernel - truth).max() < 1.5 * np.abs(by_xla - truth).max() < 0.05 * np.abs(truth).max()


@pytest.mark.slow
def test_the_same_on_any_mesh():
    """Eight devices: rows over data and fsdp, heads over tensor."""
    here = "from tests.models.layers.test_row_attention import compare_meshes; compare_meshes()"
    flags = os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-c", here], env=os.environ | {"XLA_FLAGS": flags}, cwd=Path(__file__).parents[3],
        capture_output=True, text=True, timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def compare_meshes() -> None:
    """Raise AssertionError if outputs or gradients on a mesh differ from those of one device."""
    interpret(setattr)
    *inputs, cotangent = arrays()

    @jax.jit
    def values(inputs, cotangent):
        y, pull = jax.vjp(functools.partial(drop, rate=0.1), *inputs)
        return y, *pull(cotangent)

    expected = jax.device_get(values(inputs, cotangent))
    for sizes in ((2, 2, 2), (4, 1, 2), (1, 4, 2)):
        with jax.set_mesh(make_mesh(MeshConfig(*sizes))):
            found = jax.device_get(values(inputs, cotangent))
        for ours, theirs in zip(found, expected, strict=True):
            assert np.abs(theirs).max() > 0.5
            np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)
