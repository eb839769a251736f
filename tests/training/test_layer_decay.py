"""Learning rates that fall from layer to layer: the depth of each parameter of several families."""

from __future__ import annotations

import jax
import numpy as np

from jaxlm.models.deberta import DebertaV3
from jaxlm.models.reformer import Reformer
from jaxlm.models.xlnet import Xlnet
from jaxlm.training.optimizers import scale_by_depth


def test_layer_decay_of_two_networks():
    """What is below the layers of DeBERTa v3's generator and discriminator has depth 0 in both."""
    sizes = dict(vocab_size=8, hidden_size=4, num_heads=2, intermediate_size=4)
    model = DebertaV3(**sizes, num_layers=3, generator_num_layers=2)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    ones = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), shapes)
    scale = scale_by_depth(0.5, model.input_params, model.decay_above_layers)
    found = jax.jit(lambda ones: scale.update(ones, scale.init(ones), ones)[0])(ones)
    for network in ("generator", "discriminator"):
        for name in ("embeddings", "relative"):
            assert all((leaf == 0.5**5).all() for leaf in jax.tree.leaves(found[network][name])), (network, name)


def test_layer_decay_of_repeated_kinds():
    """A Reformer of six layers, of which each third is of a kind, has six depths."""
    model = Reformer(vocab_size=8, hidden_size=8, num_layers=6, attention_types=("local", "lsh", "local"),
                     axial_widths=(4, 4))
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    ones = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), shapes)
    scale = scale_by_depth(0.5, model.input_params, 2)
    found = jax.jit(lambda ones: scale.update(ones, scale.init(ones), ones)[0])(ones)
    for kind in range(3):
        assert (found["layers"][str(kind)]["mlp_norm"]["scale"][:, 0] == 0.5 ** (7 - kind - np.array([0, 3]))).all()


def test_layer_decay_of_a_second_stack():
    """ERNIE's entities belong to its last layers, and the first of them, with a form of its own, to the one before."""
    text, first, last = (np.ones(shape, np.float32) for shape in ((4, 2), (2,), (1, 2)))
    ones = {"encoder": {"layers": {"mlp": text}}, "entity_encoder": {"first": {"mlp": first}, "layers": {"mlp": last}}}
    scale = scale_by_depth(0.5, (), 2)
    updates = scale.update(ones, scale.init(ones), ones)[0]
    found = updates["entity_encoder"]
    assert updates["encoder"]["layers"]["mlp"][:, 0].tolist() == [0.5**5, 0.5**4, 0.5**3, 0.5**2]
    assert (found["first"]["mlp"] == 0.5**3).all() and (found["layers"]["mlp"] == 0.5**2).all()


def test_layer_decay_of_xlnet():
    """Yang et al. 2019, fine-tuning: rate · d^(n - m) for layer m of 1 to n, and the full rate beside the layers."""
    model = Xlnet(vocab_size=8, hidden_size=4, num_layers=3, num_heads=2, intermediate_size=4)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    ones = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), shapes)
    ones["classifier"] = {"kernel": np.ones((4, 2), np.float32)}
    scale = scale_by_depth(0.5, model.input_params, model.decay_above_layers)
    factors = jax.jit(lambda ones: scale.update(ones, scale.init(ones), ones)[0])(ones)
    for leaf in jax.tree.leaves(factors.pop("layers")):
        np.testing.assert_array_equal(leaf.reshape(3, -1).mean(axis=1), [0.25, 0.5, 1.0])
    assert {"word", "query_start", "classifier"} < set(factors)
    assert all((leaf == 1.0).all() for leaf in jax.tree.leaves(factors))
