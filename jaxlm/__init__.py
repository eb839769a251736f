"""jaxlm: pretrain language models in JAX, from raw text to a Transformers checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from jaxlm.text.tokenizer import Tokenizer


class Loaded(NamedTuple):
    """A trained model: `objective.model` is its configuration, `params` a nested dict of float32 arrays."""

    objective: Any
    params: dict[str, Any]
    tokenizer: Tokenizer


def load(path: str) -> Loaded:
    """Opens a run folder (its newest checkpoint) or a Transformers folder. UserError when it is neither."""
    from pathlib import Path

    from jaxlm.errors import UserError

    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"{path} is not a folder; give a run folder or a Transformers folder.")
    if (folder / "checkpoints").is_dir():
        from jaxlm.training.run_folder import open_run

        run = open_run(folder)
        return Loaded(run.objective, run.params()[0], run.tokenizer)
    from jaxlm.huggingface import load_folder

    return Loaded(*load_folder(folder))
