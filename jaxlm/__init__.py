"""jaxlm: pretrain language models in JAX, from raw text to a Transformers checkpoint."""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jaxlm.runs.model import TrainedModel

try:
    __version__ = importlib.metadata.version("jaxlm")
except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
    __version__ = "0+unknown"


def load(path: str, to_answer: bool = False, preset: str = "", mesh: Mapping[str, int] = {}) -> TrainedModel:
    """Load the newest checkpoint of a run folder, a Transformers folder, or a model of the hub.

    A Transformers folder may lack heads. They are initialized, and a warning names them.

    Args:
        path: The folder, or `hf:ORG/NAME[@REVISION]`.
        to_answer: Whether the model is to fill masks or to generate, for which a missing head is an error.
        preset: A preset (a .py file) whose own classes the run has.
        mesh: Sizes of the axes that parameters and rows are sharded over, as {"data": 1, "fsdp": 8}; by default
            those of training if they fit the devices, else `fsdp`; every device has a copy of a Transformers folder.

    Raises:
        UserError: The folder is neither, or lacks a head that is needed.
    """
    import warnings

    from jaxlm.config.presets import run_preset
    from jaxlm.runs.model import load_trained

    if preset:
        run_preset(preset)
    loaded = load_trained(path, mesh)
    if to_answer:
        loaded.require_heads()
    elif loaded.fresh:
        warnings.warn(f"{path} has no {', '.join(loaded.fresh)}: initialized afresh.", stacklevel=2)
    return loaded
