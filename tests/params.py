"""Parameters of models, random, and of tests, of which the first is in the suite and the others are slow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
import pytest

from jaxlm.types import Params


def random_params(model: Any, seed: int = 0, std: float = 0.15) -> Params:
    """Return normal parameters of a model or an objective, float32, as numpy arrays.

    To trace an initialization, lower and compile it takes a second or more; its shapes alone a tenth of that.

    Args:
        model: Anything with `init`.
        seed: Seed.
        std: Standard deviation around 0, of scales of norms around 1. Biases are random too: zeros would hide a mix-up.
    """
    rng = np.random.default_rng(seed)
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: rng.normal(path[-1].key == "scale", std, leaf.shape).astype(np.float32),
        jax.eval_shape(model.init, jax.random.key(0)),
    )


def first_fast(values: Iterable[Any], fast: int = 1) -> list[Any]:
    """Return the values for `parametrize`: those after the first `fast` ones are slow, and repeat what these show."""
    rows = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*row, marks=() if place < fast else pytest.mark.slow) for place, row in enumerate(rows)]
