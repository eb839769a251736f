"""The TPU's kernel of attention in chunks, in Pallas's interpreter: as attention with scores in memory."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.models.layers import attention, chunked, chunked_kernel, kernel_tools
from jaxlm.models.layers.chunked import SELF_SCORE, attend_in_chunks
from jaxlm.models.layers.dropout import keep_scale, kept

BATCH, HEADS, LENGTH = 2, 2, 2048
"""Two blocks of the kernel."""


class Generator:
    """Stands in for the chip's generator: its words are a function of the seeds."""

    def seed(self, *seeds) -> None:
        self.key = functools.reduce(jax.random.fold_in, seeds, jax.random.key(0))

    def words(self, shape):
        return jax.lax.bitcast_convert_type(jax.random.bits(self.key, shape, jnp.uint32), jnp.int32)


def use_kernel(monkeypatch) -> Generator:
    generator = Generator()
    monkeypatch.setattr(kernel_tools.pltpu, "prng_seed", generator.seed)
    monkeypatch.setattr(kernel_tools.pltpu, "prng_random_bits", generator.words)
    monkeypatch.setattr(
        chunked_kernel.pl, "pallas_call", functools.partial(chunked_kernel.pl.pallas_call, interpret=True)
    )
    monkeypatch.setattr(chunked, "_has_kernel", lambda kernel, *_: kernel == "auto")
    return generator


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


def test_dropped_probabilities_equal_scores_in_memory_with_the_same_bits(monkeypatch):
    """Each probability is dropped by a bit of its own, the same in both passes, at the given rate."""
    generator, rate, size = use_kernel(monkeypatch), 0.2, 256
    found = values("auto", "lsh", size, rate, *places("lsh"), *arrays())
    seeds = jax.random.bits(jax.random.key(7), (BATCH, HEADS), jnp.uint32).astype(jnp.int32)

    @jax.jit
    def words(seed, chunk):
        generator.seed(seed, chunk)
        return generator.words((size // 4, 2 * size))

    drawn = np.stack([np.asarray(words(seed, chunk)) for seed in seeds.ravel() for chunk in range(LENGTH // size)])
    # A word has the bits of four queries, the highest first, as signed numbers.
    parts = np.concatenate([(drawn << shift) >> 24 for shift in range(0, 32, 8)], axis=1) + 128
    bits = jnp.asarray(parts.reshape(BATCH, HEADS, -1, size, 2 * size), jnp.uint8)
    keep = kept(bits, rate)
    assert abs(float(jnp.mean(keep)) - 1 / keep_scale(rate)) < 0.002 and abs(float(jnp.mean(keep)) - 0.8) < 0.005
    monkeypatch.setattr(chunked, "dropout", lambda x, rate, key: jnp.where(keep, x * keep_scale(rate), 0.0))
    assert close(found, values("xla", "lsh", size, rate, *places("lsh"), *arrays()), 1e-5)


@pytest.mark.parametrize(("changes", "expected"), [
    ({}, True), (dict(platform="cpu"), False), (dict(platform="gpu"), False), (dict(kind="TPU v3"), False),
    (dict(dtype="float32"), False), (dict(kernel="xla"), False), (dict(head_dim=64), False), (dict(chunks=1), False),
    (dict(length=65536 + 512), False), (dict(chunks=1024), False), (dict(kernel="cudnn"), False),
])
def test_the_kernel_is_chosen_where_it_fits(changes, expected, monkeypatch):
    case = dict(platform="tpu", kind="TPU v5 lite", dtype="bfloat16", kernel="auto", length=65536, head_dim=128,
                chunks=256) | changes
    monkeypatch.setattr(attention, "target_platform", lambda: case["platform"])
    monkeypatch.setattr(attention, "target_kind", lambda: case["kind"])
    shape = (2, 8, case["length"], case["head_dim"])
    assert chunked._has_kernel(case["kernel"], shape, case["dtype"], case["chunks"]) == expected
