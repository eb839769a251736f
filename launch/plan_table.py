#!/usr/bin/env python3
"""Plans the steps of the table in configs/README.md and prints it as Markdown; needs libtpu, but no TPU.

    .venv/bin/python launch/plan_table.py [--only bert_base] [--json FILE] [--any.field VALUE …]
    .venv/bin/python launch/plan_table.py --only distilbert_base --objective.teacher BERT_BASE    # a run or HF folder

Flags such as `--train.batch-size 512` apply to every row. A row takes minutes. Three columns are times by the TPU
compiler: of commits 0346f2a and 414361a, whose kernels are charged by their FLOPs at half the peak, and of this one,
whose kernels are counted. "Flax class" is the same step of Transformers 4.57.3's class by the same compiler, and how
many times as long it takes.
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
    """One step of the table.

    Attributes:
        name: Name of the step; `--only` selects by its beginning.
        preset: Preset in configs/.
        topology: Topology to plan it for.
        flags: Flags of the step.
        at_0346f2a: Time of a step, MFU and HBM at commit 0346f2a.
        at_414361a: The same at commit 414361a.
        peer: Milliseconds that a step of the Flax class takes.
    """

    name: str
    preset: str
    topology: str
    flags: tuple[str, ...] = ()
    at_0346f2a: str = "–"
    at_414361a: str = "–"
    peer: float | None = None


LENGTH = ("--data.length", "512")
SMALL = (*LENGTH, "--train.batch-size", "256")
ROWS = (
    Row("bert_base", "bert_base", "v5e:4x4", SMALL, "172 ms, 14 %, 9.3 GiB", "63.0 ms, 39 %, 4.9 GiB", peer=99),
    Row("bert_base, data 4, fsdp 4", "bert_base", "v5e:4x4", (*SMALL, "--mesh.data", "4", "--mesh.fsdp", "4"), peer=99),
    Row("bert_large", "bert_large", "v5e:16x16", (*LENGTH, "--train.batch-size", "4096"), "627 ms, 13 %",
        "192 ms, 43 %, 13.2 GiB"),
    Row("roberta_base", "roberta_base", "v5e:4x4", SMALL, peer=111.5),
    Row("albert_base", "albert_base", "v5e:4x4", SMALL, peer=76.0),
    Row("distilbert_base", "distilbert_base", "v5e:4x4", SMALL, peer=109.7),
    Row("gpt2", "gpt2", "v5e:8x8", (), "199 ms, 18 %, 11.9 GiB", "78.5 ms, 45 %, 6.0 GiB", peer=119),
    Row("t5_1_1_base, data 2, fsdp 32", "t5_1_1_base", "v5e:8x8", ("--mesh.data", "2", "--mesh.fsdp", "32"),
        "57 ms, 15 %, 3.0 GiB", "21.2 ms, 41 %, 1.9 GiB", peer=25.5),
    Row("electra_base", "electra_base", "v5e:4x4", (), "273 ms, 10 %", "84.7 ms, 33 %, 6.5 GiB", peer=126.4),
    Row("electra_base, data 4, fsdp 4", "electra_base", "v5e:4x4", ("--mesh.data", "4", "--mesh.fsdp", "4"),
        peer=126.4),
    Row("albert_xxlarge", "albert_xxlarge", "v5e:16x16", ("--train.accumulate", "2"),
        at_414361a="910 ms, 68 %, 13.2 GiB"),
    Row("xlnet_large", "xlnet_large", "v5e:16x16", ("--train.accumulate", "8"),
        at_414361a="2,760 ms, 11 %, 13.3 GiB"),
    Row("reformer_enwik8", "reformer_enwik8", "v5e:2x4", at_414361a="1,940 ms, 17 %, 15.5 GiB"),
    Row("gpt3_13b", "gpt3_13b", "v5e:16x16", ("--train.accumulate", "2"), at_414361a="6,970 ms, 48 %, 9.8 GiB"),
    Row("t5_11b, fsdp 256", "t5_11b", "v5e:16x16", at_414361a="3,310 ms, 28 %, 6.5 GiB"),
    Row("t5_11b, data 8, fsdp 32", "t5_11b", "v5e:16x16", ("--mesh.data", "8", "--mesh.fsdp", "32"),
        at_414361a="2,990 ms, 31 %, 10.2 GiB"),
)
COLUMNS = ("step", "topology", "0346f2a", "414361a", "now", "MFU", "by executed FLOPs", "Flax class", "kernels",
           "HBM a chip", "roofline", "collective bytes that overlap")


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
        print(table_line(COLUMNS))
        print("|---" * len(COLUMNS) + "|", flush=True)
        for row in ROWS:
            needs_teacher = row.preset == "distilbert_base" and "--objective.teacher" not in flags
            if row.name.startswith(options.only) and not needs_teacher:
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
    """Return the line of a planned step."""
    start = (f"{row.name}, {plan['batch_size']} × {plan['length']}", row.topology, row.at_0346f2a, row.at_414361a)
    memory = f"{plan['hbm_bytes_per_chip'] / 2**30:.1f} GiB"
    overlap = "–" if plan["asynchronous_share"] is None else f"{plan['asynchronous_share']:.0%}"
    if not plan["estimated_step_seconds"]:
        return table_line((*start, "does not fit", "–", "–", "–", "–", memory, "–", overlap))
    milliseconds = plan["estimated_step_seconds"] * 1e3
    kernels = [f"{plan['counted_kernels']} counted"] if plan["counted_kernels"] else []
    kernels += [f"{plan['charged_kernels']} charged"] if plan["charged_kernels"] else []
    return table_line((
        *start, f"{milliseconds:,.1f} ms", f"{plan['estimated_mfu']:.0%}", f"{plan['estimated_executed_mfu']:.0%}",
        f"{row.peer:g} ms, {row.peer / milliseconds:.2f} ×" if row.peer else "–",
        f"{', '.join(kernels)}, {plan['estimated_kernel_seconds'] * 1e3:,.1f} ms" if kernels else "–",
        memory, f"{plan['roofline_seconds'] * 1e3:,.1f} ms", overlap,
    ))


def table_line(cells: tuple[str, ...]) -> str:
    """Return a line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
