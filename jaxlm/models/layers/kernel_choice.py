"""The choice of attention's kernel for the traced program's platform, with the reason for scores in memory."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from jaxlm.models.layers.attention import attend, split_heads
from jaxlm.models.layers.banded import block_shape
from jaxlm.models.layers.row_attention import fits
from jaxlm.parallel.activations import target_kind, target_options, target_platform

BATCH = 2
"""Rows of the attention that is compiled to ask cuDNN; a first dimension of a mask or a bias is at most this."""


@dataclasses.dataclass(frozen=True)
class Attention:
    """What decides the kernel of one attention: its sizes and type, and what its scores get."""

    queries: int
    keys: int
    heads: int
    head_dim: int
    dtype: str
    """Compute type."""
    drops: bool = False
    """Whether probabilities are dropped."""
    mask: tuple[int, ...] | None = None
    """Shape of the explicit mask, or None."""
    bias: tuple[int, ...] | None = None
    """Shape of the bias, or None."""
    causal: bool = False
    """Whether later keys are masked."""
    packed: bool = False
    """Whether queries have segments."""
    has_lengths: bool = False
    """Whether the lengths of the rows are known, or all keys visible."""
    band: int | None = None
    """The band, or None."""
    has_own_kernel: bool | None = None
    """For attention with a kernel of its own on TPUs ("own"): whether that takes these sizes."""


class Choice(NamedTuple):
    """Kernel of an attention."""

    what: Attention
    kernel: str
    """"xla" for scores in memory, or the name of a fused kernel."""
    reason: str
    """Why no kernel is fused; "" if one is."""


_choices: contextvars.ContextVar[dict[Choice, None] | None] = contextvars.ContextVar("choices", default=None)


@contextlib.contextmanager
def recorded_choices() -> Iterator[Callable[[], str]]:
    """Record the kernels that are chosen while a step is traced; yield a function that describes them in a line."""
    choices: dict[Choice, None] = {}
    token = _choices.set(choices)
    try:
        yield lambda: "; ".join(dict.fromkeys(
            f"{each.what.queries} x {each.what.keys} by {each.kernel}"
            + (f" (scores in memory: {each.reason})" if each.reason else "") for each in choices
        ))
    finally:
        _choices.reset(token)


def choose_kernel(implementation: str, what: Attention) -> str:
    """Return the kernel of `attend` on the platform of the traced program; "xla" for scores in memory if asked for."""
    platform, kernel, reason = target_platform(), "xla", ""
    # The TPU's kernels skip what is beyond the band, and so does cuDNN's window, which is causal.
    in_blocks = platform != "tpu" and implementation != "xla" and what.mask is None and what.bias is None
    blocks = block_shape(what.queries, what.keys, what.band, what.causal) if in_blocks else None
    has_window = platform == "gpu" and what.causal and not what.packed
    if implementation == "xla":
        reason = "objective.model.attention is xla"
    elif platform == "tpu":
        kernel, reason = _tpu_kernel(what)
    elif platform == "gpu" and what.has_own_kernel is not None:
        reason = "cuDNN has no attention of this kind"
    elif platform == "gpu" and (what.drops or what.dtype == "float32"):
        needed = ["--objective.model.dtype bfloat16"] * (what.dtype == "float32")
        reason = "cuDNN needs " + " and ".join(needed + ["--objective.model.attention-dropout 0"] * what.drops)
    elif platform == "gpu" and target_options().get("xla_gpu_deterministic_ops"):
        # It loses the second of two equal calls (openxla/xla#46500), and the step ends in `raw_hash_map::at`.
        reason = "XLA executes only one of a step's equal attentions by cuDNN under --train.deterministic"
    elif platform == "gpu" and (not blocks or has_window):
        reason = cudnn_refusal(target_kind(), what)
        kernel = "xla" if reason else "cudnn"
    if blocks and kernel == "xla":
        (queries, keys), visible = blocks, (BATCH, 1, *blocks)
        block = Attention(queries, keys, what.heads, what.head_dim, what.dtype, what.drops, mask=visible)
        return choose_kernel(implementation, block) + " in blocks"
    if (found := _choices.get()) is not None and platform in ("tpu", "gpu"):  # others have no fused kernel
        found[Choice(what, kernel, reason)] = None
    return kernel


def _tpu_kernel(what: Attention) -> tuple[str, str]:
    """Return the TPU's kernel, and "", or "xla" and the reason."""
    # Before v4 the kernels do not multiply bfloat16.
    is_bfloat16, is_old = what.dtype == "bfloat16", target_kind() in ("TPU v2", "TPU v3")
    if is_bfloat16 and is_old:
        return "xla", f"the kernels multiply no bfloat16 on a {target_kind()}"
    if what.has_own_kernel is not None:
        reason = f"its kernel does not take {what.dtype} heads of {what.head_dim} at these lengths"
        return ("own", "") if what.has_own_kernel else ("xla", reason)
    if what.mask is not None:
        return "xla", "an explicit mask"
    has_bias, scores = what.bias is not None, (what.heads, what.queries, what.keys)
    local_heads = split_heads(what.heads)[1]
    is_short = fits(what.queries, what.keys, local_heads, what.head_dim, has_bias=has_bias, causal=what.causal)
    if is_bfloat16 and is_short and what.bias in (None, (1, *scores)):
        return "rows", ""
    if what.queries % 128 or what.keys % 128:
        return "xla", "lengths that 128 does not divide"
    if what.drops or has_bias:
        kind = "dropout" if what.drops else "a bias"
        return "xla", f"{kind} of the scores, which only the kernel for short rows has"
    precision = jax.config.jax_default_matmul_precision
    if is_bfloat16 and precision not in (None, "default", "fastest", "bfloat16"):
        return "xla", f"splash attention multiplies no bfloat16 by JAX_DEFAULT_MATMUL_PRECISION={precision}"
    return "splash", ""


@functools.cache
def cudnn_refusal(kind: str, what: Attention) -> str:
    """Return why cuDNN does not compute this attention, and its gradient, on a GPU; "" if it does.

    jax's checks decide, and the compiler if such a GPU is attached: more reliable than a table of GPUs and versions.

    `kind` is the traced program's GPU, as jax names it.
    """
    def probe(query, source, query_segments, key_segments, mask, bias):
        keys = key_segments if what.packed or what.band is None else None
        segments = {"query_segments": query_segments if what.packed else None, "key_segments": keys}
        lengths = jnp.sum(key_segments > 0, axis=1) if what.has_lengths else None
        y = attend(query, source, source, **segments, lengths=lengths, mask=mask, bias=bias, causal=what.causal,
                   band=what.band, kernel="cudnn")
        return jnp.sum(y.astype(jnp.float32))

    def rows(shape, dtype):
        return None if shape is None else jax.ShapeDtypeStruct((min(shape[0], BATCH), *shape[1:]), dtype)

    heads = what.heads, what.head_dim
    arrays = (
        rows((BATCH, what.queries, *heads), what.dtype), rows((BATCH, what.keys, *heads), what.dtype),
        rows((BATCH, what.queries), jnp.int32), rows((BATCH, what.keys), jnp.int32),
        rows(what.mask, bool), rows(what.bias, jnp.float32),
    )
    try:
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):  # two rows for one device
            lowered = jax.jit(jax.grad(probe, (0, 1))).trace(*arrays).lower(lowering_platforms=("cuda",))
        if jax.devices()[0].device_kind == kind:
            lowered.compile()
    except Exception as error:  # whatever the reason is, attention with scores in memory works
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return ""
