"""The TPU's kernel of attention in chunks, in Pallas's interpreter: as attention with scores in memory."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.models.layers import chunked, chunked_kernel, kernel_choice
from jaxlm.models.layers.chunked import SELF_SCORE, attend_in_chunks

BATCH, HEADS, LENGTH = 2, 2, 2048
"""Two blocks of the kernel."""


def use_kernel(monkeypatch) -> None:
    monkeypatch.setattr(
        chunked_kernel.pl, "pallas_call", functools.partial(chunked_kernel.pl.pallas_call, interpret=True)
    )
    monkeypatch.setattr(chunked, "_has_kernel", lambda kernel, *_: kernel == "auto")


def arrays(dtype=jnp.float32) -> list[jax.Array]:
    """Return query, key, value and the cotangents of the output and of the log-sums; keys have length 1."""
    rng = np.random.default_rng(0)
    query, key, value, d_output = (
        jnp.asarray(rng.standard_normal((BATCH, HEADS, LENGTH, 128)), dtype) for _ in range(4)
    )
    return [query, chunked.unit(key), value, d_output, jnp.asarray(rng.standard_normal(query.shape[:3]), jnp.float32)]


def places(kind: str) -> tuple[jax.Array, jax.Array]:
    """Return positions and documents: in order, or two rounds of 1,024 tokens in two random orders."""
    documents = np.repeat([[1, 2, 3, 0], [1, 1, 2, 2]], [500, 700, 600, 248], axis=1)
    if kind == "local":
        return jnp.arange(LENGTH)[None, None], jnp.asarray(documents)[:, None]
    rng = np.random.default_rng(1)
    order = np.stack([np.concatenate([rng.permutation(LENGTH // 2) for _ in range(2)]) for _ in range(BATCH * HEADS)])
    order = order.reshape(BATCH, HEADS, LENGTH)
    return jnp.asarray(order), jnp.asarray(np.take_along_axis(documents[:, None], order, axis=2))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def values(kernel, kind, chunk, rate, positions, documents, query, key, value, d_output, d_log_sums):
    def run(query, key, value):
        return attend_in_chunks(
            query, key, value, positions, documents, LENGTH // chunk, attention=kernel, dropout_rate=rate,
            dropout_key=jax.random.key(7), self_score=SELF_SCORE if kind == "lsh" else None,
        )

    found, pull = jax.vjp(run, query, key, value)
    return *found, *pull((d_output, d_log_sums))


def close(found, expected, tolerance: float) -> bool:
    """Return whether all results differ by little, relative to their largest number."""
    return all(np.abs(x - y).max() <= tolerance * np.abs(y).max() for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize(("kind", "chunk"), [pytest.param("local", 128, marks=pytest.mark.slow), ("lsh", 256)])
def test_the_kernel_equals_scores_in_memory(kind, chunk, monkeypatch):
    """Output, log-sums and gradients, with documents, padding, and a first chunk that comes after the last one."""
    use_kernel(monkeypatch)
    found, expected = (values(kernel, kind, chunk, 0.0, *places(kind), *arrays()) for kernel in ("auto", "xla"))
    assert min(np.abs(x).max() for x in expected) > 0.5
    assert close(found, expected, 1e-5)


@pytest.mark.slow
def test_bfloat16_is_as_close_as_scores_in_memory(monkeypatch):
    """Errors of both against float32."""
    use_kernel(monkeypatch)
    inputs = arrays()
    cast = [*(x.astype(jnp.bfloat16) for x in inputs[:4]), inputs[4]]
    exact, plain, ours = (
        [np.asarray(x, np.float32) for x in values(kernel, "lsh", 256, 0.0, *places("lsh"), *arguments)]
        for kernel, arguments in (("xla", inputs), ("xla", cast), ("auto", cast))
    )
    for truth, by_xla, by_kernel in zip(exact, plain, ours, strict=True):
        assert np.abs(by_kernel - truth).max() < 1.5 * np.abs(by_xla - truth).max() < 0.1 * np.abs(truth).max()


@pytest.mark.slow
def test_dropped_probabilities_equal_scores_in_memory(monkeypatch):
    """Output, log-sums and gradients: the same probabilities are dropped, in both passes."""
    use_kernel(monkeypatch)
    found, expected, whole = (
        values(kernel, "lsh", 256, rate, *places("lsh"), *arrays())
        for kernel, rate in (("auto", 0.2), ("xla", 0.2), ("xla", 0.0))
    )
    assert close(found, expected, 1e-5) and not close(found, whole, 0.1)


@pytest.mark.parametrize(("changes", "expected"), [
    ({}, True), (dict(platform="cpu"), False), (dict(platform="gpu"), False), (dict(kind="TPU v3"), False),
    (dict(dtype="float32"), False), (dict(kernel="xla"), False), (dict(head_dim=64), False), (dict(chunks=1), False),
    (dict(length=65536 + 512), False), (dict(chunks=1024), False), (dict(chunks=128), False),
])
def test_the_kernel_is_chosen_where_it_fits(changes, expected, monkeypatch):
    case = dict(platform="tpu", kind="TPU v5 lite", dtype="bfloat16", kernel="auto", length=65536, head_dim=128,
                chunks=256) | changes
    monkeypatch.setattr(kernel_choice, "target_platform", lambda: case["platform"])
    monkeypatch.setattr(kernel_choice, "target_kind", lambda: case["kind"])
    shape = (2, 8, case["length"], case["head_dim"])
    assert chunked._has_kernel(case["kernel"], shape, case["dtype"], case["chunks"]) == expected
