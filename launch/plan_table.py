#!/usr/bin/env python3
"""Plans the steps of the table in configs/README.md and prints it as Markdown; needs libtpu, but no TPU.

    .venv/bin/python launch/plan_table.py [--only bert_base] [--json FILE] [--any.field VALUE …]

Flags such as `--train.batch-size 512` apply to every row. A row takes minutes. "Before" is commit 0346f2a by the
same count (cycles times trip counts over the clock).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


@dataclasses.dataclass(frozen=True)
class Row:
    """One step of the table: a preset on a topology, and what the same step was estimated to take before."""

    name: str
    preset: str
    topology: str
    flags: tuple[str, ...] = ()
    before: str = "–"


LENGTH = ("--data.length", "512")
ROWS = (
    Row("bert_base, published dropout", "bert_base", "v5e:4x4", (*LENGTH, "--train.batch-size", "256"),
        "172 ms, 14 %, 9.3 GiB"),
    Row("bert_base, no attention dropout", "bert_base", "v5e:4x4",
        (*LENGTH, "--train.batch-size", "256", "--objective.model.attention-dropout", "0")),
    Row("bert_base, no attention dropout, data 4, fsdp 4", "bert_base", "v5e:4x4",
        (*LENGTH, "--train.batch-size", "256", "--objective.model.attention-dropout", "0",
         "--mesh.data", "4", "--mesh.fsdp", "4")),
    Row("bert_large", "bert_large", "v5e:16x16", (*LENGTH, "--train.batch-size", "4096"), "627 ms, 13 %"),
    Row("gpt2", "gpt2", "v5e:8x8", before="199 ms, 18 %, 11.9 GiB"),
    Row("t5_1_1_base, data 2, fsdp 32", "t5_1_1_base", "v5e:8x8", ("--mesh.data", "2", "--mesh.fsdp", "32"),
        "57 ms, 15 %, 3.0 GiB"),
    Row("electra_base", "electra_base", "v5e:4x4", before="273 ms, 10 %"),
    Row("albert_xxlarge", "albert_xxlarge", "v5e:16x16", ("--train.accumulate", "2")),
    Row("xlnet_large", "xlnet_large", "v5e:16x16", ("--train.accumulate", "8")),
    Row("reformer_enwik8", "reformer_enwik8", "v5e:2x4"),
    Row("gpt3_13b", "gpt3_13b", "v5e:16x16", ("--train.accumulate", "2")),
    Row("t5_11b, fsdp 256", "t5_11b", "v5e:16x16"),
    Row("t5_11b, data 8, fsdp 32", "t5_11b", "v5e:16x16", ("--mesh.data", "8", "--mesh.fsdp", "32")),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--only", default="", help="only rows whose name begins so")
    parser.add_argument("--json", type=Path, default=None, help="also write each row's plan, one JSON object a line")
    options, flags = parser.parse_known_args()

    from jaxlm.analysis import plan as planning
    from jaxlm.config.flags import override
    from jaxlm.config.presets import load_preset
    from jaxlm.errors import UserError

    try:
        planning.require_compiler()
        planning.prepare_environment()
        print("| step | topology | before | now | MFU | HBM a chip | roofline | collective bytes that overlap |")
        print("|---|---|---|---|---|---|---|---|", flush=True)
        for row in ROWS:
            if row.name.startswith(options.only):
                experiment = load_preset(str(CONFIGS / f"{row.preset}.py"))
                experiment = override(experiment, [*row.flags, *flags], f"plan_table {row.preset}")
                plan = planning.plan(experiment, row.topology)
                print(markdown(row, plan), flush=True)
                if options.json:
                    with options.json.open("a") as file:
                        file.write(json.dumps({"name": row.name, **plan}) + "\n")
    except UserError as error:
        print(f"plan_table: {error}", file=sys.stderr)
        return 2
    return 0


def markdown(row: Row, plan: dict) -> str:
    name = f"{row.name}, {plan['batch_size']} × {plan['length']}"
    memory = f"{plan['hbm_bytes_per_chip'] / 2**30:.1f} GiB"
    overlap = "–" if plan["asynchronous_share"] is None else f"{plan['asynchronous_share']:.0%}"
    if not plan["estimated_step_seconds"]:
        return f"| {name} | {row.topology} | {row.before} | does not fit | – | {memory} | – | {overlap} |"
    return (
        f"| {name} | {row.topology} | {row.before} | {plan['estimated_step_seconds'] * 1e3:.1f} ms "
        f"| {plan['estimated_mfu']:.0%} | {memory} | {plan['roofline_seconds'] * 1e3:.1f} ms | {overlap} |"
    )


if __name__ == "__main__":
    sys.exit(main())
