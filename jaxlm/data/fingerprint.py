"""The fingerprint of a text: a hash of its documents, taken while they are read."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator

from jaxlm.data.readers import Piece

ROUTE_BITS = 64


class TextHash:
    """Hashes the documents of a text in order, and each by itself, which decides whether it is held out."""

    def __init__(self) -> None:
        self._all = hashlib.sha256()
        self._document = hashlib.sha256()
        self._route = 0
        self.documents = 0
        self.bytes = 0
        self._document_bytes = 0

    def add(self, piece: Piece) -> int:
        """Returns the route of the piece's document: 64 bits of a hash of its first piece, so that it is known before
        the rest of the document is read."""
        data = piece.text.encode()
        if piece.first:
            self._document = hashlib.sha256(data)
            self._route = int.from_bytes(self._document.digest()[:8], "little")
        else:
            self._document.update(data)
        self.bytes += len(data)
        if piece.last:
            self._all.update(self._document.digest())
            self.documents += 1
        return self._route

    @property
    def fingerprint(self) -> str:
        """sha256 over the documents, whatever files they came in."""
        return self._all.hexdigest()


@dataclasses.dataclass(frozen=True)
class Survey:
    """Facts of a text, found by reading it once.

    fingerprint: of all documents in order. documents, bytes: how many (bytes in UTF-8).
    lowest_route, highest_route: over all documents.
    """

    fingerprint: str
    documents: int
    bytes: int
    lowest_route: int
    highest_route: int


def survey(pieces: Iterable[Piece]) -> Survey:
    text = TextHash()
    lowest, highest = (1 << ROUTE_BITS) - 1, 0
    for piece in pieces:
        route = text.add(piece)
        lowest, highest = min(lowest, route), max(highest, route)
    return Survey(text.fingerprint, text.documents, text.bytes, lowest, highest)


@dataclasses.dataclass(frozen=True)
class HeldOutRule:
    """Which documents are held out: those with a route below `below`, and document number `always` (-1: none)."""

    below: int
    always: int = -1

    @classmethod
    def of(cls, share: float, text: Survey) -> HeldOutRule:
        """A share of documents by hash; with two documents or more, at least one is held out and one is not."""
        below = round(share * (1 << ROUTE_BITS))
        if share <= 0 or text.documents < 2:
            return cls(0)
        if text.lowest_route == text.highest_route:  # copies of one document: take the last
            return cls(0, always=text.documents - 1)
        return cls(min(max(below, text.lowest_route + 1), text.highest_route))

    def holds_out(self, route: int, document: int) -> bool:
        return route < self.below or document == self.always


def sample(pieces: Iterable[Piece], total: int, wanted: int) -> Iterator[str]:
    """About `wanted` bytes drawn evenly from a text of `total` bytes, all of it if that is less: whole pieces of
    documents, or the beginnings of large ones."""
    share = min(1.0, wanted / max(1, total))
    credit = 0.0
    for piece in pieces:
        credit += len(piece.text) * share
        if credit >= len(piece.text) - 0.5:
            credit -= len(piece.text)
            yield piece.text
        elif credit >= 4096:
            end = piece.text.rfind(" ", 0, int(credit))
            text = piece.text[: end if end > 0 else int(credit)]
            credit -= len(text)
            yield text
