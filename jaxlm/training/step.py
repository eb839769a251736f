"""One train step: corrupt, forward, backward, update; jitted once, sharded by the table in parallel/rules.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxlm.models.layers.placement import Devices, arrays_placed_by
from jaxlm.objectives.base import Example, Metrics, Objective, Params
from jaxlm.parallel.rules import batch_sharding, batch_shards, placement, replicated, shardings
from jaxlm.types import TokenBatch


class TrainState(NamedTuple):
    """All that changes while training. step: int32 scalar, the number of updates done."""

    step: jax.Array
    params: Params
    opt_state: Any


COMPILER_OPTIONS: dict[str, dict[str, Any]] = {
    # Hardware random bits are made by each device for its own rows. Without this every TPU makes the bits of the whole
    # batch and cuts its part out: 16 GiB a layer for the attention dropout of 2,048 rows of 512 tokens. "Unsafe" says
    # that the bits then depend on the mesh, which dropout's may (see dropout_key).
    "tpu": {"xla_tpu_spmd_rng_bit_generator_unsafe": True},
}


def corruption_key(seed: int, step: jax.Array | int) -> jax.Array:
    """Key of a step's corruption: threefry, so that masks are the same on every mesh and every platform."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), step), 0)


def dropout_key(seed: int, step: jax.Array | int, platform: str) -> jax.Array:
    """Key of a step's dropout. Accelerators generate bits in hardware ("rbg"), which is many times cheaper there but
    depends on the mesh; on a CPU threefry is the faster one."""
    impl = "threefry2x32" if platform == "cpu" else "rbg"
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed, impl=impl), step), 1)


def make_init(
    objective: Objective, optimizer: optax.GradientTransformation, mesh: Mesh
) -> tuple[Callable[[jax.Array], TrainState], TrainState, TrainState]:
    """(init(key) -> state, shapes of the state, shardings of the state). Each parameter is created on the devices
    that hold it, so no device ever sees the whole."""

    def init(key: jax.Array) -> TrainState:
        params = objective.init(key)
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))

    shapes = jax.eval_shape(init, jax.random.key(0))
    layout = shardings(shapes, mesh)
    return jax.jit(init, out_shardings=layout), shapes, layout


def make_train_step(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    layout: TrainState,
    *,
    seed: int,
    accumulate: int = 1,
) -> Callable[[TrainState, TokenBatch], tuple[TrainState, Metrics]]:
    """The jitted step: (state, batch) -> (state, metrics). The old state's memory is reused for the new one.

    With `accumulate` > 1 the corrupted batch is cut into that many parts whose gradients are averaged: masks do not
    depend on it, and the loss is the mean of the parts' losses.
    """
    platform = mesh.devices.flat[0].platform
    batch_layout = batch_sharding(mesh)
    devices = Devices(platform, batch_shards(mesh))

    def loss(params: Params, example: Example, key: jax.Array) -> tuple[jax.Array, Metrics]:
        with arrays_placed_by(placement(mesh), devices):
            return objective.loss(params, example, key, True)

    def gradients(params: Params, example: Example, key: jax.Array) -> tuple[Params, Metrics]:
        (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)(params, example, key)
        return grads, {"loss": (value, jnp.ones(()))} | metrics

    def train_step(state: TrainState, batch: TokenBatch) -> tuple[TrainState, Metrics]:
        example = objective.corrupt(corruption_key(seed, state.step), batch)
        key = dropout_key(seed, state.step, platform)
        if accumulate == 1:
            grads, metrics = gradients(state.params, example, key)
        else:
            grads, metrics = _accumulated(gradients, state.params, example, key, accumulate)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        real = example.get("attention_mask", batch.segment_ids) > 0  # what the model reads, where it is told
        metrics |= {
            "grad_norm": (optax.tree.norm(grads), jnp.ones(())),
            "real_tokens": (jnp.sum(real).astype(jnp.float32), jnp.float32(real.size)),
        }
        return TrainState(state.step + 1, params, opt_state), metrics

    return jax.jit(
        train_step,
        in_shardings=(layout, TokenBatch(batch_layout, batch_layout)),
        out_shardings=(layout, replicated(mesh)),
        donate_argnums=0,
        compiler_options=COMPILER_OPTIONS.get(platform),
    )


def _accumulated(gradients, params, example, key, parts):
    # Row i goes to part i % parts: each device then cuts only rows it holds, and nothing moves between devices.
    split = jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), example)

    def body(total, xs):
        part, index = xs
        return jax.tree.map(jnp.add, total, gradients(params, part, jax.random.fold_in(key, index))), None

    first = jax.tree.map(lambda x: x[0], split)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(gradients, params, first, key))
    (grads, metrics), _ = jax.lax.scan(body, zeros, (split, jnp.arange(parts)))
    return jax.tree.map(lambda g: g / parts, grads), metrics


def make_eval_step(
    objective: Objective, mesh: Mesh, layout: TrainState, *, seed: int
) -> Callable[[Params, TokenBatch, jax.Array], Metrics]:
    """(params, batch, index of the batch) -> metrics without dropout. The same batch gets the same corruption at each
    evaluation, so losses of different steps are comparable."""
    batch_layout = batch_sharding(mesh)
    devices = Devices(mesh.devices.flat[0].platform, batch_shards(mesh))

    def eval_step(params: Params, batch: TokenBatch, index: jax.Array) -> Metrics:
        key = jax.random.fold_in(corruption_key(seed, 2**31 - 1), index)
        key_corrupt, key_loss = jax.random.split(key)
        with arrays_placed_by(placement(mesh), devices):
            value, metrics = objective.loss(params, objective.corrupt(key_corrupt, batch), key_loss, False)
        rows = jnp.sum(jnp.any(batch.segment_ids > 0, axis=1)).astype(jnp.float32)
        return {"loss": (value * rows, rows)} | metrics

    return jax.jit(
        eval_step,
        in_shardings=(layout.params, TokenBatch(batch_layout, batch_layout), None),
        out_shardings=replicated(mesh),
    )
