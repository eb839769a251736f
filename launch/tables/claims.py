#!/usr/bin/env python3
"""Run the experiments in configs/claims: small-scale replications of published claims.

    .venv/bin/python launch/tables/claims.py --list
    JAXLM_DATA=… .venv/bin/python launch/tables/claims.py replaced_tokens [CLAIM …]
    JAXLM_DATA=… .venv/bin/python launch/tables/claims.py --all --hours 3
    .venv/bin/python launch/tables/claims.py --table

A claim is one TOML file (see configs/CLAIMS.md). Every command of it has a run folder named after the command, so a
finished one is never run again, also where two claims share it, and an interrupted one goes on. A claim whose commands
are all finished gets its figures, by seed, in configs/claims/results/, and its picture in configs/claims/pictures/;
--table, or any claim that finishes, writes configs/CLAIMS.md from those figures.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from scipy import stats

ROOT = Path(__file__).resolve().parents[2]
CLAIMS = ROOT / "configs" / "claims"
SCALED = re.compile(r"(?<=--train\.steps )\d+|(?<=--optimizer\.warmup-steps )\d+|(?<=--train\.phases )\d\S*")
"""Values of the flags that --scale multiplies: numbers of steps, in phases those at the beginning and after a comma."""
STEPS = re.compile(r"(?<![\dx])\d+")


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two arms and one metric: the claim is that `better` is better than `than` by more than `margin`."""

    metric: str
    better: str
    than: str
    margin: float
    """A negative margin says "not worse by more than"."""
    lower: bool = False
    """Whether the smaller value is the better one."""

    @property
    def label(self) -> str:
        """The difference that is compared with the margin."""
        pair = (self.than, self.better) if self.lower else (self.better, self.than)
        return f"{self.metric}: {pair[0]} − {pair[1]} > {self.margin:g}"


@dataclasses.dataclass(frozen=True)
class Claim:
    """A file of configs/claims."""

    name: str
    claim: str
    """Statement under test, in one sentence."""
    paper: str
    reported: str
    """Result reported in the paper."""
    equal: str
    """Variables held constant across arms."""
    arms: dict[str, list[str]]
    """Commands of each arm, in order."""
    compare: list[Comparison]
    seeds: int = 3
    note: str = ""
    """Remarks added after the run."""

    @classmethod
    def read(cls, name: str) -> Claim:
        """Read configs/claims/NAME.toml."""
        found = tomllib.loads((CLAIMS / f"{name}.toml").read_text())
        short = tomllib.loads((CLAIMS / "commands.toml").read_text())
        found["arms"] = {
            arm: [_expand(command, short) for command in commands] for arm, commands in found["arms"].items()
        }
        found["compare"] = [Comparison(**one) for one in found["compare"]]
        return cls(name=name, **found)


def _expand(command: str, short: dict[str, str]) -> str:
    """Expand $NAME from commands.toml, recursively."""
    while (expanded := re.sub(r"\$(\w+)", lambda name: short[name[1]], command)) != command:
        command = expanded
    return " ".join(command.split())


class Unfinished(Exception):
    """A command failed."""


class OutOfTime(Exception):
    """The time limit was reached."""


class Step(NamedTuple):
    """A command of an arm."""

    label: str
    """Its name: later commands call its folder {label}, and its metrics are "label.metric"."""
    words: list[str]
    seed: int
    folder: Path

    @property
    def result(self) -> Path:
        """File of its figures, which exists when it is finished."""
        return self.folder.with_suffix(".json")


class Runner:
    """Runs commands once, each in a folder of its own."""

    def __init__(self, runs: Path, data: str, scale: float, deadline: float) -> None:
        self.runs, self.data, self.scale, self.deadline = runs.resolve(), data, scale, deadline

    def plan(self, claim: Claim) -> Iterator[tuple[str, int, Step]]:
        """Yield (arm, seed, step) in the order in which they run."""
        for seed in range(claim.seeds):
            for arm, commands in claim.arms.items():
                folders: dict[str, str] = {"data": self.data}
                for command in commands:
                    step = self.step(command, seed, folders)
                    folders[step.label] = str(step.folder)
                    yield arm, seed, step

    def step(self, command: str, seed: int, folders: dict[str, str]) -> Step:
        """Return the step of a command; its folder is named after its first words and a hash of all of it."""
        command = SCALED.sub(lambda found: STEPS.sub(lambda steps: self.scaled(int(steps[0])), found[0]), command)
        label, equals, rest = command.partition(" = ")
        if not equals:
            label, rest = "model" if command.startswith("pretrain ") else Path(command.split()[1]).stem, command
        if fixed := re.search(r"--train\.seed (\d+)", rest):  # such as a teacher that all seeds share
            seed = int(fixed[1])
        name = "-".join(Path(word).stem.strip("{}") for word in rest.split()[:2])
        known = {key: Path(folder).name for key, folder in folders.items()} | {"data": "data"}
        key = hashlib.sha256(f"{rest.format(**known, folder='')} {seed}".encode()).hexdigest()[:10]
        folder = self.runs / f"{name}-{key}"
        return Step(label, shlex.split(rest.format(**folders, folder=folder)), seed, folder)

    def scaled(self, number: int) -> str:
        """Return a number times the scale, at least 2 unless it is smaller itself."""
        return str(max(min(2, number), round(number * self.scale)))

    def run(self, step: Step) -> None:
        """Run one step, unless it is finished."""
        folder, words = step.folder, step.words
        if step.result.exists():
            return
        if time.monotonic() > self.deadline:
            raise OutOfTime("the time limit (--hours) was reached; run the same command to continue.")
        seed = [] if "--train.seed" in words else ["--train.seed", str(step.seed)]
        jaxlm = [sys.executable, "-m", "jaxlm.cli", *words]
        line = {
            "pretrain": [*jaxlm, "--run-dir", str(folder), *seed],
            "finetune": [*jaxlm, "--run-dir", str(folder), "--json", *seed],
            "export": jaxlm,
            "measure": [sys.executable, str(Path(__file__).with_name("claim_measures.py")), *words[1:],
                        "--out", str(folder), "--seed", str(step.seed)],
        }[words[0]]
        (folder if words[0] == "measure" else folder.parent).mkdir(parents=True, exist_ok=True)
        start, log_file = time.monotonic(), folder.with_suffix(".log")
        with log_file.open("a") as log:
            done = subprocess.run(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True)
            log.write(done.stdout)
        if done.returncode:
            raise Unfinished(f"`{' '.join(line[2:])}` ended with {done.returncode}; see {log_file}.")
        figures = {}
        if words[0] == "pretrain":
            figures = pretrained(folder)
        elif words[0] != "export":
            figures = json.loads(done.stdout.strip().splitlines()[-1])
        figures = figures.get("metrics", figures) | {"seconds": time.monotonic() - start}
        step.result.write_text(json.dumps({"commit": commit()} | figures))

    def figures(self, claim: Claim) -> dict[str, list[dict[str, float]]]:
        """Return the figures of each arm by seed, each under "LABEL.METRIC"."""
        arms: dict[str, list[dict[str, float]]] = {arm: [{} for _ in range(claim.seeds)] for arm in claim.arms}
        for arm, seed, step in self.plan(claim):
            values = json.loads(step.result.read_text())
            arms[arm][seed] |= {f"{step.label}.{name}": value for name, value in values.items()}
        for one in claim.compare:
            for arm in (one.better, one.than):
                if not all(math.isfinite(values.get(one.metric, math.nan)) for values in arms[arm]):
                    raise Unfinished(f"{one.metric} of the arm {arm!r} is not a finite number for every seed.")
        return arms


def pretrained(folder: Path) -> dict[str, float]:
    """Return the last held-out figures of a run, its parameters, and its training FLOPs as `step_flops` counts them."""
    import jax

    from jaxlm.runs.folder import RunFolder
    from jaxlm.tokenizers.tokenizer import Tokenizer
    from jaxlm.training.metrics import last_evaluation

    run = RunFolder.read(folder)
    e = run.experiment
    objective = e.objective.bind(Tokenizer.load(run.tokenizer_folder).vocabulary, e.data.length)
    e = dataclasses.replace(e, objective=objective)
    shapes = jax.eval_shape(objective.init, jax.random.key(0))
    figures = dict(last_evaluation(run.path)[1])
    figures["parameters"] = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    if not getattr(objective, "teacher", ""):  # a teacher's FLOPs need its parameters
        figures["flops"] = sum(
            (min(phase.last or e.train.steps, e.train.steps) - phase.after)
            * phase.experiment.objective.step_flops(phase.experiment.data.length, phase.experiment.train.batch_size)
            for phase in e.phases if phase.after < e.train.steps
        )
    return figures


def difference(one: Comparison, arms: dict[str, list[dict[str, float]]]) -> tuple[float, float, float]:
    """Return (difference of the means, lower and upper end of its 95 % interval); positive: `better` is better.

    The interval is that of the paired t-test: the arms share their seeds, and with them the order of the text, the
    masks and generated data.
    """
    sign = -1.0 if one.lower else 1.0
    gaps = [sign * (a[one.metric] - b[one.metric]) for a, b in zip(arms[one.better], arms[one.than], strict=True)]
    half = stats.t.ppf(0.975, len(gaps) - 1) * statistics.stdev(gaps) / len(gaps) ** 0.5
    return statistics.fmean(gaps), statistics.fmean(gaps) - half, statistics.fmean(gaps) + half


def verdict(one: Comparison, low: float, high: float) -> str:
    """Return the verdict: where the interval lies relative to the margin."""
    if low > one.margin:
        return "holds"
    return "does not hold" if high < one.margin else "not separable"


def verdict_of_all(verdicts: list[str]) -> str:
    """A claim holds if all its comparisons do, and does not if one does not."""
    for worst in ("does not hold", "not separable"):
        if worst in verdicts:
            return worst
    return "holds"


def machine() -> str:
    """Name of the processor and number of cores."""
    file = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*:\s*(.*)", file.read_text()) if file.exists() else []
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores} core{'s' * (cores != 1)} of {names[0] if names else platform.processor()}"


@functools.cache
def commit() -> str:
    """Return the commit of the checkout; a + stands for changes that are not committed."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain", "jaxlm", "configs/*.py"], capture_output=True, text=True)
    return head + "+" * bool(changed.stdout)


def picture(claim: Claim, arms: dict[str, list[dict[str, float]]]) -> None:
    """Draw each metric: the mean and deviation of every arm, and its seeds as dots."""
    from matplotlib.figure import Figure

    metrics = list(dict.fromkeys(one.metric for one in claim.compare))
    figure = Figure(figsize=(1.2 + 3.4 * len(metrics), 1.3 + 0.35 * len(arms)), layout="constrained")
    axes = figure.subplots(1, len(metrics), squeeze=False, sharey=True)[0]
    for axis, metric in zip(axes, metrics, strict=True):
        found = {arm: [seed[metric] for seed in seeds if metric in seed] for arm, seeds in arms.items()}
        for row, values in enumerate(reversed(found.values())):
            if values:
                deviation = statistics.stdev(values) if len(values) > 1 else 0.0
                axis.errorbar(statistics.fmean(values), row, xerr=deviation, fmt="|", color="black", capsize=4, ms=14)
                axis.plot(values, [row] * len(values), "o", alpha=0.6)
        axis.set_yticks(range(len(found)), list(found)[::-1])
        axis.set_ylim(-0.6, len(found) - 0.4)
        axis.set_xlabel(metric.replace(".", " ").replace("_", " "))
        axis.grid(axis="x", alpha=0.3)
    figure.suptitle(claim.claim, fontsize=9, wrap=True)
    (CLAIMS / "pictures").mkdir(exist_ok=True)
    figure.savefig(CLAIMS / "pictures" / f"{claim.name}.png", dpi=110)


def record(claim: Claim, arms: dict[str, list[dict[str, Any]]]) -> None:
    """Write the figures of a finished claim."""
    commits = sorted({values.pop(name) for values in itertools.chain(*arms.values()) for name in [*values]
                      if name.endswith(".commit")})
    facts = {"commit": ", ".join(commits), "machine": machine(), "arms": arms}
    (CLAIMS / "results").mkdir(exist_ok=True)
    (CLAIMS / "results" / f"{claim.name}.json").write_text(json.dumps(facts, indent=1) + "\n")


def table() -> str:
    """Return configs/CLAIMS.md: the heading with the verdict of each claim, then a section for each."""
    verdicts, details = ["| claim | verdict | hours |", "|---|---|---|"], []
    for name in names():
        claim, file = Claim.read(name), CLAIMS / "results" / f"{name}.json"
        facts = json.loads(file.read_text()) if file.exists() else None
        whole = f"**{verdict_of_all([row[-1] for row in compared(claim, facts)])}**" if facts else "not run"
        # Arms share runs, whose seconds are then equal to the last digit.
        runs = itertools.chain(*facts["arms"].values()) if facts else ()
        distinct = {item for values in runs for item in values.items() if item[0].endswith(".seconds")}
        hours = sum(seconds for _, seconds in distinct) / 3600
        verdicts.append(f"| [{claim.claim}](#{name}) | {whole} | {hours:.1f} |")
        details += detail(claim, facts)
    heading = (CLAIMS / "heading.md").read_text().rstrip().replace("VERDICTS", "\n".join(verdicts))
    return "\n".join([heading, *details]) + "\n"


def compared(claim: Claim, facts: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return (label, difference with its interval, verdict) of each comparison."""
    found = [(one, *difference(one, facts["arms"])) for one in claim.compare]
    return [(one.label, interval(gap, low, high), verdict(one, low, high)) for one, gap, low, high in found]


def detail(claim: Claim, facts: dict[str, Any] | None) -> list[str]:
    """Return the section of one claim."""
    lines = ["", f"## {claim.name}", "", f"[Arms](claims/{claim.name}.toml). {claim.paper} Reported: {claim.reported}"]
    if facts:
        lines += ["", "| comparison | difference [95 % CI] | verdict |", "|---|---|---|"]
        lines += [f"| {' | '.join(row)} |" for row in compared(claim, facts)]
        lines += ["", f"![{claim.name}](claims/pictures/{claim.name}.png)", ""]
        runs = [*itertools.chain(*facts["arms"].values())]
        metrics = [*dict.fromkeys([*(one.metric for one in claim.compare), "model.flops", "model.parameters"])]
        metrics = [name for name in metrics if any(name in values for values in runs)]
        lines += [f"| arm | {' | '.join(metrics)} |", "|---" * (1 + len(metrics)) + "|"]
        for arm, seeds in facts["arms"].items():
            cells = [spread([one[name] for one in seeds if name in one]) for name in metrics]
            lines.append(f"| {arm} | {' | '.join(cells)} |")
    return [*lines, *(["", claim.note.strip()] if claim.note else [])]


def spread(values: list[float]) -> str:
    """Return mean ± deviation."""
    if not values:
        return "–"
    return short(statistics.fmean(values)) + (f" ± {short(statistics.stdev(values))}" if len(set(values)) > 1 else "")


def interval(gap: float, low: float, high: float) -> str:
    """Return a difference and the ends of its interval."""
    return f"{short(gap, '+')} [{short(low, '+')}, {short(high, '+')}]"


def short(value: float, sign: str = "") -> str:
    """Return a number with four decimals, or in scientific notation if that would hide it or be long."""
    return f"{value:{sign}.4f}" if not value or 1e-3 <= abs(value) < 1000 else f"{value:{sign}.4g}"


def names() -> list[str]:
    """Names of all claims, in the order of the alphabet."""
    return sorted(path.stem for path in CLAIMS.glob("*.toml") if path.stem != "commands")


def main() -> int:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("claims", nargs="*", metavar="CLAIM")
    parser.add_argument("--list", action="store_true", help="print the claims and end")
    parser.add_argument("--all", action="store_true", help="run every claim")
    parser.add_argument("--table", action="store_true", help="write configs/CLAIMS.md and the pictures and end")
    parser.add_argument("--hours", type=float, default=math.inf, help="start no new command after this many hours")
    parser.add_argument("--runs", type=Path, default=Path("runs/claims"), help="folder of the run folders")
    parser.add_argument("--data", default=os.environ.get("JAXLM_DATA", ""), help="folder of texts and tasks")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the steps; 0.01 for a smoke test")
    options = parser.parse_args()
    if options.list:
        for name in names():
            print(f"{name:20} {Claim.read(name).claim}")
        return 0
    if options.table:
        for name in names():
            if (file := CLAIMS / "results" / f"{name}.json").exists():
                picture(Claim.read(name), json.loads(file.read_text())["arms"])
        (ROOT / "configs" / "CLAIMS.md").write_text(table())
        return 0
    chosen = names() if options.all else options.claims
    if not chosen or (unknown := set(chosen) - set(names())):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; see --list" if chosen else "name a claim, or --all")
    if not options.data:
        parser.error("--data, or JAXLM_DATA, must name the folder of texts and tasks")
    runner = Runner(options.runs, options.data, options.scale, time.monotonic() + 3600 * options.hours)
    return run_all(runner, [Claim.read(name) for name in chosen])


def run_all(runner: Runner, claims: list[Claim]) -> int:
    """Run the commands of all claims; return 0 if all are finished."""
    plans = {claim.name: list(runner.plan(claim)) for claim in claims}
    failed = False
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TimeRemainingColumn(elapsed_when_finished=True))
    with Progress(*columns) as bar:
        task = bar.add_task("", total=sum(map(len, plans.values())))
        for claim in claims:
            try:
                for arm, seed, step in plans[claim.name]:
                    bar.update(task, description=f"{claim.name}: {arm}, seed {seed}, {step.label}")
                    runner.run(step)
                    bar.advance(task)
                arms = runner.figures(claim)
            except OutOfTime as error:
                bar.console.print(f"{claim.name}: {error}", markup=False, soft_wrap=True)
                return 1
            except Unfinished as error:
                bar.console.print(f"{claim.name}: {error}", markup=False, soft_wrap=True)
                failed = True
                continue
            for one in claim.compare:
                gap, low, high = difference(one, arms)
                bar.console.print(
                    f"{claim.name}: {one.label}: {interval(gap, low, high)}, {verdict(one, low, high)}",
                    markup=False, soft_wrap=True,
                )
            if runner.scale == 1.0:
                record(claim, arms)
                picture(claim, arms)
                (ROOT / "configs" / "CLAIMS.md").write_text(table())
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
