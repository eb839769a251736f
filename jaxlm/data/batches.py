"""Batches of windows of a token store: batch k is a function of (seed, k), row by row, on any number of hosts.

There is no iterator state. Row r of batch k is window number `k * batch_size + r` of an endless sequence in which every
epoch is a fresh permutation of all windows; so a run starts at step one million as fast as at step 0.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from jaxlm.data.permutation import permute
from jaxlm.data.store import Store
from jaxlm.data.windows import PACKINGS, windows_of
from jaxlm.errors import UserError
from jaxlm.types import TokenBatch

_AHEAD = 4
_EVALUATION_KEY = 0x6576616C  # evaluation always takes the same windows, whatever the run's seed


class Batches:
    """The batches of one part of a store.

    store: the token store. split: "train" or "held_out". batch_size: rows of a batch over all hosts.
    raw_length: tokens of a row, before an objective adds its symbols.
    packing: "document": a row holds tokens of one document (see windows.DocumentWindows); "packed": documents follow
    each other without padding; "packed-eos": the same, with one end-of-sequence token after each document.
    seed: of the shuffle. Raises UserError for values out of range and for a text too short for a single window.
    """

    def __init__(self, store: Store, split: str, batch_size: int, raw_length: int, packing: str, seed: int) -> None:
        if batch_size < 1 or raw_length < 2:
            raise UserError(f"A batch needs 1 row and 2 tokens or more, not {batch_size} rows of {raw_length}.")
        if packing not in PACKINGS:
            raise UserError(f"{packing!r} is no packing; choose one of {', '.join(PACKINGS)}.")
        if seed < 0:
            raise UserError(f"The seed must be 0 or more, not {seed}.")
        self.batch_size = batch_size
        self.raw_length = raw_length
        self._seed = seed
        self._windows = windows_of(store, split, raw_length, packing)
        self.num_rows = self._windows.count
        if self.num_rows == 0 and split == "train":
            raise UserError(
                "No document to train on has 2 tokens or more; give --data.source more text."
            )

    def batch(self, step: int, rows: slice = slice(None)) -> TokenBatch:
        """Batch number `step`, or the `rows` of it that this host feeds. Raises UserError if there is nothing to
        batch."""
        self._require_rows()
        wanted = np.arange(self.batch_size)[rows]
        epoch, place = np.divmod(step * self.batch_size + wanted, self.num_rows)
        index = np.empty_like(place)
        for number in np.unique(epoch):
            chosen = epoch == number
            index[chosen] = permute(place[chosen], self.num_rows, self._seed, int(number))
        return self._windows.read(index)

    def stream(self, start_step: int = 0, rows: slice = slice(None)) -> Iterator[TokenBatch]:
        """Batches start_step, start_step + 1, ... without end, a few read ahead by a thread that ends when the iterator
        is closed or dropped."""
        self._require_rows()
        return ahead((self.batch(step, rows) for step in _count_from(start_step)), _AHEAD)

    def evaluation(self, batch_size: int, count: int, rows: slice = slice(None)) -> Iterator[TokenBatch]:
        """The first `count` batches of all windows in one fixed shuffled order, none twice; fewer if the windows end.
        The last batch is filled up with empty rows (segment_ids all 0)."""
        batches = min(count, -(-self.num_rows // batch_size))
        for number in range(batches):
            wanted = number * batch_size + np.arange(batch_size)[rows]
            index = np.full(len(wanted), -1, np.int64)
            inside = wanted < self.num_rows
            index[inside] = permute(wanted[inside], self.num_rows, _EVALUATION_KEY)
            yield self._windows.read(index)

    def _require_rows(self) -> None:
        if self.num_rows == 0:
            raise UserError("No text is held out; give --data.source more documents, --data.held-out a share above 0.")


def _count_from(step: int) -> Iterator[int]:
    while True:
        yield step
        step += 1


def ahead(items: Iterable[Any], count: int) -> Iterator[Any]:
    """The same items, made by a thread that runs up to `count` items ahead. The thread ends with the iterator."""
    slots: queue.Queue[tuple[str, Any]] = queue.Queue(count)
    stopped = threading.Event()

    def put(kind: str, value: Any) -> bool:
        while not stopped.is_set():
            with contextlib.suppress(queue.Full):
                slots.put((kind, value), timeout=0.1)
                return True
        return False

    def work() -> None:
        try:
            for item in items:
                if not put("item", item):
                    return
            put("end", None)
        except BaseException as error:  # raised again where the items are wanted
            put("error", error)

    thread = threading.Thread(target=work, daemon=True, name="jaxlm-ahead")
    thread.start()
    try:
        while True:
            kind, value = slots.get()
            if kind == "end":
                return
            if kind == "error":
                raise value
            yield value
    finally:
        stopped.set()
        thread.join()
