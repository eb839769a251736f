"""Mentions of entities in text: their form in JSON, and the tokens at which they begin."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxlm.errors import UserError


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


def read_mentions(value: Any, text: str, place: str, name: str) -> Mentions:
    """Return the mentions that a JSON object has in its field `name`: objects with `start`, `end` and `id`.

    Args:
        value: value of the field; None for none.
        text: the text. Offsets count its characters (Unicode code points).
        place: place of the object, for messages.
        name: name of the field, for messages.

    Raises:
        UserError: the value is anything else, or a span is empty or outside the text.
    """
    if value is None:
        return ()
    if not isinstance(value, list):
        raise UserError(f"{place}: the field {name!r} is not a list of mentions; each is an object {_FORM}.")
    return tuple(_mention(item, text, place, name) for item in value)


_FORM = '{"start": 0, "end": 5, "id": "Q90"}, in characters'


def _mention(item: Any, text: str, place: str, name: str) -> Mention:
    try:
        mention = Mention(item["start"], item["end"], str(item["id"]))
        is_span = type(mention.start) is type(mention.end) is int and 0 <= mention.start < mention.end <= len(text)
    except (KeyError, TypeError):
        is_span = False
    if not is_span:
        raise UserError(
            f"{place}: the field {name!r} has {str(item)[:80]}, which is no span of the text of {len(text):,} "
            f"characters; write it as {_FORM}."
        )
    return mention


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
