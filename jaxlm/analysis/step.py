"""The train step of an experiment on synthetic rows: its program, batch and memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax

from jaxlm.config.experiment import Experiment, Resolved
from jaxlm.config.presets import load_preset
from jaxlm.fields import settings
from jaxlm.objectives.base import Constants, Objective
from jaxlm.parallel.rules import batch_sharding, shardings
from jaxlm.runs.folder import NO_RUN, RunFolder
from jaxlm.runs.load import teacher_shapes
from jaxlm.runs.session import Session, open_session, require_model
from jaxlm.training.program import Program
from jaxlm.types import Report

Batch = Any
"""Shapes of a batch: a tree of jax.ShapeDtypeStruct."""


def open_stand_in(
    experiment: Experiment, config: str | None = None,
    load_constants: Callable[[Objective], Constants] = teacher_shapes, report: Report = print,
) -> Session:
    """Open an experiment to plan or time its step on synthetic rows.

    A run has its own vocabulary, and a preset for which flags name other data that of pretraining on them, which may
    have to be trained first. Any other preset has a stand-in for the vocabulary that its model was published with.

    Args:
        experiment: The resolved configuration.
        config: The preset or run folder that it comes from.
        load_constants: Returns the objective's constants, or their shapes.
        report: Receives progress messages.
    """
    experiment.validate()
    require_model(experiment)
    run, is_named = NO_RUN if config is None else RunFolder.read(config), False
    if config is not None and run.tokenizer_folder is None:
        pairs = zip(settings(experiment.data), settings(load_preset(config).data), strict=True)
        is_named = any(
            new.value != old.value for new, old in pairs
            if new.name == "source" or (new.name != "length" and "resumable" not in new.marks)
        )
    return open_session(Resolved(experiment), run, report, load_constants, use_stand_in=not is_named)


def batch_shapes(session: Session) -> Batch:
    """Return the shapes of a batch of full rows."""
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), session.synthetic_batch())


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


def describe_vocabulary(session: Session) -> str:
    """Describe the size and origin of the vocabulary."""
    owner = "tokenizer's" if session.tokenizer else "preset's own"
    return f"vocabulary of {session.objective.vocabulary.size:,}: the {owner}"
