"""One or two sides timed in turns, in one process: ours, and a peer's."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

ROUNDS = 5
Runner = Callable[[], float]
"""Does one round and returns its figure, such as its seconds."""


@dataclasses.dataclass(frozen=True)
class Rounds:
    """What was timed. heading: what was done, for people. unit: what is counted ("rows"). amount: how many units a
    round has. facts: what was done, for JSON. seconds: of each round."""

    heading: str
    unit: str
    amount: int
    facts: dict[str, Any]
    seconds: list[float]
    peer: str | None = None
    peer_seconds: list[float] = dataclasses.field(default_factory=list)

    def speed(self, seconds: list[float]) -> float:
        """Units a second: the median over rounds."""
        return self.amount / statistics.median(seconds)

    @property
    def ratio(self) -> float | None:
        """Our speed over the peer's."""
        return ratio(self.seconds, self.peer_seconds) if self.peer else None

    def to_json(self) -> dict[str, Any]:
        """facts, `seconds`, `UNIT_per_second`, those of the peer, and `ratio`."""
        name = f"{self.unit}_per_second"
        return self.facts | {
            "seconds": self.seconds, name: self.speed(self.seconds), "peer": self.peer,
            "peer_seconds": self.peer_seconds, "ratio": self.ratio,
            f"peer_{name}": self.speed(self.peer_seconds) if self.peer else None,
        }

    def report(self) -> str:
        """The result as text for a terminal."""
        lines = [f"{self.heading}; medians of {len(self.seconds)} rounds", "",
                 f"{'':<44}{self.unit + '/s':>10}{'seconds':>10}"]
        for name, seconds in (("jaxlm", self.seconds), (self.peer, self.peer_seconds)):
            if name:
                lines.append(f"{name:<44}{self.speed(seconds):>10,.1f}{statistics.median(seconds):>10,.2f}")
        return "\n".join(lines + ([f"ratio{self.ratio:>49.2f}"] if self.peer else []))


def in_turns(sides: Sequence[Runner]) -> list[list[float]]:
    """What each side gave in each of ROUNDS rounds."""
    found: list[list[float]] = [[] for _ in sides]
    for _ in range(ROUNDS):
        for side, figures in zip(sides, found, strict=True):
            figures.append(side())
    return found


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Their seconds over ours: the median over rounds, each of which timed both."""
    return statistics.median(t / o for t, o in zip(theirs, ours, strict=True))
