"""Documents that repeat an earlier one word for word, which are left out of a text.

They have the same 128-bit hash of their text in NFC with white space collapsed; the first one stays. Texts are
streamed; a document takes 16 bytes of memory, and some 100 while all are compared.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import numpy as np

from jaxlm.data.cache import cached_arrays
from jaxlm.data.corpus import Corpus
from jaxlm.data.readers import NO_TEXT, Piece
from jaxlm.types import Report

Deduplicate = Literal["off", "exact"]


def document_keys(pieces: Iterable[Piece]) -> Iterator[np.ndarray]:
    """Yield the hash of each document: uint64 [2]."""
    exact = hashlib.blake2b()
    for piece in pieces:
        if piece == NO_TEXT:
            continue
        if piece.first:
            exact = hashlib.blake2b(digest_size=16)
        # A piece ends before white space, or where a script without spaces reaches its largest size.
        exact.update((" ".join(unicodedata.normalize("NFC", piece.text).split()) + " ").encode())
        if piece.last:
            yield np.frombuffer(exact.digest(), np.uint64)


def first_of(keys: np.ndarray) -> np.ndarray:
    """Return for each document the first one with its keys, int64 [documents]."""
    _, first, group = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    return first[group.ravel()]


def without_duplicates(corpora: Sequence[Corpus], kind: Deduplicate, cache_dir: str, report: Report) -> list[Corpus]:
    """Return the corpora without documents that repeat one before them in the same or an earlier corpus.

    The texts are read once; the cache folder keeps which documents stay.
    """
    facts = [1, kind, *(corpus.stamp for corpus in corpora)]

    def compute() -> dict[str, np.ndarray]:
        report(f"Looking for {kind} duplicates in {', '.join(corpus.source for corpus in corpora)}")
        dtype = np.dtype((np.uint64, 2))
        parts = (part() for corpus in corpora for part in corpus.parts)
        keys = [np.fromiter(document_keys(part), dtype) for part in parts]
        first = first_of(np.concatenate(keys))
        return {"kept": first == np.arange(len(first)), "ends": np.cumsum([len(part) for part in keys])}

    arrays = cached_arrays("duplicates", facts, compute, cache_dir)
    masks, result = iter(np.split(arrays["kept"], arrays["ends"][:-1])), []
    for corpus in corpora:
        kept = [next(masks) for _ in corpus.parts]
        parts = tuple(functools.partial(_kept, part, mask) for part, mask in zip(corpus.parts, kept, strict=True))
        all_kept = np.concatenate(kept)
        told = f"Left out of {corpus.source} as {kind} duplicates: {(~all_kept).sum():,} of {len(all_kept):,} documents"
        stats, remark = (*corpus.stats, json.dumps(facts)), "\n".join(filter(None, [corpus.remark, told]))
        result.append(dataclasses.replace(corpus, parts=parts, stats=stats, remark=remark))
    return result


def _kept(part: Callable[[], Iterator[Piece]], kept: np.ndarray) -> Iterator[Piece]:
    number = -1
    for piece in part():
        number += piece.first and piece != NO_TEXT
        if piece == NO_TEXT or kept[number]:
            yield piece
