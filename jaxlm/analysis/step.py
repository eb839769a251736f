"""The train step of an experiment on synthetic rows: its program, batch and memory."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import Mesh

from jaxlm.config.experiment import Experiment
from jaxlm.objectives.base import Constants, Objective, constant_shapes
from jaxlm.parallel.rules import batch_sharding, shardings
from jaxlm.runs.load import load_teacher
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.training.program import Program

Batch = Any
"""Shapes of a batch: a tree of jax.ShapeDtypeStruct."""


def train_program(experiment: Experiment, mesh: Mesh, vocabulary: Vocabulary | None = None) -> tuple[Program, Batch]:
    """Return the program of an experiment's train step over a mesh, and the shapes of its batch.

    Args:
        experiment: The preset or run.
        mesh: The mesh.
        vocabulary: The run's vocabulary; None for a stand-in of the preset's size.
    """
    objective, constants, batch = step_inputs(experiment, vocabulary)
    return Program(objective, experiment.train, experiment.optimizer, mesh, constants), batch


def step_inputs(experiment: Experiment, vocabulary: Vocabulary | None = None) -> tuple[Objective, Constants, Batch]:
    """Return what does not depend on the mesh: the bound objective, and the shapes of its constants and of a batch."""
    objective = experiment.objective.bind(
        vocabulary or stand_in_vocabulary(experiment.objective), experiment.data.length
    )
    batch = synthetic_batch(experiment, objective)
    shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), batch)
    return objective, constant_shapes(objective, load_teacher), shapes


def synthetic_batch(experiment: Experiment, objective: Any) -> Any:
    """Return full rows of random tokens, as the host provides them."""
    row_format = objective.row_format(experiment.data.length)
    return experiment.data.synthetic(experiment.train.batch_size, row_format, objective.vocabulary)


def input_bytes(program: Program, batch: Batch) -> dict[str, int]:
    """Return the bytes of the step's inputs on one device, by kind."""

    def bytes_per_device(shapes: Any, placement: Any) -> int:
        def share(leaf: Any, sharding: Any) -> int:
            return math.prod(sharding.shard_shape(tuple(leaf.shape))) * leaf.dtype.itemsize

        return sum(jax.tree.leaves(jax.tree.map(share, shapes, placement)))

    return {
        "parameters": bytes_per_device(program.shapes.params, program.shardings.params),
        "optimizer_state": bytes_per_device(program.shapes.opt_state, program.shardings.opt_state),
        "recurrence_memory": bytes_per_device(program.shapes.memory, program.shardings.memory),
        "constants": bytes_per_device(program.constants, shardings(program.constants, program.mesh)),
        "batch": bytes_per_device(batch, jax.tree.map(lambda _: batch_sharding(program.mesh), batch)),
    }


def memory_by_kind(memory: Any, held: dict[str, int]) -> dict[str, int]:
    """Return HBM of a compiled step by kind: inputs, temporaries at their peak, code, and layout padding."""
    # Arguments and output both count donated buffers.
    arguments = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return held | {
        "activations_and_workspace": memory.temp_size_in_bytes,
        "program": memory.generated_code_size_in_bytes,
        "other": arguments - sum(held.values()),
    }


def describe_vocabulary(objective: Any, vocabulary: Vocabulary | None) -> str:
    """Describe the size and origin of a vocabulary. None means the stand-in of a preset."""
    if vocabulary is None:
        return f"vocabulary of {objective.model.vocab_size:,}: the preset's own"
    return f"vocabulary of {vocabulary.size:,}: the tokenizer's"


def stand_in_vocabulary(objective: Any) -> Vocabulary:
    """Return a stand-in vocabulary of the published size of the objective's model."""
    return Vocabulary.stand_in(objective.model.vocab_size, objective.symbols)
