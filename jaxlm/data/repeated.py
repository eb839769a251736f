"""Documents that a text trains on and also holds out, or that another source of its mixture holds out.

Sources of different sizes hold out different shares (see `HeldOutRule`), and the tail of a small text may repeat a
document before it. Such documents leave the training text; what is held out stays the same. Equal documents are those
with an equal split hash. The texts are streamed once, and a document takes 18 bytes of memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from jaxlm.data.cache import cached_arrays
from jaxlm.data.corpus import Corpus
from jaxlm.data.fingerprint import HeldOutRule, TextHash
from jaxlm.data.readers import NO_TEXT
from jaxlm.types import Report

_DOCUMENT = np.dtype([("start", np.int64), ("split_hash", np.uint64), ("is_trained", bool), ("is_held_out", bool)])


def repeated_documents(
    corpora: Sequence[Corpus], rules: Sequence[HeldOutRule], cache_dir: str, report: Report
) -> list[np.ndarray]:
    """Return the first byte, within its text, of each document that leaves the training text: int64 [documents].

    There is one array per corpus. None leaves a corpus that would have nothing left, such as copies of one document.
    """
    facts = [1, *([corpus.stamp, rule.below, rule.tail] for corpus, rule in zip(corpora, rules, strict=True))]

    def compute() -> dict[str, np.ndarray]:
        report(f"Looking for held-out documents in the training text of {', '.join(each.source for each in corpora)}")
        found = [np.fromiter(_split(*each), _DOCUMENT) for each in zip(corpora, rules, strict=True)]
        held_out = np.sort(np.concatenate([each["split_hash"][each["is_held_out"]] for each in found]))
        result = {}
        for number, each in enumerate(found):
            hashes = each["split_hash"]
            copies = np.searchsorted(held_out, hashes, side="right") - np.searchsorted(held_out, hashes)
            # The document that the tail divides is no copy of itself.
            leaves = each["is_trained"] & (copies > each["is_held_out"])
            result[str(number)] = each["start"][leaves & (leaves.sum() < each["is_trained"].sum())]
        return result

    arrays = cached_arrays("repeated", facts, compute, cache_dir)
    return [arrays[str(number)] for number in range(len(corpora))]


def _split(corpus: Corpus, rule: HeldOutRule) -> Iterator[tuple[int, int, bool, bool]]:
    """Yield first byte and split hash of each document, and whether any of it is trained on and any held out."""
    seen, first, is_trained, is_held_out = TextHash(), 0, False, False
    for piece in corpus.pieces():
        if piece == NO_TEXT:
            continue
        start = seen.bytes
        first = start if piece.first else first
        split_hash = seen.add(piece)
        for part in rule.divide(piece, split_hash, start, seen.bytes):
            is_trained |= bool(part.text) and not part.is_held_out
            is_held_out |= bool(part.text) and part.is_held_out
        if piece.last:
            yield first, split_hash, is_trained, is_held_out
            is_trained = is_held_out = False
