"""Mentions of entities in text: their form in JSON, and the tokens at which they begin."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np


class Mention(NamedTuple):
    """A span of characters that names an entity.

    Attributes:
        start: its first character.
        end: its last character + 1.
        entity: the entity's name in the knowledge graph, such as "Q90".
    """

    start: int
    end: int
    entity: str


Mentions = tuple[Mention, ...]


def within(mentions: Iterable[Mention], start: int, end: int) -> Mentions:
    """Return the mentions inside text[start:end], with offsets into that part. Those across its ends are left out."""
    return tuple(
        Mention(m.start - start, m.end - start, m.entity) for m in mentions if start <= m.start and m.end <= end
    )


def divide_mentions(mentions: Mentions, sizes: Iterable[int]) -> Iterator[Mentions]:
    """Yield the mentions of each of the consecutive parts of a text, given the numbers of characters of the parts."""
    for start, end in itertools.pairwise(itertools.accumulate(sizes, initial=0)):
        yield within(mentions, start, end)


def first_tokens(offsets: np.ndarray, mentions: Mentions) -> Iterator[tuple[int, str]]:
    """Yield (first token, entity) of the mentions of a text; of those with the same first token only the first.

    The official pretraining code of ERNIE means this too; but a mention of several tokens has its entity at each second
    one of them there, since it compares a token with its left neighbour after it has blanked that one.

    Args:
        offsets: start and end of each token in characters, int [tokens, 2].
        mentions: the mentions.
    """
    taken: set[int] = set()
    ends: Sequence[int] = np.maximum.accumulate(offsets[:, 1])
    for mention, token in zip(mentions, np.searchsorted(ends, [m.start for m in mentions], side="right"), strict=True):
        if token < len(offsets) and offsets[token, 0] < mention.end and token not in taken:
            taken.add(int(token))
            yield int(token), mention.entity
