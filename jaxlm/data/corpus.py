"""The documents of `--data.source`.

See `jaxlm.data.text.TextData.source` for its forms. It is streamed: `Corpus.pieces()` holds a few megabytes at most.
"""

from __future__ import annotations

import collections
import dataclasses
import glob
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence

import fsspec
from etils import epath

from jaxlm.data import arrow_source, tfds_source
from jaxlm.data.parts import Part, Reader, grouped, parts_of_dataset, parts_of_file
from jaxlm.data.readers import Columns, Piece, line_hint, suffix_of
from jaxlm.data.rows import kind_of, quoting_remark, refuse_saved_dataset
from jaxlm.errors import UserError
from jaxlm.paths import any_path, at_once, file_state, in_bucket, reading, real_path

SOURCES = "`python-docs`, a file, a folder, a glob, `tfds:NAME` or `hf:NAME`"
"""What --data.source takes, for messages."""
_DATASETS = ("tfds:", "hf:")
_PYTHON_DOCS = 2_000_000  # bytes
_READER = Reader()
_WILD = re.compile(r"[*?\[]")


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The text of a source, located but not yet read.

    Attributes:
        source: the source as the user named it.
        parts: its parts, in order.
        files: files of the source, and of its datasets.
        remark: which files are read and which are not, and from which quotes are removed; "" for a single file without.
    """

    source: str
    parts: tuple[Part, ...]
    files: tuple[str, ...]
    remark: str = ""

    def pieces(self) -> Iterator[Piece]:
        """Yield all documents in a fixed order, in pieces (see readers.Piece); raise UserError for unreadable ones."""
        for part in self.parts:
            yield from part.pieces()


def open_corpus(source: str, reader: Reader = _READER) -> Corpus:
    """Locate the text of a source. Raise UserError if a part of it does not exist.

    A file that several items of the source name is read once.
    """
    parts: list[Part] = []
    remarks: list[str] = []
    seen: dict[str, None] = {}
    names = collections.defaultdict(list)  # of files that are left out, by reason, and of those that are read
    with reading(source):
        items = split_source(source)
    for item in dict.fromkeys(items):
        if item == "python-docs" or item.startswith(_DATASETS):
            states, files, size, rows = _dataset_state(item, reader.columns)
            parts += parts_of_dataset(item, states, size, rows, reader)
            seen |= dict.fromkeys(files)
        else:
            with reading(item):
                files = _files(item)
            names_of = {path: real_path(path) for path in files}
            kinds = {path: None if path.endswith("/") else kind_of(path) for path in files}
            new = [each for each in names_of.items() if kinds[each[0]] and each[1] not in seen]
            located = dict(zip(new, at_once(lambda each: _locate(*each, reader), new), strict=True))
            for path, name in names_of.items():
                size, quoting, own = located.get((path, name), (0, "", []))
                if kinds[path] is None:
                    reason = "folder" if path.endswith("/") else suffix_of(path) or "without a suffix"
                elif name in seen:
                    reason = "read already"
                else:
                    is_file = in_bucket(path) or os.path.isfile(path)
                    reason = "" if size else "empty" if is_file else "no regular file"
                    seen[name] = None
                if not reason:
                    remarks += [line_hint(path) if kind_of(path) == "text" and not parts else quoting]
                    parts += own
                names[reason].append(os.path.basename(path.rstrip("/")))
    remarks.insert(0, _remark(len(names.pop("", [])), names))
    return Corpus(source, tuple(grouped(parts)), tuple(seen), "\n".join(filter(None, remarks)))


def _locate(path: str, name: str, reader: Reader) -> tuple[int, str, list[Part]]:
    """Return the size of a file, given its name without links, a remark about quotes, and its parts."""
    with reading(path):
        state = file_state(path)
    quoting = quoting_remark(path) if kind_of(path) == "table" else ""
    parts = parts_of_file(path, name, [*state, *filter(None, [quoting])], reader)
    return int(state[0]), quoting, list(parts)


def _dataset_state(source: str, columns: Columns) -> tuple[list[str], list[str], int, int]:
    """Return the states of the files of a dataset, equal if it is unchanged, the files, their bytes, and the rows."""
    if source == "python-docs":
        return [f"python-docs of Python {sys.version}"], [], _PYTHON_DOCS, 0
    if source.startswith("tfds:"):
        builder, data = tfds_source.open_dataset(source)
        columns.chosen(list(builder.info.features), source)
        files = sorted(str(file) for file in builder.data_path.iterdir() if not file.is_dir())
    else:
        data = arrow_source.open_dataset(source, columns)
        files = [file["filename"] for file in data.cache_files]
    # Each machine downloads or converts a dataset at a time of its own; the paths have its commit, version or state.
    name = source.removeprefix("hf:").partition(":")[0]
    is_folder = source.startswith("hf:") and any_path(name).exists()
    saved = {file for file in files if is_folder and real_path(file).startswith(os.path.join(real_path(name), ""))}
    states = [[file, *file_state(file)[: None if file in saved else 1]] for file in files]
    return [json.dumps([source, len(data)]), *map(json.dumps, states)], files, sum(s[1] for s in states), len(data)


def _remark(count: int, left_out: Mapping[str, Sequence[str]]) -> str:
    """Return how many files are read, and for each reason how many are not, with their first names."""
    reasons = [
        f"{len(names):,} {reason} ({', '.join(names[:3])}{', …' * (len(names) > 3)})"
        for reason, names in left_out.items()
    ]
    left = f"; left out: {', '.join(reasons[:8])}{', …' * (len(reasons) > 8)}" if reasons else ""
    return f"Files of text: {count:,}{left}" if reasons or count > 1 else ""


def split_source(source: str) -> list[str]:
    """Return the items of a source; a file may have a comma in its name."""
    if source and "," in source and not source.startswith(_DATASETS) and any_path(source).exists():
        return [source]
    items = [item.strip() for item in source.split(",")]
    if not all(items):
        raise UserError(f"--data.source names no text; give {SOURCES}.")
    return items


def _files(item: str) -> list[str]:
    """Return the files of a path, a folder or a glob, sorted; raise UserError if none is of a kind that is read.

    Folders that a glob matches end with "/".
    """
    refuse_saved_dataset(item)
    path, wild = any_path(item), _WILD.search(item)
    if path.is_dir():
        found = list(_walk(path, set()))
    elif path.exists():
        found = [str(path)]
    elif wild:
        matches = _matches(item, wild.start())
        is_dir = (lambda file: epath.Path(file).is_dir()) if in_bucket(item) else os.path.isdir
        folders = dict(zip(matches, at_once(is_dir, matches), strict=True))
        found = [f"{file.rstrip('/')}/" if folders[file] else file for file in matches
                 if not folders[file] or "**" not in item]
    else:
        raise UserError(f"{item} does not exist; --data.source takes {SOURCES}.")
    if not any(kind_of(file) for file in found if not file.endswith("/")):
        raise UserError(f"{item} names no .txt, .jsonl, .csv, .tsv (each also .gz, .xz or .zst) or .parquet file.")
    return sorted(found)


def _matches(pattern: str, wild: int) -> list[str]:
    """Return the matches of a glob whose first wildcard is at `wild`."""
    if not in_bucket(pattern):
        return glob.glob(os.path.expanduser(pattern), recursive=True)
    if "**" in pattern:
        raise UserError(f"{pattern}: a bucket cannot be searched with **; name the folder, which is searched in depth.")
    head = pattern[:wild].rpartition("/")[0]
    return [str(file) for file in epath.Path(head).glob(pattern[len(head) + 1 :])]


def _walk(folder: epath.Path, seen: set[str]) -> Iterator[str]:
    """Yield all files below a folder, visiting every folder once even if links repeat it.

    Hidden ones (.ipynb_checkpoints) are left out, as by a glob.
    """
    if in_bucket(folder):  # one listing; a bucket is asked again whether an entry is a folder
        store, name = fsspec.core.url_to_fs(os.fspath(folder))
        yield from (store.unstrip_protocol(file) for file in store.find(name)
                    if not file.endswith("/") and "/." not in file.removeprefix(name))
    elif real_path(folder) not in seen:
        seen.add(real_path(folder))
        for entry in folder.iterdir():
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                yield from _walk(entry, seen)
            else:
                yield str(entry)
