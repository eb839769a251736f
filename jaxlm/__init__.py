"""jaxlm: pretrain language models in JAX, from raw text to a Transformers checkpoint."""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxlm.objectives.base import PretrainedModel

try:
    __version__ = importlib.metadata.version("jaxlm")
except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
    __version__ = "0+unknown"


def load(path: str, to_answer: bool = False) -> PretrainedModel:
    """Load the newest checkpoint of a run folder, a Transformers folder, or a model of the hub.

    A Transformers folder may lack heads. They are initialized, and a warning names them.

    Args:
        path: The folder, or `hf:ORG/NAME[@REVISION]`.
        to_answer: Whether the model is to fill masks or to generate, for which a missing head is an error.

    Raises:
        UserError: The folder is neither, or lacks a head that is needed.
    """
    import warnings

    from jaxlm.errors import UserError
    from jaxlm.runs.load import load_model
    from jaxlm.trees import within

    loaded = load_model(path)
    needs = loaded.objective.model.output_params if to_answer else ()
    missing = ", ".join(f for f in loaded.fresh if any(within(f, need) or within(need, f) for need in needs))
    if missing:
        raise UserError(f"{path} has no {missing}, so it would answer at random; `jaxlm import` and train it first.")
    if loaded.fresh and not to_answer:
        warnings.warn(f"{path} has no {', '.join(loaded.fresh)}: initialized afresh.", stacklevel=2)
    return loaded
