"""The documents of `--data.source`.

A source is `python-docs`, a file, a folder or a glob of .txt (documents separated by blank lines), .jsonl (one object
per line), .csv and .tsv (a line of names first), each also .gz, .xz or .zst, and .parquet; or a dataset,
`tfds:NAME[/CONFIG][:SPLIT]` or `hf:NAME[:CONFIG][:SPLIT]`. Commas separate several; a file that several name is read
once. Every source is streamed: `Corpus.pieces()` never holds more than a few megabytes.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import glob
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from etils import epath

from jaxlm.data import arrow_source, python_docs, tfds_source
from jaxlm.data.fingerprint import file_state
from jaxlm.data.mentions import read_mentions
from jaxlm.data.readers import Columns, Cutter, Piece, line_hint, open_text, read_text, suffix_of, text_of
from jaxlm.data.rows import kind_of, quoting_remark, read_rows, refuse_saved_dataset
from jaxlm.errors import UserError
from jaxlm.paths import any_path, in_bucket, reading, real_path
from jaxlm.tokenizers.tokenizer import replace_surrogates

SOURCES = "`python-docs`, a file, a folder, a glob, `tfds:NAME` or `hf:NAME`"
"""What --data.source takes, for messages."""
_DATASETS = ("tfds:", "hf:")
_WILD = re.compile(r"[*?\[]")


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The text of a source, located but not yet read.

    Attributes:
        source: the source as the user named it.
        parts: functions that read the text, in order.
        stats: state of each part (path and `file_state`), which detects changes without a full read.
        remark: which files are read and which are not, and from which quotes are removed; "" for a single file without.
    """

    source: str
    parts: tuple[Callable[[], Iterator[Piece]], ...]
    stats: tuple[str, ...]
    remark: str = ""

    def pieces(self) -> Iterator[Piece]:
        """Yield all documents in a fixed order, in pieces (see readers.Piece); raise UserError for unreadable ones."""
        for part in self.parts:
            yield from part()

    @property
    def stamp(self) -> str:
        """Hash of `stats` and of the version of surveys; with an equal stamp, the text need not be surveyed again."""
        return hashlib.sha256(json.dumps([2, *self.stats]).encode()).hexdigest()


def open_corpus(source: str, text_field: str = "text", entities_field: str = "") -> Corpus:
    """Locate the text of a source; the fields are those of `read_documents`. Raise UserError if a part does not exist.

    A file that several parts name is read once.
    """
    parts: list[str] = []
    stats: list[str] = []
    remarks: list[str] = []
    seen: set[str] = set()
    names = collections.defaultdict(list)  # of files that are left out, by reason, and of those that are read
    with reading(source):
        items = split_source(source)
    for item in dict.fromkeys(items):
        if item == "python-docs" or item.startswith(_DATASETS):
            parts.append(item)
            stats.extend(_dataset_state(item, _columns(text_field, entities_field)))
        else:
            with reading(item):
                files = _files(item)
            for path in files:
                kind, name = kind_of(path), real_path(path)
                if kind is None:
                    reason = suffix_of(path) or "without a suffix"
                elif name in seen:
                    reason = "read already"
                else:
                    with reading(path):
                        state = file_state(path)
                    columns = _columns(text_field, entities_field)
                    fields = [""] if kind == "text" else [*columns.names, *columns.optional]
                    quoting = quoting_remark(path) if kind == "table" else ""
                    remarks += [line_hint(path) if kind == "text" and state[0] and not parts else quoting]
                    stats.append(json.dumps([name, *state, *fields, *filter(None, [quoting])]))
                    is_file = in_bucket(path) or os.path.isfile(path)
                    reason = "" if state[0] else "empty" if is_file else "no regular file"
                seen.add(name)
                names[reason].append(os.path.basename(path))
                if not reason:
                    parts.append(path)
    readers = tuple(functools.partial(read_documents, part, text_field, entities_field) for part in parts)
    remarks.insert(0, _remark(len(names.pop("", [])), names))
    return Corpus(source, readers, tuple(stats), "\n".join(filter(None, remarks)))


def read_documents(source: str, text_field: str, entities_field: str = "") -> Iterator[Piece]:
    """Yield the documents of a file or of a dataset; raise UserError, with the place, for unreadable content.

    Args:
        source: The file or dataset (see `jaxlm.data.rows.read_rows`).
        text_field: Column of the text, except in files of text.
        entities_field: Column of the mentions, which tables lack; "" to read none.
    """
    cutter = Cutter()
    if source == "python-docs":
        for text in python_docs.documents():
            yield from cutter.document(replace_surrogates(text))
        return
    if kind_of(source) == "text":
        with open_text(source) as stream:
            yield from read_text(stream, cutter)
        return
    for row in read_rows(source, _columns(text_field, "" if kind_of(source) == "table" else entities_field)):
        if isinstance(row, UserError):
            raise row
        place, values = row
        value = "" if values[text_field] is None else values[text_field]
        text = replace_surrogates(text_of(value, place, text_field, others=()))
        mentions = read_mentions(values.get(entities_field), text, place, entities_field)
        yield from cutter.document(text, mentions)


def _columns(text_field: str, entities_field: str) -> Columns:
    advice = "Choose the column of the text with --data.text-field"
    return Columns([text_field], advice, [entities_field] if entities_field else [])


def _dataset_state(source: str, columns: Columns) -> list[str]:
    """Return the state of the files of a dataset, equal if the dataset is unchanged."""
    if source == "python-docs":
        return [f"python-docs of Python {sys.version}"]
    if source.startswith("tfds:"):
        builder, data = tfds_source.open_dataset(source)
        columns.chosen(list(builder.info.features), source)
        files = sorted(str(file) for file in builder.data_path.iterdir() if not file.is_dir())
    else:
        data = arrow_source.open_dataset(source, columns)
        files = [file["filename"] for file in data.cache_files]
    facts = [source, *columns.names, *columns.optional, len(data)]
    return [json.dumps(facts), *(json.dumps([file, *file_state(file)]) for file in files)]


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
    if source and "," in source and not source.startswith(_DATASETS) and epath.Path(source).exists():
        return [source]
    items = [item.strip() for item in source.split(",")]
    if not all(items):
        raise UserError(f"--data.source names no text; give {SOURCES}.")
    return items


def _files(item: str) -> list[str]:
    """Return the files of a path, a folder or a glob, sorted; raise UserError if none is of a kind that is read."""
    refuse_saved_dataset(item)
    path, wild = any_path(item), _WILD.search(item)
    if path.is_dir():
        found = list(_walk(path, set()))
    elif path.exists():
        found = [str(path)]
    elif wild:
        found = [file for file in _matches(item, wild.start()) if not epath.Path(file).is_dir()]
    else:
        raise UserError(f"{item} does not exist; --data.source takes {SOURCES}.")
    if not any(map(kind_of, found)):
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
    """Yield all files below a folder, visiting every folder once even if links repeat it."""
    if real_path(folder) not in seen:
        seen.add(real_path(folder))
        for entry in folder.iterdir():
            if entry.is_dir():
                yield from _walk(entry, seen)
            else:
                yield str(entry)
