"""The type checker that conftest's import hook puts on every function: beartype, to which an int is a float too."""

from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype

_check = beartype(conf=BeartypeConf(is_pep484_tower=True))


def typechecked(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with its types checked on every call; unchanged where it mentions Self, which beartype takes only
    where it decorates the whole class."""
    mentions_self = {"Self", "typing.Self"} & set(map(str, function.__annotations__.values()))
    return function if mentions_self else _check(function)
