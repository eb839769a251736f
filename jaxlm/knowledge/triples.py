"""Triples of a knowledge graph: their flags, and their ids, which the cache folder keeps."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np

from jaxlm.data.base import Data, RowFormat, Statistics
from jaxlm.data.batches import Batches
from jaxlm.data.cache import cached_arrays
from jaxlm.errors import UserError
from jaxlm.fields import field
from jaxlm.knowledge.graph_tokenizer import GraphSize, graph_names, graph_tokenizer
from jaxlm.knowledge.knowledge_graph import read_triples
from jaxlm.paths import file_state, reading
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import Report, TripleBatch

_FORMAT = 2
_GROUP = 1 << 18  # triples hashed at a time
_SPLIT_HASHES = 1 << 64


@dataclasses.dataclass(frozen=True)
class TripleData(Data):
    """Triples of a knowledge graph in a file; see `jaxlm.data.base.Data`."""

    source: str = field("", resumable=True)
    """Triples to train on: a file with head, relation and tail a line, between tabs; also .gz, .xz or .zst."""
    dev: str = field("", resumable=True)
    """Triples to evaluate on, in the same form; empty: a share of the source's."""
    tokenizer: str = field("auto", weights=True)
    """`auto` takes the names of `source` and `dev`; otherwise the folder of a run's tokenizer."""
    held_out: float = field(0.01, range="[0, 0.5]")
    """Share of the source's triples, selected by a hash of their text, that is held out without `dev`."""
    max_known: int = field(4096, resumable=True, range="[1, inf)")
    """An end of a held-out triple at which more entities than this form a triple of the graph is not ranked: the list
    of those entities stands in every row of an evaluation."""
    cache_dir: str = field("", path=True)
    """Folder of the ids; by default $JAXLM_CACHE, else ~/.cache/jaxlm."""

    length: ClassVar[int] = 3

    def prepare_tokenizer(self, report: Report = print, symbols: Sequence[str] = ()) -> Tokenizer:
        if self.tokenizer != "auto":
            return Tokenizer.load(self.tokenizer)
        self.validate()
        report(f"Reading the names of {' and '.join(self._files())}")
        entities: dict[str, None] = {}
        relations: dict[str, None] = {}
        for file in self._files():
            for head, relation, tail in read_triples(file):
                entities[head] = entities[tail] = relations[relation] = None
        return graph_tokenizer(tuple(entities), tuple(relations))

    def open(self, tokenizer: Tokenizer, report: Report = print) -> TripleSource:
        """Open the ids of these triples in the cache folder; write them if they are missing."""
        self.validate()
        with reading(self.source):
            states = [file_state(file) for file in self._files()]
        facts = [_FORMAT, self._files(), states, tokenizer.fingerprint, self.held_out]

        def compute() -> dict[str, np.ndarray]:
            report(f"Reading the ids of {self.source}")
            return _arrays(self, tokenizer)

        arrays = cached_arrays("triples", facts, compute, self.cache_dir)
        return TripleSource(arrays, GraphSize.of(tokenizer.vocabulary), self.max_known)

    def synthetic(self, rows: int, row_format: RowFormat, vocabulary: Vocabulary) -> TripleBatch:
        entities, relations = row_format.packing
        high = [entities, relations, entities]
        return TripleBatch(np.random.default_rng(0).integers(0, high, (rows, 3)).astype(np.int32))

    def _files(self) -> list[str]:
        if not self.source:
            raise UserError("--data.source is empty; give a file of triples.")
        return [self.source, *([self.dev] if self.dev else [])]


@dataclasses.dataclass(frozen=True, eq=False)
class TripleStatistics(Statistics):
    """Statistics of a knowledge graph; `token_counts` has those of its names.

    Attributes:
        head_share: float32 [relations], the share of corrupted triples in which the head is replaced: tails per head /
            (tails per head + heads per tail) (Wang et al. 2014, section 4.2).
    """

    head_share: np.ndarray = dataclasses.field(kw_only=True)


class TripleSource:
    """Opened triples; see `jaxlm.data.base.Source`."""

    def __init__(self, arrays: dict[str, np.ndarray], size: GraphSize, max_known: int) -> None:
        """Hold the arrays of `_arrays`."""
        self.fingerprint = arrays["digest"].tobytes().hex()
        self._arrays, self._size, self._max_known = arrays, size, max_known
        is_ranked = arrays["ranges"][..., 1:] - arrays["ranges"][..., :1] <= max_known
        self._ranges = np.where(is_ranked, arrays["ranges"], 0)

    @property
    def summary(self) -> str:
        """Sizes of the graph and of both splits, in one line."""
        train, held_out = (f"{len(self._arrays[split]):,}" for split in ("train", "held_out"))
        left_out = int(np.sum(self._ranges[..., 1] == 0))
        note = f" ({left_out:,} of their ends have more than {self._max_known:,} known entities and are not ranked)"
        return (
            f"Triples: {train} to train on, {held_out} held out{note if left_out else ''}, "
            f"of {self._size.entities:,} entities and {self._size.relations:,} relations"
        )

    @property
    def statistics(self) -> TripleStatistics:
        """Counts of the names among the triples to train on, and how often heads are replaced."""
        return TripleStatistics(self._arrays["counts"], 0.0, head_share=self._arrays["head_share"])

    def batches(self, split: str, batch_size: int, row_format: RowFormat, seed: int) -> Batches:
        """Return batches of triples, a `jaxlm.types.TripleBatch` each."""
        if split == "train":
            return Batches(_Rows(self._arrays["train"]), batch_size, seed)
        return Batches(_Rows(self._arrays["held_out"], self._arrays["known"], self._ranges), batch_size, seed)


class _Rows:
    """Triples as rows; see `jaxlm.data.batches.RowTable`."""

    length = TripleData.length

    def __init__(self, triples: np.ndarray, known: np.ndarray | None = None, ranges: np.ndarray | None = None) -> None:
        """Hold int32 [rows, 3] and, for held-out ones, entities and for each end their range, [rows, 2, (from, to)]."""
        self.count, self._triples, self._known, self._ranges = len(triples), triples, known, ranges

    def read(self, index: np.ndarray) -> TripleBatch:
        is_row = (index >= 0)[:, None]
        triples = np.where(is_row, self._triples[np.maximum(index, 0)], -1)
        if self._known is None:
            return TripleBatch(triples)
        start, end = np.moveaxis(self._ranges, -1, 0)
        offsets = np.arange(max(1, np.max(end - start)))
        start, end = (np.where(is_row, bound[np.maximum(index, 0)], 0)[..., None] for bound in (start, end))
        known = self._known[np.minimum(start + offsets, len(self._known) - 1)]
        return TripleBatch(triples, np.where(start + offsets < end, known, -1))


def _arrays(data: TripleData, tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    """Return the ids of the triples, and what evaluation and corruption need to know of the graph."""
    vocabulary, size = tokenizer.vocabulary, GraphSize.of(tokenizer.vocabulary)
    rows = np.fromiter(_rows(data, vocabulary), np.dtype((np.int32, 4)))
    triples, is_held_out = rows[:, :3], rows[:, 3] > 0
    digest = hashlib.sha256(tokenizer.fingerprint.encode())
    for start in range(0, len(rows), _GROUP):
        group = slice(start, start + _GROUP)
        digest.update(triples[group].tobytes() + is_held_out[group].tobytes())
    train, held_out = triples[~is_held_out], triples[is_held_out]
    del rows, triples  # 16 bytes a triple
    if not len(train):
        raise UserError(f"{data.source} has no triples to train on.")
    known, ranges = _known(train, held_out, size.relations)
    counts = np.bincount(train[:, ::2].reshape(-1), minlength=vocabulary.size)
    counts += np.bincount(train[:, 1] + size.entities, minlength=vocabulary.size)
    return {
        "train": train, "held_out": held_out, "known": known, "ranges": ranges, "counts": counts,
        "head_share": _head_share(train, size.relations), "digest": np.frombuffer(digest.digest(), np.uint8),
    }


def _rows(data: TripleData, vocabulary: Vocabulary) -> Iterator[tuple[int, int, int, bool]]:
    """Yield the ids of each triple, and whether it is held out."""
    entities, relations = ({name: number for number, name in enumerate(names)} for names in graph_names(vocabulary))
    for file in data._files():
        for head, relation, tail in read_triples(file):
            is_held_out = file == data.dev
            if not data.dev:
                split_hash = hashlib.sha256(f"{head}\t{relation}\t{tail}".encode()).digest()[:8]
                is_held_out = int.from_bytes(split_hash, "little") < data.held_out * _SPLIT_HASHES
            try:
                yield entities[head], relations[relation], entities[tail], is_held_out
            except KeyError as error:
                raise UserError(
                    f"{file} has the name {error}, which is not in {vocabulary.name}; leave its triples out, or begin "
                    "a run without that tokenizer."
                ) from error


def _known(train: np.ndarray, held_out: np.ndarray, num_relations: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the entities that form a triple of the graph in the place of either end of each held-out triple.

    Returns:
        Entities, int32, and for heads and tails their range in it, int64 [triples, 2, (from, to)].
    """
    known, ranges, size, triples = [], [], 0, np.concatenate([held_out, train])
    for end, other in ((0, 2), (2, 0)):
        rest = triples[:, other].astype(np.int64) * num_relations + triples[:, 1]  # numbers of triples without that end
        wanted = rest[: len(held_out)]
        chosen = np.isin(rest, wanted)
        pairs = np.unique(np.stack([rest[chosen], triples[chosen, end]], axis=1), axis=0)
        ranges.append(size + np.stack([np.searchsorted(pairs[:, 0], wanted, side) for side in ("left", "right")], 1))
        known.append(pairs[:, 1].astype(np.int32))
        size += len(pairs)
    return np.concatenate(known), np.stack(ranges, axis=1)


def _head_share(triples: np.ndarray, num_relations: int) -> np.ndarray:
    """Return `TripleStatistics.head_share`; 0.5 for relations without triples."""
    relation = triples[:, 1].astype(np.int64)
    heads, tails = (
        np.bincount(np.unique(np.stack([relation, triples[:, end]]), axis=1)[0], minlength=num_relations)
        for end in (0, 2)
    )
    # Tails per head are triples / heads, heads per tail triples / tails.
    return np.where(heads + tails > 0, tails / np.maximum(heads + tails, 1), 0.5).astype(np.float32)
