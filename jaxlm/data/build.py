"""Construction of a token store: stream the text, tokenize it in parallel, and rename the complete store."""

from __future__ import annotations

import collections
import contextlib
import errno
import json
import os
import secrets
import shutil
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from etils import epath

from jaxlm.data import arrays, store
from jaxlm.data.fingerprint import HeldOutRule, Part, Survey, TextHash, sentence_parts
from jaxlm.data.mentions import first_tokens
from jaxlm.data.readers import Piece
from jaxlm.errors import UserError
from jaxlm.paths import in_bucket

_GROUP = 1 << 18  # characters per task of a thread
_MOST_THREADS = 8  # more threads only wait for the GIL


def build_store(
    folder: str,
    pieces: Iterable[Piece],
    text: Survey,
    tokenizer: Any,
    held_out: float,
    *,
    source: str = "",
    sentences: bool = False,
    workers: int = 0,
    progress: Callable[[int], None] = lambda done: None,
) -> store.Store:
    """Tokenize a text into a new store at `folder`, or return the finished store there.

    The store is written under a temporary name beside `folder` and renamed when it is complete. Simultaneous builds by
    several processes give the same store.

    Args:
        folder: folder of the store.
        pieces: the documents.
        text: their survey.
        tokenizer: a `jaxlm.tokenizers.tokenizer.Tokenizer`.
        held_out: share of the text to hold out (see HeldOutRule).
        source: name of the text, for messages and the manifest.
        sentences: whether each sentence becomes a document of the store; whole documents are held out all the same.
        workers: number of threads; 0 for one per core, up to 8.
        progress: called with the number of bytes done.

    Raises:
        UserError: the text is empty, differs from its survey, or does not fit on the disk.
    """
    if store.is_finished(folder):
        return store.Store(folder)
    if text.documents == 0:
        raise UserError(f"{source or 'The source'} holds no text; every document in it is empty.")
    with new_folder(folder) as writing:
        rule = HeldOutRule.of(held_out, text)
        # In a bucket two builds share the folder, so each writes arrays of its own, and the last manifest counts.
        arrays_name = secrets.token_hex(8) if in_bucket(folder) else ""
        arrays_folder = str(epath.Path(writing) / arrays_name)
        facts, entities = _write(arrays_folder, pieces, text, tokenizer, rule, sentences, workers, progress)
        manifest = {
            "format": store.FORMAT,
            "fingerprint": store.store_fingerprint(text, tokenizer.fingerprint, held_out, sentences),
            "text": text.fingerprint,
            "tokenizer": tokenizer.fingerprint,
            "held_out": held_out,
            "held_out_tail": rule.tail < text.bytes,
            "unit": "sentences" if sentences else "documents",
            "source": source,
            "vocabulary": {
                "size": tokenizer.vocabulary.size,
                "pad": tokenizer.vocabulary.pad,
                "eos": tokenizer.vocabulary.eos,
            },
            "arrays": arrays_name,
            "parts": facts,
        }
        if text.mentions:
            manifest["entities"] = len(entities)
            (epath.Path(writing) / store.ENTITIES).write_text(json.dumps(entities, ensure_ascii=False))
        (epath.Path(writing) / store.MANIFEST).write_text(json.dumps(manifest, indent=1))
    return store.Store(folder)


def _write(
    folder: str,
    pieces: Iterable[Piece],
    text: Survey,
    tokenizer: Any,
    rule: HeldOutRule,
    sentences: bool,
    workers: int,
    progress: Callable[[int], None],
) -> tuple[dict[str, Any], list[str]]:
    """Write the splits; return the facts of each, and the names of the entities."""
    size, entities = tokenizer.vocabulary.size, {} if text.mentions else None
    writers = {name: _SplitWriter(str(epath.Path(folder) / name), size, entities) for name in store.SPLITS}
    seen = TextHash()

    def groups() -> Iterator[tuple[list[Part], int]]:
        """Yield parts of the text for one thread, and the number of bytes so far."""
        group: list[Part] = []
        size = 0
        for piece in pieces:
            start = seen.bytes
            route = seen.add(piece)
            for part in rule.divide(piece, route, start, seen.bytes):
                group += sentence_parts(part) if sentences else [part]
            size += len(piece.text)
            if size >= _GROUP:
                yield group, seen.bytes
                group, size = [], 0
        yield group, seen.bytes

    def write(encoding: Future, group: list[Part], done: int) -> None:
        for (ids, mentions), part in zip(encoding.result(), group, strict=True):
            writers["held_out" if part.is_held_out else "train"].add(ids, mentions, part)
        for writer in writers.values():
            writer.flush()
        progress(done)

    threads = workers or min(_MOST_THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 4)
    with ThreadPoolExecutor(threads, "jaxlm-tokenise") as pool:
        waiting: collections.deque[tuple] = collections.deque()
        for group, done in groups():
            waiting.append((pool.submit(_encode, tokenizer, group), group, done))
            if len(waiting) > threads + 1:
                write(*waiting.popleft())
        while waiting:
            write(*waiting.popleft())
    if seen.fingerprint != text.fingerprint:
        raise UserError("The text of --data.source changed while it was tokenised; run again when it is complete.")
    return {name: writer.close() for name, writer in writers.items()}, list(entities or ())


def _encode(tokenizer: Any, group: list[Part]) -> list[tuple[np.ndarray, list[tuple[int, str]]]]:
    """Return for each part its ids, int32 [tokens], and (first token, entity) of its mentions."""
    if not any(part.mentions for part in group):
        return [(ids, []) for ids in tokenizer.encode_arrays([part.text for part in group], num_threads=1)]
    encoded = tokenizer.encode_with_offsets([part.text for part in group])
    return [(ids, list(first_tokens(at, part.mentions))) for (ids, at), part in zip(encoded, group, strict=True)]


class _SplitWriter:
    """Writer of one split of a store, which appends documents piece by piece."""

    def __init__(self, folder: str, vocab_size: int, entities: dict[str, int] | None) -> None:
        """Create the arrays; `entities` numbers the entities from 1 for all splits, None for text without them."""
        self._folder = folder
        self._numbers = entities
        self._entities = None if entities is None else arrays.ArrayWriter(f"{folder}/entities", "uint32")
        self._mentions = 0
        self._dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
        self._tokens = arrays.ArrayWriter(f"{folder}/tokens", self._dtype)
        self._offsets = arrays.ArrayWriter(f"{folder}/offsets", "int64")
        self._offsets.append(np.zeros(1, np.int64))
        self._counts = np.zeros(vocab_size, np.int64)
        self._pending: list[np.ndarray] = []  # ids that `flush` will write
        self._ends: list[int] = []  # document ends that `flush` will write
        self._length = 0
        self._document_start = 0
        self._text_bytes = 0

    def add(self, ids: np.ndarray, mentions: list[tuple[int, str]], part: Part) -> None:
        self._pending.append(np.asarray(ids, self._dtype))
        if self._entities is not None:
            entities = np.zeros(len(ids), np.uint32)
            for token, entity in mentions:
                entities[token] = self._numbers.setdefault(entity, 1 + len(self._numbers))
            self._entities.append(entities)
            self._mentions += len(mentions)
        self._length += len(self._pending[-1])
        self._text_bytes += part.size
        if part.last:
            if self._length > self._document_start:
                self._ends.append(self._length)
            self._document_start = self._length

    def flush(self) -> None:
        if self._pending:
            values = np.concatenate(self._pending)
            self._tokens.append(values)
            self._counts += np.bincount(values, minlength=len(self._counts))
            self._offsets.append(np.asarray(self._ends, np.int64))
            self._pending, self._ends = [], []

    def close(self) -> dict[str, int]:
        counts = arrays.ArrayWriter(f"{self._folder}/counts", "int64")
        counts.append(self._counts)
        counts.close()
        if self._entities is not None:
            self._entities.close()
        return ({} if self._entities is None else {"mentions": self._mentions}) | {
            "documents": self._offsets.close() - 1,
            "tokens": self._tokens.close(),
            "text_bytes": self._text_bytes,
            "disk_bytes": store.disk_bytes(self._folder),
        }


@contextlib.contextmanager
def new_folder(folder: str) -> Iterator[str]:
    """Yield a temporary folder, rename it to `folder` on success, and remove it on failure.

    A bucket has no rename, so a folder there is written in place; its manifest, written last, marks it as finished.
    """
    if in_bucket(folder):
        yield folder
        return
    parent, name = os.path.split(os.path.abspath(folder))
    host = socket.gethostname()
    temporary = os.path.join(parent, f".{name}.{host}.{os.getpid()}.{threading.get_ident()}")
    try:
        os.makedirs(parent, exist_ok=True)
        _remove_abandoned(parent, f".{name}.{host}.")
        os.makedirs(temporary)
        yield temporary
        try:
            os.rename(temporary, folder)
        except OSError:
            if not store.is_finished(folder):
                raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise arrays.disk_full(folder) from error
        raise UserError(
            f"{error.filename or folder} cannot be written ({error.strerror}); choose another --data.cache-dir."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _remove_abandoned(parent: str, prefix: str) -> None:
    """Remove the temporary folders of killed builds of the same store on this machine."""
    for name in os.listdir(parent):
        if name.startswith(prefix):
            pid = int(name.removeprefix(prefix).split(".")[0])
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                shutil.rmtree(os.path.join(parent, name), ignore_errors=True)
            except PermissionError:  # the process of another user is alive
                pass
