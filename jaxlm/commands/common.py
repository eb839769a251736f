"""What several commands need."""

from __future__ import annotations

import argparse
from typing import NoReturn

from jaxlm.errors import UserError


class Parser(argparse.ArgumentParser):
    """argparse whose errors are UserErrors."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message[0].lower()}{message[1:]}; see `{self.prog} --help`.")


def start_jax() -> None:
    """Joins the processes of a cluster and turns on the persistent compilation cache."""
    import jax

    from jaxlm.data.text import compilation_cache
    from jaxlm.parallel.hosts import join_processes

    if not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", compilation_cache())
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    try:
        join_processes()
        jax.devices()
    except (RuntimeError, ValueError) as error:
        raise UserError(f"jax cannot start its devices: {str(error).splitlines()[0]}") from error
