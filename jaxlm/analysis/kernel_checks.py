"""Checks of `jaxlm check`: dropout, and each attention kernel beside scores in memory in float32 on the CPU.

A check yields figures with their limits. A new kernel is an entry of KERNELS.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from jaxlm.models.layers import chunked, disentangled, relative
from jaxlm.models.layers.attention import attend
from jaxlm.models.layers.chunked_kernel import Options
from jaxlm.models.layers.config import StackConfig
from jaxlm.models.layers.dropout import dropout
from jaxlm.models.layers.rotary import Rope
from jaxlm.training.program import dropout_key

Figure = tuple[str, float, float | None]
"""Name, value, and the limit that it must not exceed; None without one."""
Evaluation = Callable[[jax.Array | None, Sequence[np.ndarray]], list[np.ndarray]]
"""Result of `compiled`."""
LIMITS = {"float32": 1e-4, "bfloat16": 3e-2}
"""Relative errors by type; more is allowed where scores in memory have half of it in the same type on the CPU."""
ROWS, LENGTH, HEADS, WIDTH = 2, 256, 2, 64
RATE = 0.25
DOCUMENTS = np.repeat([[1, 2], [1, 0]], [100, 156], axis=1).astype(np.int32)
"""Segments of two rows; the second ends with padding, of more than 128 tokens."""
CONFIG = StackConfig(hidden_size=HEADS * WIDTH, num_layers=1, num_heads=HEADS, head_dim=WIDTH, intermediate_size=1,
                     attention="xla", attention_dropout=RATE)


class Case(NamedTuple):
    """Arguments of an attention: `run(is_fused, dropout_key, query, key, value, …)`, and the shapes of the arrays.

    Queries, keys and values are [batch, positions, heads, head_dim], outputs too, with further columns or without.
    """

    run: Callable[..., jax.Array]
    shapes: tuple[tuple[int, ...], ...]


class Kernel(NamedTuple):
    """A kernel and where it runs; on CPUs those of TPUs run in Pallas's interpreter."""

    cases: tuple[Case, ...]
    platforms: tuple[str, ...] = ("tpu", "cpu")
    dtypes: tuple[str, ...] = ("bfloat16",)
    drops: bool = True


def _attend(kernel: str, packed: bool = False, has_bias: bool = False, **options: Any) -> Case:
    def run(is_fused, dropout_key, *arrays):
        segments = jnp.asarray(DOCUMENTS)
        lengths = None if packed else jnp.sum(segments > 0, axis=1)
        y = attend(*arrays[:3], bias=arrays[3] if has_bias else None, query_segments=segments if packed else None,
                   key_segments=segments, lengths=lengths, scale=0.125, dropout_rate=RATE, dropout_key=dropout_key,
                   kernel=kernel if is_fused else "xla", **options)
        return jnp.where(DOCUMENTS[..., None, None] > 0, y, 0)

    return Case(run, ((ROWS, LENGTH, HEADS, WIDTH),) * 3 + ((1, HEADS, LENGTH, LENGTH),) * has_bias)


def _relative(targets: int, memory: int) -> Case:
    """Return a case of XLNet: the query stream of some targets, or with 0 the content stream."""
    count, before = targets or LENGTH, ((0, 0), (memory, 0))
    ranks = np.random.default_rng(0).permuted(np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1)), axis=1)
    ranks[:, -1] = -1  # every query attends to a key
    at = np.tile(np.arange(count, dtype=np.int32) * (LENGTH // count), (ROWS, 1))
    queries = relative.Queries(at if targets else None, DOCUMENTS[:, at[0]], ranks[:, at[0]])
    keys = relative.Keys(np.pad(DOCUMENTS, before), np.pad(ranks, before, constant_values=-1))

    def run(is_fused, dropout_key, query, key, value, distance_query, distance, segment_scores):
        return (relative.fused if is_fused else relative.in_memory)(
            CONFIG, query, distance_query, key, value, distance, segment_scores, jnp.arange(ROWS, dtype=jnp.int32),
            *jax.tree.map(jnp.asarray, (queries, keys)), dropout_key,
        )

    own, all_keys = (ROWS, count, HEADS, WIDTH), (ROWS, memory + LENGTH, HEADS, WIDTH)
    return Case(run, (own, all_keys, all_keys, own, (2, memory + 2 * LENGTH, HEADS, WIDTH), (2, ROWS, HEADS, count)))


def _disentangled(is_fused, dropout_key, query, key, value, distance_query, distance_key):
    segments = jnp.asarray(DOCUMENTS)
    if is_fused:
        y = disentangled.fused(CONFIG, query, key, value, distance_query[::-1], distance_key, None,
                               jnp.stack([segments] * 2, axis=1), dropout_key)
    else:
        y = disentangled.attend_disentangled(
            CONFIG, query, key, value, distance_query, distance_key, None, query_segments=segments,
            key_segments=segments, mask=None, dropout_key=dropout_key,
        )
    return jnp.where(DOCUMENTS[..., None, None] > 0, y, 0)


def _chunked(length: int = 2048, chunk: int = 256) -> Case:
    """Return a case of the Reformer: two rounds of hashing, each of half the length in a random order."""
    rng = np.random.default_rng(0)
    positions = np.concatenate([rng.permutation(length // 2) for _ in range(2)]).astype(np.int32)[None, None]
    documents, score = np.where(positions < length // 5, 1, 2).astype(np.int32), chunked.SELF_SCORE

    def run(is_fused, dropout_key, query, key, value):
        arrays = [x.swapaxes(1, 2) for x in (query, chunked.unit(key), value)]
        arrays += [jnp.asarray(positions), jnp.asarray(documents)]
        if is_fused:
            options = Options(chunk, score, 0.0 if dropout_key is None else RATE)
            y, log_sums = chunked.fused(*arrays, dropout_key, options)
        else:
            y, log_sums = chunked.attend_in_chunks(*arrays, length // chunk, self_score=score, dropout_rate=RATE,
                                                   dropout_key=dropout_key)
        return jnp.concatenate([y, log_sums[..., None].astype(y.dtype)], axis=-1).swapaxes(1, 2)

    return Case(run, ((1, length, 1, 128),) * 3)


KERNELS: dict[str, Kernel] = {
    "xla": Kernel((_attend("xla", has_bias=True), _attend("xla", packed=True, causal=True, band=64)),
                  ("tpu", "gpu", "cpu"), ("float32", "bfloat16")),
    "rows": Kernel((_attend("rows", has_bias=True), _attend("rows", packed=True, causal=True, rope=Rope(1e4)))),
    "xla in blocks": Kernel((_attend("xla in blocks", packed=True, band=40),
                             _attend("xla in blocks", causal=True, band=40)), ("gpu", "cpu"), ("float32", "bfloat16"),
                            drops=False),
    "splash": Kernel((_attend("splash", packed=True, causal=True), _attend("splash", band=64)),
                     dtypes=("float32", "bfloat16"), drops=False),
    "cudnn": Kernel((_attend("cudnn"), _attend("cudnn", has_bias=True), _attend("cudnn", packed=True, causal=True),
                     _attend("cudnn", has_bias=True, causal=True), _attend("cudnn in blocks", packed=True, band=40)),
                    ("gpu",), drops=False),
    "relative": Kernel((_relative(85, 0), _relative(0, 128))),
    "disentangled": Kernel((Case(_disentangled, ((ROWS, LENGTH, HEADS, WIDTH),) * 3
                                 + ((2 * LENGTH + 1, HEADS, WIDTH),) * 2),)),
    "chunked": Kernel((_chunked(),)),
}
"""Attention kernels by name; "xla" keeps its scores in memory."""


def check_kernel(kernel: Kernel, device: jax.Device, cpu: jax.Device) -> Iterator[Figure]:
    """Compare outputs and gradients of a kernel with scores in memory on the CPU, also with dropout, by one mask."""
    # True is the plain interpreter: that of a TPU's memories, the default, does not run splash attention (jax 0.10).
    is_cpu = device.platform == "cpu"
    with pltpu.force_tpu_interpret_mode(True) if is_cpu else contextlib.nullcontext():
        for number, (run, shapes) in enumerate(kernel.cases, 1):
            arrays, plain, fused = normal(shapes), functools.partial(run, False), functools.partial(run, True)
            for key in (None, dropout_key(0, 1))[: 1 + kernel.drops]:
                exact = compiled(plain, cpu, "float32")(key, arrays)
                for dtype in kernel.dtypes:
                    on_cpu, found = (compiled(*one, dtype)(key, arrays) for one in ((plain, cpu), (fused, device)))
                    for what, part in (("output", slice(1)), ("gradients", slice(1, None))):
                        limit = max(LIMITS[dtype], 2 * _error(on_cpu[part], exact[part]))
                        name = f"{dtype} {what} {number}" + " with dropout" * (key is not None)
                        yield name, _error(found[part], exact[part]), limit


def check_dropout(device: jax.Device, cpu: jax.Device) -> Iterator[Figure]:
    """Check the law of dropout, that its mask is the CPU's, and that the backward pass has the same."""
    shape, variance, masks = (ROWS, LENGTH, HEADS, WIDTH), RATE * (1 - RATE), []
    run = functools.partial(compiled, lambda key, x: dropout(x, RATE, key), dtype="float32")
    (output, gradient), (cpus, _) = (run(device=one)(dropout_key(0, 1), [np.ones(shape)]) for one in (device, cpu))
    yield "elements unlike the CPU's", np.sum((output > 0) != (cpus > 0)), 0
    yield "gradients unlike the outputs", np.sum((output > 0) != (gradient != 0)), 0
    for step in (1, 2):
        masks.append((run(device=device)(dropout_key(0, step), [np.ones(shape)])[0] > 0).ravel() - (1 - RATE))
        yield f"deviations of rate {step}", abs(masks[-1].sum()) / np.sqrt(variance * masks[-1].size), 5
    spectra = [np.fft.rfft(mask) for mask in masks]
    for name, other in (("itself", 0), ("another key's", 1)):  # at every distance: neighbours, heads and rows
        correlation = np.fft.irfft(spectra[0] * spectra[other].conj()) / (variance * np.sqrt(masks[0].size))
        yield f"deviations of correlation with {name}", np.abs(correlation[1 - other :]).max(), 6.5


def normal(shapes: Sequence[tuple[int, ...]], seed: int = 0) -> list[np.ndarray]:
    """Return normal numbers that bfloat16 has exactly."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(jnp.bfloat16).astype(np.float64) for shape in shapes]


def precision(dtype: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which products of float32 are exact on every device."""
    return jax.default_matmul_precision("highest") if dtype == "float32" else contextlib.nullcontext()


def compiled(run: Callable[..., jax.Array], device: jax.Device, dtype: str) -> Evaluation:
    """Return a function of (dropout key, arrays): the output of `run`, and its gradients for a fixed cotangent."""
    @jax.jit
    def output_and_gradients(key, arrays):
        y, pull = jax.vjp(functools.partial(run, key), *arrays)
        return y, *pull(jnp.asarray(normal([y.shape], 1)[0], y.dtype))

    def evaluate(key, arrays):
        with jax.default_device(device), precision(dtype):
            found = output_and_gradients(key, [jnp.asarray(x, dtype) for x in arrays])
        return [np.asarray(x, np.float64) for x in found]

    return evaluate


def _error(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """Return the largest error, relative to the largest number of its array."""
    return max(np.abs(x - y).max() / np.abs(y).max() for x, y in zip(found, expected, strict=True))
