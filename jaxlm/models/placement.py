"""Where activations lie on the devices. Modules only say which arrays are activations; who runs them says where those go."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator

import jax
from jaxtyping import Array, Float

_rule: contextvars.ContextVar[Callable[[jax.Array], jax.Array] | None] = contextvars.ContextVar("rule", default=None)


@contextlib.contextmanager
def activations_placed_by(rule: Callable[[jax.Array], jax.Array]) -> Iterator[None]:
    """While a function is traced inside this, `rule` is applied to every activation that a stack takes or gives.

    Without it the compiler guesses from the parameters' shardings, and for parameters split over `fsdp` it guesses
    that activations are split along their width, and moves them about instead of the parameters.
    """
    token = _rule.set(rule)
    try:
        yield
    finally:
        _rule.reset(token)


def place(x: Float[Array, "batch *shape"]) -> Float[Array, "batch *shape"]:
    """The same values, placed by the rule in force; the identity where there is none."""
    rule = _rule.get()
    return x if rule is None else rule(x)
