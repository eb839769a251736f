"""What a run reads: of each step its batch, short rows first where that is asked for, and the held-out batches."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from jaxlm.errors import UserError
from jaxlm.experiment import Experiment
from jaxlm.objectives.base import Objective
from jaxlm.parallel.hosts import local_rows, place_rows
from jaxlm.parallel.rules import batch_sharding
from jaxlm.text.batches import Batches
from jaxlm.text.store import Store
from jaxlm.types import TokenBatch


class Stage(NamedTuple):
    """Steps whose batches have one shape: from the one after `first` to `last`, or without end."""

    first: int
    last: int | None
    length: int
    batches: Batches


class Feed:
    """The batches of a run on its devices; each process reads the rows of its own. A batch is a function of the step.

    Raises UserError for a text or a `train.short_length` too short for the objective.
    """

    def __init__(self, experiment: Experiment, store: Store, objective: Objective, mesh: Mesh) -> None:
        t, length = experiment.train, experiment.data.length
        self._sharding = batch_sharding(mesh)
        self._objective = objective

        def batches(split: str, length: int, rows: int) -> Batches:
            return Batches(store, split, rows, objective.raw_length(length), objective.packing, t.seed)

        self._stages = [Stage(t.short_steps, None, length, batches("train", length, t.batch_size))]
        if t.short_steps:
            try:
                objective.bind(objective.vocabulary, t.short_length)
            except UserError as error:
                raise UserError(f"train.short_length {t.short_length} is too short: {error}") from None
            rows = t.batch_size * length // t.short_length
            short = Stage(0, t.short_steps, t.short_length, batches("train", t.short_length, rows))
            self._stages.insert(0, short)
        self._held_out = batches("held_out", length, t.batch_size)
        self._evaluation = t.batch_size, t.eval_batches

    def __str__(self) -> str:
        return ", then ".join(
            f"{s.batches.batch_size} x {s.length}" + (f" for {s.last:,} steps" if s.last else "") for s in self._stages
        )

    def after(self, step: int) -> Iterator[TokenBatch]:
        """The batches of the steps after `step`, without end, some read ahead."""
        for stage in self._stages:
            if stage.last is not None and step >= stage.last:
                continue
            rows = self._rows(stage.batches)
            with contextlib.closing(stage.batches.stream(step - stage.first, rows)) as stream:
                count = None if stage.last is None else stage.last - step
                yield from self._placed(itertools.islice(stream, count), stage.batches, rows)
            step = stage.last or step

    def flops(self, step: int) -> float:
        """Of a step: three times the forward pass's by the objective's formula."""
        stage = next(s for s in self._stages if s.last is None or step <= s.last)
        return 3 * self._objective.flops(stage.length) * stage.batches.batch_size

    @property
    def has_held_out(self) -> bool:
        return self._held_out.num_rows > 0

    def held_out(self) -> Iterator[TokenBatch]:
        """The same batches each time."""
        rows = self._rows(self._held_out)
        return self._placed(self._held_out.evaluation(*self._evaluation, rows), self._held_out, rows)

    def _rows(self, batches: Batches) -> slice:
        return local_rows(self._sharding, batches.batch_size, batches.raw_length)

    def _placed(self, stream: Iterator[TokenBatch], batches: Batches, rows: slice) -> Iterator[TokenBatch]:
        place = place_rows(self._sharding, batches.batch_size, rows)
        for batch in stream:
            yield TokenBatch(place(np.asarray(batch.tokens)), place(np.asarray(batch.segment_ids)))
