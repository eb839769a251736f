"""Datasets of TensorFlow Datasets, `tfds:NAME[/CONFIG][:SPLIT]`, read from array_record without TensorFlow."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxlm.data.readers import Columns
from jaxlm.errors import UserError
from jaxlm.paths import without_queries

_AT_ONCE = 64  # records read together


def read_rows(
    source: str, columns: Columns, start: int = 0, end: int | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, {column: value}) of each record, or of `start` to `end - 1`, where place is "SOURCE, record N".

    A text becomes str, a sequence becomes a list, and a class number becomes the name of the class, or None for -1
    (no label).

    Raises:
        UserError: The dataset cannot be read or lacks a column.
    """
    builder, data = open_dataset(source)
    chosen = columns.chosen(list(builder.info.features), source)
    names = {column: class_names(source, column) for column in chosen}
    end = len(data) if end is None else end
    for first in range(start, end, _AT_ONCE):
        numbers = range(first, min(first + _AT_ONCE, end))
        for number, record in zip(numbers, data.__getitems__(list(numbers)), strict=True):
            place = f"{source}, record {number}"
            yield place, {name: _value(record[name], names[name], f"{place}, {name!r}") for name in names}


def class_names(source: str, column: str) -> tuple[str, ...]:
    """Return the class names of a column in numeric order; an empty tuple unless it is a ClassLabel."""
    return tuple(getattr(open_dataset(source)[0].info.features[column], "names", None) or ())


@functools.lru_cache(maxsize=4)
def open_dataset(source: str) -> tuple[Any, Any]:
    """Return (builder, records) of a dataset under $TFDS_DATA_DIR, by default ~/tensorflow_datasets.

    A missing dataset is downloaded and prepared there; raise UserError for one that cannot be read.
    """
    import tensorflow_datasets as tfds  # slow to import and rarely needed
    import tensorflow_datasets.text  # registers wikipedia, c4 and others

    name, _, split = source.removeprefix("tfds:").partition(":")
    if not name:
        raise UserError(f"{source!r} names no dataset; write tfds:NAME, tfds:NAME/CONFIG or tfds:NAME:SPLIT.")
    try:
        builder = tfds.builder(name, data_dir=os.environ.get("TFDS_DATA_DIR"), file_format="array_record")
        try:
            builder.download_and_prepare()
        except Exception:
            if not builder.data_path.exists():  # else another process has prepared it at the same time
                raise
            builder = tfds.builder(name, data_dir=os.environ.get("TFDS_DATA_DIR"), file_format="array_record")
        return builder, builder.as_data_source(split=split or "train")
    except Exception as error:  # tfds raises many kinds of exceptions
        reason = without_queries((str(error) or type(error).__name__).strip().splitlines()[0])
        raise UserError(
            f"{source} cannot be read ({reason}); check the name and the split, and that $TFDS_DATA_DIR holds the "
            "dataset prepared as array_record, or that it can be downloaded."
        ) from error


def _value(value: Any, names: Sequence[str], place: str) -> Any:
    """Convert a field of a record as in `read_rows`; `names` are its class names."""
    if names and np.ndim(value) == 0:
        return names[int(value)] if value >= 0 else None
    if isinstance(value, dict):
        return {name: _value(item, (), place) for name, item in value.items()}
    if isinstance(value, (list, np.ndarray)):
        return [_value(item, names, place) for item in value]
    if isinstance(value, (float, np.floating)) and np.float32(value) == value:
        return float(str(np.float32(value)))  # 3.8, not the 3.799999952316284 that a float32 is
    if not isinstance(value, bytes):
        return value.item() if isinstance(value, np.generic) else value
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{place}, byte {error.start}: this is not UTF-8 text.") from error
