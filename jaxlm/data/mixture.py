"""Mixtures of sources in fixed shares: each row is a function of the seed and of its place.

The endless sequence of rows is cut into blocks of `BLOCK` slots. A permutation of each block gives source j exactly
c_j of its slots, the largest-remainder rounding of its share of the rows. Slot s of block b reads row
b · c_j + (number of earlier slots of the block with the same source) of the shuffled epochs of source j. So a source
gives every row once per epoch, and the rows of any step take O(BLOCK) to find.
"""

from __future__ import annotations

import collections
import copy
import functools
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np

from jaxlm.data.base import RowFormat, Statistics, entropy
from jaxlm.data.batches import Batches
from jaxlm.data.corpus import split_source
from jaxlm.data.permutation import permute
from jaxlm.data.readers import KINDS
from jaxlm.data.store import Store
from jaxlm.data.windows import NUMBERS
from jaxlm.errors import UserError
from jaxlm.paths import any_path, reading
from jaxlm.types import TokenBatch

BLOCK = 1 << 14
MOST_EPOCHS = 4
"""Epochs up to which repeated text is worth nearly as much as new text (Muennighoff et al. 2023, section 5)."""
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?")
_SUFFIXES = rf"({'|'.join(map(re.escape, KINDS))})?(\.gz|\.xz|\.zst)?"
_SUFFIX = re.compile(rf"{_SUFFIXES}$", re.IGNORECASE)
# What a source's name leaves out: everything from a wildcard on, and suffixes.
_UNNAMED = re.compile(rf"(/?[^/]*[*?\[].*|{_SUFFIXES})$", re.IGNORECASE)


def parse_mixture(source: str, temperature: float = 0.0) -> dict[str, tuple[str, float]]:
    """Return the sources of a mixture with their weights, by their names in metrics.

    A weight follows the last `@` of an item, if a number does, unless a file has the whole name. Text that is no
    mixture has the name "" and the weight 1. Weights that a temperature is to decide are 0.

    Raises:
        UserError: A weight is not above 0; only some sources have one, or a temperature as well; or a temperature meets
            a single source.
    """
    with reading(source):
        items = [_divide_weight(item) for item in split_source(source)]
    kinds = {weight is None for _, weight in items}
    if len(kinds) > 1 or (temperature and (False in kinds or len(items) == 1)):
        needed = "a weight for each source, as a.txt@0.7, or for none"
        if temperature:
            needed = f"two or more sources without weights, since --data.temperature is {temperature:g} (0: none)"
        raise UserError(f"--data.source {source!r} needs {needed}.")
    if len(items) == 1 or (not temperature and True in kinds):
        return {"": (source if True in kinds else items[0][0], 1.0)}
    sources = [item for item, _ in items]
    if twice := [item for item in sources if sources.count(item) > 1]:
        raise UserError(f"--data.source {source!r} names {twice[0]} twice; give it once, with the sum of its weights.")
    names = next(names for names in _names(sources) if len({*names} - {""}) == len(names))
    return {name: (item, weight or 0.0) for name, (item, weight) in zip(names, items, strict=True)}


def _names(sources: Sequence[str]) -> Iterator[list[str]]:
    """Yield names of sources, the shortest first, until they differ."""
    def plain(text: str) -> str:
        return re.sub(r"\W+", "_", text).strip("_")

    paths = [_UNNAMED.sub("", source.rstrip("/")) or "source" for source in sources]
    yield [re.split("[/:]", path)[-1] for path in paths]
    yield [plain(path) for path in paths]
    yield [plain(_SUFFIX.sub("", source.rpartition("/")[2])) for source in sources]
    yield [plain(source) for source in sources]
    yield [f"{plain(source)}_{number}" for number, source in enumerate(sources, 1)]


def _divide_weight(item: str) -> tuple[str, float | None]:
    name, _, number = item.rpartition("@")
    if not name or not _NUMBER.fullmatch(number) or any_path(item).exists():
        return item, None
    if not 0 < float(number) < math.inf:
        raise UserError(f"The weight of {name} in --data.source is {number}; give a number above 0.")
    return name, float(number)


def shares_of(weights: Sequence[float], sizes: Sequence[int], temperature: float) -> np.ndarray:
    """Return the share of each source: of its weight, or of n^(1/T) for its size n and a temperature T.

    XLM-R (Conneau et al. 2020, equation 1) and mT5 have 1/T = 0.3.
    """
    values = np.asarray(sizes, np.float64) ** (1 / temperature) if temperature else np.asarray(weights, np.float64)
    # Rounded, so that they do not depend on a machine's power function.
    return np.round(values / values.sum(), 12)


def weights_of_phase(items: Sequence[str], source: str, temperature: float) -> tuple[list[float], float]:
    """Return the weight of each of a mixture's `items` in a phase, and its temperature, which decides all above 0.

    Args:
        items: the sources of the run.
        source: those of the phase, with weights or a temperature; the others have the weight 0.
        temperature: of the phase.

    Raises:
        UserError: the run is no mixture, or the phase has a source that it has not.
    """
    if len(items) < 2:
        raise UserError("data.source and data.temperature of a phase are for a mixture of texts; leave them out.")
    if source in items:
        return [float(item == source) for item in items], 0.0
    temperature *= len(split_source(source)) > 1  # one source has all rows
    found = {item: weight or 1.0 for item, weight in parse_mixture(source, temperature).values()}
    if other := [item for item in found if item not in items]:
        raise UserError(f"data.source of a phase has {other[0]}, which is no source of the run; give some of "
                        f"{', '.join(items)}, with weights or data.temperature.")
    return [found.get(item, 0.0) for item in items], temperature


def quotas(shares: np.ndarray, size: int) -> np.ndarray:
    """Return the largest-remainder rounding of `shares` of `size`: int64 [sources] with the sum `size`."""
    exact = shares / shares.sum() * size
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: size - counts.sum()]] += 1
    return counts


@functools.lru_cache(maxsize=8)
def _block(counts: tuple[int, ...], seed: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the source of each slot of a block, and how many earlier slots have the same source: int64 [BLOCK]."""
    ends = np.cumsum(counts)
    labels = np.searchsorted(ends, permute(np.arange(BLOCK), BLOCK, seed, number), side="right")
    ranks = np.empty(BLOCK, np.int64)
    ranks[np.argsort(labels, kind="stable")] = np.arange(BLOCK) - np.repeat(ends - counts, counts)
    return labels, ranks


class _MixedRows:
    """Rows of several sources, numbered one source after the other; see `jaxlm.data.batches.RowTable`.

    Attributes:
        starts: number of the first row of each source.
    """

    def __init__(self, sources: Sequence[Any], documents: Sequence[int]) -> None:
        """Number the rows of `sources`; `documents` are added to the document numbers of each."""
        self._sources, self._documents, self.length = sources, documents, sources[0].length
        self.starts = np.cumsum([0, *(rows.count for rows in sources)])
        self.count = int(self.starts[-1])

    def read(self, index: np.ndarray) -> TokenBatch:
        """Read the rows `index`, int [batch], where -1 stands for an empty row."""
        label, found = np.maximum(np.searchsorted(self.starts, index, side="right") - 1, 0), []
        for source in np.unique(label):
            chosen = index[label == source]
            batch = self._sources[source].read(np.where(chosen < 0, -1, chosen - self.starts[source]))
            moved = (batch.segment_ids - 1 + self._documents[source]) % NUMBERS + 1
            found.append(batch._replace(segment_ids=np.where(batch.segment_ids > 0, moved, 0).astype(np.int32)))
        back, fields = np.argsort(np.argsort(label, kind="stable")), zip(*found, strict=True)
        return TokenBatch(*(None if each[0] is None else np.concatenate(each)[back] for each in fields))


class MixedBatches(Batches):
    """Shuffled batches of a mixture.

    Attributes:
        parts: batches of each source.
        mean_lengths: mean number of tokens of a row of each source.
        shares: share in the tokens of each source that has rows.
    """

    def __init__(
        self, parts: Mapping[str, Batches], shares: Mapping[str, float], documents: Sequence[int], seed: int
    ) -> None:
        """Store the arguments; `documents` are those of `_MixedRows`."""
        batches = list(parts.values())
        super().__init__(_MixedRows([part.table for part in batches], documents), batches[0].batch_size, seed)
        self.parts, self.mean_lengths = parts, {name: max(1.0, p.table.mean_length) for name, p in parts.items()}
        found = {name: shares[name] for name, part in parts.items() if part.num_rows}
        self.shares = {name: share / sum(found.values()) for name, share in found.items()}

    @functools.cached_property
    def quotas(self) -> tuple[int, ...]:
        """Rows of each source in a block.

        Raises:
            UserError: a source has too small a share to get one.
        """
        rates = np.array([self.shares.get(name, 0) / each for name, each in self.mean_lengths.items()])
        counts = quotas(rates, BLOCK)
        if not counts[rates > 0].all():
            name = list(self.parts)[np.argmin(np.where(rates > 0, counts, BLOCK))]
            raise UserError(f"{name} would get less than one of {BLOCK:,} rows; raise its weight, or leave it out.")
        return tuple(counts.tolist())

    def drawn(self, rows: int) -> dict[str, int]:
        """Return how many of the first `rows` rows of these batches are of each source."""
        def before(place: int) -> np.ndarray:
            blocks, rest = divmod(place, BLOCK)
            more = np.bincount(_block(self.quotas, self._seed, blocks)[0][:rest], minlength=len(self.quotas))
            return blocks * np.array(self.quotas) + more

        counts = before(self.first + rows) - before(self.first)
        return dict(zip(self.parts, counts.tolist(), strict=True))

    def after_draws(self, draws: Iterable[tuple[Batches, int]]) -> Self:
        """Return batches that go on with each source after what other batches of this mixture have read of it.

        Args:
            draws: those batches, and how many of their rows are read.
        """
        counts = sum((collections.Counter(batches.drawn(rows)) for batches, rows in draws), collections.Counter())
        later = copy.copy(self)
        later.parts = {name: part.after(counts[name], self.batch_size) for name, part in self.parts.items()}
        return later

    def shuffled(self, place: np.ndarray) -> np.ndarray:
        counts, (block, slot) = np.array(self.quotas), np.divmod(place, BLOCK)
        label, number, index = np.zeros((3, *place.shape), np.int64)
        for each in np.unique(block):
            here = block == each
            label[here], rank = (facts[slot[here]] for facts in _block(self.quotas, self._seed, int(each)))
            number[here] = each * counts[label[here]] + rank
        for source, part in enumerate(self.parts.values()):
            chosen = label == source
            index[chosen] = self.table.starts[source] + part.shuffled(part.first + number[chosen])
        return index


class Mixture:
    """Token stores of several sources, read in fixed shares; see `jaxlm.data.base.Source`."""

    def __init__(self, stores: Mapping[str, Store], weights: Sequence[float], temperature: float) -> None:
        """Compute the shares of `stores` in the tokens; see `shares_of`."""
        self.stores = stores
        shares = shares_of(weights, [store.train.num_tokens for store in stores.values()], temperature)
        self.shares = dict(zip(stores, shares.tolist(), strict=True))
        facts = [[name, store.fingerprint, self.shares[name]] for name, store in stores.items()]
        self.fingerprint = hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    @property
    def summary(self) -> str:
        """Shares and sizes of the sources."""
        each = []
        for name, store in self.stores.items():
            sizes = f"{store.train.num_tokens:,} tokens to train on, {store.held_out.num_tokens:,} held out"
            each.append(f"{name} {self.shares[name]:.1%} ({'; '.join(filter(None, [sizes, store.unknown]))})")
        return f"Mixture of {', '.join(each)}"

    @functools.cached_property
    def statistics(self) -> Statistics:
        """Token statistics of the mixture: training counts are rounded up, held-out figures are means per token."""
        total = sum(store.train.num_tokens for store in self.stores.values())
        longest = max(self.shares[name] * store.statistics.longest_document for name, store in self.stores.items())
        counts = np.ceil(self._mean("train", lambda store: store.counts("train")) * total).astype(np.int64)
        held_out = self._mean("held_out", lambda store: store.counts("held_out"))
        size = self._mean("held_out", lambda store: store.held_out.text_bytes)
        return Statistics(counts, entropy(held_out), longest, held_out if held_out.any() else None, size)

    def _mean(self, split: str, figure: Callable[[Store], Any]) -> Any:
        """Return the mean per token of a sum over each store, such as its counts of ids, in the mixture's rows."""
        sizes = [(self.shares[name], store.counts(split).sum(), figure(store)) for name, store in self.stores.items()]
        found = sum(share for share, size, _ in sizes if size)
        return sum(share / max(found, 1e-12) * each / max(1, size) for share, size, each in sizes)

    def of_phase(self, shares: tuple[Sequence[float], float]) -> Mixture:
        """Return the mixture with the weights and the temperature of a phase; see `jaxlm.data.base.Source`."""
        weights, temperature = shares
        chosen = {name: weight for name, weight in zip(self.stores, weights, strict=True) if weight}
        sizes = [self.stores[name].train.num_tokens for name in chosen]
        found = dict(zip(chosen, shares_of([*chosen.values()], sizes, temperature).tolist(), strict=True))
        phase = copy.copy(self)
        phase.shares = dict.fromkeys(self.stores, 0.0) | found
        return phase

    def batches(self, split: str, batch_size: int, row_format: RowFormat, seed: int) -> Batches:
        """Return batches of windows; see `jaxlm.data.base.Source` and `Store.batches`."""
        seeds = np.random.SeedSequence(seed).generate_state(len(self.stores)).tolist()
        opened = zip(self.stores.items(), seeds, strict=True)
        parts = {name: store.batches(split, batch_size, row_format, own) for (name, store), own in opened}
        # The rows of this packing have the numbers of their documents, which tell documents apart.
        sizes = [getattr(store, split).documents for store in self.stores.values()]
        documents = np.cumsum([0, *sizes]) * (row_format.packing == "document")
        return MixedBatches(parts, self.shares, documents, seed)


def describe_draws(draws: Iterable[tuple[Batches, int]]) -> list[str]:
    """Return what a run draws of each source of a mixture, with a warning for many epochs; nothing for one source.

    Args:
        draws: batches, and how many of their rows are read.
    """
    tokens, epochs = collections.Counter(), collections.Counter()
    for batches, rows in draws:
        for name, drawn in (batches.drawn(rows) if isinstance(batches, MixedBatches) else {}).items():
            tokens[name] += drawn * batches.mean_lengths[name]
            epochs[name] += drawn / batches.parts[name].num_rows
    warning = f"; beyond {MOST_EPOCHS} repeated text teaches little (Muennighoff et al. 2023): lower its weight"
    return [
        f"Drawn of {name}: {tokens[name] / tokens.total():.2%} of the tokens, {count:,.2f} epochs"
        + warning * (count > MOST_EPOCHS) for name, count in epochs.items()
    ]
