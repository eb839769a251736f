"""The type checker that conftest's import hook puts on every function: beartype, to which an int is a float too."""

from collections.abc import Callable
from typing import Any, Self

from beartype import BeartypeConf, FrozenDict, beartype

# The hook decorates a method before its class exists, so that beartype cannot tell what Self is.
_checked = beartype(conf=BeartypeConf(is_pep484_tower=True, hint_overrides=FrozenDict({Self: Any})))


def typechecked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Functions inside functions are let be: they would be decorated anew at every call of the outer one."""
    return function if "<locals>" in getattr(function, "__qualname__", "") else _checked(function)
