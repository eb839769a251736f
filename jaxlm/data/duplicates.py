"""Documents that repeat an earlier one, word for word or nearly, which are left out of a text.

Exact duplicates have the same 128-bit hash of their text in NFC with white space collapsed. Near ones have MinHash
signatures (Broder 1997) that agree in one of `BANDS` bands of `ROWS` hashes of the documents' shingles: with Jaccard
similarity s, probability 1 - (1 - s^ROWS)^BANDS, 0.21 at 0.6, 0.77 at 0.75 and 0.99 at 0.85, as for FineWeb (Penedo et
al. 2024). Duplicates of duplicates are one group, and the first document of each group stays. Texts are streamed; a
document takes 16 bytes of memory, or 128 for near duplicates, and some 100, or 400, while all are compared.

Without deduplication, documents that are held out still leave the training text (`repeated_documents`).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
import unicodedata
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import numpy as np

from jaxlm.data.cache import cached_arrays
from jaxlm.data.corpus import Corpus
from jaxlm.data.fingerprint import HeldOutRule, split_documents
from jaxlm.data.readers import NO_TEXT, Piece
from jaxlm.types import Report

Deduplicate = Literal["off", "exact", "near"]
BANDS, ROWS = 14, 8
SHINGLE = 5  # words; characters of scripts without spaces
PRIME = (1 << 61) - 1
_AT_ONCE = 1 << 10  # words hashed together
# Thai to Lao, Burmese, Khmer, kana and Han.
_UNSPACED = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")
_A, _C = (np.random.SeedSequence(0).generate_state(2 * BANDS * ROWS, np.uint64) % PRIME).reshape(2, -1, 1)
_ODD = np.random.SeedSequence(1).generate_state(SHINGLE + ROWS, np.uint64) | 1  # multipliers mod 2^64


def minima(words: Sequence[str]) -> np.ndarray:
    """Return the minima over the shingles x of words of the hashes (a x + c) mod PRIME: uint64 [BANDS * ROWS]."""
    codes = np.array([zlib.crc32(word.encode()) for word in words], np.uint64)
    width, least = min(SHINGLE, len(codes)) or 1, np.full(len(_A), PRIME, np.uint64)
    for start in range(0, len(codes) - width + 1, _AT_ONCE):
        windows = np.lib.stride_tricks.sliding_window_view(codes[start : start + _AT_ONCE + width - 1], width)
        x = (windows @ _ODD[:width]) >> 32
        high, low = (_A >> 32) * x, (_A & 0xFFFFFFFF) * x
        # 2^61 is 1 mod PRIME: 2^32 · high is a rotation of its 61 bits, and bits above them count once.
        total = ((high & ((1 << 29) - 1)) << 32 | high >> 29) + (low & PRIME) + (low >> 61) + _C
        total = (total & PRIME) + (total >> 61)  # `%` takes ten times as long
        least = np.minimum(least, np.minimum(total, total - PRIME).min(axis=1))
    return least


def document_keys(pieces: Iterable[Piece], is_near: bool) -> Iterator[np.ndarray]:
    """Yield the keys of each document: uint64 [2], the exact one, and for near duplicates [BANDS] more."""
    exact, words, least = hashlib.blake2b(), [], minima([])
    for piece in pieces:
        if piece == NO_TEXT:
            continue
        if piece.first:
            exact, words, least = hashlib.blake2b(digest_size=16), [], minima([])
        text = unicodedata.normalize("NFC", piece.text)
        exact.update((" ".join(text.split()) + " ").encode())
        words += _WORD.findall(text.casefold()) if is_near else []
        if is_near and (len(words) >= SHINGLE or (piece.last and least[0] == PRIME)):  # or a document without a shingle
            least, words = np.minimum(least, minima(words or [exact.hexdigest()])), words[1 - SHINGLE :]
        if piece.last:
            bands = [least.reshape(BANDS, ROWS) @ _ODD[SHINGLE:]] if is_near else []
            yield np.concatenate([np.frombuffer(exact.digest(), np.uint64), *bands])


def first_of(keys: np.ndarray) -> np.ndarray:
    """Return for each document the first one of its group, int64 [documents], from the keys of all, in order."""
    columns = [keys[:, :2], *keys[:, 2:].T]
    groups = [np.unique(column, axis=0, return_inverse=True)[1].ravel() for column in columns]
    first, before = np.arange(len(keys)), None
    while not np.array_equal(first, before):  # groups that share a document are one
        before = first
        for group in groups:
            least = np.full(len(keys), len(keys))
            np.minimum.at(least, group, first)
            first = least[group]
    return first


def without_duplicates(corpora: Sequence[Corpus], kind: Deduplicate, cache_dir: str, report: Report) -> list[Corpus]:
    """Return the corpora without documents that repeat one before them in the same or an earlier corpus.

    The texts are read once; the cache folder keeps which documents stay.
    """
    facts = [1, kind, *(corpus.stamp for corpus in corpora)]

    def compute() -> dict[str, np.ndarray]:
        report(f"Looking for {kind} duplicates in {', '.join(corpus.source for corpus in corpora)}")
        dtype = np.dtype((np.uint64, 2 + BANDS * (kind == "near")))
        parts = (part() for corpus in corpora for part in corpus.parts)
        keys = [np.fromiter(document_keys(part, kind == "near"), dtype) for part in parts]
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


def repeated_documents(
    corpora: Sequence[Corpus], rules: Sequence[HeldOutRule], cache_dir: str, report: Report
) -> list[frozenset[int]]:
    """Return for each corpus the first bytes of documents that it trains on and that itself or another one holds out.

    Sources hold out different shares, and the tail of a small text may repeat a document before it. Documents are equal
    if their split hashes are. A corpus keeps its repeats if it would otherwise be empty.
    """
    facts = [1, *([corpus.stamp, rule.below, rule.tail] for corpus, rule in zip(corpora, rules, strict=True))]

    def compute() -> dict[str, np.ndarray]:
        documents = (split_documents(each.pieces(), rule) for each, rule in zip(corpora, rules, strict=True))
        found = [np.fromiter(each, np.dtype((np.uint64, 4))).T for each in documents]
        held_out = np.sort(np.concatenate([hashes[held > 0] for _, hashes, _, held in found]))
        result = {}
        for corpus, (starts, hashes, trained, held) in zip(corpora, found, strict=True):
            copies = np.searchsorted(held_out, hashes, side="right") - np.searchsorted(held_out, hashes)
            leaves = (trained > 0) & (copies > held)  # the document that the tail divides is no copy of itself
            leaves &= leaves.sum() < trained.sum()
            result[str(len(result))] = starts[leaves]
            if leaves.any():
                report(f"Left out of the training text of {corpus.source}, as held out: {leaves.sum():,} documents")
        return result

    arrays = cached_arrays("repeated", facts, compute, cache_dir)
    return [frozenset(arrays[str(number)].tolist()) for number in range(len(corpora))]


def _kept(part: Callable[[], Iterator[Piece]], kept: np.ndarray) -> Iterator[Piece]:
    number = -1
    for piece in part():
        number += piece.first and piece != NO_TEXT
        if piece == NO_TEXT or kept[number]:
            yield piece
