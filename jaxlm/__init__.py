"""jaxlm: pretrain language models in JAX, from raw text to a Transformers checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection

    from jaxlm.tokenizers.tokenizer import Tokenizer


class Loaded(NamedTuple):
    """A trained model: the objective that it was trained with, whose `model` is its configuration, its parameters (a
    nested dict of float32 arrays) and its tokenizer."""

    objective: Any
    params: dict[str, Any]
    tokenizer: Tokenizer


def load(path: str, needs: Collection[str] = ()) -> Loaded:
    """Opens a run folder (its newest checkpoint) or a Transformers folder. UserError when it is neither.

    Heads that a Transformers folder lacks are initialised at random, and a warning names them. needs: the first names
    of the parameters that the caller reads ("mlm_head"); UserError where one of those would be random.
    """
    import warnings
    from pathlib import Path

    from jaxlm.errors import UserError

    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"{path} is not a folder; give a run folder or a Transformers folder.")
    if (folder / "checkpoints").is_dir():
        from jaxlm.runs.run import open_run

        run = open_run(folder)
        params, step = run.params()
        loaded = Loaded(run.objective, params, run.tokenizer)
        fresh = run.metadata.get("fresh", []) if step == 0 else []
    else:
        from jaxlm.huggingface import import_folder

        imported = import_folder(folder)
        loaded, fresh = Loaded(imported.objective, imported.params, imported.tokenizer), imported.fresh_heads
    missing = ", ".join(name for name in fresh if name in needs)
    if missing:
        raise UserError(f"{path} has no {missing}, so it would answer at random; `jaxlm import` and train it first.")
    if fresh and not needs:
        warnings.warn(f"{path} has no {', '.join(fresh)}: initialised afresh.", stacklevel=2)
    return loaded
