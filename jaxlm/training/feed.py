"""Batches of a run: of its training steps, optionally with shorter rows first, and of its evaluations."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxlm.config.experiment import TrainConfig
from jaxlm.data.base import Source
from jaxlm.data.batches import Batches
from jaxlm.objectives.base import Objective
from jaxlm.parallel.hosts import local_rows, place_rows
from jaxlm.parallel.rules import batch_sharding


class Stage(NamedTuple):
    """Steps with one batch shape: those after `after`, up to `last`, which is None for the final stage."""

    after: int
    last: int | None
    length: int
    batches: Batches


def stages_of(source: Source, objective: Objective, t: TrainConfig, length: int) -> list[Stage]:
    """Return the stage of short rows, if `train.short_steps` is set, and that of full rows."""
    full = source.batches("train", t.batch_size, objective.row_format(length), t.seed)
    stages = [Stage(t.short_steps, None, length, full)]
    if t.short_steps:
        rows = t.batch_size * length // t.short_length
        short = source.batches("train", rows, objective.row_format(t.short_length), t.seed)
        stages.insert(0, Stage(0, t.short_steps, t.short_length, short))
    return stages


def stage_after(stages: list[Stage], step: int) -> Stage:
    """Return the stage of the step after `step`."""
    return next(s for s in stages if s.last is None or step < s.last)


class Feed:
    """Batches of a run on its devices. Each process reads its own rows; a batch is a function of the step."""

    def __init__(self, source: Source, objective: Objective, train: TrainConfig, length: int, mesh: Mesh) -> None:
        """Open the batches of `source`."""
        self.source, self.length, self._train = source, length, train
        self._stages = stages_of(source, objective, train, length)
        self._held_out = source.batches("held_out", train.batch_size, objective.row_format(length), train.seed)
        full = self._stages[-1]
        self.tokens_per_step = full.batches.batch_size * full.batches.read_length(full.length)
        self._sharding = batch_sharding(mesh)

    def __str__(self) -> str:
        """Return the shapes of the batches: "256 x 16 for 700 steps, then 32 x 128"."""
        done = [s for s in self._stages if s.after < self._train.steps]
        return ", then ".join(
            f"{s.batches.batch_size} x {s.length}" + (f" for {s.last:,} steps" if s is not done[-1] else "")
            for s in done
        )

    def after(self, step: int) -> Iterator[Any]:
        """Yield the batches of the steps after `step`, without end; some are read ahead."""
        while True:
            stage = stage_after(self._stages, step)
            rows = self._rows(stage.batches)
            with contextlib.closing(stage.batches.stream(step - stage.after, rows)) as stream:
                count = None if stage.last is None else stage.last - step
                yield from self._placed(itertools.islice(stream, count), stage.batches, rows)
            step = stage.last  # the last stage has no end

    def shape(self, step: int) -> tuple[int, int]:
        """Return the length and the number of rows of the batch of `step`."""
        stage = stage_after(self._stages, step - 1)
        return stage.batches.read_length(stage.length), stage.batches.batch_size

    def change_at(self, step: int) -> str | None:
        """Return a sentence if the rows of `step` have another length than those before, else None."""
        stage = stage_after(self._stages, step - 1)
        if step == 1 or stage.after != step - 1:
            return None
        return f"From step {step:,} on, rows have {stage.length} tokens; so the loss may jump."

    @property
    def passes(self) -> float:
        """Number of passes over the text."""
        steps = self._train.steps
        return sum(
            max(0, min(s.last or steps, steps) - s.after) * s.batches.batch_size / s.batches.num_rows
            for s in self._stages
        )

    @property
    def has_held_out(self) -> bool:
        """Whether there is text to evaluate on."""
        return self._held_out.num_rows > 0

    def held_out(self) -> Iterator[Any]:
        """Return the batches of an evaluation, the same each time."""
        t, rows = self._train, self._rows(self._held_out)
        return self._placed(self._held_out.evaluation(t.batch_size, t.eval_batches, rows), self._held_out, rows)

    def texts(self, count: int) -> list[np.ndarray]:
        """Return the token ids of `count` rows of held-out text, or of the text to train on if none is held out."""
        batches = self._held_out if self.has_held_out else self._stages[-1].batches
        batch = next(batches.evaluation(self._train.batch_size, 1))
        rows = zip(batch.tokens[:count], batch.segment_ids[:count], strict=True)
        return [tokens[segments > 0] for tokens, segments in rows]

    def _rows(self, batches: Batches) -> slice:
        return local_rows(self._sharding, batches.batch_size, batches.raw_length)

    def _placed(self, stream: Iterator[Any], batches: Batches, rows: slice) -> Iterator[Any]:
        place = place_rows(self._sharding, batches.batch_size, rows)
        for batch in stream:
            yield jax.tree.map(lambda array: place(np.asarray(array)), batch)
