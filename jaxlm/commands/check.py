"""Check whether this machine's devices compute what a CPU does, and write one file to attach to a report.

jaxlm check [--json] [--minutes M] [SYSTEM …]

Attention kernels, dropout and tiny presets are compared with the CPU of this machine, a step is computed twice, a run
stopped and resumed, and three steps are timed. SYSTEM is a preset (bert_tiny) or a check that is printed (rows). Exit
code 0, or 1 if something is wrong.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from jaxlm.commands.common import Parser, log_line, start_jax
from jaxlm.errors import UserError


def main(arguments: list[str]) -> int:
    """Run the command and return its exit code."""
    parser = Parser("jaxlm check", __doc__)
    parser.add_argument("systems", nargs="*", metavar="SYSTEM", help="presets or checks; by default all")
    parser.add_argument("--minutes", type=float, default=5.0, metavar="M", help="begin no check later; default 5")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output, nothing else")
    options = parser.parse_args(arguments)
    if not options.minutes > 0:
        raise UserError(f"--minutes is {options.minutes:g}; it must be above 0.")
    start_jax()
    from jaxlm.analysis.check import all_checks, run_checks

    checks, file = all_checks(options.systems), Path(time.strftime("jaxlm-check-%Y%m%d-%H%M%S.json"))

    def save(found: dict[str, Any]) -> None:
        file.write_text(json.dumps(found, indent=1, ensure_ascii=False), "utf-8")

    report = log_line if options.json else lambda line: print(line, flush=True)
    found = run_checks(checks, options.minutes, save, report)
    results = [one["result"] for one in found["checks"].values()]
    counts = ", ".join(f"{results.count(kind)} {kind}" for kind in ("✓", "✗", "not reached") if kind in results)
    report(f"{counts} on {found['devices']} {found['device']}; attach {file} to a report.")
    if options.json:
        print(json.dumps(found, ensure_ascii=False))
    return int("✗" in results)
