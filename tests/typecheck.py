"""The type checker that conftest's import hook puts on every function: beartype, to which an int is a float too."""

from typing import Any, Self

from beartype import BeartypeConf, FrozenDict, beartype

# The hook decorates a method before its class exists, so that beartype cannot tell what Self is.
typechecked = beartype(conf=BeartypeConf(is_pep484_tower=True, hint_overrides=FrozenDict({Self: Any})))
