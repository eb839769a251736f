"""Splits of a tokenized text: which documents are held out, which are left out, and where the tokens of each split lie.

Held out are the documents with the lowest hashes, or the end of a text of few documents. Left out are duplicates
(`jaxlm.data.duplicates`), and documents to train on that repeat one that is held out, of any source of a mixture.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from etils import epath

from jaxlm.data.arrays import SPLITS, ArrayWriter, Files, FlatArray, Increasing, IncreasingWriter, Spliced, write_array
from jaxlm.data.parts import Part
from jaxlm.data.shards import LEAST, Shard, Shards, Totals
from jaxlm.errors import UserError
from jaxlm.paths import at_once

TRAIN, HELD_OUT, LEFT_OUT = range(3)
HASH_BITS = 64
_AT_ONCE = 1 << 22  # tokens


@dataclasses.dataclass(frozen=True)
class HeldOutRule:
    """The held-out text: documents with a hash below `below`, and everything after byte `tail` of the text."""

    below: int
    tail: int

    @classmethod
    def of(cls, share: float, text: Totals) -> HeldOutRule:
        """Hold out a share of the documents by hash, or the tail of a text with few documents or large ones.

        At least LEAST bytes are held out, but of a small text a tenth; whole documents make it a little more.
        """
        if share <= 0 or not text.bytes:
            return cls(0, text.bytes)
        share = max(share, min(0.1, LEAST / text.bytes))
        below = max(round(share * (1 << HASH_BITS)), text.least_below)
        has_many = share * text.documents >= 4
        if has_many and text.least_below and text.lowest < below <= text.highest:
            return cls(below, text.bytes)
        return cls(0, text.bytes - round(share * text.bytes))


@dataclasses.dataclass(frozen=True)
class SplitText:
    """The shards of a source with the split of each document.

    Attributes:
        shards: its shards; of a text whose tail is held out the one that the tail begins in is divided there.
        removed: duplicates, bool [documents], of each shard; () for none.
        totals: facts of the text without duplicates.
        rule: what is held out.
        tail: shard and document that the tail begins with.
        cut: number of the part that the tail divides, and the byte of its text; None where none is divided.
        held_out_hashes: sorted hashes of held-out documents, whose copies to train on are left out; None for none.
        num_copies: number of these copies.
    """

    shards: Sequence[Shard]
    removed: Sequence[np.ndarray]
    totals: Totals
    rule: HeldOutRule
    tail: tuple[int, int]
    cut: tuple[int, int] | None = None
    held_out_hashes: np.ndarray | None = None
    num_copies: int = 0

    @classmethod
    def of(
        cls, parts: Sequence[Part], shards: Shards, share: float, removed: Sequence[np.ndarray] = ()
    ) -> SplitText:
        """Decide what is held out of a text, given its share; a shard that the tail divides is made anew.

        All parts have their shards. `removed` are the duplicates of each part, bool [documents]; () for none.
        """
        removed = list(removed)
        opened, totals = _open(parts, shards, removed)
        rule = HeldOutRule.of(share, totals)
        tail, divided = (len(opened), 0), None
        if rule.tail < totals.bytes:
            number, document, cut = _place(opened, removed, rule.tail)
            if cut is not None:
                halves = dataclasses.replace(shards, cut=cut)
                halves.make(parts[number])
                divided = (number, cut)
                opened[number] = Shard(halves.path(parts[number]))
                document = opened[number].facts["divided"]
                if removed:
                    removed[number] = np.insert(removed[number], document, removed[number][document - 1])
            tail = (number, document)
        return cls(opened, removed, totals, rule, tail, divided)

    @property
    def has_tail(self) -> bool:
        """Whether the end of the text is held out, and has documents before it."""
        return self.tail[0] < len(self.shards) and self.totals.documents > 1

    def splits(self, number: int) -> np.ndarray:
        """Return the split of each document of a shard: int8 [documents]."""
        hashes = self.shards[number].read("hashes")
        found = np.where(hashes < np.uint64(self.rule.below), HELD_OUT, TRAIN).astype(np.int8)
        if number >= self.tail[0]:
            found[self.tail[1] if number == self.tail[0] else 0 :] = HELD_OUT
        if self.removed:
            found[self.removed[number]] = LEFT_OUT
        if self.held_out_hashes is not None:
            count = np.searchsorted(self.held_out_hashes, hashes, side="right")
            count -= np.searchsorted(self.held_out_hashes, hashes)
            if (number, self.shards[number].facts["divided"]) == self.tail:
                count[self.tail[1] - 1] -= 1  # the second half of a divided document is no copy of the first one
            found[(found == TRAIN) & (count > 0)] = LEFT_OUT
        return found


def _open(parts: Sequence[Part], shards: Shards, removed: Sequence[np.ndarray]) -> tuple[list[Shard], Totals]:
    """Open the shards, and add up their documents without those that are removed.

    The digest is that of all documents.
    """
    opened: list[Shard] = []

    def read(number: int) -> tuple[Shard, np.ndarray, np.ndarray]:
        shard = Shard(shards.path(parts[number]))
        hashes, sizes = shard.read("hashes"), shard.read("sizes")
        if removed and len(removed[number]) != len(hashes):
            raise UserError(f"{parts[number]} changed while it was read; run again when it is complete.")
        kept = ~removed[number] if removed else slice(None)
        return shard, hashes[kept], sizes[kept]

    def documents() -> Iterator[tuple[dict[str, Any], np.ndarray, np.ndarray]]:
        for shard, hashes, sizes in at_once(read, range(len(parts))):
            opened.append(shard)
            yield shard.facts, hashes, sizes

    return opened, Totals.of(documents())


def _place(shards: Sequence[Shard], removed: Sequence[np.ndarray], tail: int) -> tuple[int, int, int | None]:
    """Return the shard and the document that a byte of the kept text is in, and which byte of the shard's text it is.

    That is None at the beginning of a document.
    """
    before = 0
    for number, shard in enumerate(shards):
        sizes = shard.read("sizes")
        ends = before + np.cumsum(sizes * ~removed[number] if removed else sizes)
        document = int(np.searchsorted(ends, tail, side="right"))
        if document < len(ends):
            inside = tail - int(ends[document] - sizes[document])
            cut = int(sizes[:document].sum()) + inside
            return number, document, cut if inside else None
        before = int(ends[-1]) if len(ends) else before


def leave_out_copies(texts: Sequence[SplitText]) -> list[SplitText]:
    """Leave out of each source the documents to train on that a source holds out.

    Sources hold out different shares, and the tail of a small text may repeat a document before it. Documents are equal
    if their hashes are. A source keeps its copies if it would otherwise be empty.
    """
    def hashes(place: tuple[SplitText, int]) -> np.ndarray:
        text, number = place
        return text.shards[number].read("hashes")[text.splits(number) == HELD_OUT]

    places = [(text, number) for text in texts for number in range(len(text.shards))]
    held_out = np.sort(np.concatenate(list(at_once(hashes, places))))
    found = []
    for text in texts:
        without = dataclasses.replace(text, held_out_hashes=held_out)
        trained, left = _num_trained(text), _num_trained(without)
        found.append(dataclasses.replace(without, num_copies=trained - left) if 0 < left < trained else text)
    return found


def _num_trained(text: SplitText) -> int:
    return sum(at_once(lambda number: int((text.splits(number) == TRAIN).sum()), range(len(text.shards))))


def tokens_of(folder: epath.Path, paths: Sequence[str], sizes: Sequence[int], dtype: str, runs: int,
              name: str = "tokens", base: np.ndarray | None = None) -> Spliced:
    """Open the tokens, or the array `name`, of a split: `runs` runs in the shards at `paths` of `sizes` tokens each."""
    files = Files([f"{path}/{name}" for path in paths], dtype)
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])
    return Spliced(files, starts, Increasing(folder / "runs", runs), FlatArray(folder / "places", "int64", runs), base)


def write_index(folder: epath.Path, text: SplitText) -> tuple[dict[str, dict[str, int]], str]:
    """Write the arrays `offsets`, `runs`, `places` and `counts` of each split in a folder.

    Returns:
        Of each split, numbers of documents, tokens, runs and bytes of text, and the longest document; and a SHA-256
        (hex) of which documents are left out, "" for none.
    """
    writers = [_SplitWriter(folder / name) for name in SPLITS]
    left_out, bits = hashlib.sha256(), np.zeros(0, bool)  # bits that do not fill a byte yet, whatever the shards
    place, total = 0, np.zeros(text.shards[0].facts["vocabulary"], np.int64)

    def read(number: int) -> tuple[np.ndarray, ...]:
        shard = text.shards[number]
        has_several = shard.facts["units"] > shard.facts["documents"]
        sentences = shard.read("sentences") if has_several else np.ones(1, np.int64)
        return text.splits(number), shard.read("sizes"), sentences, shard.read("ends"), shard.read("counts")

    found = at_once(read, range(len(text.shards)))
    for shard, (splits, sizes, sentences, ends, counts) in zip(text.shards, found, strict=True):
        bits = np.concatenate([bits, splits == LEFT_OUT])
        left_out.update(np.packbits(bits[: len(bits) // 8 * 8]).tobytes())
        bits = bits[len(bits) // 8 * 8 :]
        unit_splits = np.repeat(splits, sentences)
        for split, writer in enumerate(writers):
            writer.add(place, ends, unit_splits == split, int(sizes[splits == split].sum()))
        place += shard.facts["tokens"]
        total += counts
    left_out.update(np.packbits(bits).tobytes())
    facts = {name: writer.close() for name, writer in zip(SPLITS, writers, strict=True)}
    paths, sizes = zip(*((os.fspath(shard.path), shard.facts["tokens"]) for shard in text.shards), strict=True)
    for name in ("held_out", "left_out"):
        tokens = tokens_of(folder / name, paths, sizes, text.shards[0].facts["dtype"], facts[name]["runs"])
        counts = count_ids(tokens, len(total))
        total -= counts
        if name == "held_out":
            write_array(folder / name / "counts", counts)
    write_array(folder / "train" / "counts", total)
    return facts, left_out.hexdigest() if facts["left_out"]["text_bytes"] else ""


class _SplitWriter:
    def __init__(self, folder: epath.Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._offsets = IncreasingWriter(folder / "offsets")
        self._runs = IncreasingWriter(folder / "runs")
        self._places = ArrayWriter(folder / "places", "int64")
        self._longest = self._text_bytes = 0

    def add(self, place: int, ends: np.ndarray, is_own: np.ndarray, text_bytes: int) -> None:
        """Add the documents of a shard that are in the split; its first token has the number `place`."""
        starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]]) if len(ends) else ends
        chosen = is_own & (ends > starts)  # without empty documents
        starts, ends = starts[chosen], ends[chosen]
        self._text_bytes += text_bytes
        if not len(starts):
            return
        self._offsets.append(ends - starts)
        self._longest = max(self._longest, int((ends - starts).max()))
        begins = np.flatnonzero(np.append(True, starts[1:] != ends[:-1]))  # of runs of documents
        sizes = np.append(ends[begins[1:] - 1], ends[-1]) - starts[begins]
        self._runs.append(sizes)
        self._places.append(place + starts[begins])

    def close(self) -> dict[str, int]:
        self._places.close()
        return {"documents": self._offsets.close(), "tokens": self._offsets.last, "runs": self._runs.close(),
                "longest": self._longest, "text_bytes": self._text_bytes}


def count_ids(tokens: Spliced, size: int) -> np.ndarray:
    """Return the count of each id: int64 [size]."""
    counts = np.zeros(size, np.int64)
    for start in range(0, tokens.size, _AT_ONCE):
        counts += np.bincount(tokens.read(start, min(start + _AT_ONCE, tokens.size)), minlength=size)
    return counts
