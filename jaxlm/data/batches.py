"""Batches of rows that can be read by number: batch k is a function of (seed, k), row by row, on any number of hosts.

There is no iterator state. Row r of batch k is window number `k * batch_size + r` of an endless sequence in which every
epoch is a fresh permutation of all windows; so a run starts at step one million as fast as at step 0. In a stream, row
r of batch k goes on where row r of batch k - 1 ended; in a stream both ways every second row ends where it began.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from jaxlm.data.permutation import permute
from jaxlm.errors import UserError

_AHEAD = 4
EVALUATION_KEY = 0x6576616C  # evaluation always takes the same windows, whatever the run's seed


class Rows(Protocol):
    """What batches are made of: `count` rows of `length` tokens that can be read by number."""

    count: int
    length: int

    def read(self, index: np.ndarray) -> Any:
        """index: int [batch], -1 for an empty row. Returns a NamedTuple or a dict of arrays whose first dimension is
        batch."""
        ...


class Batches:
    """Shuffled batches of `rows`, of batch_size rows over all hosts; or a stream.

    seed: of the shuffle, or of where in the text a stream begins. both_ways: the odd rows of a stream go back through
    the text, window by window (the tokens of a window stand in the order of the text). Raises UserError for values out
    of range.
    """

    def __init__(
        self, rows: Rows, batch_size: int, seed: int, stream: bool = False, both_ways: bool = False
    ) -> None:
        if batch_size < 1 or rows.length < 2:
            raise UserError(f"A batch needs 1 row and 2 tokens or more, not {batch_size} rows of {rows.length}.")
        if seed < 0:
            raise UserError(f"The seed must be 0 or more, not {seed}.")
        if both_ways and batch_size % 2:
            raise UserError(f"Half of the rows read backward, so train.batch_size must be even, not {batch_size}.")
        self._rows = rows
        self._seed = seed
        self._is_stream = stream
        self._both_ways = both_ways
        self.batch_size = batch_size
        self.raw_length = rows.length
        self.num_rows = rows.count

    def read_length(self, length: int) -> int:
        """Tokens of a row as a model of sequences of `length` reads it, on average; for speeds and FLOPs."""
        return length

    def batch(self, step: int, rows: slice = slice(None)) -> Any:
        """Batch number `step`, or the `rows` of it that this host feeds. Raises UserError if there is nothing to
        batch."""
        self._require_rows()
        wanted = np.arange(self.batch_size)[rows]
        if self._is_stream:
            return self._rows.read(self._in_stream(step, wanted, self.batch_size, self._seed))
        epoch, place = np.divmod(step * self.batch_size + wanted, self.num_rows)
        index = np.empty_like(place)
        for number in np.unique(epoch):
            chosen = epoch == number
            index[chosen] = permute(place[chosen], self.num_rows, self._seed, int(number))
        return self._rows.read(index)

    def stream(self, start_step: int = 0, rows: slice = slice(None)) -> Iterator[Any]:
        """Batches start_step, start_step + 1, ... without end, a few read ahead by a thread that ends when the iterator
        is closed or dropped."""
        self._require_rows()
        return self._read_ahead(itertools.count(start_step), rows)

    def _read_ahead(self, steps: Iterator[int], rows: slice) -> Iterator[Any]:
        pool = ThreadPoolExecutor(1, "jaxlm-batches")
        try:
            waiting = collections.deque(pool.submit(self.batch, step, rows) for step in itertools.islice(steps, _AHEAD))
            for step in steps:
                batch = waiting.popleft().result()
                waiting.append(pool.submit(self.batch, step, rows))
                yield batch
        finally:
            pool.shutdown(cancel_futures=True)

    def evaluation(self, batch_size: int, count: int, rows: slice = slice(None)) -> Iterator[Any]:
        """The first `count` batches of all windows in one fixed shuffled order, or of a stream, none twice; fewer if
        the windows end. The last batch is filled up with empty rows (segment_ids all 0, or row -1)."""
        if self._is_stream and self.num_rows >= batch_size:
            for number in range(min(count, self.num_rows // self._parts(batch_size))):
                yield self._rows.read(self._in_stream(number, np.arange(batch_size)[rows], batch_size, 0))
            return
        batches = min(count, -(-self.num_rows // batch_size))
        for number in range(batches):
            wanted = number * batch_size + np.arange(batch_size)[rows]
            index = np.full(len(wanted), -1, np.int64)
            inside = wanted < self.num_rows
            index[inside] = permute(wanted[inside], self.num_rows, EVALUATION_KEY)
            yield self._rows.read(index)

    def _in_stream(self, step: int, wanted: np.ndarray, batch_size: int, seed: int) -> np.ndarray:
        """Window numbers of the rows `wanted` of a batch of a stream. The text is cut into as many parts as rows read
        forward; each reads a part, then goes on with the next without a break. A row that reads backward takes the
        windows of the part of the row before it from the last to the first."""
        steps = self.num_rows // self._parts(batch_size)
        if self.num_rows < batch_size:
            raise UserError(
                f"The text has {self.num_rows:,} windows of {self.raw_length} tokens, fewer than the {batch_size:,} "
                "rows of a batch, each of which reads a part of its own; lower train.batch_size or give more text."
            )
        if not self._both_ways:
            return (wanted * steps + step + seed) % (steps * batch_size)
        part, backward = np.divmod(wanted, 2)
        place = part * steps + np.where(backward, steps - 1 - step, step)
        return (place + seed) % (steps * (batch_size // 2))

    def _parts(self, batch_size: int) -> int:
        """Rows of a stream that read forward."""
        return batch_size // 2 if self._both_ways else batch_size

    def _require_rows(self) -> None:
        if self.num_rows == 0:
            raise UserError("No text is held out; give --data.source more documents, --data.held-out a share above 0.")
