"""`tfds:NAME[/CONFIG][:SPLIT]`: prepared datasets, read from array_record files without TensorFlow."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator

from jaxlm.errors import UserError

_AT_ONCE = 64  # records read together


@dataclasses.dataclass(frozen=True)
class Dataset:
    """texts: gives the text of every record, in order. stats: what tells that it has not changed."""

    texts: Callable[[], Iterator[str]]
    stats: tuple[str, ...]


def open_dataset(source: str, text_field: str) -> Dataset:
    """Finds a dataset under $TFDS_DATA_DIR (else ~/tensorflow_datasets), or downloads and prepares it there.

    Raises UserError if it is not known, cannot be had, or has no such split or text field.
    """
    import tensorflow_datasets as tfds  # slow to import, and few need it
    import tensorflow_datasets.text  # wikipedia, c4 and others are known only after this

    name, _, split = source.removeprefix("tfds:").partition(":")
    split = split or "train"
    if not name:
        raise UserError(f"{source!r} names no dataset; write tfds:NAME, tfds:NAME/CONFIG or tfds:NAME:SPLIT.")
    try:
        builder = tfds.builder(name, data_dir=os.environ.get("TFDS_DATA_DIR"), file_format="array_record")
        builder.download_and_prepare()
        data = builder.as_data_source(split=split)
    except Exception as error:  # tfds raises nearly anything
        reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        raise UserError(
            f"{source} cannot be read ({reason}); check the name and the split, and that $TFDS_DATA_DIR holds the "
            "dataset prepared as array_record, or that it can be downloaded."
        ) from error
    if text_field not in builder.info.features:
        fields = ", ".join(map(repr, builder.info.features))
        raise UserError(f"{source} has no field {text_field!r}; choose one with --data.text-field (here: {fields}).")
    files = sorted(builder.data_path.iterdir())
    stats = [json.dumps([str(file), file.stat().length, file.stat().mtime]) for file in files]
    facts = json.dumps([builder.info.full_name, split, text_field])
    return Dataset(lambda: _texts(data, source, text_field), (facts, *stats))


def _texts(data, source: str, text_field: str) -> Iterator[str]:
    for start in range(0, len(data), _AT_ONCE):
        numbers = list(range(start, min(start + _AT_ONCE, len(data))))
        for number, record in zip(numbers, data.__getitems__(numbers), strict=True):
            yield _text(record[text_field], f"{source}, record {number}", text_field)


def _text(value, place: str, text_field: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, bytes):
        raise UserError(
            f"{place}: the field {text_field!r} is {type(value).__name__}, not text; choose one with --data.text-field."
        )
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{place}, byte {error.start}: this is not UTF-8 text.") from error
