"""Rows of a task: one or two texts and a label, from TSV, CSV or JSON lines."""

from __future__ import annotations

import csv
import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxlm.data.base import Report, Statistics, entropy, random_tokens
from jaxlm.data.batches import Batches
from jaxlm.data.permutation import permute
from jaxlm.data.readers import json_object, read_lines, without_compression
from jaxlm.errors import UserError
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.tokenizers.vocabulary import Vocabulary

_SPLIT_KEY = 0x73706C6974


class LabelledBatch(NamedTuple):
    """Rows of a task.

    tokens: int32 [batch, length], the first text's tokens, then the second's, without special symbols; then padding.
    segment_ids: int32 [batch, length], 1 for the first text, 2 for the second, 0 for padding.
    labels: int32 [batch], the class, or float32 [batch], the number; -1 in rows that only fill up a batch.
    """

    tokens: Any
    segment_ids: Any
    labels: Any


@dataclasses.dataclass(frozen=True)
class LabelledData:
    """Which rows to learn a task from."""

    source: str = ""
    """Rows to train on: .jsonl, or .tsv or .csv whose first line names the columns; each also .gz, .xz or .zst."""

    held_out_source: str = ""
    """Rows to evaluate on, in a file of the same form; empty: a share of the source's."""

    text_field: str = "text"
    """Column of the text. A number is the place of the column, from 1, in a file that has no line of names."""

    text_pair_field: str = ""
    """Column of the second text; empty where there is one text a row."""

    label_field: str = "label"
    """Column of the label."""

    target: Literal["class", "number"] = "class"
    """What a label is: one of the values in the source, numbered in sorted order, or a number (regression)."""

    length: int = 128
    """Sequence length of the model, special symbols included; of two long texts the longer is cut first."""

    tokenizer: str = ""
    """The pretrained model's tokenizer: its folder, .model, vocab.txt or tokenizer.json."""

    held_out: float = 0.1
    """Share of the source's rows, drawn at random but always the same, that is kept from training where there is no
    `held_out_source`."""

    def validate(self) -> None:
        if not self.text_field or not self.label_field:
            raise UserError("--data.text-field and --data.label-field must name columns.")
        if self.length < 8:
            raise UserError(f"--data.length must be 8 or more, not {self.length}.")
        if not 0 <= self.held_out <= 0.5:
            raise UserError(f"--data.held-out is a share between 0 and 0.5, not {self.held_out}.")

    def prepare_tokenizer(self, report: Report = print, symbols: Sequence[str] = ()) -> Tokenizer:
        if not self.tokenizer:
            raise UserError("--data.tokenizer is empty; give the tokenizer of the pretrained model.")
        tokenizer = Tokenizer.load(self.tokenizer)
        for name in symbols:
            tokenizer.vocabulary.id(name)
        return tokenizer

    def open(self, tokenizer: Tokenizer, report: Report = print) -> LabelledSource:
        """Reads and tokenises all rows, which stay in memory. Raises UserError, with file and line, for bad ones."""
        self.validate()
        if not self.source:
            raise UserError("--data.source is empty; give a .tsv, .csv or .jsonl file.")
        rows = {"train": list(self._rows(self.source)), "held_out": []}
        classes = tuple(sorted({row.label for row in rows["train"]})) if self.target == "class" else ()
        if self.held_out_source:
            rows["held_out"] = list(self._rows(self.held_out_source))
        elif self.held_out:
            # Not the last ones: files of tasks are often sorted by label.
            place = permute(np.arange(len(rows["train"])), len(rows["train"]), _SPLIT_KEY)
            count = round(self.held_out * len(rows["train"]))
            rows["held_out"] = [row for row, p in zip(rows["train"], place, strict=True) if p < count]
            rows["train"] = [row for row, p in zip(rows["train"], place, strict=True) if p >= count]
        if not rows["train"]:
            raise UserError(f"{self.source} has no rows to train on.")
        facts = hashlib.sha256(json.dumps([tokenizer.fingerprint, self.target, classes]).encode())
        for name, part in rows.items():
            for row in part:
                facts.update(json.dumps([name, row.text, row.text_pair, row.label]).encode())
        tables = {name: _encoded(part, tokenizer, self.target, classes) for name, part in rows.items()}
        report(f"{self.source}: {len(rows['train']):,} rows to train on, {len(rows['held_out']):,} held out")
        return LabelledSource(facts.hexdigest(), classes, tokenizer.vocabulary, tables)

    def synthetic(self, rows: int, raw_length: int, vocabulary: Vocabulary) -> LabelledBatch:
        tokens = random_tokens(rows, raw_length, vocabulary)
        segments = np.ones_like(tokens)
        if self.text_pair_field:
            segments[:, raw_length // 2 :] = 2
        return LabelledBatch(tokens, segments, np.zeros(rows, np.int32 if self.target == "class" else np.float32))

    def _rows(self, path: str) -> Iterator[_Row]:
        fields = [name for name in (self.text_field, self.text_pair_field, self.label_field) if name]
        for place, values in _records(path, named=not all(name.isdecimal() for name in fields)):
            if missing := [name for name in fields if name not in values]:
                known = ", ".join(map(repr, values))
                raise UserError(f"{place} has no column {missing[0]!r}; choose columns with --data.text-field, "
                                f"--data.text-pair-field and --data.label-field (here: {known}).")
            pair = str(values[self.text_pair_field]) if self.text_pair_field else ""
            yield _Row(place, str(values[self.text_field]), pair, str(values[self.label_field]))


class _Row(NamedTuple):
    place: str
    text: str
    text_pair: str
    label: str


def _records(path: str, named: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a file as (place, column → value); columns without names are "1", "2", ..."""
    kind = os.path.splitext(without_compression(path))[1]
    if kind not in (".tsv", ".csv", ".jsonl", ".ndjson"):
        raise UserError(f"{path} is of no known kind; its name must end in .tsv, .csv or .jsonl, and then perhaps .gz, "
                        ".xz or .zst.")
    lines = read_lines(path)
    if kind in (".jsonl", ".ndjson"):
        yield from ((place, json_object(line, place)) for place, line in lines if line.strip())
        return
    form: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if kind == ".tsv" else {}
    reader = csv.reader((line for _, line in lines), **form)
    names: list[str] | None = None
    try:
        for values in filter(None, reader):  # an empty line is no row
            place = f"{path}, line {reader.line_num}"
            if names is None:
                names = values if named else [str(number + 1) for number in range(len(values))]
                if named:
                    continue
            if len(values) != len(names):
                raise UserError(f"{place} has {len(values)} columns instead of {len(names)}; mend or remove the line.")
            yield place, dict(zip(names, values, strict=True))
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: this is no row of a table ({error}).") from error


Table = tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray]
"""Tokenised rows: the two texts of each, the second perhaps empty, and the labels."""


def _encoded(rows: list[_Row], tokenizer: Tokenizer, target: str, classes: tuple[str, ...]) -> Table:
    labels = np.zeros(len(rows), np.int32 if target == "class" else np.float32)
    number = {name: place for place, name in enumerate(classes)}
    for index, row in enumerate(rows):
        try:
            labels[index] = number[row.label] if target == "class" else float(row.label)
        except (KeyError, ValueError) as error:
            wrong = "does not occur in the training file" if target == "class" else "is no number"
            raise UserError(f"{row.place}: the label {row.label!r} {wrong}; mend or remove the line.") from error
    first, second = (tokenizer.encode_arrays([getattr(row, name) for row in rows]) for name in ("text", "text_pair"))
    return list(zip(first, second, strict=True)), labels


@dataclasses.dataclass(frozen=True, eq=False)
class LabelledSource:
    """Tokenised rows, in memory; see `jaxlm.data.base.Source`. classes: labels by number, none for regression."""

    fingerprint: str
    classes: tuple[str, ...]
    vocabulary: Vocabulary
    tables: dict[str, Table]

    @functools.cached_property
    def statistics(self) -> Statistics:
        counts = {}
        for name, (texts, _) in self.tables.items():
            tokens = np.concatenate([np.zeros(0, np.int32), *(text for pair in texts for text in pair)])
            counts[name] = np.bincount(tokens, minlength=self.vocabulary.size)
        return Statistics(counts["train"], entropy(counts["held_out"]))

    def batches(
        self, split: str, rows: int, raw_length: int, packing: str, seed: int, stride: int | None = None
    ) -> Batches:
        if split not in self.tables:
            raise UserError(f"Labelled rows have the splits train and held_out, not {split!r}.")
        return Batches(_Rows(self.tables[split], raw_length, max(self.vocabulary.pad, 0)), rows, seed)


class _Rows:
    """Rows of one length; see `jaxlm.data.batches.Rows`."""

    def __init__(self, table: Table, length: int, pad: int) -> None:
        self._texts, self._labels = table
        self._pad, self.count, self.length = pad, len(self._labels), length

    def read(self, index: np.ndarray) -> LabelledBatch:
        tokens = np.full((len(index), self.length), self._pad, np.int32)
        segments = np.zeros_like(tokens)
        labels = np.where(index >= 0, self._labels[index], -1).astype(self._labels.dtype)
        for row in np.flatnonzero(index >= 0):
            first, second = self._texts[index[row]]
            # As if one token after another were taken from the longer (BERT's `_truncate_seq_pair`).
            second = second[: max(self.length // 2, self.length - len(first))]
            first = first[: self.length - len(second)]
            both = len(first) + len(second)
            tokens[row, :both] = np.concatenate([first, second])
            segments[row, :both] = 2
            segments[row, : len(first)] = 1
        return LabelledBatch(tokens, segments, labels)
