"""jaxlm: pretrain language models in JAX, from raw text to a Transformers checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from jaxlm.runs.load import LoadedModel


def load(path: str, needs: Collection[str] = ()) -> LoadedModel:
    """Opens a run folder (its newest checkpoint) or a Transformers folder. UserError when it is neither.

    A Transformers folder may lack heads, which are then initialized: a warning names them. needs: what the caller
    reads, by the first names of its parameters ("mlm_head"); UserError where one of those is missing.
    """
    import warnings

    from jaxlm.errors import UserError
    from jaxlm.runs.load import load_model

    loaded = load_model(path)
    missing = ", ".join(name for name in loaded.fresh if name in needs)
    if missing:
        raise UserError(f"{path} has no {missing}, so it would answer at random; `jaxlm import` and train it first.")
    if loaded.fresh and not needs:
        warnings.warn(f"{path} has no {', '.join(loaded.fresh)}: initialized afresh.", stacklevel=2)
    return loaded
