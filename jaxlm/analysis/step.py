"""The train step of an experiment on synthetic rows: its session, batch, memory and compiled module."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from jaxlm.analysis.hlo import Module, Traffic, parse
from jaxlm.config.experiment import Experiment, Resolved
from jaxlm.config.presets import load_preset
from jaxlm.errors import UserError
from jaxlm.fields import settings, with_value
from jaxlm.objectives.base import Constants, Objective
from jaxlm.parallel.rules import batch_sharding, shardings
from jaxlm.runs.folder import NO_RUN, RunFolder
from jaxlm.runs.load import constant_shapes, load_model
from jaxlm.runs.session import Session, require_model, set_up, with_steps
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.training.program import Program
from jaxlm.types import Report

BatchShapes = Any
"""A batch as a tree of jax.ShapeDtypeStruct."""


def open_stand_in(
    experiment: Experiment, config: str | None = None,
    constants_of: Callable[[Objective, Vocabulary], Constants] = constant_shapes, report: Report = print,
    phase: int | None = None,
) -> Session:
    """Open an experiment to plan or time its step on synthetic rows. Of phases, only one is left, with its own steps.

    A run has its own vocabulary. A preset has a stand-in for the one that its model was published with; if flags name
    other data, it has the vocabulary of those, which may have to be trained first.

    `config` is the preset or run folder that the experiment comes from; `phase` is a number, by default that of the
    last one. `constants_of` returns the objective's constants, or their shapes.
    """
    experiment.validate()
    require_model(experiment)
    run = NO_RUN if config is None else RunFolder.read(config)
    names_data = config is not None and any(
        new.value != old.value
        for new, old in zip(settings(experiment.data), settings(load_preset(config).data), strict=True)
        if new.name == "source" or (new.name != "length" and "resumable" not in new.marks)
    )
    setup = set_up(Resolved(experiment), load_model, run, report, constants_of, use_stand_in=not names_data)
    session = setup.without_data()
    experiment = with_steps(session.experiment, experiment.train.batch_size, run)  # an epoch of a batch
    phases = experiment.phases
    if phase is not None and not 0 < phase <= len(phases):
        raise UserError(f"--phase is {phase}; the last one is {len(phases)} (train.phases).")
    chosen = experiment.phase_at(experiment.train.steps) if phase is None else phases[phase - 1]
    if len(phases) > 1:
        which = f"phase {chosen.number} of {len(phases)}"
        report(f"Batches are {experiment.describe_phases()}; this is a step of {which}.")
    steps = (chosen.last or experiment.train.steps) - chosen.after
    return dataclasses.replace(session, experiment=with_value(chosen.experiment, "train.steps", steps))


def batch_shapes(session: Session) -> BatchShapes:
    """Return the shapes of a batch of full rows."""
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), session.synthetic_batch())


def input_bytes(program: Program, batch: BatchShapes) -> dict[str, int]:
    """Return the bytes of the step's inputs on one device, by kind."""

    def bytes_per_device(leaf: Any, sharding: Any) -> int:
        return math.prod(sharding.shard_shape(tuple(leaf.shape))) * leaf.dtype.itemsize

    state, placement = program.shapes, program.shardings
    inputs = {
        "parameters": ((state.params, state.average), (placement.params, placement.average)),
        "optimizer_state": (state.opt_state, placement.opt_state),
        "recurrence_memory": (state.memory, placement.memory),
        "constants": (program.constants, shardings(program.constants, program.mesh)),
        "batch": (batch, jax.tree.map(lambda _: batch_sharding(program.mesh), batch)),
    }
    return {kind: sum(jax.tree.leaves(jax.tree.map(bytes_per_device, *trees))) for kind, trees in inputs.items()}


class Operation(NamedTuple):
    """Time and number of executions of an operation in one step."""

    seconds: float = 0.0
    executions: float = 0.0


class Kernels(NamedTuple):
    """Mosaic kernels of a step.

    Attributes:
        seconds: Time of all of them.
        counted: Number of different kernels whose time follows from their recorded counts.
        charged: Number of different kernels that are charged by their FLOPs.
    """

    seconds: float
    counted: int
    charged: int


class Estimate(NamedTuple):
    """Estimated time of one step on one device, without collectives.

    Attributes:
        seconds: Step time.
        executed_flops: FLOPs of the compiled program's matrix products.
        bytes_accessed: HBM traffic of a step.
        method: By what the time is estimated.
        kernels: Mosaic kernels; None where the estimate does not tell them apart.
        operations: Operations by name (digits replaced by #), where the time is a sum over them.
        bound: "compute", or "memory" where most of the time is that of memory traffic.
        is_roofline: Whether it follows from assumed shares of the peak and the bandwidth.
    """

    seconds: float
    executed_flops: float
    bytes_accessed: float
    method: str
    kernels: Kernels | None = None
    operations: Mapping[str, Operation] = MappingProxyType({})
    bound: str = "compute"
    is_roofline: bool = False


class CompiledStep(NamedTuple):
    """A compiled train step, on one device.

    Attributes:
        hbm_by_kind: Memory in bytes; of a step that does not fit only its inputs.
        hbm_bytes: Memory in bytes; of a step that does not fit from the compiler's message.
        estimate: Time without collectives; None if it is not known.
        collectives: Totals by kind.
        compile_seconds: Time of lowering and compilation.
        kernels: Number of executions of each kernel: Pallas kernels and library calls, by name.
        message: The compiler's message for a step that does not fit, else "".
    """

    hbm_by_kind: dict[str, int]
    hbm_bytes: int
    estimate: Estimate | None
    collectives: dict[str, Traffic]
    compile_seconds: float
    kernels: Mapping[str, int] = MappingProxyType({})
    message: str = ""


def read_compiled(
    compiled: Any, program: Program, batch: BatchShapes, hlo: Path | None = None
) -> tuple[Module, dict[str, int]]:
    """Return the module of a compiled step, and its memory by kind.

    The kinds are inputs, temporaries at their peak, code, and layout padding.

    The module's text is written to `hlo`.
    """
    text, memory, held = compiled.as_text(), compiled.memory_analysis(), input_bytes(program, batch)
    if hlo is not None:
        hlo.write_text(text)
    # Arguments and output both count donated buffers.
    arguments = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return parse(text), held | {
        "activations_and_workspace": memory.temp_size_in_bytes,
        "program": memory.generated_code_size_in_bytes,
        "other": arguments - sum(held.values()),
    }


def mesh_text(sizes: Mapping[str, int]) -> str:
    """Return the axes of a mesh as text: "data 4, fsdp 1, tensor 1"."""
    return ", ".join(f"{axis} {size}" for axis, size in sizes.items())


def describe_vocabulary(session: Session) -> str:
    """Describe the size and origin of the vocabulary."""
    owner = "tokenizer's" if session.tokenizer else "preset's own"
    return f"vocabulary of {session.objective.vocabulary.size:,}: the {owner}"
