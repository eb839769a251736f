"""Attention within a band in blocks: against jax's own local attention, its memory, and eight devices."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxlm.models.layers.attention import attend
from jaxlm.models.layers.banded import block_shape
from jaxlm.models.layers.config import StackConfig
from jaxlm.models.layers.multi_head import MultiHeadAttention, Visibility
from jaxlm.models.layers.rotary import Rope
from jaxlm.parallel.mesh import MeshConfig, make_mesh

answer = jax.nn.dot_product_attention


def inputs(length: int, heads: int, head_dim: int, rows: int = 2) -> list[jax.Array]:
    """Return query, key, value and the cotangent of the result."""
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal((rows, length, heads, head_dim)), jnp.float32) for _ in range(4)]


def segments(kind: str, length: int, rows: int = 2) -> dict[str, jax.Array]:
    """Return the segments of rows of a kind, 0 at padding: packed, padded, with holes, or whole rows without any."""
    rng = np.random.default_rng(1)
    whole = np.ones((rows, length), np.int32)
    padded = np.arange(length) < np.array([[length], [length * 2 // 3]] * (rows // 2))
    packed = (1 + np.cumsum(rng.random((rows, length)) < 0.03, axis=1)) * padded
    holes = whole * (rng.random((rows, length)) < 0.7)
    names = ("query_segments", "key_segments")[0 if kind == "packed" else 1 :]
    numbers = {"packed": packed, "padded": padded, "holes": holes}.get(kind)
    return {} if numbers is None else {name: jnp.asarray(numbers, jnp.int32) for name in names}


def reference(query, key, value, *, query_segments=None, key_segments=None, causal, band, scale):
    """Return jax's attention with a local window, by its implementation with scores in memory."""
    mask = None
    if query_segments is not None:
        mask = query_segments[:, None, :, None] == key_segments[:, None, None, :]
    elif key_segments is not None:
        mask = key_segments[:, None, None, :] > 0
    window = (band - 1, 0 if causal else band - 1)
    return answer(query, key, value, mask=mask, is_causal=causal, local_window_size=window, scale=scale,
                  implementation="xla")


def values(function, arrays, seen=True, dtype="float32"):
    """Return result and gradients, of the queries that see a key."""
    *given, cotangent = (x.astype(dtype) for x in arrays)

    @jax.jit
    def run(*given):
        y, pull = jax.vjp(lambda *x: jnp.where(seen, function(*x), 0), *given)
        return y, *pull(cotangent)

    return [np.asarray(x, np.float32) for x in jax.device_get(run(*given))]


def differences(found, expected) -> list[float]:
    return [np.abs(ours - theirs).max() / np.abs(theirs).max() for ours, theirs in zip(found, expected, strict=True)]


def answered_by_jax(asked: list, *arguments, implementation, **options):
    """Take down the call of cuDNN; jax's implementation with scores in memory answers."""
    assert implementation == "cudnn"
    asked.append(dict(zip(("query", "key", "value", "bias", "mask"), arguments, strict=True)) | options)
    return answer(*arguments, **options, implementation="xla")


# Blocks of 2 reaches, of 128 with shorter reaches, and of a reach; the length is one of whole blocks, or not.
@pytest.mark.parametrize(("kind", "causal", "length", "band", "heads", "head_dim", "kernel"), [
    ("packed", False, 300, 33, 2, 32, "xla"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("packed", False, 301, 33, 2, 32, "cudnn"),
        ("packed", True, 256, 33, 2, 64, "xla"), ("padded", False, 525, 65, 2, 32, "xla"),
        ("holes", True, 300, 17, 2, 32, "xla"), ("holes", False, 128, 17, 2, 32, "xla"),
        ("whole", False, 600, 130, 1, 64, "xla"), ("whole", True, 257, 2, 2, 32, "xla"))),
])
def test_blocks_equal_jaxs_local_attention(kind, causal, length, band, heads, head_dim, kernel, monkeypatch):
    """A band that is wider by one does not."""
    asked = []
    monkeypatch.setattr(jax.nn, "dot_product_attention", functools.partial(answered_by_jax, asked))
    arrays, given = inputs(length, heads, head_dim), segments(kind, length)
    given |= dict(causal=causal, scale=0.2)
    seen = jnp.ones((2, length), bool) if kind == "whole" else given["key_segments"] > 0
    block = block_shape(length, length, band, causal)
    expected = values(functools.partial(reference, band=band, **given), arrays, seen[..., None, None])
    run = functools.partial(attend, kernel=f"{kernel} in blocks", **given)
    found = values(functools.partial(run, band=band), arrays, seen[..., None, None])
    assert [(x["query"].shape[1], x["key"].shape[1]) for x in asked] == [block] * (kernel == "cudnn")
    assert max(differences(found, expected)) < 2e-6
    wider = values(functools.partial(run, band=band + 1), arrays, seen[..., None, None])
    assert min(differences(wider, expected)) > 1e-3


@pytest.mark.slow
def test_blocks_in_bfloat16_and_rotary_positions():
    """As near to float32 as scores in memory are; positions are those in the row."""
    arrays = inputs(300, 2, 32)
    given = segments("packed", 300) | dict(causal=False, band=33, scale=0.2, rope=Rope(100.0))
    seen = (given["key_segments"] > 0)[..., None, None]
    exact, dense, blocks = (
        values(functools.partial(attend, kernel=kernel, **given), arrays, seen, dtype)
        for kernel, dtype in (("xla", "float32"), ("xla", "bfloat16"), ("xla in blocks", "bfloat16"))
    )
    assert max(differences(blocks, exact)) < 1.2 * max(differences(dense, exact)) < 0.05


@pytest.mark.slow
def test_dropout_in_blocks():
    """Values are unit vectors, so that results are probabilities: each is 0, or that without dropout scaled."""
    query, key, _, cotangent = inputs(128, 2, 128)
    value = jnp.broadcast_to(jnp.eye(128)[:, None], query.shape)
    run = jax.jit(functools.partial(attend, query, key, band=17, scale=0.1, kernel="xla in blocks", dropout_rate=0.25,
                                    **segments("packed", 128)), static_argnames="dropout_rate")
    probabilities = np.asarray(run(value))
    dropped, pull = jax.vjp(lambda value: run(value, dropout_key=jax.random.key(0)), value)
    is_kept, is_seen = np.asarray(dropped) > 0, probabilities > 0
    np.testing.assert_allclose(dropped, np.where(is_kept, probabilities / 0.75, 0), rtol=1e-5)
    count = is_seen.sum()
    assert count > 4000 and abs(is_kept[is_seen].mean() - 0.75) < 4 * np.sqrt(0.25 * 0.75 / count)
    # The gradient of the values has the same probabilities.
    np.testing.assert_allclose(pull(cotangent)[0], jnp.einsum("bqhk,bqhd->bkhd", dropped, cotangent), atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_cudnn_has_the_window_of_causal_bands(causal, monkeypatch):
    asked = []
    monkeypatch.setattr(jax.nn, "dot_product_attention", functools.partial(answered_by_jax, asked))
    arrays, given = inputs(40, 2, 32), dict(causal=causal, band=7, scale=0.2)
    found = values(functools.partial(attend, kernel="cudnn", **given), arrays)
    assert max(differences(found, values(functools.partial(reference, **given), arrays))) < 2e-6
    assert [x["local_window_size"] for x in asked] == [(6, 0) if causal else None]
    assert [x["mask"] is None for x in asked] == [causal]


@pytest.mark.slow
def test_a_layer_of_8192_tokens_in_blocks_takes_little_memory():
    """By default, compiled for this CPU: 2 heads' scores of 8,192² in float32 take 512 MiB."""
    config = StackConfig(hidden_size=64, num_layers=1, num_heads=2, head_dim=32, band=65, intermediate_size=64,
                         attention_dropout=0.0, rope=Rope(100.0))
    row, x = jax.ShapeDtypeStruct((1, 8192), jnp.int32), jax.ShapeDtypeStruct((1, 8192, 64), jnp.float32)

    def temporaries(config):
        layer = MultiHeadAttention(config)
        params = jax.eval_shape(layer.init, jax.random.key(0), x)

        def loss(params, x, row):
            return jnp.sum(layer.apply(params, x, visibility=Visibility(row, row))[0])

        return jax.jit(jax.grad(loss)).lower(params, x, row).compile().memory_analysis().temp_size_in_bytes

    dense, blocks = (temporaries(StackConfig(**vars(config) | {"attention": kind})) for kind in ("xla", "auto"))
    assert 16 * blocks < dense > 2**29


def compare_meshes() -> None:
    """Raise AssertionError if results on a mesh differ from those of one device, or need other devices' arrays."""
    jax.nn.dot_product_attention = functools.partial(answered_by_jax, [])
    arrays, given = inputs(130, 2, 32, rows=8), segments("packed", 130, rows=8)

    def run(kernel, query, key, value, cotangent, segments):
        def result(query, key, value):
            y = attend(query, key, value, band=17, scale=0.2, kernel=kernel, **segments)
            return jnp.where((segments["key_segments"] > 0)[..., None, None], y, 0)

        y, pull = jax.vjp(result, query, key, value)
        return y, *pull(cotangent)

    expected = jax.device_get(jax.jit(functools.partial(run, "xla"))(*arrays, given))
    for sizes, kernel in (((2, 2, 2), "xla"), ((4, 2, 1), "cudnn"), ((1, 4, 2), "cudnn")):
        mesh = make_mesh(MeshConfig(*sizes))
        rows, heads = (NamedSharding(mesh, PartitionSpec(("data", "fsdp"), *rest)) for rest in ((), (None, "tensor")))
        with jax.set_mesh(mesh):
            placed = *jax.device_put(arrays, heads), jax.device_put(given, rows)
            compiled = jax.jit(functools.partial(run, f"{kernel} in blocks")).lower(*placed).compile()
            found = compiled(*placed)
        assert not re.findall(r" (?:all|collective|reduce-scatter)\S*\(", compiled.as_text()), (sizes, kernel)
        assert max(differences(jax.device_get(found), expected)) < 2e-6, (sizes, kernel)


@pytest.mark.slow
def test_blocks_stay_on_their_device():
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    command = [sys.executable, "-m", "tests.models.layers.test_banded"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]


if __name__ == "__main__":
    compare_meshes()
