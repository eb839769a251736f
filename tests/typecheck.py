"""The type checker that conftest's import hook puts on every function: beartype, to which an int is a float too."""

from beartype import BeartypeConf, beartype

typechecked = beartype(conf=BeartypeConf(is_pep484_tower=True))
