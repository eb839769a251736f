"""The table of faults."""

from __future__ import annotations

from typing import Any

Record = dict[str, Any]
"""What became of one fault: run, seed, place, processes, kind, moment, outcome, sentence, seconds to recover, end."""


def table(records: list[Record]) -> str:
    """Return a table in Markdown, with one row per kind of fault."""
    lines = ["| fault | how many | went on | ended, then resumed | with a sentence | same parameters at the end "
             "| longest recovery (s) |", "|---|---|---|---|---|---|---|"]
    kinds = sorted({record["kind"] for record in records})
    for kind in [*kinds, "all"]:
        rows = [record for record in records if kind in (record["kind"], "all")]
        recoveries = [record["seconds"] for record in rows if record["seconds"] is not None]
        counts = [len(rows), *(sum(map(choose, rows)) for choose in (
            lambda row: row["outcome"] == "went on", lambda row: row["outcome"] == "ended",
            lambda row: row["outcome"] == "ended" and bool(row["sentence"]), lambda row: row["end"] == "same",
        )), f"{max(recoveries, default=0):.0f}"]
        lines.append(f"| {kind} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)
