"""GPT-1: the published size and the initialization."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxlm.models.gpt1 import Gpt1
from jaxlm.models.layers.stack import unstack


def test_parameter_count():
    """The sum of the released params_shapes.json, which has no final norm."""
    shapes = jax.eval_shape(Gpt1().init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == 116_534_784
    assert set(shapes["decoder"]) == {"layers"}


@pytest.mark.slow
def test_initialization():
    """N(0, 0.02) everywhere (Radford et al. 2018, section 4.1), without a factor for the residual stream."""
    model = Gpt1(vocab_size=500, hidden_size=128, num_layers=2, num_heads=2, intermediate_size=512)
    params = jax.jit(model.init)(jax.random.key(0))
    layer = unstack(params["decoder"]["layers"])[1]
    for array in (params["embeddings"]["word"]["embedding"], params["embeddings"]["position"]["embedding"],
                  layer["attention"]["out"]["kernel"], layer["mlp"]["wo"]["kernel"]):
        assert np.std(array) == pytest.approx(0.02, rel=0.02)
