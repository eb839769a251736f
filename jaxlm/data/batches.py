"""Batches by number: batch k is a function of (seed, k), row by row, on any number of hosts.

There is no iterator state, so a run starts at step one million as fast as at step 0. Row r of batch k is window
`k * batch_size + r` of an endless sequence, in which every epoch is a new permutation of all windows. In a stream, row
r of batch k continues row r of batch k - 1. In a bidirectional stream, every odd row ends where its predecessor began.
"""

from __future__ import annotations

import collections
import copy
import itertools
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, Protocol, Self

import numpy as np

from jaxlm.data.permutation import permute
from jaxlm.errors import UserError

_AHEAD = 4
EVALUATION_KEY = 0x6576616C  # evaluation uses the same windows for every seed of a run


class RowTable(Protocol):
    """Rows of tokens by number.

    Attributes:
        count: number of rows.
        length: tokens of a row.
    """

    count: int
    length: int

    def read(self, index: np.ndarray) -> Any:
        """Read the rows `index`, int [batch], where -1 stands for an empty row.

        Returns:
            A NamedTuple or a dict of arrays [batch, ...].
        """
        ...


class Batches:
    """Shuffled batches, or a stream.

    Attributes:
        table: rows to draw from.
        batch_size: rows of a batch over all hosts.
        first: place in the sequence of rows at which batch 0 begins.
        num_rows: number of rows to draw from.
        parts: batches of each source of a mixture.
        shares: share of each of them in an evaluation; of one source, which has the name "".
    """

    parts: Mapping[str, Batches] = MappingProxyType({})
    shares: Mapping[str, float] = MappingProxyType({"": 1.0})

    def __init__(
        self, table: RowTable, batch_size: int, seed: int, stream: bool = False, both_ways: bool = False
    ) -> None:
        """Store the arguments.

        Args:
            table: rows to draw from.
            batch_size: rows of a batch over all hosts.
            seed: seed of the shuffle, or of the position in the text where a stream begins.
            stream: whether each row continues in the next batch.
            both_ways: whether the odd rows of a stream move backward through the text, window by window. The tokens of
                a window keep the order of the text.

        Raises:
            UserError: an odd number of rows is to be read both ways.
        """
        if both_ways and batch_size % 2:
            raise UserError(f"Half of the rows read backward, so train.batch_size must be even, not {batch_size}.")
        self.table = table
        self._seed = seed
        self._is_stream = stream
        self._rows_per_part = 2 if both_ways else 1
        self.first = 0
        self.batch_size = batch_size
        self.num_rows = table.count

    def after(self, rows: int, batch_size: int) -> Self:
        """Return batches of `batch_size` that go on after the first `rows` rows; those of a stream keep their size."""
        later = copy.copy(self)
        later.first, later.batch_size = rows, batch_size
        return later

    def read_length(self, length: int) -> int:
        """Return the mean row length in tokens, for throughput; `length` is the maximum sequence length."""
        return length

    def batch(self, step: int, local: np.ndarray | slice = slice(None)) -> Any:
        """Return batch number `step`, or of it only this host's rows `local`; raise UserError if there are none."""
        self._require_rows()
        row_numbers = np.arange(self.batch_size)[local]
        if self._is_stream:
            step += self.first // self.batch_size
            return self.table.read(self._in_stream(step, row_numbers, self.batch_size, self._seed))
        return self.table.read(self.shuffled(self.first + step * self.batch_size + row_numbers))

    def shuffled(self, place: np.ndarray) -> np.ndarray:
        """Return the row numbers at places of the endless sequence of shuffled epochs."""
        epoch, position = np.divmod(place, self.num_rows)
        index = np.empty_like(position)
        for number in np.unique(epoch):
            chosen = epoch == number
            index[chosen] = permute(position[chosen], self.num_rows, self._seed, int(number))
        return index

    def stream(self, start_step: int = 0, local: np.ndarray | slice = slice(None)) -> Iterator[Any]:
        """Yield batches start_step, start_step + 1, ... without end.

        A thread reads a few batches ahead. It ends when the iterator is closed or garbage-collected.
        """
        steps = itertools.count(start_step)
        pool = ThreadPoolExecutor(1, "jaxlm-batches")
        try:
            first = itertools.islice(steps, _AHEAD)
            waiting = collections.deque(pool.submit(self.batch, step, local) for step in first)
            for step in steps:
                batch = waiting.popleft().result()
                waiting.append(pool.submit(self.batch, step, local))
                yield batch
        finally:
            pool.shutdown(cancel_futures=True)

    def evaluation(self, batch_size: int, count: int, local: np.ndarray | slice = slice(None)) -> Iterator[Any]:
        """Yield the first `count` batches of a fixed permutation, or of a stream, and stop after all windows.

        Empty rows (segment_ids all 0, or row -1) fill the last batch.
        """
        if self._is_stream and self.num_rows >= batch_size:
            for number in range(min(count, self.num_rows // (batch_size // self._rows_per_part))):
                yield self.table.read(self._in_stream(number, np.arange(batch_size)[local], batch_size, 0))
            return
        chosen = self._evaluation_order(min(self.num_rows, count * batch_size))
        for start in range(0, len(chosen), batch_size):
            part = chosen[start : start + batch_size]
            yield self._read(np.pad(part, (0, batch_size - len(part)), constant_values=-1), local)

    def _evaluation_order(self, size: int) -> np.ndarray:
        """Return the `size` rows of an evaluation in their order."""
        return permute(np.arange(size), self.num_rows, EVALUATION_KEY)

    def _read(self, index: np.ndarray, local: np.ndarray | slice) -> Any:
        """Read this host's rows `local` of a batch of the rows `index`."""
        return self.table.read(index[local])

    def _in_stream(self, step: int, row_numbers: np.ndarray, batch_size: int, seed: int) -> np.ndarray:
        """Return the window row_numbers of the rows `row_numbers` of a batch of a stream.

        The text is cut into one part per forward row; a row reads its part, then continues with the next one. A
        backward row reads the part of the preceding row from its last window to its first.
        """
        if self.num_rows < batch_size:
            raise UserError(
                f"The text has {self.num_rows:,} windows of {self.table.length} tokens, fewer than the {batch_size:,} "
                "rows of a batch, each of which reads a part of its own; lower train.batch_size or give more text."
            )
        parts = batch_size // self._rows_per_part
        steps = self.num_rows // parts
        part, backward = np.divmod(row_numbers, self._rows_per_part)
        position = part * steps + np.where(backward, steps - 1 - step, step)
        return (position + seed) % (steps * parts)

    def _require_rows(self) -> None:
        if self.num_rows == 0:
            raise UserError("No text is held out; give --data.source more documents, --data.held-out a share above 0.")
