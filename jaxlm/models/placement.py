"""Where arrays lie on the devices while a step runs: modules say what their dimensions count, whoever runs them where
that goes."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Literal

import jax
from jaxtyping import Array, Float

Counts = Literal["batch", "vocabulary"] | None
"""What a dimension counts: rows of the batch, tokens of the vocabulary, or anything that stays whole."""
Rule = Callable[[jax.Array, tuple[Counts, ...]], jax.Array]

_rule: contextvars.ContextVar[Rule | None] = contextvars.ContextVar("rule", default=None)


@contextlib.contextmanager
def arrays_placed_by(rule: Rule) -> Iterator[None]:
    """While a function is traced inside this, `rule` is applied to every array that is given to `place`.

    Without it the compiler guesses from the parameters' shardings, and for parameters split over `fsdp` it guesses
    that activations are split along their width, and moves them about instead of the parameters.
    """
    token = _rule.set(rule)
    try:
        yield
    finally:
        _rule.reset(token)


def place(x: Float[Array, "*shape"], *counts: Counts) -> Float[Array, "*shape"]:
    """The same values, placed by the rule in force; the identity where there is none.

    counts: what the first dimensions of x count; with none given it is an activation, whose first is the batch.
    """
    rule = _rule.get()
    return x if rule is None else rule(x, counts or ("batch",))
