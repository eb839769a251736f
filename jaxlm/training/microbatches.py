"""Gradients of a batch, whole or in microbatches, and the sums of an evaluation in parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxlm.errors import UserError
from jaxlm.objectives.base import Bound, Example, Memory, Term, Terms, total_loss
from jaxlm.parallel.activations import constrain
from jaxlm.trees import matches_patterns, path_string
from jaxlm.types import Params

RESERVED_TERMS = {"loss", "grad_norm", "real_tokens", "replay", "skipped"}
"""Names of what training adds to the terms of an objective."""


def gradients(
    objective: Bound, params: Params, example: Example, memory: Memory, key: jax.Array, num_microbatches: int = 1,
    frozen_params: Sequence[str] = (), num_groups: int = 0,
) -> tuple[Params, Terms, Memory]:
    """Return the gradients of the loss, zero for frozen parameters, its terms and the memory for the next batch.

    The terms include "loss", and are metrics (coefficient 0), since those of microbatches are added up, as their
    gradients are. Every term is divided by its weight in the whole batch, so that gradients are those of the whole
    batch, except that each microbatch has dropout masks of its own. Microbatches are added in float32. Devices add the
    gradients of kernels in the model's dtype: of bfloat16 they differ from float32's by 0.8 % on one device (Frobenius
    norm, BERT of 2 layers, 64 rows of 128, CPU). The rows of each of the `num_groups` groups of the batch
    (`Objective.row_group`; 0: every row is one) stay together.
    """
    if num_microbatches == 1:
        return _part_gradients(objective, params, example, memory, key, None, frozen_params)
    # Only the weights are used, so the compiler removes this forward pass.
    terms, _ = objective.stream_loss(params, example, memory, key, True)
    weights = {name: term.weight for name, term in terms.items()}

    def part(example: Example, memory: Memory, index: jax.Array | int) -> tuple[Any, Memory]:
        key_part = jax.random.fold_in(key, index)
        *sums, memory = _part_gradients(objective, params, example, memory, key_part, weights, frozen_params)
        return tuple(sums), memory

    (grads, terms), memory = sum_over_microbatches(
        part, objective.shared_arrays, example, memory, num_microbatches, num_groups
    )
    return grads, terms | {"loss": Term(terms["loss"].total, jnp.ones(()))}, memory


def sum_over_microbatches(
    part: Callable[[Example, Memory, jax.Array | int], tuple[Any, Memory]], shared_arrays: Sequence[str],
    example: Example, memory: Memory, num_microbatches: int, num_groups: int,
) -> tuple[Any, Memory]:
    """Return the sums of what `part` returns for each microbatch, given its index, and the memory of the whole batch.

    `shared_arrays` are those of the objective, which all microbatches get.
    """
    shared = {name: example[name] for name in shared_arrays}
    rows = {name: array for name, array in example.items() if name not in shared}

    # Group i of rows goes to microbatch i % num_microbatches, so that each device splits its own rows.
    rounds = num_groups // num_microbatches

    def split(x: jax.Array) -> jax.Array:
        x = x.reshape(rounds or len(x) // num_microbatches, num_microbatches, -1, *x.shape[1:]).swapaxes(0, 1)
        return x.reshape(num_microbatches, -1, *x.shape[3:])

    def join(x: jax.Array) -> jax.Array:
        x = x.reshape(num_microbatches, rounds or x.shape[1], -1, *x.shape[2:]).swapaxes(0, 1)
        return constrain(x.reshape(-1, *x.shape[3:]))

    def microbatch(xs: Any, index: jax.Array | int) -> tuple[Any, Memory]:
        rows, memory = jax.tree.map(constrain, xs)
        return part(rows | shared, memory, index)

    def add(total: Any, xs: Any) -> tuple[Any, Memory]:
        sums, memory = microbatch(*xs)
        return jax.tree.map(jnp.add, total, sums), memory

    parts = jax.tree.map(split, (rows, memory))
    shapes, _ = jax.eval_shape(microbatch, jax.tree.map(lambda x: x[0], parts), 0)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    sums, memory = jax.lax.scan(add, zeros, (parts, jnp.arange(num_microbatches)))
    return sums, jax.tree.map(join, memory)


def _part_gradients(
    objective: Bound, params: Params, example: Example, memory: Memory, key: jax.Array,
    weights: Mapping[str, jax.Array] | None, frozen_params: Sequence[str],
) -> tuple[Params, Terms, Memory]:
    """Return the part of `gradients` of one microbatch, given the weights of the whole batch; None if it is that."""
    def loss(params: Params) -> tuple[jax.Array, tuple[Terms, Memory]]:
        def trained_only(path: Any, x: jax.Array) -> jax.Array:  # leaves out the backward pass of frozen layers
            return jax.lax.stop_gradient(x) if matches_patterns(path_string(path), frozen_params) else x

        params = jax.tree_util.tree_map_with_path(trained_only, params)
        terms, carried = objective.stream_loss(params, example, memory, key, True)
        if taken := sorted(RESERVED_TERMS & terms.keys()):
            raise UserError(f"{type(objective).__name__} has a term {taken[0]!r}, which training has of its own; give "
                            "it another name.")
        metrics = {name: term._replace(coefficient=0.0) for name, term in terms.items()}
        return total_loss(terms, weights), (metrics, carried)

    (value, (terms, carried)), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return grads, {"loss": Term(value, jnp.ones(()))} | terms, carried
