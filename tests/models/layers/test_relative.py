"""Attention with relative positions: the TPU's kernels in Pallas's interpreter against scores in memory."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from jaxlm.models.layers import disentangled, kernel_choice, relative
from jaxlm.models.layers.config import StackConfig
from jaxlm.models.layers.disentangled import attend_disentangled, disentangled_bias
from jaxlm.models.layers.disentangled_kernel import disentangled_attention
from jaxlm.models.layers.dropout import keep_mask, keep_scale
from jaxlm.models.layers.relative import Keys, Queries, RelativeAttention, by_key, sinusoids
from jaxlm.models.layers.relative_kernel import relative_attention
from jaxlm.models.xlnet import MASKED_RANK, MEMORY_RANK
from jaxlm.parallel.mesh import MeshConfig, make_mesh
from jaxlm.parallel.rules import replicated
from tests.params import first_fast

ROWS, LENGTH, TARGETS = 4, 256, 85
CONFIG = StackConfig(
    hidden_size=64, num_layers=1, num_heads=4, head_dim=16, intermediate_size=64, init="normal", init_std=0.3,
    attention_dropout=0.0,
)


def inputs(stream: str, memory: int, dtype=jnp.float32) -> tuple:
    """Return the arguments of RelativeAttention: both directions, three segments, a random order and padding."""
    rng = np.random.default_rng(0)
    ranks = rng.integers(0, LENGTH, (ROWS, LENGTH))
    limits = ranks + rng.integers(0, 2, ranks.shape)
    ranks[1, :40], limits[1, :40] = MASKED_RANK, 1
    ranks[:, -1] = -1  # every query attends to a key, also without a memory
    segments = np.sort(rng.integers(0, 3, ranks.shape), axis=1)
    positions = np.sort(np.stack([rng.permutation(LENGTH)[:TARGETS] for _ in range(ROWS)]), axis=1)
    positions[0, -3:], positions[2, :2] = 0, (0, LENGTH - 1)  # slots without a target, and the ends of a row
    before = ((0, 0), (memory, 0))
    keys = Keys(np.pad(segments, before), np.pad(ranks, before, constant_values=MEMORY_RANK))
    queries = Queries(None, segments, limits)
    if stream == "query":
        queries = Queries(positions, *(np.take_along_axis(x, positions, axis=1) for x in (segments, limits)))
    x = rng.standard_normal((ROWS, queries.segments.shape[1], 64))
    source = rng.standard_normal((ROWS, memory + LENGTH, 64))
    to_jax = functools.partial(jax.tree.map, lambda x: jnp.asarray(x, jnp.int32))
    return (
        jnp.asarray(x, dtype), jnp.asarray(source, dtype), jnp.asarray(sinusoids(LENGTH, memory, 64), dtype),
        jnp.asarray([0, 1, 1, 0], jnp.int32), to_jax(queries), to_jax(keys),
    )


def use_kernel(patch) -> None:
    """Make relative attention use its kernel, in the interpreter."""
    for module in (relative, disentangled):
        patch.setattr(module, "has_kernel", lambda *_: True)
    patch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, interpret=True))


def attended(module: RelativeAttention, x, source, distances, *rest):
    return module(x, module.shared(source, distances), *rest)


def run(config: StackConfig, arguments: tuple, key: jax.Array | None = None) -> dict[str, np.ndarray]:
    """Return the output of RelativeAttention and all gradients."""
    module = RelativeAttention(config, key is None)
    float32 = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, arguments)
    init = functools.partial(RelativeAttention(CONFIG).init, method=attended)
    params = jax.jit(init)(jax.random.key(0), *float32)["params"]

    @jax.jit
    def results(params, x, source, distances, cotangent, key):
        def output(params, x, source, distances):
            rngs = None if key is None else {"dropout": key}
            return module.apply({"params": params}, x, source, distances, *arguments[3:], rngs=rngs, method=attended)

        y, pull = jax.vjp(output, params, x, source, distances)
        gradients = dict(zip(("params", "x", "source", "distances"), pull(cotangent.astype(y.dtype)), strict=True))
        return gradients.pop("params") | gradients | {"output": y}

    cotangent = jnp.asarray(np.random.default_rng(1).standard_normal(arguments[0].shape), jnp.float32)
    found = jax.device_get(results(params, *arguments[:3], cotangent, key))
    return {jax.tree_util.keystr(path): np.asarray(leaf, np.float32) for path, leaf in jax.tree.leaves_with_path(found)}


def assert_close(found: dict, expected: dict, tolerance: float) -> None:
    """Compare arrays up to `tolerance` times their largest number."""
    assert found.keys() == expected.keys() and len(found) == 13
    for name, value in expected.items():
        size = np.abs(value).max()
        assert size > 0.1, name
        assert np.abs(found[name] - value).max() <= tolerance * size, name


@pytest.mark.parametrize(("stream", "memory"), first_fast([
    ("content", 128), ("query", 0), ("content", 0), ("query", 128)
]))
def test_the_kernel_equals_scores_in_memory(stream, memory, monkeypatch):
    arguments = inputs(stream, memory)
    expected = run(CONFIG, arguments)
    use_kernel(monkeypatch)
    assert_close(run(CONFIG, arguments), expected, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("stream", ["content", pytest.param("query", marks=pytest.mark.slow)])
def test_the_kernel_in_bfloat16(stream, monkeypatch):
    """Outputs and gradients are within 5 % of float32; on average they are as close as those of scores in memory."""
    config, arguments = dataclasses.replace(CONFIG, dtype="bfloat16"), inputs(stream, 128, jnp.bfloat16)
    expected, plain = run(CONFIG, inputs(stream, 128)), run(config, arguments)
    use_kernel(monkeypatch)
    found = run(config, arguments)
    assert_close(found, expected, 0.05)
    errors = [np.mean([np.linalg.norm(x[name] - e) / np.linalg.norm(e) for name, e in expected.items()])
              for x in (found, plain)]
    assert errors[0] < 1.1 * errors[1] < 0.03


@pytest.mark.slow
def test_queries_without_visible_keys_are_finite_and_have_no_gradients(monkeypatch):
    *rest, keys = inputs("query", 0)
    use_kernel(monkeypatch)
    results = run(CONFIG, (*rest, keys._replace(ranks=jnp.full_like(keys.ranks, MASKED_RANK))))
    assert all(np.isfinite(x).all() for x in results.values())
    assert results["['output']"].any() and not results["['x']"].any() and not results["['source']"].any()


HEADS, HEAD_DIM = 2, 16


def draw(rows: int) -> tuple:
    """Return the arguments of a content stream of 256 tokens, up to the seeds. All tokens are visible."""
    rng = np.random.default_rng(0)
    wide = (rows, HEADS * HEAD_DIM, LENGTH)
    arrays = [rng.standard_normal(wide) for _ in range(4)] + [rng.standard_normal((2, wide[1], 2 * LENGTH)) / 4]
    arrays.append(rng.standard_normal((rows, HEADS, 2, LENGTH)))
    segments = rng.integers(0, 2, (rows, 1, LENGTH))
    vectors = np.concatenate([0 * segments, segments, 0 * segments + 1], axis=1), np.stack([segments, 0 * segments], 1)
    return (
        *(jnp.asarray(x, jnp.float32) for x in arrays), jnp.asarray(vectors[0], jnp.int32),
        jnp.asarray(vectors[1][:, :, 0], jnp.int32), jnp.asarray(np.arange(rows) % 2, jnp.int32),
    )


@pytest.mark.slow  # test_row_attention.py has it of another kernel
def test_dropout(monkeypatch):
    """Output and gradients by the formula, with the mask of `keep_mask`."""
    use_kernel(monkeypatch)
    rate, seeds, arguments = 0.1, jnp.asarray([[5, -7], [2**31 - 1, 0]], jnp.int32), draw(2)
    masks = keep_mask(seeds, (LENGTH, LENGTH), rate)

    def formula(content, distance_query, key, value, distance, segment_scores):
        split = functools.partial(jnp.reshape, shape=(2, HEADS, HEAD_DIM, -1))
        own = split(distance[arguments[8]])
        scores = jnp.einsum("bhdq,bhdk->bhqk", split(content), split(key))
        scores += by_key(jnp.einsum("bhdq,bhdk->bhqk", split(distance_query), own), None, LENGTH)
        is_other = arguments[6][:, 1, :, None] != arguments[7][:, 0, None]
        scores += jnp.where(is_other[:, None], segment_scores[:, :, 1, :, None], segment_scores[:, :, 0, :, None])
        probabilities = jax.nn.softmax(scores) * masks * keep_scale(rate)
        return jnp.einsum("bhqk,bhdk->bhdq", probabilities, split(value)).reshape(content.shape)

    def kernel(*arrays):
        return relative_attention(*arrays, *arguments[6:], seeds, rate, True)

    cotangent = jnp.asarray(np.random.default_rng(1).standard_normal(arguments[0].shape), jnp.float32)
    results = []
    for function in (kernel, formula):
        y, pull = jax.vjp(jax.jit(function), *arguments[:6])
        results.append([y, *pull(cotangent)])
    for found, expected in zip(*results, strict=True):
        assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max() > 1e-5


@pytest.mark.parametrize(("changes", "expected"), [
    ({}, True), (dict(platform="cpu"), False), (dict(platform="gpu"), False), (dict(kind="TPU v3"), False),
    (dict(dtype="float32"), False), (dict(attention="xla"), False), (dict(head_dim=40), False),
    (dict(length=320), False), (dict(memory=100), False), (dict(memory=0), True), (dict(length=2048), False),
])
def test_the_kernel_is_chosen_where_it_fits(changes, expected, monkeypatch):
    changes = dict(platform="tpu", kind="TPU v5 lite", length=512, memory=384, dtype="bfloat16", head_dim=64,
                   attention="auto") | changes
    platform, kind, length, memory = (changes.pop(name) for name in ("platform", "kind", "length", "memory"))
    monkeypatch.setattr(kernel_choice, "target_platform", lambda: platform)
    monkeypatch.setattr(kernel_choice, "target_kind", lambda: kind)
    config = dataclasses.replace(CONFIG, **changes)
    assert relative.has_kernel(config, memory + 2 * length, memory + length) == expected


def disentangled_inputs(kind: str, dtype=jnp.float32) -> tuple[list[jax.Array], dict[str, jax.Array], np.ndarray]:
    """Return arrays and masks of `attend_disentangled`, and which outputs count."""
    rng = np.random.default_rng(0)
    length = 384
    shapes = [(ROWS, length, HEADS, HEAD_DIM)] * 3 + [(2 * length + 1, HEADS, HEAD_DIM)] * 2
    arrays = [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]
    padding = np.arange(length) < np.array([length, 200, 1, 383])[:, None]
    segments = np.sort(rng.integers(1, 5, (ROWS, length)), axis=1) * padding
    masks = dict(positions=None, query_segments=None, key_segments=jnp.asarray(padding, jnp.int32))
    counts = np.ones((ROWS, length), bool)
    if "packed" in kind:
        masks |= dict.fromkeys(("query_segments", "key_segments"), jnp.asarray(segments, jnp.int32))
    if "at" in kind:  # the ends of a row, and positions that pad the others
        positions = 1 + np.stack([rng.permutation(length - 2)[:40] for _ in range(ROWS)])
        positions[:, :2], positions[:, -3:] = (0, length - 1), 0
        masks["positions"], counts = jnp.asarray(positions, jnp.int32), np.ones(positions.shape, bool)
        counts[:, -3:] = False
        arrays[0] = jnp.take_along_axis(arrays[0], masks["positions"][..., None, None], axis=1)
        if "packed" in kind:
            masks["query_segments"] = jnp.take_along_axis(masks["key_segments"], masks["positions"], axis=1)
    return arrays, masks, counts


def run_disentangled(config: StackConfig, given: tuple, key: jax.Array | None = None) -> dict[str, np.ndarray]:
    """Return the outputs that count, and the gradients of all arrays."""
    arrays, masks, counts = given
    rng = np.random.default_rng(1)
    attention = functools.partial(attend_disentangled, config, **masks, mask=None, dropout_key=key)
    names = "query", "key", "value", "distance_query", "distance_key"
    cotangent = jnp.asarray(rng.standard_normal(arrays[0].shape) * counts[..., None, None], arrays[0].dtype)

    @jax.jit
    def results(*arrays):
        y, pull = jax.vjp(lambda *a: attention(**dict(zip(names, a, strict=True))), *arrays)
        return dict(zip(("output", *names), (y, *pull(cotangent)), strict=True))

    found = {name: np.asarray(x, np.float32) for name, x in results(*arrays).items()}
    return found | {"output": found["output"] * counts[..., None, None]}


DISENTANGLED = dataclasses.replace(CONFIG, hidden_size=32, num_heads=2, score_width=3 * CONFIG.head_dim)


@pytest.mark.parametrize("kind", first_fast(["packed", "padded", "at", "packed, at"]))
def test_the_disentangled_kernel_equals_scores_in_memory(kind, monkeypatch):
    given = disentangled_inputs(kind)
    expected = run_disentangled(DISENTANGLED, given)
    use_kernel(monkeypatch)
    for name, found in run_disentangled(DISENTANGLED, given).items():
        assert np.abs(found - expected[name]).max() <= 1e-5 * np.abs(expected[name]).max() > 1e-6, name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["packed", "padded", "at", "packed, at"])
def test_the_disentangled_kernel_in_bfloat16(kind, monkeypatch):
    """Its errors, relative to float32, are no larger than those of scores in memory."""
    rounded, *rest = disentangled_inputs(kind, jnp.bfloat16)
    exact = [x.astype(jnp.float32) for x in rounded]
    expected, plain = (run_disentangled(DISENTANGLED, (arrays, *rest)) for arrays in (exact, rounded))
    use_kernel(monkeypatch)
    for name, found in run_disentangled(DISENTANGLED, (rounded, *rest)).items():
        errors = [np.linalg.norm(x - expected[name]) / np.linalg.norm(expected[name]) for x in (found, plain[name])]
        assert errors[0] < 1.05 * errors[1] < 0.02, (name, errors)


@pytest.mark.parametrize(("changes", "expected"), [
    ({}, True), (dict(platform="gpu"), False), (dict(dtype="float32"), False), (dict(length=1024), True),
    (dict(length=1152), False), (dict(length=500), False), (dict(length=1024, head_dim=128), False),
])
def test_the_disentangled_kernel_is_chosen_where_it_fits(changes, expected, monkeypatch):
    given = dict(platform="tpu", dtype="bfloat16", length=512, head_dim=64) | changes
    monkeypatch.setattr(kernel_choice, "target_platform", lambda: given["platform"])
    monkeypatch.setattr(kernel_choice, "target_kind", lambda: "TPU v5 lite")
    length, head_dim, dtype = given["length"], given["head_dim"], given["dtype"]
    config = dataclasses.replace(DISENTANGLED, head_dim=head_dim, hidden_size=2 * head_dim, dtype=dtype)
    tokens, distances = (jax.ShapeDtypeStruct(shape, dtype) for shape in (
        (2, length, 2, head_dim), (2 * length + 1, 2, head_dim)
    ))
    masks = dict.fromkeys(("positions", "query_segments", "key_segments", "mask", "dropout_key"))
    run = jax.make_jaxpr(functools.partial(attend_disentangled, config, **masks))
    text = str(run(tokens, tokens, tokens, distances, distances))
    assert ("disentangled_attention_forward" in text) == expected


@pytest.mark.slow
def test_each_key_and_row_drops_other_probabilities(monkeypatch):
    use_kernel(monkeypatch)
    drops = dataclasses.replace(DISENTANGLED, attention_dropout=0.5)
    arrays, masks, counts = disentangled_inputs("padded")
    arrays = [jnp.tile(x[:1], (ROWS, 1, 1, 1)) if x.ndim == 4 else x for x in arrays]
    given = arrays, masks | {"key_segments": None}, counts
    one, other = (run_disentangled(drops, given, jax.random.key(seed))["output"] for seed in (1, 2))
    assert np.abs(one - other).max() > 0.1 and all(np.abs(one[0] - row).max() > 0.1 for row in one[1:])


@pytest.mark.slow
def test_dropout_of_the_disentangled_kernel(monkeypatch):
    """Output and gradients by the formula, with the mask of `keep_mask`."""
    use_kernel(monkeypatch)
    rate, length, width = 0.1, 128, HEADS * HEAD_DIM
    rng, rows, seeds = np.random.default_rng(0), 2, jnp.asarray([[5, -7], [2**31 - 1, 0]], jnp.int32)
    segments = jnp.ones((rows, 2, length), jnp.int32)
    sizes = [(rows, width, length)] * 3 + [(1, width, 2 * length)] * 2
    arrays = [jnp.asarray(rng.standard_normal(size), jnp.float32) for size in sizes]
    masks = keep_mask(seeds, (length, length), rate)

    def formula(query, key, value, distance_query, distance_key):
        split = lambda x: x.reshape(x.shape[0], HEADS, HEAD_DIM, -1).transpose(0, 3, 1, 2)  # noqa: E731
        vectors = [jnp.pad(split(x)[0], ((0, 1), (0, 0), (0, 0))) for x in (distance_query, distance_key)]
        scores = jnp.einsum("bqhd,bkhd->bhqk", split(query), split(key))
        scores += disentangled_bias(split(query), split(key), vectors[0][::-1], vectors[1], None, 1.0)
        y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores) * masks * keep_scale(rate), split(value))
        return y.transpose(0, 2, 3, 1).reshape(query.shape)

    def kernel(*arrays):
        return disentangled_attention(*arrays, segments, seeds, rate)

    cotangent = jnp.asarray(rng.standard_normal(sizes[0]), jnp.float32)
    results = []
    for function in (kernel, formula):
        y, pull = jax.vjp(jax.jit(function), *arrays)
        results.append([y, *pull(cotangent)])
    for found, expected in zip(*results, strict=True):
        assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max() > 1e-5


def largest_differences() -> list[float]:
    """Return the differences between one device and eight (rows over 4, heads over 2), relative to the numbers."""
    use_kernel(pytest.MonkeyPatch())
    mesh, key, differences = make_mesh(MeshConfig(2, 2, 2), jax.devices()), jax.random.key(3), []
    for results, config, given in (
        (run, CONFIG, inputs("query", 128)), (run_disentangled, DISENTANGLED, disentangled_inputs("at"))
    ):
        drops = dataclasses.replace(config, attention_dropout=0.1)
        one, whole = results(drops, given, key), results(config, given)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            on_mesh = jax.tree.map(lambda x: jax.device_put(x, replicated(mesh)), given)
            eight = results(drops, on_mesh, jax.device_put(key, replicated(mesh)))
        output = next(name for name in one if "output" in name)
        assert np.abs(one[output] - whole[output]).max() > 0.1
        differences += [float(np.abs(eight[name] - x).max() / np.abs(x).max()) for name, x in one.items()]
    return differences


@pytest.mark.slow
def test_a_mesh_gives_the_results_of_one_device_with_dropout():
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    command = [sys.executable, "-m", "tests.models.layers.test_relative"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    differences = json.loads(done.stdout)
    assert len(differences) == 13 + 6 and max(differences) < 1e-5


if __name__ == "__main__":
    print(json.dumps(largest_differences()))
