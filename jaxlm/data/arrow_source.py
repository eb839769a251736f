"""Rows of Parquet files, and of datasets of the library `datasets`, `hf:NAME[:CONFIG][:SPLIT]`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from etils import epath

from jaxlm.data.readers import BLOCK, Columns
from jaxlm.errors import UserError
from jaxlm.paths import reading, without_queries

_AT_ONCE = 64  # rows read together


def parquet_rows(
    path: str, columns: Columns, start: int = 0, end: int | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, {column: value}) of each row of a Parquet file, or of its groups of rows `start` to `end - 1`.

    Raises:
        UserError: The file cannot be read or lacks a column.
    """
    import pyarrow.parquet  # slow to import and rarely needed

    with reading(path), epath.Path(path).open("rb") as raw:
        # Unbuffered, the column of a group of rows is read whole: 300 MB more for a group of 400 MB.
        file = pyarrow.parquet.ParquetFile(raw, buffer_size=BLOCK, pre_buffer=False)
        chosen = columns.chosen(file.schema_arrow.names, path)
        groups = range(file.num_row_groups)[start:end]
        batches = file.iter_batches(_AT_ONCE, row_groups=groups, columns=chosen, use_threads=False)
        rows = (row for batch in batches for row in batch.to_pylist())
        first = sum(file.metadata.row_group(group).num_rows for group in range(start))
        yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows, first))


def parquet_groups(path: str) -> list[int]:
    """Return the size of each group of rows of a Parquet file, uncompressed, in bytes."""
    import pyarrow.parquet

    with reading(path), epath.Path(path).open("rb") as raw:
        metadata = pyarrow.parquet.ParquetFile(raw).metadata
        # Some writers leave the sizes 0.
        return [max(1, metadata.row_group(group).total_byte_size) for group in range(metadata.num_row_groups)]


def read_rows(
    source: str, columns: Columns, start: int = 0, end: int | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, {column: value}) of each row of a dataset, which is mapped into memory, or of `start` to `end - 1`.

    A class of -1 (no label) is None.

    Raises:
        UserError: The library is missing, or the dataset cannot be read or lacks a column.
    """
    data = open_dataset(source, columns)
    part = data if end is None else data.select(range(start, end))
    classes = [name for name, feature in data.features.items() if hasattr(feature, "names")]
    for number, row in enumerate(part, start):
        yield f"{source}, row {number}", row | {name: None for name in classes if row[name] == -1}


def open_dataset(source: str, columns: Columns) -> Any:
    """Open a dataset with the wanted columns; raise UserError as `read_rows`.

    NAME is a dataset of the Hugging Face hub, read from the cache or downloaded into it; a folder of
    `Dataset.save_to_disk`; or a folder of data files. The split is "train" by default.
    """
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"{source} needs the library `datasets`; install it (`pip install datasets`).") from error
    if int(datasets.__version__.partition(".")[0]) < 4:
        raise UserError(f"{source} needs `datasets` 4 or newer, which runs no code of a dataset; upgrade it.")
    name, *options = re.split(r":(?![^\[]*\])", source.removeprefix("hf:"))  # not within train[:10%]
    if not name or len(options) > 2:
        raise UserError(f"{source!r} names no dataset; write hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT.")
    split, config = (options[-1] if options else "train"), (options[0] if len(options) == 2 else None)
    folder = Path(name).expanduser()
    try:
        if (folder / "dataset_dict.json").exists():
            data = datasets.load_from_disk(str(folder / split))
        elif (folder / "state.json").exists():
            data = datasets.load_from_disk(str(folder))
        else:
            data = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # the library and the file systems below it raise many kinds of exceptions
        reason = without_queries((str(error) or type(error).__name__).strip().splitlines()[0]).rstrip(".")
        raise UserError(
            f"{source} cannot be read ({reason}); check the name, the configuration and the split "
            "(hf:NAME:CONFIG:SPLIT), and that the dataset is in the cache of `datasets` or can be downloaded."
        ) from error
    return data.select_columns(columns.chosen(data.column_names, source))
