"""Construction of a token store: the text is tokenized in chunks, which are then joined.

A chunk is 8 MB of the text. A thread tokenizes one at a time and writes it to a file of the folder `<store>.chunks`, so
an interrupted build goes on with the chunks that are missing, and several processes or machines can each tokenize a
range of them. The store is the same whoever has tokenized them.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import dataclasses
import hashlib
import io
import itertools
import json
import os
import secrets
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from etils import epath

from jaxlm.data import arrays, store
from jaxlm.data.fingerprint import HeldOutRule, Part, Survey, TextHash, sentence_parts
from jaxlm.data.mentions import first_tokens
from jaxlm.data.readers import NO_TEXT, Piece
from jaxlm.errors import UserError
from jaxlm.paths import in_bucket, reading, write_whole
from jaxlm.tokenizers.unknown import NUM_WORDS, unknown_words
from jaxlm.types import Report

_CHUNK = 1 << 23  # bytes of text
_GROUP = 1 << 18  # characters encoded at a time, since encodings take many bytes a token
# Texts of a store, and their first characters, with which the tokenizer is compared with its export.
_COMPARED, _COMPARED_LENGTH = 1000, 1000
_PROGRESS_SECONDS = 10.0  # between two progress reports
_MOST_THREADS = 8  # more threads only wait for the one that reads


@dataclasses.dataclass(frozen=True)
class StoreBuild:
    """A token store to build.

    Attributes:
        folder: folder of the store.
        files: the documents of each file of the text, read at most once.
        text: survey of the text.
        tokenizer: a `jaxlm.tokenizers.tokenizer.Tokenizer`.
        held_out: share of the text to hold out (see HeldOutRule).
        source: name of the text, for messages and the manifest.
        sentences: whether each sentence becomes a document of the store; whole documents are held out all the same.
        workers: number of threads; 0 for one per core, up to 8.
        repeated: first bytes of documents that are left out of the training split, since they are also held out.
        report: gets a line before text is tokenized, and about the progress now and then.
    """

    folder: str
    files: Sequence[Iterable[Piece]]
    text: Survey
    tokenizer: Any
    held_out: float
    source: str = ""
    sentences: bool = False
    workers: int = 0
    repeated: Collection[int] = ()
    report: Report = print

    def missing(self, shard: int = 0, shards: int = 1) -> list[int]:
        """Return the numbers of the chunks of a shard, a contiguous range, that are not yet tokenized."""
        if store.is_finished(self.folder):
            return []
        folder, count = self._chunks, self.num_chunks
        done = {path.name for path in folder.iterdir()} if folder.is_dir() else ()
        return [k for k in range(shard * count // shards, (shard + 1) * count // shards) if _file_name(k) not in done]

    def tokenize(self, shard: int = 0, shards: int = 1) -> None:
        """Tokenize the missing chunks of a shard.

        Reading begins with the file of the first of them, since no reader can begin within a file.

        Raises:
            UserError: the text cannot be read, or a chunk cannot be written.
        """
        if not (missing := self.missing(shard, shards)):
            return
        part = f", {len(missing):,} of {self.num_chunks:,} chunks" if len(missing) < self.num_chunks else ""
        size = f"{self.text.bytes / 1e6:,.1f} MB, {self.text.documents:,} documents{part}"
        self.report(f"Tokenising {self.source} ({size}) into {self.folder}")
        threads = self.workers or min(_MOST_THREADS, os.cpu_count() or 1)
        waiting: collections.deque[Future] = collections.deque()
        start = reported = time.monotonic()
        with ThreadPoolExecutor(threads, "jaxlm-tokenise") as pool:
            for number, chunk in enumerate(self._read(missing)):
                waiting.append(pool.submit(self._write_chunk, *chunk))
                if len(waiting) > threads:
                    waiting.popleft().result()
                    if (now := time.monotonic()) - reported >= _PROGRESS_SECONDS:
                        done, reported = (number + 1 - threads) * _CHUNK / 1e6, now
                        total, speed = len(missing) * _CHUNK / 1e6, done / (now - start)
                        self.report(f"Tokenised {done:,.1f} of {total:,.1f} MB, {speed:,.1f} MB/s")
            for future in waiting:
                future.result()

    def finish(self) -> store.Store:
        """Tokenize all missing chunks, join them, and open the store; if it is finished, only open it.

        The manifest is written last. Simultaneous builds by several processes give the same store.

        Raises:
            UserError: the text differs from its survey, or does not fit on the disk.
        """
        if not store.is_finished(self.folder):
            self.tokenize()
            try:
                self._join()
            except Exception:
                if not store.is_finished(self.folder):  # else another build has finished it and removed the chunks
                    raise
            with contextlib.suppress(OSError):  # another build removes them too
                self._chunks.rmtree()
        return store.Store(self.folder)

    @property
    def num_chunks(self) -> int:
        """Number of chunks of the text."""
        return -(-self.text.bytes // _CHUNK)

    @property
    def _chunks(self) -> epath.Path:
        return epath.Path(f"{self.folder}.chunks")

    @property
    def _dtype(self) -> str:
        return "uint16" if self.tokenizer.vocabulary.size <= 1 << 16 else "uint32"

    def _read(self, numbers: Sequence[int]) -> Iterator[tuple[int, list[Part], bytes]]:
        """Yield the number of each chunk of `numbers`, its parts, and the digests of the documents that end in it."""
        file = max(0, bisect.bisect_right(self.text.starts, numbers[0] * _CHUNK) - 1)
        rule, seen, left = HeldOutRule.of(self.held_out, self.text), TextHash(self.text.starts[file]), set(numbers)

        def pieces() -> Iterator[tuple[int, Piece, int, int, bool]]:
            """Yield the chunk and first byte of each piece, its document's split hash, and whether that is repeated."""
            is_repeated = False
            for piece in itertools.chain.from_iterable(self.files[file:]):
                start = seen.bytes
                if piece != NO_TEXT:
                    is_repeated = start in self.repeated if piece.first else is_repeated
                    yield start // _CHUNK, piece, start, seen.add(piece), is_repeated

        for number, group in itertools.groupby(pieces(), lambda item: item[0]):
            if number > numbers[-1]:
                break
            if number in left:
                left.remove(number)
                parts, digests = [], b""
                for _, piece, start, split_hash, is_repeated in group:
                    found = rule.divide(piece, split_hash, start, seen.bytes)
                    parts += [part for part in found if part.is_held_out or not is_repeated]
                    digests += seen.digest if piece.last else b""
                yield number, parts, digests
        for number in sorted(left):  # the last piece may go through a whole chunk
            yield number, [], b""

    def _write_chunk(self, number: int, parts: list[Part], digests: bytes) -> None:
        """Tokenize the parts of a chunk and write its file."""
        every = max(1, len(parts) * self.num_chunks // _COMPARED)
        self.tokenizer.require_equal_ids([part.text[:_COMPARED_LENGTH] for part in parts[::every]])
        if self.sentences:
            parts = [sentence for part in parts for sentence in sentence_parts(part)]
        names: dict[str, int] = {}  # the entities of the chunk, numbered from 1
        ids, entities = [], []
        for tokens, mentions in _encode(self.tokenizer, parts):
            ids.append(tokens.astype(self._dtype))
            entities.append(np.zeros(len(tokens) if self.text.mentions else 0, "uint32"))
            for token, entity in mentions:
                entities[-1][token] = names.setdefault(entity, 1 + len(names))
        arrays_of = {"digests": np.frombuffer(digests, "uint8")}
        arrays_of["names"] = np.frombuffer(json.dumps(list(names)).encode(), "uint8")
        unk = self.tokenizer.vocabulary.unk
        words = unknown_words(self.tokenizer, (part.text for i, part in enumerate(parts) if unk in ids[i]))
        arrays_of["unknown_words"] = np.frombuffer(json.dumps(words).encode(), "uint8")
        for split in store.SPLITS:
            own = [i for i, part in enumerate(parts) if part.is_held_out == (split == "held_out")]
            is_last = np.array([parts[i].last for i in own], bool)
            arrays_of[f"{split}.tokens"] = np.concatenate([np.zeros(0, self._dtype), *(ids[i] for i in own)])
            arrays_of[f"{split}.entities"] = np.concatenate([np.zeros(0, "uint32"), *(entities[i] for i in own)])
            arrays_of[f"{split}.ends"] = np.cumsum([len(ids[i]) for i in own], dtype="int64")[is_last]
            arrays_of[f"{split}.text_bytes"] = np.int64(sum(len(parts[i].text.encode()) for i in own))
        file = io.BytesIO()
        np.savez(file, **arrays_of)
        write_whole(self._chunks / _file_name(number), file.getvalue())

    def _join(self) -> None:
        """Write the store from its chunks.

        Raises:
            UserError: the chunks are of another text than the survey, and are removed; or as `finish`.
        """
        text, vocabulary, folder = self.text, self.tokenizer.vocabulary, epath.Path(self.folder)
        name = secrets.token_hex(8)  # two builds at once write arrays of their own, and the last manifest counts
        # Beside the chunks, so that those of a killed build go with them; a bucket has no renaming.
        writing = (folder if in_bucket(folder) else self._chunks) / name
        try:
            writers = {
                split: _SplitWriter(str(writing / split), self._dtype, vocabulary.size, text.mentions > 0)
                for split in store.SPLITS
            }
            seen, entities, unknown = hashlib.sha256(), {}, {}
            for number in range(self.num_chunks):
                path = self._chunks / _file_name(number)
                with reading(path), np.load(io.BytesIO(path.read_bytes())) as file:
                    chunk = dict(file)
                seen.update(chunk["digests"])
                for entity in json.loads(chunk["names"].tobytes()):
                    entities.setdefault(entity, 1 + len(entities))
                unknown |= dict.fromkeys(json.loads(chunk["unknown_words"].tobytes()))
                for split, writer in writers.items():
                    writer.add(chunk, split, entities)
            if seen.hexdigest() != text.fingerprint:
                self._chunks.rmtree()
                raise UserError(
                    "The text of --data.source changed while it was tokenised; run again when it is complete."
                )
            parts = {split: writer.close() for split, writer in writers.items()}
            if not in_bucket(folder):
                folder.mkdir(parents=True, exist_ok=True)
                writing = writing.rename(folder / name)
                if store.is_finished(self.folder):  # another build may have removed some of these arrays
                    writing.rmtree()
                    return
        except BaseException:
            with contextlib.suppress(OSError):
                writing.rmtree()
            raise
        manifest = {
            "format": store.FORMAT,
            "fingerprint": store.store_fingerprint(text, self.tokenizer.fingerprint, self.held_out, self.sentences,
                                                   self.repeated),
            "text": text.fingerprint, "tokenizer": self.tokenizer.fingerprint,
            "held_out": self.held_out,
            "held_out_tail": HeldOutRule.of(self.held_out, text).tail < text.bytes,
            "unit": "sentences" if self.sentences else "documents",
            "source": self.source,
            "vocabulary": {name: getattr(vocabulary, name) for name in ("size", "pad", "eos", "unk")},
            "unknown_words": list(unknown)[:NUM_WORDS],
            "arrays": name,
            "parts": parts,
        }
        if text.mentions:
            manifest["entities"] = len(entities)
            write_whole(folder / store.ENTITIES, json.dumps(list(entities), ensure_ascii=False).encode())
        write_whole(folder / store.MANIFEST, json.dumps(manifest, indent=1).encode())


def _file_name(number: int) -> str:
    return f"{number:06}.npz"


def _encode(tokenizer: Any, parts: list[Part]) -> Iterator[tuple[np.ndarray, list[tuple[int, str]]]]:
    """Yield for each part its ids, int32 [tokens], and (first token, entity) of its mentions."""
    size = itertools.accumulate(len(part.text) for part in parts)
    for _, grouped in itertools.groupby(zip(parts, size, strict=True), lambda item: item[1] // _GROUP):
        group = [part for part, _ in grouped]
        texts = [part.text for part in group]
        if any(part.mentions for part in group):
            for (ids, at), part in zip(tokenizer.encode_with_offsets(texts), group, strict=True):
                yield ids, list(first_tokens(at, part.mentions))
        else:
            yield from ((ids, []) for ids in tokenizer.encode_arrays(texts, num_threads=1))


class _SplitWriter:
    """Writer of one split of a store, which appends the chunks."""

    def __init__(self, folder: str, dtype: str, vocab_size: int, has_entities: bool) -> None:
        """Create the arrays."""
        self._folder = folder
        self._entities = arrays.ArrayWriter(f"{folder}/entities", "uint32") if has_entities else None
        self._tokens = arrays.ArrayWriter(f"{folder}/tokens", dtype)
        self._offsets = arrays.ArrayWriter(f"{folder}/offsets", "int64")
        self._offsets.append(np.zeros(1, np.int64))
        self._counts = np.zeros(vocab_size, np.int64)
        self._length = self._document_start = self._longest = self._text_bytes = self._mentions = 0

    def add(self, chunk: Mapping[str, np.ndarray], split: str, entities: Mapping[str, int]) -> None:
        """Append what a chunk has for the split; `entities` are the numbers of all entities."""
        tokens, ends = chunk[f"{split}.tokens"], self._length + chunk[f"{split}.ends"]
        self._tokens.append(tokens)
        self._counts += np.bincount(tokens, minlength=len(self._counts))
        sizes = np.diff(ends, prepend=self._document_start)
        self._offsets.append(ends[sizes > 0])  # without empty documents
        self._longest = int(max(self._longest, sizes.max(initial=0)))
        self._document_start = ends[-1] if len(ends) else self._document_start
        self._length += len(tokens)
        self._text_bytes += int(chunk[f"{split}.text_bytes"])
        if self._entities is not None:
            numbers = [0, *(entities[name] for name in json.loads(chunk["names"].tobytes()))]
            found = np.array(numbers, np.uint32)[chunk[f"{split}.entities"]]
            self._entities.append(found)
            self._mentions += int(np.count_nonzero(found))

    def close(self) -> dict[str, int]:
        counts = arrays.ArrayWriter(f"{self._folder}/counts", "int64")
        counts.append(self._counts)
        counts.close()
        if self._entities is not None:
            self._entities.close()
        return ({} if self._entities is None else {"mentions": self._mentions}) | {
            "documents": self._offsets.close() - 1,
            "tokens": self._tokens.close(),
            "longest": self._longest,
            "text_bytes": self._text_bytes,
            "disk_bytes": store.disk_bytes(self._folder),
        }
