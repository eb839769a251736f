"""Dense layers beside flax's, and no gradient that is a long sum in bfloat16."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.analysis.step import open_stand_in
from jaxlm.config.presets import load_preset
from jaxlm.fields import with_value
from jaxlm.models.layers.dense import Dense, add_bias, broadcast, dense_product
from jaxlm.objectives.base import total_loss
from tests.params import first_fast


def test_float32_is_flax_s_layer():
    x, init = jax.random.normal(jax.random.key(0), (3, 5, 8)), nn.initializers.normal(0.5)
    ours, theirs = Dense(6, True, jnp.float32, init), nn.Dense(6, kernel_init=init)
    params = theirs.init(jax.random.key(1), x)
    jax.tree.map(np.testing.assert_array_equal, ours.init(jax.random.key(1), x), params)

    def loss(layer, params, x):
        return jnp.sum(jnp.sin(layer.apply(params, x)))

    pairs = (jax.value_and_grad(lambda *a, layer=layer: loss(layer, *a), (0, 1))(params, x) for layer in (ours, theirs))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *pairs)


def test_a_bfloat16_bias_has_the_sum_of_many_rows_as_its_gradient():
    y = jnp.zeros((65_536, 2), jnp.bfloat16)
    assert jax.grad(lambda bias: jnp.sum(add_bias(y, bias), dtype=jnp.float32))(jnp.zeros(2)).tolist() == [65_536.0] * 2
    x = jnp.zeros((1, 2))
    spread = jax.grad(lambda x: jnp.sum(broadcast(x, y.shape, y.dtype), dtype=jnp.float32))(x)
    assert spread.tolist() == [[65_536.0] * 2]


def test_a_bfloat16_kernel_has_the_float32_sum_as_its_gradient():
    """In the order of jax the error on a CPU is 2 %."""
    x, kernel, g = (jax.random.normal(jax.random.key(i), shape).astype(jnp.bfloat16)
                    for i, shape in enumerate([(32, 128, 64), (64, 256), (32, 128, 256)]))
    found = jax.jit(lambda *a: jax.vjp(dense_product, *a[:2])[1](a[2])[1])(x, kernel, g).astype(jnp.float32)
    exact = jnp.einsum("bla,blc->ac", x.astype(jnp.float32), g.astype(jnp.float32))
    assert jnp.linalg.norm(found - exact) < 0.005 * jnp.linalg.norm(exact)


NAMES = ["bert_tiny", "electra_tiny", "xlnet_tiny", "deberta_v3_tiny", "gpt2_tiny", "t5_tiny", "reformer_tiny",
         "roberta_tiny", "spanbert_tiny", "albert_tiny", "gpt1_tiny", "gpt3_tiny", "ul2_tiny", "modernbert_tiny",
         "masked_diffusion_tiny", "contrastive_tiny", "llama_tiny", "eurobert_tiny"]


@pytest.mark.parametrize("name", first_fast(NAMES, 4))
def test_no_gradient_adds_more_than_64_values_in_bfloat16(name):
    """Of 256 equal values such a sum loses some, of 65,536 seven eighths. Matrix products add in float32."""
    experiment = with_value(load_preset(name), "objective.model.dtype", "bfloat16")
    session = open_stand_in(with_value(experiment, "train.phases", ()), name, report=lambda *_: None)
    objective, rows = session.objective, session.experiment.train.batch_size
    params = jax.eval_shape(objective.init, jax.random.key(0))
    example = jax.eval_shape(objective.corrupt, jax.random.key(1), session.synthetic_batch())

    def loss(params, example):
        memory = objective.initial_memory(rows)
        return total_loss(objective.stream_loss(params, example, memory, jax.random.key(2), False)[0])

    long = [sizes for sizes in _sums(jax.make_jaxpr(jax.grad(loss))(params, example).jaxpr) if sizes[0] > 64 * sizes[1]]
    assert not long


def _sums(jaxpr):
    """Yield the sizes before and after each sum in bfloat16, those of inner functions included."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "reduce_sum" and equation.invars[0].aval.dtype == jnp.bfloat16:
            yield equation.invars[0].aval.size, equation.outvars[0].aval.size
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from _sums(inner)
