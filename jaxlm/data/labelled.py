"""Labelled rows of a task, read from files, encoded by the task, in batches of rows of similar length."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import numpy as np

from jaxlm.data.base import Data, RowFormat, Statistics
from jaxlm.data.batches import Batches
from jaxlm.data.holdout import draw_rows, group_rows
from jaxlm.data.permutation import permute
from jaxlm.data.rows import quoting_remark
from jaxlm.errors import UserError
from jaxlm.fields import field
from jaxlm.paths import real_path
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.tokenizers.unknown import summarize_unknown
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import Report

_ORDER_KEY = 0x6F72646572
_POOL = 32  # batches whose rows are sorted by length together
_SHOWN_ERRORS = 10  # errors of rows in one message
BUCKETS = (1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1.0)
"""Lengths of batches as shares of `--data.length`, rounded up to multiples of 8; the step is compiled for each."""

Arrays = dict[str, np.ndarray]
Item = TypeVar("Item")


ANSWERS = ("label", "labels", "tags", "answers", "targets")
"""Names of the values that hold the right answer; one that is None has none."""
NO_TEXTS = ("names", "start", "kind")
"""Names of other values that are no texts: names of choices, place and kind of an answer."""


class Record(NamedTuple):
    """A row of a task."""

    id: str
    """The id in the data, or the number of the row."""
    place: str
    """File and line, for messages."""
    values: dict[str, Any]
    """Texts and label by name, as JSON values."""
    texts: tuple[str, ...]
    """One or more texts that other rows may share; see `group_rows`."""
    document: str = ""
    """Document of the row, which is held out as a whole; empty if the file has no documents."""

    @property
    def is_labelled(self) -> bool:
        """Whether the right answer is known."""
        return all(self.values.get(name, "") is not None for name in ANSWERS)

    @property
    def inputs(self) -> list[Any]:
        """What is read besides the right answer; the "text" of a question's record is its answer's."""
        no_inputs = ANSWERS + NO_TEXTS + ("text",) * ("passage" in self.values)
        return [value for name, value in self.values.items() if name not in no_inputs]

    @property
    def has_text(self) -> bool:
        """Whether there is anything to read besides the right answer."""
        values = self.inputs
        leaves = itertools.chain.from_iterable(value if isinstance(value, list) else [value] for value in values)
        return any(str(leaf).strip() for leaf in leaves if leaf is not None)


class EncodedExample(NamedTuple):
    """Arrays of a record, without batch dimension."""

    record: int
    """Number of the record; a long record has several examples."""
    arrays: Arrays
    """Arrays by name; those named by `RowEncoder.padding` have tokens as their last axis."""
    notes: Any = None
    """Data of the task that stays on the host."""


class RowEncoder(Protocol):
    """Encoder of records into arrays: a task, as the `packing` of its row format. Equal encoders share encoded rows."""

    @property
    def padding(self) -> dict[str, int]:
        """Padding value of each array whose last axis is tokens; the array of ids comes first."""
        ...

    def encode(self, records: Sequence[Record], tokenizer: Tokenizer, length: int) -> list[EncodedExample]:
        """Return examples of at most `length` tokens, in the order of the records.

        Raises:
            UserError: A record cannot be encoded; the message has its file and line.
        """
        ...

    def synthetic(self, rows: int, length: int) -> Arrays:
        """Return a batch of full rows, for plans and benchmarks."""
        ...


@dataclasses.dataclass(frozen=True)
class LabelledData(Data):
    """Rows of a task in files; a subclass per format implements `read`."""

    has_labels: ClassVar[bool] = True
    label_flag: ClassVar[str] = ""
    """Flag of the column of labels."""
    label_advice: ClassVar[str] = "fill it in, or name the column that has it"
    """What to do about a row without a label."""

    source: str = field("", resumable=True)
    """Rows to train on: a file, also .gz, .xz or .zst, or for named columns `tfds:NAME[/CONFIG][:SPLIT]` or
    `hf:NAME[:CONFIG][:SPLIT]`."""

    dev: str = field("", resumable=True)
    """Rows to evaluate on, in the same format; empty: a share of the source's rows."""

    length: int = field(128, range="[8, inf)")
    """Sequence length of the model, special tokens included; longer texts are truncated, or read in windows."""

    tokenizer: str = field("", weights=True)
    """Tokenizer of the pretrained model."""

    held_out: float = field(0.1, range="[0, 0.5]")
    """Share of the source's rows that is held out without `dev`: groups of rows that share texts, drawn at random but
    always the same."""

    buckets: bool = True
    """Batch rows of similar length and pad them to one of a few lengths; otherwise pad all rows to `length`."""

    skip_bad_rows: bool = False
    """Leave out rows that cannot be read, and training rows without a label, and report their number; otherwise they
    are an error."""

    def read(self, path: str) -> Iterator[Record | UserError]:
        """Read the rows of a file, with an error, which names file and line, in place of one that cannot be read.

        Raises:
            UserError: The file cannot be read.
        """
        raise NotImplementedError

    @classmethod
    def format_fields(cls) -> tuple[dataclasses.Field[Any], ...]:
        """Return the fields of the format, such as the names of columns."""
        return dataclasses.fields(cls)[len(dataclasses.fields(LabelledData)):]

    def class_names(self) -> tuple[str, ...]:
        """Return the labels in the order of their numbers; empty if the source has no such order."""
        return ()

    def prepare_tokenizer(self, report: Report = print, symbols: Sequence[str] = ()) -> Tokenizer:
        if not self.tokenizer:
            raise UserError("a task needs a trained model; pass --init-from RUN_OR_HF_DIR.")
        return Tokenizer.load(self.tokenizer)

    def open(self, tokenizer: Tokenizer, report: Report = print) -> LabelledSource:
        """Read all rows into memory; raise UserError, with file and line, for those that cannot be read."""
        return _read_rows(self, tokenizer, tuple(map(_changed, (self.source, self.dev))))

    def synthetic(self, rows: int, row_format: RowFormat, vocabulary: Vocabulary) -> Arrays:
        return row_format.packing.synthetic(rows, row_format.length)


@functools.lru_cache(maxsize=2)
def _read_rows(data: LabelledData, tokenizer: Tokenizer, changed: tuple[int, ...]) -> LabelledSource:
    """Read all rows. `changed`, when the files were modified, makes the cache read changed files again."""
    data.validate()
    if not data.source and not data.dev:
        raise UserError("--data.source is empty; give a file of rows.")
    refuse_same_file("--data.dev", data.dev, data.source)
    train, bad_train = good_rows(data, data.source, needs_labels=True)
    held_out, bad_held_out = good_rows(data, data.dev)
    holdout_description = ""
    if train and not data.dev and data.held_out:
        groups = group_rows([row.texts for row in train], [row.document for row in train])
        wanted = max(1, round(data.held_out * len(train)))
        drawn = draw_rows(groups, wanted)  # not the last ones: files of tasks are often sorted by label
        held_out = [row for row, is_drawn in zip(train, drawn, strict=True) if is_drawn]
        train = [row for row, is_drawn in zip(train, drawn, strict=True) if not is_drawn]
        num_drawn, num_groups = len(np.unique(groups[drawn])), groups.max() + 1
        holdout_description = f"{num_drawn:,} of {num_groups:,} groups of rows that share texts"
        if abs(len(held_out) - wanted) > 0.1 * wanted:
            share = f"--data.held-out {data.held_out:g}"
            holdout_description += f", drawn whole, so not {share} of the rows; name others with --data.dev FILE"
    if data.source and not train:
        raise UserError(f"{data.source} has no rows to train on.")
    if data.dev and not held_out:
        raise UserError(f"{data.dev} has no rows to evaluate on.")
    records = {"train": train, "held_out": held_out}
    num_bad = {"train": bad_train, "held_out": bad_held_out}
    remarks = [quoting_remark(path) for path in (data.source, data.dev) if path]
    remarks += [shared_rows(data.dev, held_out, data.source, train, "is trained on")] if data.dev else []
    return LabelledSource(tokenizer, records, data.buckets, holdout_description, num_bad, remarks)


def refuse_same_file(flag: str, path: str, source: str, of: str = "--data.source", use: str = "is trained on") -> None:
    """Raise UserError if a file of rows to evaluate on is one with another use, that of the flag `of`."""
    if path and source and real_path(path) == real_path(source):
        raise UserError(f"{flag} is the file of {of}, {source}, which {use}; give other rows.")


def shared_rows(path: str, rows: Sequence[Record], source: str, others: Sequence[Record], use: str) -> str:
    """Return a remark about rows that another file has, too, whatever their answers; "" if there are none."""
    def key(row: Record) -> str:
        return json.dumps(row.inputs)

    wanted = Counter(map(key, rows))  # the other file's rows may be millions
    count = sum(wanted[found] for found in wanted.keys() & map(key, others))
    return f"{count:,} of {len(rows):,} rows of {path} are also in {source}, which {use}" if count else ""


def row_or_error(read: Callable[..., Item], *arguments: Any) -> Item | UserError:
    """Return the row that `read(*arguments)` returns, or the UserError that it raises."""
    try:
        return read(*arguments)
    except UserError as error:
        return error


def good_rows(data: LabelledData, path: str, needs_labels: bool = False) -> tuple[list[Record], int]:
    """Return the rows of a file, none if it has no name, and the number of rows that were left out.

    Rows without text are left out, as in pretraining. With `needs_labels`, as in training, a row without a label is a
    bad one.

    Raises:
        UserError: There are bad rows, and `data.skip_bad_rows` is off or there are no others.
    """
    rows: list[Record] = []
    errors: list[UserError] = []
    without_text = 0
    for row in data.read(path) if path else ():
        if isinstance(row, UserError):
            errors.append(row)
        elif not row.has_text:
            without_text += 1
        elif needs_labels and not row.is_labelled:
            errors.append(UserError(f"{row.place} has no label; {data.label_advice}."))
        else:
            rows.append(row)
    if errors and not rows:
        raise errors[0]
    if errors and not data.skip_bad_rows:
        shown = "".join(f"\n  {str(error).removeprefix(f'{path}, ')}" for error in errors[:_SHOWN_ERRORS])
        more = f"\n  and {len(errors) - _SHOWN_ERRORS:,} more" if len(errors) > _SHOWN_ERRORS else ""
        raise UserError(
            f"{path}: {len(errors):,} of {len(rows) + len(errors):,} rows cannot be used; fix them, or leave them out "
            f"with --data.skip-bad-rows True.{shown}{more}"
        )
    return rows, len(errors) + without_text


def _changed(path: str) -> int:
    """Return the modification time of a file in nanoseconds; 0 for other sources."""
    return os.stat(path).st_mtime_ns if os.path.exists(path) else 0


class LabelledSource:
    """Opened rows; see `jaxlm.data.base.Source`.

    Attributes:
        records: the records of each split.
        tokenizer: the tokenizer.
        num_bad: number of rows that were left out, of the file of each split.
    """

    def __init__(
        self, tokenizer: Tokenizer, records: dict[str, list[Record]], buckets: bool, holdout_description: str = "",
        num_bad: Mapping[str, int] = {}, remarks: Sequence[str] = (),
    ) -> None:
        """Hold the records of each split.

        Args:
            tokenizer: The tokenizer.
            records: The records of each split.
            buckets: See `LabelledData.buckets`.
            holdout_description: How the held-out rows were drawn, for the summary.
            num_bad: Number of rows that were left out, of the file of each split.
            remarks: About the files, for the summary.
        """
        self.records, self.tokenizer, self._buckets = records, tokenizer, buckets
        self._holdout_description, self.num_bad, self._remarks = holdout_description, num_bad, remarks
        self._encoded: dict[Any, list[EncodedExample]] = {}

    @functools.cached_property
    def fingerprint(self) -> str:
        facts = hashlib.sha256(self.tokenizer.fingerprint.encode())
        for split, rows in self.records.items():
            for row in rows:
                facts.update(json.dumps([split, row.id, row.values]).encode())
        return facts.hexdigest()

    @property
    def summary(self) -> str:
        """Sizes of both splits, in one line."""
        how = f" ({self._holdout_description})" if self._holdout_description else ""
        counts = [f"{len(self.records[split]):,}" for split in ("train", "held_out")]
        num_bad = sum(self.num_bad.values())
        bad = f"; {num_bad:,} left out, which have no text or cannot be used" if num_bad else ""
        sizes = f"Labelled rows: {counts[0]} to train on, {counts[1]} held out{how}{bad}"
        return "; ".join(filter(None, [sizes, self.unknown, *self._remarks]))

    @property
    def unknown(self) -> str:
        """Share of [UNK] in the rows encoded so far; see `jaxlm.tokenizers.unknown.summarize_unknown`."""
        rows = [(example.arrays[next(iter(encoder.padding))], self.records[split][example.record].texts)
                for (split, encoder, _), examples in self._encoded.items() for example in examples]
        return summarize_unknown(self.tokenizer, rows)

    @functools.cached_property  # the runs on these rows are bound to it, and share encoded rows if they are equal
    def statistics(self) -> Statistics:
        """Token statistics, all zero: tasks do not use them."""
        return Statistics(np.zeros(self.tokenizer.vocabulary.size, np.int64), 0.0)

    def examples(self, split: str, encoder: RowEncoder, length: int) -> list[EncodedExample]:
        """Return the examples of a split, which is encoded once for equal encoders."""
        key = (split, encoder, length)
        if key not in self._encoded:
            self._encoded[key] = encoder.encode(self.records[split], self.tokenizer, length)
        return self._encoded[key]

    def cut_remarks(self, encoder: RowEncoder, length: int) -> list[str]:
        """Return a line about the training rows that reach the length; none if there are no such rows.

        A row of several texts counts if one of them does. Encoders that read long texts in windows cut nothing.
        """
        name, examples = next(iter(encoder.padding)), self.examples("train", encoder, length)
        num_full = int(np.sum([example.arrays[name].shape[-1] >= length for example in examples]))
        if not num_full or len(examples) != len(self.records["train"]):
            return []
        rows = f"{num_full:,} of {len(examples):,} rows"
        return [f"{rows} reach --data.length {length}; longer texts are cut there"]

    def batches(self, split: str, batch_size: int, row_format: RowFormat, seed: int) -> Batches:
        """Return batches of the encoder's arrays and `row`, int32 [batch].

        `row` is the number of the example, or -1 in rows that fill up a batch.
        """
        encoder, length = row_format.packing, row_format.length
        encoded = _Rows(self.examples(split, encoder, length), encoder.padding, length, self._buckets)
        return (LengthBatches if self._buckets else Batches)(encoded, batch_size, seed)


class _Rows:
    """Examples as rows; see `jaxlm.data.batches.RowTable`."""

    def __init__(self, examples: list[EncodedExample], padding: dict[str, int], length: int, buckets: bool) -> None:
        self._examples, self._padding = examples, padding
        self.count, self.length = len(examples), length
        name = next(iter(padding))
        self.lengths = np.array([example.arrays[name].shape[-1] for example in examples], np.int32)
        shares = BUCKETS if buckets else (1.0,)
        self._sizes = sorted({min(length, 8 * math.ceil(share * length / 8)) for share in shares})

    def padded(self, index: np.ndarray) -> int:
        """Return the length to which a batch of the rows `index` is padded."""
        longest = int(self.lengths[index[index >= 0]].max(initial=1))
        return next(size for size in self._sizes if size >= longest)

    def read(self, index: np.ndarray, length: int | None = None) -> Arrays:
        length = length or self.padded(index)
        first = self._examples[max(0, int(index.max(initial=0)))].arrays
        batch: Arrays = {"row": index.astype(np.int32)}
        for name, array in first.items():
            shape = (*array.shape[:-1], length) if name in self._padding else array.shape
            batch[name] = np.full((len(index), *shape), self._padding.get(name, 0), array.dtype)
        for row in np.flatnonzero(index >= 0):
            example = self._examples[index[row]]
            for name, array in example.arrays.items():
                place = (row, ..., slice(array.shape[-1])) if name in self._padding else row
                batch[name][place] = array
        return batch


class LengthBatches(Batches):
    """Batches of rows of similar length; batch k is a function of (seed, k).

    The shuffled rows of 32 batches of an epoch are sorted by length and cut into batches in shuffled order.
    """

    def __init__(self, table: _Rows, batch_size: int, seed: int) -> None:
        super().__init__(table, batch_size, seed)
        self._pool = functools.lru_cache(maxsize=2)(self._sorted_pool)

    def read_length(self, length: int) -> int:
        return round(float(np.mean([self.table.padded(index) for index in self._pool(0)]))) if self.num_rows else length

    def batch(self, step: int, local: np.ndarray | slice = slice(None)) -> Arrays:
        self._require_rows()
        pool, number = divmod(step, _POOL)
        # Only batches that begin in the same epoch change places, so whole epochs read every row equally often.
        epoch = (pool * _POOL + np.arange(_POOL)) * self.batch_size // self.num_rows
        first, count = np.searchsorted(epoch, epoch[number]), np.count_nonzero(epoch == epoch[number])
        place = permute(np.array([number - first]), count, _ORDER_KEY ^ self._seed, pool, int(epoch[number]))
        return self._read(self._pool(pool)[first + int(place[0])], local)

    def _sorted_pool(self, pool: int) -> np.ndarray:
        """Return the row numbers of the batches of a pool, [32, batch], from short rows to long ones."""
        place = pool * _POOL * self.batch_size + np.arange(_POOL * self.batch_size)
        index = self.shuffled(place)
        # Sort by epoch first, so that a row that is twice in a pool is not twice in a batch.
        return index[np.lexsort((self.table.lengths[index], place // self.num_rows))].reshape(_POOL, self.batch_size)

    def _evaluation_order(self, size: int) -> np.ndarray:
        chosen = super()._evaluation_order(size) if size < self.num_rows else np.arange(size)
        return chosen[np.argsort(self.table.lengths[chosen], kind="stable")]

    def _read(self, index: np.ndarray, local: np.ndarray | slice) -> Arrays:
        return self.table.read(index[local], self.table.padded(index))
