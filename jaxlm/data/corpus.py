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
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from etils import epath

from jaxlm.data import arrow_source, python_docs, tfds_source
from jaxlm.data.fingerprint import file_state
from jaxlm.data.readers import Cutter, Piece, kind_of, read_file, without_compression
from jaxlm.errors import UserError
from jaxlm.paths import any_path, in_bucket, reading, real_path
from jaxlm.tokenizers.tokenizer import mend_surrogates

SOURCES = "`python-docs`, a file, a folder, a glob, `tfds:NAME` or `hf:NAME`"
"""What --data.source takes, for messages."""
_DATASETS = ("tfds:", "hf:")
_AGAIN = "read already"
_WILD = re.compile(r"[*?\[]")


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The text of a source, located but not yet read.

    Attributes:
        source: the source as the user named it.
        parts: functions that read the text, in order.
        stats: state of each part (path and `file_state`), which detects changes without a full read.
        remark: which files are read and which are not, for the user; "" for a single file.
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
    """Locate the text of a source; the fields are those of `read_file`. Raise UserError if a part does not exist.

    A file that several parts name is read once.
    """
    parts: list[Callable[[], Iterator[Piece]]] = []
    stats: list[str] = []
    seen: set[str] = set()
    with reading(source):
        items = collections.Counter(_split(source))
    again = {item: None for item, count in items.items() if count > 1}
    left_out = collections.defaultdict(dict, {_AGAIN: again} if again else {})  # files by reason
    for item in items:
        if item == "python-docs":
            parts.append(lambda: _pieces(python_docs.documents()))
            stats.append(f"python-docs of Python {sys.version}")
        elif item.startswith(_DATASETS):
            texts, state = (tfds_source if item.startswith("tfds:") else arrow_source).open_text(item, text_field)
            parts.append(lambda texts=texts: _pieces(texts()))
            stats.extend(state)
        else:
            with reading(item):
                files = _files(item)
            for path in files:
                kind, name = kind_of(path), real_path(path)
                if kind is None or name in seen:
                    suffix = os.path.splitext(without_compression(path))[1]
                    left_out[_AGAIN if kind else suffix or "without a suffix"][name] = None
                    continue
                seen.add(name)
                stats.append(_stat(path, [text_field, entities_field] if entities_field else [text_field]))
                if json.loads(stats[-1])[1] == 0:
                    left_out["empty"][name] = None
                elif kind == "parquet":
                    parts.append(lambda path=path: _pieces(arrow_source.parquet_texts(path, text_field)))
                else:
                    parts.append(functools.partial(read_file, path, text_field, entities_field))
    return Corpus(source, tuple(parts), tuple(stats), _remark(len(seen), left_out))


def _remark(count: int, left_out: Mapping[str, Collection[str]]) -> str:
    """Return how many files are read, and for each reason how many are not, with their first names."""
    reasons = []
    for reason, paths in left_out.items():
        names = ", ".join(map(os.path.basename, itertools.islice(paths, 3)))
        reasons.append(f"{len(paths):,} {reason} ({names}{', …' * (len(paths) > 3)})")
    files = f"Files of text: {count - len(left_out.get('empty', ())):,}"
    remark = f"{files}; left out: {', '.join(reasons[:8])}{', …' * (len(reasons) > 8)}" if reasons else files
    return remark if reasons or count > 1 else ""


def _split(source: str) -> list[str]:
    if source and "," in source and not source.startswith(_DATASETS) and epath.Path(source).exists():
        return [source]
    items = [item.strip() for item in source.split(",")]
    if not all(items):
        raise UserError(f"--data.source names no text; give {SOURCES}.")
    return items


def _files(item: str) -> list[str]:
    """Return the files of a path, a folder or a glob, sorted; raise UserError if none is of a kind that is read."""
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


def _stat(path: str, fields: list[str]) -> str:
    with reading(path):
        if not in_bucket(path) and os.path.exists(path) and not os.path.isfile(path):
            raise UserError(f"{path} is not a regular file; write its text to one, which can be read more than once.")
        state = file_state(path)
    return json.dumps([real_path(path), *state, *([""] if kind_of(path) == "text" else fields)])


def _pieces(texts: Iterable[str]) -> Iterator[Piece]:
    cutter = Cutter()
    for text in texts:
        yield from cutter.document(mend_surrogates(text))
