"""Counts of the words of a text, part by part, for a vocabulary of words."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from etils import epath

from jaxlm.data.arrays import FACTS, damaged, read_facts, write_facts
from jaxlm.data.engine import Progress, Work
from jaxlm.data.parts import Part
from jaxlm.paths import write_whole
from jaxlm.tokenizers.training import Normalization, count_words, drop_rare_words

FORMAT = 1
_COUNTS = "counts.json"


@dataclasses.dataclass(frozen=True)
class Words(Work):
    """The counts of the words of parts; see `jaxlm.tokenizers.training.count_words`.

    Attributes:
        normalization: normalization of the text.
    """

    normalization: Normalization

    def depends_on(self, part: Part) -> list[Any]:
        return [FORMAT, part.name, self.normalization]

    def write(self, folder: epath.Path, part: Part, progress: Progress) -> None:
        def texts() -> Iterator[str]:
            for piece in part.pieces():
                yield piece.text
                progress(len(piece.text.encode()))

        counts = count_words(texts(), self.normalization)
        write_whole(folder / _COUNTS, json.dumps(counts).encode())
        write_facts(folder / FACTS, {"format": FORMAT, "words": counts.total()})

    def merged(self, sources: Sequence[Sequence[Part]], shares: Sequence[float]) -> Mapping[str, float]:
        """Return the counts in the parts of all sources, weighted so that each has its share of all words."""
        sizes = [sum(read_facts(self.path(part) / FACTS, FORMAT)["words"] for part in parts) for parts in sources]
        counts, least = collections.Counter(), 1
        for parts, share, size in zip(sources, shares, sizes, strict=True):
            weight = share * sum(sizes) / max(size, 1)
            for part in parts:
                for word, count in _read_counts(self.path(part) / _COUNTS).items():
                    counts[word] += weight * count
                least = drop_rare_words(counts, least)
        return counts


def _read_counts(path: epath.Path) -> Mapping[str, int]:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise damaged(os.fspath(path), error) from error
