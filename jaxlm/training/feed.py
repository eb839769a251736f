"""Batches of a run: of its training steps, phase by phase, and of its evaluations."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxlm.config.experiment import Experiment, Phase
from jaxlm.data.base import RowFormat, Source
from jaxlm.data.batches import Batches
from jaxlm.objectives.base import Objective
from jaxlm.parallel.rules import batch_sharding, local_rows


class Stage(NamedTuple):
    """A phase of a run and its batches, which are numbered from 0."""

    phase: Phase
    row_format: RowFormat
    shares: Any
    """Its own shares of a mixture (see `Data.phase_shares`); None for those of the run."""
    batches: Batches

    @property
    def rows(self) -> int:
        """Number of rows that it reads; only the last phase has no end."""
        return (self.phase.last - self.phase.after) * self.batches.batch_size


def stages_of(source: Source, experiment: Experiment) -> list[Stage]:
    """Return the stages of all phases. One goes on after the rows that earlier ones of the same format read.

    After a change of shares, each source of a mixture continues where earlier phases stopped.
    """
    stages: list[Stage] = []
    for phase in experiment.phases:
        e = phase.experiment
        row_format, batch_size = e.objective.row_format(e.data.length), e.train.batch_size
        shares = experiment.data.phase_shares(e.data)
        own = source if shares is None else source.of_phase(shares)
        earlier = [stage for stage in stages if stage.row_format == row_format]
        same = [stage for stage in earlier if stage.shares == shares]
        batches = same[0].batches if same else own.batches("train", batch_size, row_format, e.train.seed)
        batches = batches.after(sum(stage.rows for stage in same), batch_size)
        if len(same) < len(earlier):
            batches = batches.after_draws([(stage.batches, stage.rows) for stage in earlier if stage not in same])
        stages.append(Stage(phase, row_format, shares, batches))
    return stages


def stage_after(stages: list[Stage], step: int) -> Stage:
    """Return the stage of the step after `step`."""
    return next(s for s in stages if s.phase.last is None or step < s.phase.last)


class Feed:
    """Batches of a run on its devices. Each process reads its own rows; a batch is a function of the step."""

    def __init__(self, source: Source, experiment: Experiment, mesh: Mesh) -> None:
        """Open the batches of `source`; the objective of `experiment` is bound."""
        self.source, self.length, self._train = source, experiment.data.length, experiment.train
        self._stages = stages_of(source, experiment)
        seed, size = experiment.train.seed, experiment.train.batch_size
        self._held_out_rows = functools.cache(functools.partial(source.batches, "held_out", size, seed=seed))
        self._held_out = self._held_out_rows(experiment.objective.row_format(self.length))
        self._sharding = batch_sharding(mesh)

    def after(self, step: int) -> Iterator[Any]:
        """Yield the batches of the steps after `step`, without end; some are read ahead."""
        while True:
            stage = stage_after(self._stages, step)
            local = local_rows(self._sharding, stage.batches.batch_size)
            with contextlib.closing(stage.batches.stream(step - stage.phase.after, local)) as stream:
                count = None if stage.phase.last is None else stage.phase.last - step
                yield from self._placed(itertools.islice(stream, count), stage.batches.batch_size)
            step = stage.phase.last  # the last stage has no end

    def shape(self, step: int) -> tuple[int, int]:
        """Return the length and the number of rows of the batch of `step`."""
        stage = stage_after(self._stages, step - 1)
        return stage.batches.read_length(stage.phase.experiment.data.length), stage.batches.batch_size

    def change_at(self, step: int) -> str | None:
        """Return a sentence if a phase other than the first begins at `step`, else None."""
        phase = stage_after(self._stages, step - 1).phase
        if step == 1 or phase.after != step - 1:
            return None
        before, kind = (type(stage_after(self._stages, at).phase.experiment.objective) for at in (step - 2, step - 1))
        change = "" if kind is before else f" of {kind.__name__}"
        return f"From step {step:,} on, batches{change} are {phase}; so the loss may jump."

    @property
    def passes(self) -> float:
        """Number of passes over the text."""
        return sum(rows / batches.num_rows for batches, rows in self.draws)

    @property
    def draws(self) -> list[tuple[Batches, int]]:
        """Batches of each stage, and how many of their rows the run reads."""
        steps = self._train.steps
        return [
            (s.batches, max(0, min(s.phase.last or steps, steps) - s.phase.after) * s.batches.batch_size)
            for s in self._stages
        ]

    @property
    def has_held_out(self) -> bool:
        """Whether there is text to evaluate on."""
        return self._held_out.num_rows > 0

    @property
    def held_out_shares(self) -> Mapping[str, float]:
        """Share of each source of a mixture in the figures of an evaluation; one source has the name ""."""
        return self._held_out.shares

    def held_out(self, objective: Objective, source: str = "") -> Iterator[Any]:
        """Return the batches of an evaluation with an objective on a source, the same each time."""
        rows = self._held_out_rows(objective.row_format(self.length))
        t, batches = self._train, rows.parts.get(source, rows)
        local = local_rows(self._sharding, batches.batch_size)
        return self._placed(batches.evaluation(t.batch_size, t.eval_batches, local), batches.batch_size)

    def texts(self, count: int) -> list[np.ndarray]:
        """Return the token ids of `count` rows of held-out text, or of the text to train on if none is held out."""
        batches = self._held_out if self.has_held_out else self._stages[-1].batches
        batch = next(batches.evaluation(self._train.batch_size, 1))
        rows = zip(batch.tokens[:count], batch.segment_ids[:count], strict=True)
        return [tokens[segments > 0] for tokens, segments in rows]

    def _placed(self, stream: Iterator[Any], batch_size: int) -> Iterator[Any]:
        def place(rows: Any) -> jax.Array:
            shape = (batch_size, *rows.shape[1:])
            # `jax.device_put` would compare the rows between all processes, on each call.
            return jax.make_array_from_process_local_data(self._sharding, np.asarray(rows), shape)

        for batch in stream:
            yield jax.tree.map(place, batch)
