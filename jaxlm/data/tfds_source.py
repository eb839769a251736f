"""Datasets of TensorFlow Datasets, `tfds:NAME[/CONFIG][:SPLIT]`, read from array_record without TensorFlow."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxlm.data.fingerprint import file_state
from jaxlm.data.readers import text_of
from jaxlm.errors import UserError

_AT_ONCE = 64  # records read together


def open_text(source: str, text_field: str) -> tuple[Callable[[], Iterator[str]], tuple[str, ...]]:
    """Open a text dataset (see `_open`).

    Returns:
        A function that yields the text of every record, in order; and the state of the files, equal if the dataset is
        unchanged.

    Raises:
        UserError: the dataset cannot be read or lacks the text field.
    """
    builder, data, split = _open(source)
    _require(builder, source, [text_field])
    files = sorted(builder.data_path.iterdir())
    state = [json.dumps([str(file), *file_state(str(file))]) for file in files if not file.is_dir()]
    facts = json.dumps([builder.info.full_name, split, text_field])
    return lambda: _texts(data, source, text_field), (facts, *state)


def read_rows(source: str, columns: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, {column: value}) of each record, where place is "SOURCE, record N".

    A text becomes str, a sequence becomes a list, and a class number becomes the name of the class, or None for -1
    (no label).

    Raises:
        UserError: the dataset cannot be read or lacks a column.
    """
    builder, data, _ = _open(source)
    _require(builder, source, columns)
    names = {column: _class_names(builder, column) for column in columns}
    for place, record in _records(data, source):
        yield place, {column: _value(record[column], names[column], f"{place}, {column!r}") for column in columns}


def class_names(source: str, column: str) -> tuple[str, ...]:
    """Return the class names of a column in numeric order; an empty tuple unless it is a ClassLabel."""
    return _class_names(_open(source)[0], column)


def _open(source: str) -> tuple[Any, Any, str]:
    """Return (builder, records, split) of a dataset under $TFDS_DATA_DIR, by default ~/tensorflow_datasets.

    A missing dataset is downloaded and prepared there. An unknown dataset or split raises UserError.
    """
    import tensorflow_datasets as tfds  # slow to import and rarely needed
    import tensorflow_datasets.text  # registers wikipedia, c4 and others

    name, _, split = source.removeprefix("tfds:").partition(":")
    split = split or "train"
    if not name:
        raise UserError(f"{source!r} names no dataset; write tfds:NAME, tfds:NAME/CONFIG or tfds:NAME:SPLIT.")
    try:
        builder = tfds.builder(name, data_dir=os.environ.get("TFDS_DATA_DIR"), file_format="array_record")
        builder.download_and_prepare()
        data = builder.as_data_source(split=split)
    except Exception as error:  # tfds raises many kinds of exceptions
        reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        raise UserError(
            f"{source} cannot be read ({reason}); check the name and the split, and that $TFDS_DATA_DIR holds the "
            "dataset prepared as array_record, or that it can be downloaded."
        ) from error
    return builder, data, split


def _require(builder: Any, source: str, columns: Sequence[str]) -> None:
    if missing := [column for column in columns if column not in builder.info.features]:
        fields = ", ".join(map(repr, builder.info.features))
        raise UserError(
            f"{source} has no field {missing[0]!r}; it has {fields}. Choose with --data.text-field, --data.label-field "
            "and so on."
        )


def _class_names(builder: Any, column: str) -> tuple[str, ...]:
    return tuple(getattr(builder.info.features[column], "names", None) or ())


def _records(data: Any, source: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, fields) of each record."""
    for start in range(0, len(data), _AT_ONCE):
        numbers = list(range(start, min(start + _AT_ONCE, len(data))))
        for number, record in zip(numbers, data.__getitems__(numbers), strict=True):
            yield f"{source}, record {number}", record


def _texts(data: Any, source: str, text_field: str) -> Iterator[str]:
    for place, record in _records(data, source):
        yield text_of(_value(record[text_field], (), place), place, text_field, others=())


def _value(value: Any, names: Sequence[str], place: str) -> Any:
    """Convert a field of a record as in `read_rows`; `names` are its class names."""
    if names and np.ndim(value) == 0:
        return names[int(value)] if value >= 0 else None
    if isinstance(value, (list, np.ndarray)):
        return [_value(item, names, place) for item in value]
    if isinstance(value, dict):
        raise UserError(f"{place} has fields of its own, which cannot be read; choose a field of texts or numbers.")
    if isinstance(value, (float, np.floating)) and np.float32(value) == value:
        return float(str(np.float32(value)))  # 3.8, not the 3.799999952316284 that a float32 is
    if not isinstance(value, bytes):
        return value.item() if isinstance(value, np.generic) else value
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{place}, byte {error.start}: this is not UTF-8 text.") from error
