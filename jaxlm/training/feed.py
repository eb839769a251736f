"""What a run reads: of each step its batch, short rows first where that is asked for, and the held-out batches."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from jaxlm.config.experiment import Experiment
from jaxlm.data.base import Source
from jaxlm.data.batches import Batches
from jaxlm.errors import UserError
from jaxlm.objectives.base import Objective
from jaxlm.parallel.hosts import local_rows, place_rows
from jaxlm.parallel.rules import batch_sharding
from jaxlm.types import TokenBatch


class Stage(NamedTuple):
    """Steps whose batches have one shape: from the one after `first` to `last`, or without end."""

    first: int
    last: int | None
    length: int
    batches: Batches


def stages_of(experiment: Experiment, store: Source, objective: Objective) -> list[Stage]:
    """The short rows, where they are asked for, and the full ones. Raises UserError for a text or a
    `train.short_length` too short for the objective."""
    t, length = experiment.train, experiment.data.length
    full = Stage(t.short_steps, None, length, batches_of(experiment, store, objective, "train"))
    if not t.short_steps:
        return [full]
    try:
        objective.bind(objective.vocabulary, t.short_length)
    except UserError as error:
        raise UserError(f"train.short_length will not do as a data.length: {error}") from None
    rows = t.batch_size * length // t.short_length
    short = store.batches("train", rows, objective.raw_length(t.short_length), objective.packing, t.seed)
    return [Stage(0, t.short_steps, t.short_length, short), full]


def stage_after(stages: list[Stage], step: int) -> Stage:
    """The one that the step after `step` belongs to."""
    return next(s for s in stages if s.last is None or step < s.last)


def batches_of(experiment: Experiment, store: Source, objective: Objective, split: str) -> Batches:
    """The batches of `data.length`."""
    t, raw_length = experiment.train, objective.raw_length(experiment.data.length)
    return store.batches(split, t.batch_size, raw_length, objective.packing, t.seed)


class Feed:
    """The batches of a run on its devices; each process reads the rows of its own. A batch is a function of the step.

    Raises UserError as `stages_of` does.
    """

    def __init__(self, experiment: Experiment, store: Source, objective: Objective, mesh: Mesh) -> None:
        self._experiment, self._objective = experiment, objective
        self._sharding = batch_sharding(mesh)
        self._stages = stages_of(experiment, store, objective)
        self._held_out = batches_of(experiment, store, objective, "held_out")

    def __str__(self) -> str:
        done = [s for s in self._stages if s.first < self._experiment.train.steps]
        return ", then ".join(
            f"{s.batches.batch_size} x {s.length}" + (f" for {s.last:,} steps" if s is not done[-1] else "")
            for s in done
        )

    def after(self, step: int) -> Iterator[TokenBatch]:
        """The batches of the steps after `step`, without end, some read ahead."""
        while True:
            stage = stage_after(self._stages, step)
            rows = self._rows(stage.batches)
            with contextlib.closing(stage.batches.stream(step - stage.first, rows)) as stream:
                count = None if stage.last is None else stage.last - step
                yield from self._placed(itertools.islice(stream, count), stage.batches, rows)
            step = stage.last  # the last stage has no end

    def flops(self, step: int) -> float:
        """Of a step: three times the forward pass's by the objective's formula."""
        stage = stage_after(self._stages, step - 1)
        return 3 * self._objective.flops(stage.length) * stage.batches.batch_size

    @property
    def has_held_out(self) -> bool:
        return self._held_out.num_rows > 0

    def held_out(self) -> Iterator[TokenBatch]:
        """The same batches each time."""
        t, rows = self._experiment.train, self._rows(self._held_out)
        return self._placed(self._held_out.evaluation(t.batch_size, t.eval_batches, rows), self._held_out, rows)

    def _rows(self, batches: Batches) -> slice:
        return local_rows(self._sharding, batches.batch_size, batches.raw_length)

    def _placed(self, stream: Iterator[TokenBatch], batches: Batches, rows: slice) -> Iterator[TokenBatch]:
        place = place_rows(self._sharding, batches.batch_size, rows)
        for batch in stream:
            yield TokenBatch(place(np.asarray(batch.tokens)), place(np.asarray(batch.segment_ids)))
