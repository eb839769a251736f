"""Initial values of ELMo, XLNet and the Reformer: constants, and laws with their spreads."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest

from jaxlm.models.elmo import Elmo
from jaxlm.models.reformer import Reformer
from jaxlm.models.xlnet import Xlnet
from jaxlm.trees import leaves

SIZES = dict(vocab_size=500, hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64)
MODELS = {
    "elmo": Elmo(vocab_size=500, hidden_size=32, cell_size=48, filter_widths=3, num_highways=1, num_layers=1),
    "xlnet": Xlnet(**SIZES),
    "reformer": Reformer(
        **SIZES, head_dim=16, attention_types=("local", "lsh"), axial_shape=(16, 32), axial_widths=(12, 20),
        local_chunk_size=4, lsh_chunk_size=4,
    ),
}
# Patterns of parameters; the first that fits has the law: a constant, or the kind and the standard deviation of one.
LAWS = {
    "elmo": {
        r"characters/": ("uniform", 1 / 3**0.5), r"filters/\d/kernel": ("uniform", 0.05 / 3**0.5), r"carry/bias": -2.0,
        r"bias": 0.0, r"highways/|token_projection/": ("normal", 128**-0.5), r"softmax/": ("normal", 32**-0.5),
        r"ward/\d/kernel": ("uniform", (2 / (32 + 32 + 4 * 48)) ** 0.5),
        r"ward/\d/projection/": ("uniform", (2 / (48 + 32)) ** 0.5),
    },
    "xlnet": {r"scale": 1.0, r"(^|norm/|mlp/\w+/)bias": 0.0, r"": ("normal", 0.02)},
    "reformer": {r"scale": 1.0, r"bias": 0.0, r"^position_": ("normal", 1.0), r"": ("normal", 0.02)},
}


@pytest.mark.parametrize("name", MODELS)
def test_initial_values_are_those_of_the_official_codes(name):
    """ELMo: bilm/training.py of allenai/bilm-tf, with ReLU, whose LSTMs have the glorot_uniform of TensorFlow's
    `get_variable`; glorot_uniform has the variance 2 / (inputs + outputs). XLNet: modeling.py of zihangdai/xlnet, where
    `init_std` is 0.02 and biases of attention are drawn too; the start of the query stream as in Transformers, since
    there it has TensorFlow's default. Reformer: the position tables of trax's
    `AxialPositionalEncoding`, RandomNormalInitializer(1.0); else, as there, Transformers' `axial_norm_std` 1.0 and
    `initializer_range` 0.02.
    """
    laws, used = LAWS[name], set()
    for path, leaf in leaves(jax.device_get(jax.jit(MODELS[name].init)(jax.random.key(0)))).items():
        pattern = next(pattern for pattern in laws if re.search(pattern, path))
        used.add(pattern)
        if isinstance(laws[pattern], float):
            assert (leaf == laws[pattern]).all(), path
            continue
        kind, std = laws[pattern]
        # Four standard errors; those of the standard deviation of n normal values are about std / √(2n).
        assert abs(leaf.std() / std - 1) < 4 / (2 * leaf.size) ** 0.5, path
        assert abs(leaf.mean()) < 4 * std / leaf.size**0.5, path
        if leaf.size > 300:  # a uniform law ends at √3 of its standard deviations, a truncated one at 2 or 2.3
            most = np.abs(leaf).max() / std
            assert most > 2.5 if kind == "normal" else most < 1.74, path
    assert used == set(laws)
