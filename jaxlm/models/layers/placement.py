"""Where arrays lie on the devices while a step runs: modules say what their dimensions count, whoever runs them where
that goes."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import jax
from jaxtyping import Array, Float

Counts = Literal["batch", "vocabulary"] | None
"""What a dimension counts: rows of the batch, tokens of the vocabulary, or anything that stays whole."""
Rule = Callable[[jax.Array, tuple[Counts, ...]], jax.Array]


class Devices(NamedTuple):
    """What a step will run on, as far as the size of its parts depends on it."""

    platform: str
    """"cpu", "gpu" or "tpu"."""
    batch_shards: int
    """Devices over which the rows of a batch are split."""


_rule: contextvars.ContextVar[Rule | None] = contextvars.ContextVar("rule", default=None)
_devices: contextvars.ContextVar[Devices | None] = contextvars.ContextVar("devices", default=None)


@contextlib.contextmanager
def arrays_placed_by(rule: Rule, on: Devices) -> Iterator[None]:
    """While a function is traced inside this, `rule` is applied to every array that is given to `place`, and `devices`
    tells what the program is for.

    Without it the compiler guesses from the parameters' shardings, and for parameters split over `fsdp` it guesses
    that activations are split along their width, and moves them about instead of the parameters.
    """
    before = _rule.set(rule), _devices.set(on)
    try:
        yield
    finally:
        _rule.reset(before[0])
        _devices.reset(before[1])


def place(x: Float[Array, "*shape"], *counts: Counts) -> Float[Array, "*shape"]:
    """The same values, placed by the rule in force; the identity where there is none.

    counts: what the first dimensions of x count; with none given it is an activation, whose first is the batch.
    """
    rule = _rule.get()
    return x if rule is None else rule(x, counts or ("batch",))


def devices() -> Devices:
    """What the program that is being traced will run on: a single device of this process unless it was told."""
    return _devices.get() or Devices(jax.default_backend(), 1)
