"""The timing loop of all benchmarks, and the figures that it gives."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxlm.types import Report

ROUNDS = 5


@dataclasses.dataclass
class Side:
    """An implementation that is timed.

    Attributes:
        name: Name in the report.
        run: Run a number of steps and wait for the device.
        describe: Return further figures of this side, after the last round.
        first_seconds: Duration of the first run, with compilation.
        seconds: Duration of each round.
    """

    name: str
    run: Callable[[int], Any]
    describe: Callable[[], dict[str, Any]] = dict
    first_seconds: float = 0.0
    seconds: list[float] = dataclasses.field(default_factory=list)

    def time(self, steps: int) -> float:
        """Return the seconds that a number of steps takes."""
        start = time.perf_counter()
        self.run(steps)
        return time.perf_counter() - start

    def start(self, steps: int, report: Report) -> None:
        """Run the first steps, which compile."""
        report(f"First run of {self.name}, which compiles it …")
        self.first_seconds = self.time(steps)
        report(f"{self.name}: {self.first_seconds:.1f} s")

    def figures(self, unit: str, step_units: int, steps: int) -> dict[str, Any]:
        """Return speeds and durations, medians over rounds, for `step_units` units (such as tokens) a step."""
        by_round = [seconds / steps for seconds in self.seconds]
        step_seconds = statistics.median(by_round)
        return {
            f"{unit}_per_second": step_units / step_seconds, "step_seconds": step_seconds,
            "step_seconds_by_round": by_round, "seconds": self.seconds, "first_run_seconds": self.first_seconds,
            **self.describe(),
        }


def time_in_turns(sides: Sequence[Side], steps: int, report: Report) -> None:
    """Time every side in each of ROUNDS rounds, so that a busy machine slows down all of them."""
    report(f"Timing {ROUNDS} rounds of {steps} step{'s' * (steps > 1)} …")
    for _ in range(ROUNDS):
        for side in sides:
            side.seconds.append(side.time(steps))


def compare(
    ours: Side, peer: Side | None, unit: str, step_units: int, steps: int, step_flops: float = 0.0,
    peak_flops: float = 1.0,
) -> dict[str, Any]:
    """Return the figures of our side, those of the peer, and their ratio, as JSON has them.

    The peer's figures have the prefix "peer_", and are null without one. `unit` is what is counted, such as "tokens";
    without `step_flops` there is no MFU.
    """
    sides = [side.figures(unit, step_units, steps) for side in (ours, peer) if side]
    if step_flops:
        sides = [found | {"mfu": step_flops / found["step_seconds"] / peak_flops} for found in sides]
    theirs = sides[1] if peer else dict.fromkeys(sides[0])
    ratios = [theirs / ours for theirs, ours in zip(peer.seconds, ours.seconds, strict=True)] if peer else []
    return {"rounds": ROUNDS, "steps_per_round": steps} | sides[0] | {
        "peer": peer and peer.name, **{f"peer_{name}": value for name, value in theirs.items()},
        "ratio": statistics.median(ratios) if peer else None,
    }


def readable(figures: dict[str, Any]) -> str:
    """Return figures for a terminal, one a line; those of single rounds are only in JSON."""
    lines = []
    for name, value in figures.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            value = f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
        if value is not None and not isinstance(value, list):
            lines.append(f"{name:<34}{value}")
    return "\n".join(lines)
