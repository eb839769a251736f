"""A stack as accelerators compile it, a loop over its layers, against the layers written out as on a CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxlm.models.layers.placement import Devices, arrays_placed_by

from jaxlm.models.layers.stack import Stack, StackConfig, empty_cache

CONFIG = StackConfig(  # all that a family may ask for
    hidden_size=16, num_layers=3, num_heads=2, head_dim=8, intermediate_size=32, causal=True, cross_attention=True,
    norm="rms", norm_placement="pre", final_norm=True, init_std=0.3,
)
ROWS, LENGTH, MEMORY = 2, 6, 5


def on(platform: str, function, *arguments):
    """The function traced for a platform and run here."""
    def traced(*arguments):
        with arrays_placed_by(lambda x, counts: x, Devices(platform, 1)):
            return function(*arguments)

    loops = str(jax.make_jaxpr(traced)(*arguments)).count("scan[")
    assert loops if platform == "tpu" else not loops
    return jax.device_get(jax.jit(traced)(*arguments))


def test_a_loop_gives_what_the_layers_written_out_give():
    rng = np.random.default_rng(0)
    x, memory, bias = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((ROWS, LENGTH, 16), (ROWS, MEMORY, 16), (1, 2, LENGTH, LENGTH))
    )
    seen = jnp.asarray(rng.random((ROWS, 1, 1, MEMORY)) < 0.7).at[..., 0].set(True)
    stack = Stack(CONFIG)
    variables = jax.jit(lambda key: stack.init(key, x, memory=memory, memory_mask=seen, bias=bias))(jax.random.key(0))

    def loss(variables, x, memory, bias):
        return jnp.mean(stack.apply(variables, x, memory=memory, memory_mask=seen, bias=bias)[0] ** 3)

    gradients = jax.value_and_grad(loss, (0, 1, 2, 3))
    here, there = (on(platform, gradients, variables, x, memory, bias) for platform in ("cpu", "tpu"))
    kernels = [np.abs(g).max() for path, g in jax.tree_util.tree_leaves_with_path(here[1]) if "kernel" in str(path)]
    assert len(kernels) == 10 and min(kernels) > 1e-4
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), here, there)

    def token_by_token(variables, x, memory):
        cache, states = empty_cache(CONFIG, ROWS, LENGTH, MEMORY), []
        for index in range(LENGTH):
            read = jnp.arange(LENGTH)[None, None, None] <= index
            state, cache = stack.apply(
                variables, x[:, index : index + 1], mask=read, memory=memory if index == 0 else None, memory_mask=seen,
                cache=cache, index=jnp.int32(index),
            )
            states.append(state)
        return jnp.concatenate(states, axis=1)

    whole = jax.jit(lambda v: stack.apply(v, x, memory=memory, memory_mask=seen)[0])(variables)
    for platform in ("cpu", "tpu"):
        np.testing.assert_allclose(on(platform, token_by_token, variables, x, memory), whole, atol=2e-5)
