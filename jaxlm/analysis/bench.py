"""`jaxlm bench`: the speed of pretraining, generation and fine-tuning here, beside Transformers if asked."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from jaxlm.analysis.peer import TrainStep, fine_tuning, generation
from jaxlm.analysis.step import describe_vocabulary
from jaxlm.analysis.timing import Side, compare, time_in_turns
from jaxlm.config.experiment import Experiment, OptimizerConfig
from jaxlm.errors import UserError
from jaxlm.inference.generate import Settings, continuations
from jaxlm.keys import Purpose, purpose_key
from jaxlm.models.layers.kernel_choice import recorded_choices
from jaxlm.objectives.base import Objective
from jaxlm.parallel.hosts import from_main
from jaxlm.parallel.mesh import make_mesh
from jaxlm.parallel.peaks import measured_flops, peak_flops
from jaxlm.parallel.rules import batch_sharding
from jaxlm.runs.session import Session
from jaxlm.training.program import Program, TrainState, corruption_key
from jaxlm.types import Report, TokenBatch

MFU_FORMULA = "3 x forward FLOPs (matrix products and attention) x sequences a second / (peak FLOP/s x devices)"
ROUND_SECONDS = 2.0
MAX_STEPS = 200
WARMUP_STEPS = 3
FINE_TUNING_STEPS = 64
"""Steps of a round of fine-tuning: two pools of batches that are sorted by length together."""


def bench_pretraining(
    session: Session, has_peer: bool = False, steps: int | None = None, report: Report = print
) -> dict[str, Any]:
    """Time the train step (corruption, forward, backward, update) on full rows of random tokens.

    With `has_peer` the Transformers model of the same sizes is timed too; if it lacks the optimizer, both take AdamW. A
    round has `steps` steps; by default it takes about ROUND_SECONDS.
    """
    experiment, objective = session.experiment, session.objective
    if has_peer and experiment.optimizer.name not in ("adamw", "adafactor", "adagrad"):
        report(f"The peer has no {experiment.optimizer.name}; timing both sides with AdamW …")
        fields = {f.name: getattr(experiment.optimizer, f.name) for f in dataclasses.fields(OptimizerConfig)}
        session = session.replace(optimizer=OptimizerConfig(**fields | {"name": "adamw"}))
        experiment = session.experiment
    t, length, mesh = experiment.train, experiment.data.length, make_mesh(experiment.mesh)
    batch, device, dtype = session.synthetic_batch(), mesh.local_devices[0], objective.model.dtype
    peer = TrainStep(experiment, objective, batch, report).side() if has_peer else None
    program = session.program(mesh)
    placed, state = jax.device_put(batch, batch_sharding(mesh)), program.init_state(program.init_params(t.seed))
    step = _Steps(program, state)
    ours = Side("jaxlm", lambda steps: step.run([placed] * steps), lambda: {
        "optimizer": experiment.optimizer.name, "note": f"jax {jax.__version__}",
        "peak_memory_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use"),
    })
    corruption = _corruption(objective, placed, t.seed)
    sides = [side for side in (ours, peer, corruption) if side]
    with recorded_choices() as kernels:  # named before minutes of compilation
        program.train_step.trace(state, placed, program.constants)
    if kernels():
        report(f"Attention: {kernels()}.")
    for side in sides:
        side.start(1, report)
        side.run(WARMUP_STEPS)
    steps = from_main(steps or max(1, min(MAX_STEPS, math.ceil(ROUND_SECONDS / ours.time(1)))))
    peaks: list[float] = []  # measured in every round: a single measurement on a busy machine would be far too low
    published_peak = peak_flops(device)
    peak_side = Side("peak", lambda _: peaks.append(published_peak or measured_flops(device, dtype)))
    time_in_turns([peak_side, *sides], steps, report)
    # The devices of one CPU share its cores, so each reaches its share of the measured peak.
    peak = max(peaks) / (mesh.size if device.platform == "cpu" else 1)
    flops = program.step_flops(length, t.batch_size)
    found = compare(ours, peer, "tokens", t.batch_size * length, steps, flops, peak * mesh.size)
    corruption_seconds = statistics.median(corruption.seconds) / steps
    return _facts(experiment, objective) | dict(
        devices=mesh.size, parameters=program.num_params,
        vocabulary=describe_vocabulary(session),
        compile_and_first_step_seconds=ours.first_seconds, corruption_seconds=corruption_seconds,
        corruption_share=corruption_seconds / found["step_seconds"], flops_per_step=flops, peak_flops_per_device=peak,
        peak_is_measured=not published_peak, mfu_formula=MFU_FORMULA,
    ) | found


def bench_generation(
    session: Session, new_tokens: int, has_peer: bool = False, report: Report = print
) -> dict[str, Any]:
    """Time greedy generation with random parameters, one prompt of half the sequence length per row of a batch.

    No stop token ends a continuation early. With `has_peer` Transformers' `generate` is timed too.
    """
    experiment, objective = session.experiment, session.objective
    rows, length = experiment.train.batch_size, max(1, experiment.data.length // 2)
    if objective.answer_kind != "text":
        raise UserError(f"{type(objective).__name__} trains no model that writes text; leave --generate out.")
    prompts = np.random.default_rng(0).choice(np.flatnonzero(~objective.vocabulary.special), (rows, length)).tolist()
    params = jax.jit(objective.init)(purpose_key(experiment.train.seed, Purpose.INITIALIZATION))
    settings = Settings(max_new_tokens=new_tokens, stop_ids=())
    sides = [Side("jaxlm", lambda _: continuations(objective, params, prompts, settings))]
    if has_peer:
        sides.append(generation(objective, prompts, new_tokens))
    facts = dict(vocabulary=describe_vocabulary(session), prompt=length, new_tokens=new_tokens)
    return _facts(experiment, objective) | facts | _timed(sides, "tokens", rows, new_tokens, report)


def bench_fine_tuning(
    session: Session, has_peer: bool = False, steps: int | None = None, report: Report = print
) -> dict[str, Any]:
    """Time fine-tuning as `jaxlm finetune` does it, without evaluations and checkpoints.

    With `has_peer` Transformers' `Trainer` is timed on the same rows, too.
    """
    experiment, task, rows = session.experiment, session.objective, session.source
    steps, t, length = steps or FINE_TUNING_STEPS, experiment.train, experiment.data.length
    program = session.program(make_mesh(experiment.mesh))
    feed = session.feed(program.mesh)
    fresh = program.init_params(t.seed)
    params = task.merge_pretrained(fresh, session.pretrained)
    step = _Steps(program, program.init_state(params))
    sides = [Side("jaxlm", lambda steps: step.run(itertools.islice(feed.after(0), steps)))]
    if has_peer:
        examples = rows.examples("train", task, length)
        batches = rows.batches("train", t.batch_size, task.row_format(length), t.seed)
        chosen = [examples[i].arrays for step in range(steps) for i in batches.batch(step)["row"]]
        sides.append(fine_tuning(experiment, task, jax.device_get(params), session.tokenizer, chosen, steps))
    facts = _facts(experiment, task) | dict(task=task.name, model=type(task.model).__name__, steps=steps)
    return facts | _timed(sides, "rows", t.batch_size, steps, report)


class _Steps:
    """Train steps that continue one state."""

    def __init__(self, program: Program, state: TrainState) -> None:
        self.program, self.state = program, state

    def run(self, batches: Iterable[Any]) -> None:
        for batch in batches:
            self.state, _ = self.program.train_step(self.state, batch, self.program.constants)
        jax.block_until_ready(self.state)


def _corruption(objective: Objective, batch: TokenBatch, seed: int) -> Side:
    corrupt = jax.jit(lambda step, batch: objective.corrupt(corruption_key(seed, step), batch))

    def run(steps: int) -> None:
        for step in range(steps):
            example = corrupt(np.int32(step), batch)
        jax.block_until_ready(example)

    return Side("corruption", run)


def _timed(sides: list[Side], unit: str, step_units: int, steps: int, report: Report) -> dict[str, Any]:
    """Return the figures of one or two sides, each started with a whole round that compiles every shape."""
    for side in sides:
        side.start(steps, report)
    time_in_turns(sides, steps, report)
    return compare(sides[0], sides[1] if len(sides) > 1 else None, unit, step_units, steps)


def _facts(experiment: Experiment, objective: Objective) -> dict[str, Any]:
    """Return the configuration entries that all benchmarks report."""
    return {
        "objective": type(objective).__name__, "device": jax.devices()[0].device_kind, "dtype": objective.model.dtype,
        "batch_size": experiment.train.batch_size, "length": experiment.data.length,
    }
