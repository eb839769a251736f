"""The data contract: `Data`, a frozen configuration, and `Source`, which reads batches.

The kinds are `jaxlm.data.text.TextData` (pretraining text), `jaxlm.data.labelled.LabelledData` (rows of a task) and
`jaxlm.knowledge.triples.TripleData` (a knowledge graph). This module does not import jax.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
from etils import epath

from jaxlm.data.batches import Batches
from jaxlm.errors import UserError
from jaxlm.fields import check_ranges
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import Report


@dataclasses.dataclass(frozen=True, eq=False)
class Statistics:
    """Token statistics of a source.

    Attributes:
        token_counts: int64 [vocabulary], count of each id in the training split.
        unigram_entropy: entropy of the tokens of the held-out split, in nats per token: the loss of a model that knows
            only token frequencies. 0 without a held-out split.
        longest_document: share of the training tokens that are in the longest document; 0 if there are no documents.
        held_out_counts: int64 [vocabulary], count of each id in the held-out split; None if no text is held out.
        held_out_bytes: UTF-8 bytes of the text of that split. A mixture divides both by the number of its tokens; only
            their ratio is used.
    """

    token_counts: np.ndarray
    unigram_entropy: float
    longest_document: float = 0.0
    held_out_counts: np.ndarray | None = None
    held_out_bytes: float = 0


def entropy(counts: np.ndarray) -> float:
    """Return the entropy in nats of the empirical distribution of `counts`; 0 without counts."""
    shares = counts[counts > 0] / max(1, counts.sum())
    return float(-(shares * np.log(shares)).sum())


class RowFormat(NamedTuple):
    """How a source cuts its data into rows.

    Attributes:
        packing: for text, a packing of `jaxlm.data.store.Store.batches`; for labelled rows, a
            `jaxlm.data.labelled.RowEncoder`.
        length: tokens of a row.
        stride: tokens from a row of a stream to its continuation in the next batch; None for `length`.
        entities: for text with mentions, the folder of the knowledge graph whose ids the rows hold; "" for rows without
            entities.
    """

    packing: Any
    length: int
    stride: int | None = None
    entities: str = ""


class Source(Protocol):
    """Opened data.

    Attributes:
        fingerprint: SHA-256 (hex) of everything that determines the batches, except the arguments of `batches`.
    """

    fingerprint: str

    @property
    def summary(self) -> str:
        """Sizes of the training and held-out splits, in one line."""
        ...

    @property
    def statistics(self) -> Statistics:
        """Token statistics of the splits."""
        ...

    def of_phase(self, shares: Any) -> Source:
        """Return this mixture in the shares of a phase (see `Data.phase_shares`), to train on."""
        ...

    def batches(self, split: str, batch_size: int, row_format: RowFormat, seed: int) -> Batches:
        """Return shuffled batches.

        Args:
            split: "train" or "held_out".
            batch_size: rows of a batch over all hosts.
            row_format: how the data is cut into rows.
            seed: seed of the shuffle.

        Raises:
            UserError: a value is out of range, or the training split is empty.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Data:
    """Configuration of the data, a frozen dataclass of flags.

    Every subclass has the fields `source`, `length` (sequence length of the model, including special tokens),
    `tokenizer` and `held_out` (share of the data).
    """

    has_labels: ClassVar[bool] = False
    """Whether its rows have labels or belong together."""
    dev: ClassVar[str] = ""
    """File of held-out data; a flag where there is one."""

    def validate(self) -> None:
        """Raise UserError for a value out of range."""
        check_ranges(self, "data.")

    @property
    def shared_cache(self) -> epath.Path | None:
        """Folder in which the processes of a run find what others have prepared; None for data without one."""
        return None

    @property
    def has_held_out(self) -> bool:
        """Whether a part of the data is held out to evaluate on."""
        return bool(self.dev) or self.held_out > 0

    def prepare_tokenizer(self, report: Report = print, symbols: Sequence[str] = ()) -> Tokenizer:
        """Load the tokenizer, or train it.

        It is separate from `open`, so that a missing special token is found before a corpus is tokenized.

        Args:
            report: gets a line about everything that takes time.
            symbols: names of special tokens that the objective needs beyond those of every trained tokenizer.

        Raises:
            UserError: the tokenizer lacks one of `symbols`.
        """
        raise NotImplementedError

    def check_format(self, row_format: RowFormat) -> None:
        """Raise UserError if the data cannot be cut into such rows; it is asked before the data is read."""

    def phase_shares(self, data: Data) -> Any:
        """Return what `Source.of_phase` takes for a phase configured by `data`; None for the shares of the run.

        Raises:
            UserError: The phase has other text.
        """
        if data.source != self.source:
            raise UserError("data.source of a phase is for a mixture of texts; leave it out.")

    def parts(self) -> Sequence[Any]:
        """Return the parts of a text (`jaxlm.data.parts.Part`), which are tokenized one by one; none without text."""
        return ()

    def missing(self, parts: Sequence[Any], tokenizer: Tokenizer) -> Sequence[int]:
        """Return the numbers of the parts that are not tokenized yet."""
        return ()

    def tokenize(self, tokenizer: Tokenizer, shard: int, shards: int, report: Report = print) -> None:
        """Tokenize one shard of the text into the cache folder; do nothing for data without shards.

        Args:
            tokenizer: as for `open`.
            shard: number of the share, from 0.
            shards: number of shares.
            report: gets a line about everything that takes time.
        """

    def describe(self, tokenizer: Tokenizer, report: Report = print) -> None:
        """Report the lengths, scripts and unknown characters of the text; nothing for data without text."""

    def open(self, tokenizer: Tokenizer, report: Report = print) -> Source:
        """Open the prepared data, and prepare what is missing."""
        raise NotImplementedError

    def synthetic(self, rows: int, row_format: RowFormat, vocabulary: Vocabulary) -> Any:
        """Return a batch of random text tokens for plans and benchmarks, without reading the source.

        It has the arrays of a batch of the source, as numpy arrays, and full rows.
        """
        raise NotImplementedError
