"""Texts of a column: of Parquet files, and of datasets of the library `datasets`, `hf:NAME[:CONFIG][:SPLIT]`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from etils import epath

from jaxlm.data.fingerprint import file_state
from jaxlm.data.readers import BLOCK, require_field, text_of
from jaxlm.errors import UserError
from jaxlm.paths import reading

_ROWS = 64  # rows read together


def parquet_texts(path: str, text_field: str) -> Iterator[str]:
    """Yield the text of every row of a Parquet file, "" for a missing one.

    Raises:
        UserError: the file cannot be read, lacks the column, or has something other than text in it.
    """
    import pyarrow.parquet  # slow to import and rarely needed

    row = 0
    with reading(path), epath.Path(path).open("rb") as raw:
        # Unbuffered, the column of a group of rows is read whole: 300 MB more for a group of 400 MB.
        file = pyarrow.parquet.ParquetFile(raw, buffer_size=BLOCK, pre_buffer=False)
        require_field(text_field, file.schema_arrow.names, path)
        for batch in file.iter_batches(_ROWS, columns=[text_field], use_threads=False):
            yield from _texts(batch.column(0).to_pylist(), path, row, text_field)
            row += len(batch)


def open_text(source: str, text_field: str) -> tuple[Callable[[], Iterator[str]], tuple[str, ...]]:
    """Open a dataset, which is mapped into memory.

    NAME is a dataset of the Hugging Face hub, read from the cache or downloaded into it; a folder of
    `Dataset.save_to_disk`; or a folder of data files. The split is "train" by default.

    Returns:
        A function that yields the text of every row, in order, "" for a missing one; and the state of the cached files,
        equal if the dataset is unchanged.

    Raises:
        UserError: the library is missing, or the dataset cannot be read or lacks the column.
    """
    data = _open(source)
    require_field(text_field, data.column_names, source)
    data = data.select_columns([text_field])
    state = [json.dumps([file["filename"], *file_state(file["filename"])]) for file in data.cache_files]

    def texts() -> Iterator[str]:
        for start in range(0, len(data), _ROWS):
            yield from _texts(data[start : start + _ROWS][text_field], source, start, text_field)

    return texts, (json.dumps([source, text_field, len(data)]), *state)


def _open(source: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"{source} needs the library `datasets`; install it (`pip install datasets`).") from error
    name, *options = source.removeprefix("hf:").split(":")
    if not name or len(options) > 2:
        raise UserError(f"{source!r} names no dataset; write hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT.")
    split, config = (options[-1] if options else "train"), (options[0] if len(options) == 2 else None)
    folder = Path(name).expanduser()
    try:
        if (folder / "dataset_dict.json").exists():
            return datasets.load_from_disk(str(folder / split))
        if (folder / "state.json").exists():
            return datasets.load_from_disk(str(folder))
        return datasets.load_dataset(name, config, split=split)
    except Exception as error:  # the library and the file systems below it raise many kinds of exceptions
        reason = (str(error) or type(error).__name__).strip().splitlines()[0].rstrip(".")
        raise UserError(
            f"{source} cannot be read ({reason}); check the name, the configuration and the split "
            "(hf:NAME:CONFIG:SPLIT), and that the dataset is in the cache of `datasets` or can be downloaded."
        ) from error


def _texts(values: list[Any], source: str, first: int, name: str) -> Iterator[str]:
    """Yield the values of a column as texts; `first` is the number of their first row."""
    for row, value in enumerate(values, first):
        yield "" if value is None else text_of(value, f"{source}, row {row}", name, others=())
