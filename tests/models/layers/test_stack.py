"""Looped, rematerialized and shared layers against unrolled layers."""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.models.layers.config import StackConfig
from jaxlm.models.layers.feed_forward import FeedForward
from jaxlm.models.layers.multi_head import HeadsDense, Visibility, empty_cache
from jaxlm.models.layers.stack import SharedInputs, init_stack, run_layers, run_stack, unstack
from tests.params import first_fast

CONFIG = StackConfig(  # all features of a family
    hidden_size=16, num_layers=3, num_heads=2, head_dim=8, intermediate_size=32, causal=True, cross_attention=True,
    norm="rms", norm_placement="pre", final_norm=True, init_std=0.3,
)
ROWS, LENGTH, MEMORY = 2, 6, 5


def inputs():
    """Return x, memory, bias, and the mask of the memory."""
    rng = np.random.default_rng(0)
    shapes = (ROWS, LENGTH, 16), (ROWS, MEMORY, 16), (1, 2, LENGTH, LENGTH)
    seen = jnp.asarray(rng.random((ROWS, 1, 1, MEMORY)) < 0.7).at[..., 0].set(True)
    return *(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes), seen


def init(config: StackConfig):
    return jax.jit(init_stack, static_argnums=0)(config, jax.random.key(0))


def has_loop(function, *arguments) -> bool:
    return "stablehlo.while" in function.lower(*arguments).as_text()


@pytest.fixture(scope="module")
def params():
    return init(CONFIG)


def test_a_loop_equals_unrolled_layers(params):
    x, memory, bias, seen = inputs()

    def gradients(loop: bool):
        config = dataclasses.replace(CONFIG, loop_layers=loop)

        def loss(params, x, memory, bias):
            shared = SharedInputs(Visibility(bias=bias), memory, Visibility(mask=seen))
            return jnp.mean(run_stack(config, params, x, shared)[0] ** 3)

        function = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))
        assert has_loop(function, params, x, memory, bias) == loop
        return jax.device_get(function(params, x, memory, bias))

    here, there = gradients(False), gradients(True)
    leaves = jax.tree_util.tree_leaves_with_path(here[1])
    kernels = [np.abs(g).max((1, 2)).min() for path, g in leaves if "kernel" in str(path)]
    assert len(kernels) == 10 and min(kernels) > 1e-4
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), here, there)


@pytest.mark.slow  # test_gpt2.py and test_t5.py decode token by token
def test_decoding_equals_the_whole(params):
    x, memory, _, seen = inputs()

    def token_by_token(params, x, memory, loop):
        config = dataclasses.replace(CONFIG, loop_layers=loop)
        caches, states = empty_cache(CONFIG, ROWS, LENGTH, MEMORY), []
        for index in range(LENGTH):
            read = jnp.arange(LENGTH)[None, None, None] <= index
            shared = SharedInputs(
                Visibility(mask=read), memory if index == 0 else None, Visibility(mask=seen), jnp.int32(index)
            )
            state, caches = run_stack(config, params, x[:, index : index + 1], shared, caches=caches)
            states.append(state)
        return jnp.concatenate(states, axis=1)

    shared = SharedInputs(memory=memory, memory_visible=Visibility(mask=seen))
    whole = jax.jit(lambda params: run_stack(CONFIG, params, x, shared)[0])(params)
    for loop in (False, True):
        decoded = jax.jit(token_by_token, static_argnums=3)(params, x, memory, loop)
        np.testing.assert_allclose(decoded, whole, atol=2e-5)


class Doubled(nn.Module):
    """Another feed-forward; `seen` has the lengths of its inputs."""

    config: StackConfig
    seen: ClassVar[list[int]] = []

    @nn.compact
    def __call__(self, x, deterministic=True):
        self.seen.append(x.shape[1])
        return 2 * FeedForward(self.config, name="inner")(x, deterministic)


def test_another_feed_forward():
    """Its parameters are stacked, and in the last layer it sees only the selected positions."""
    own = dataclasses.replace(CONFIG, num_layers=2, cross_attention=False, causal=False, feed_forward=Doubled)
    params = init(own)
    mlp = params["layers"]["mlp"]["inner"]
    mlp = mlp | {"wo": jax.tree.map(lambda leaf: 2 * leaf, mlp["wo"])}
    plain = params | {"layers": params["layers"] | {"mlp": mlp}}
    Doubled.seen.clear()
    at = jnp.array([[1, 3]] * ROWS)
    run = jax.jit(lambda config, params: run_stack(config, params, inputs()[0], positions=at)[0], static_argnums=0)
    expected = run(dataclasses.replace(own, feed_forward=None), plain)
    np.testing.assert_allclose(run(own, params), expected, rtol=1e-5, atol=1e-5)
    assert Doubled.seen == [LENGTH, 2]


def reversible(params, state, shift):
    """Return a layer over two streams (Gomez et al. 2017, equation 8), with its own input and output."""
    a, b = state
    a = a + jnp.tanh(b @ params["f"] + shift)
    b = b + jnp.tanh(a @ params["g"])
    return (a, b), jnp.sum(a)


def two_streams():
    rng = np.random.default_rng(1)
    matrix = lambda: jnp.asarray(rng.normal(0, 0.4, (8, 8)), jnp.float32)  # noqa: E731
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *({"f": matrix(), "g": matrix()} for _ in range(4)))
    return params, tuple(jnp.asarray(rng.normal(size=(3, 8)), jnp.float32) for _ in range(2))


def run_two_streams(params, state, **options):
    (a, b), outputs = run_layers([reversible] * 4, params, state, jnp.arange(4.0), **options)
    return jnp.sum(a**3) + jnp.sum(b**2) + outputs[1], (a, b, outputs)


@pytest.mark.parametrize("loop", first_fast([True, False]))
@pytest.mark.parametrize("remat", first_fast(["full", "none", "dots"]))
def test_the_state_may_be_any_pytree(remat, loop):
    """Two streams against the written-out equations; inputs and outputs of the layers in order."""
    params, state = two_streams()
    function = jax.jit(jax.value_and_grad(
        lambda params, state: run_two_streams(params, state, remat=remat, loop=loop), (0, 1), has_aux=True
    ))
    assert has_loop(function, params, state) == loop
    found = function(params, state)

    def plain(params, state):
        (a, b), sums = state, []
        for i, own in enumerate(unstack(params)):
            a = a + jnp.tanh(b @ own["f"] + i)
            b = b + jnp.tanh(a @ own["g"])
            sums.append(jnp.sum(a))
        return jnp.sum(a**3) + jnp.sum(b**2) + sums[1], (a, b, jnp.stack(sums))

    expected = jax.jit(jax.value_and_grad(plain, (0, 1), has_aux=True))(params, state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, expected)
    assert min(np.abs(g).max() for g in jax.tree.leaves(expected[1])) > 0.1


@pytest.mark.slow
def test_a_loop_runs_whole_periods():
    """A first layer, two periods of two kinds and a last layer, against the written-out sums."""
    factors = (2.0, 1.0, -0.5, 1.0, -0.5, 3.0)
    kinds = {factor: lambda matrix, x, shift, factor=factor: (x + factor * jnp.tanh(x @ matrix + shift), jnp.sum(x))
             for factor in factors}
    layers, rng = [kinds[factor] for factor in factors], np.random.default_rng(2)
    params, x, shifts = (jnp.asarray(rng.normal(0, 0.4, shape), jnp.float32) for shape in ((6, 8, 8), (3, 8), (6,)))

    def loss(params, loop):
        last, outputs = run_layers(layers, params, x, shifts, period=2, remat="full", loop=loop)
        return jnp.sum(last**3) + outputs @ jnp.arange(6.0)

    def plain(params):
        y, sums = x, []
        for factor, matrix, shift in zip(factors, params, shifts, strict=True):
            sums.append(jnp.sum(y))
            y = y + factor * jnp.tanh(y @ matrix + shift)
        return jnp.sum(y**3) + jnp.stack(sums) @ jnp.arange(6.0)

    expected = jax.jit(jax.value_and_grad(plain))(params)
    for loop in (False, True):
        function = jax.jit(jax.value_and_grad(functools.partial(loss, loop=loop)))
        assert has_loop(function, params) == loop
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), function(params), expected)


@pytest.mark.slow
def test_remat_keeps_less_of_two_streams():
    params, state = two_streams()

    def kept(remat):
        pull = jax.eval_shape(lambda p: jax.vjp(lambda p: run_two_streams(p, state, remat=remat)[0], p)[1], params)
        return sum(leaf.size for leaf in jax.tree.leaves(pull))

    assert kept("none") > kept("full")


@pytest.mark.slow
@pytest.mark.parametrize("loop", [False, True])
def test_shared_layers_get_the_sum_of_their_gradients(loop):
    """Four layers in two groups, as in ALBERT, against four separate layers with equal parameters."""
    x = inputs()[0]
    own = dataclasses.replace(CONFIG, num_layers=4, cross_attention=False, use_bias=False)
    shared = dataclasses.replace(own, num_groups=2, loop_layers=loop)
    params = init(shared)
    unshared = params | {"layers": jax.tree.map(lambda leaf: jnp.repeat(leaf, 2, axis=0), params["layers"])}

    def gradients(config, params):
        return jax.jit(jax.value_and_grad(lambda p: jnp.mean(run_stack(config, p, x)[0] ** 3)))(params)

    loss, found = gradients(shared, params)
    expected_loss, each = gradients(own, unshared)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)  # a mean of cubes of both signs; measured 1.1e-6
    for i in (0, 1):
        first, second = unstack(each["layers"])[2 * i : 2 * i + 2]
        expected = jax.tree.map(jnp.add, first, second)
        own = unstack(found["layers"])[i]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), own, expected)
        difference = jax.tree.map(lambda a, b: np.abs(a - b).max(), first, second)
        assert min(jax.tree.leaves(difference)) > 1e-4  # no other combination would pass


@pytest.mark.parametrize("loop", first_fast([False, True]))
def test_each_sublayer_drops_other_elements(loop):
    """Both sublayers of two layers add a dropped constant, and their four masks are the binary digits of the sum."""
    config = dataclasses.replace(
        CONFIG, num_layers=2, dropout=0.5, attention_dropout=0.0, cross_attention=False, loop_layers=loop,
        final_norm=False, hidden_size=64, num_heads=1, head_dim=1, intermediate_size=1,
    )
    params = jax.tree.map(jnp.zeros_like, jax.eval_shape(functools.partial(init_stack, config), jax.random.key(0)))
    for sublayer, values in (("attention", [1.0, 4.0]), ("mlp", [2.0, 8.0])):
        out = params["layers"][sublayer]["out" if sublayer == "attention" else "wo"]
        out["bias"] += jnp.array(values)[:, None]
    run = jax.jit(lambda params, x: run_stack(config, params, x, key=jax.random.key(0))[0])
    total = np.asarray(run(params, jnp.zeros((8, 16, 64)))).astype(int) // 2
    masks = np.stack([total >> digit & 1 for digit in range(4)]).reshape(32, -1)  # and rows have masks of their own
    agree = np.mean(masks[:, None] == masks, axis=-1)
    assert np.abs(agree - np.eye(32) / 2 - 0.5).max() < 5 * 0.5 / masks.shape[1] ** 0.5


def test_a_bias_is_added_in_the_type_of_the_product_and_its_gradient_summed_in_float32():
    """A float32 addition is a pass of its own on GPUs; a bfloat16 sum of these rows would be off by several percent."""
    dense = HeadsDense(dataclasses.replace(CONFIG, dtype="bfloat16", use_bias=True), name="key")
    keys = jax.random.split(jax.random.key(0))
    x, gradient = (jax.random.normal(key, shape, jnp.bfloat16) + 0.3 for key, shape in zip(
        keys, ((8, 1024, 16), (8, 1024, 2, 8)), strict=True))
    params = dense.init(keys[0], x)

    def backward(params, x, gradient):
        return jax.vjp(dense.apply, params, x)[1](gradient)[0]["params"]["bias"]

    forward = jax.make_jaxpr(dense.apply)(params, x)
    wide = [v.aval for e in forward.eqns for v in e.outvars if v.aval.shape[:1] == x.shape[:1]]
    assert wide and all(aval.dtype == jnp.bfloat16 for aval in wide)
    found, exact = jax.jit(backward)(params, x, gradient), np.sum(np.asarray(gradient, np.float64), (0, 1)).reshape(-1)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, exact, rtol=1e-5)
