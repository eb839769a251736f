"""Types that several packages share. The module does not import jax, so that readers start fast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

Params = dict[str, Any]
"""Parameters: a nested dict of arrays."""
Report = Callable[[str], None]
"""Receiver of progress messages."""


class TokenBatch(NamedTuple):
    """Uncorrupted rows of text.

    tokens: int32 [batch, length], padded with the vocabulary's `pad`.
    segment_ids: int32 [batch, length]; 0 is padding. Where documents are packed, 1, 2, ... number those inside a row;
        else they are the number of the row's document in its split, from 1.
    entities: entity of the mention that begins at each token, int32 [batch, length]; -1 for none. None for text without
        entities.
    Padding stands only at the end of a row.
    """

    tokens: Any
    segment_ids: Any
    entities: Any = None
