"""Runs on a mixture: stopped and resumed anywhere, evaluated on each source, on one process and on several."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxlm.cli import main
from jaxlm.runs.load import load_run
from jaxlm.training import loop
from tests.parallel.test_processes import processes
from tests.training.support import Command, metadata, metrics, stopped_after, write_preset, write_text


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    source = ",".join(
        f"{write_text(folder / f'{name}.txt', seed, documents)}@{weight}"
        for seed, (name, documents, weight) in enumerate([("wiki", 120, 0.7), ("books", 40, 0.3)])
    )
    flags = ["--data.source", source, "--train.eval-every", "6"]
    return [str(write_preset(folder)), *flags]


@pytest.fixture(scope="module")
def whole(arguments, tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "whole"
    assert main(["pretrain", *arguments, "--run-dir", str(run)]) == 0
    return run


def test_the_loss_of_each_source_is_told(whole):
    """The overall figures are their means by the shares."""
    found = [line for line in metrics(whole) if "eval_loss" in line]
    assert [line["step"] for line in found] == [6, 12]
    for line in found:
        overall = 0.7 * line["eval_wiki_mlm_loss"] + 0.3 * line["eval_books_mlm_loss"]
        assert line["eval_mlm_loss"] == pytest.approx(overall, rel=1e-9)
        assert line["eval_loss"] == pytest.approx(line["eval_mlm_loss"], rel=1e-6)
        assert line["eval_wiki_mlm_loss"] != line["eval_books_mlm_loss"]


@pytest.mark.slow
def test_stopping_anywhere_changes_nothing(arguments, whole, tmp_path, capsys):
    """A run in five pieces is the run in one piece, bit for bit."""
    for steps in (1, 4, 5, 9, 12):
        code = stopped_after(steps, ["pretrain", *arguments, "--run-dir", str(tmp_path / "pieces")])
        assert code == (0 if steps == 12 else 143)
    assert metadata(tmp_path / "pieces", 12) == metadata(whole, 12)
    assert metrics(tmp_path / "pieces") == metrics(whole)
    said = capsys.readouterr().out
    share = r"\d\d\.\d\d% of the tokens, [\d.]+ epochs"
    assert re.search(rf"\nDrawn of wiki: {share}\nDrawn of books: {share}\n", said)
    assert re.search(r"held out: mlm_loss .* wiki_mlm_loss \d\.\d+  books_mlm_loss \d\.\d+", said)


def test_other_weights_are_another_text(arguments, whole, capsys):
    other = [words.replace("@0.3", "@0.4") for words in arguments]
    assert main(["pretrain", *other, "--run-dir", str(whole), "--train.steps", "14"]) == 2
    assert "the text has changed since this run began" in capsys.readouterr().err


PHASES = "5x16x12, 7x32x4"
PARTS = {1: (12,), 2: (6, 12), 4: (12,)}
"""Steps at which a run of 1, 2 and 4 processes ends; one of them is resumed in its second phase."""


class Recorder(Command):
    """A `Command` that writes down the rows of every training step, as the devices of its process have them."""

    @staticmethod
    def target(arguments: list[str], environment: dict[str, str], log: str) -> None:
        real = loop.run_step

        def run_step(program, state, batches, step_log, step):
            batch = next(batches)
            shards = zip(*(leaf.addressable_shards for leaf in jax.tree.leaves(batch)), strict=True)
            with Path(log).with_suffix(".rows").open("a") as file:
                for shard in shards:  # the tokens of some rows, and their segments
                    first = shard[0].index[0].start or 0
                    for number, row in enumerate(zip(*(np.asarray(part.data) for part in shard), strict=True), first):
                        print(json.dumps([step, number, np.concatenate(row).tolist()]), file=file)
            return real(program, state, iter([batch]), step_log, step)

        loop.run_step = run_step
        Command.target(arguments, environment, log)


@pytest.mark.slow
def test_one_two_and_four_processes_read_the_same_batches(arguments, tmp_path):
    """Over a phase boundary. Parameters differ by the order in which gradients are summed."""
    rows, params, lines = {}, {}, {}
    for count, parts in PARTS.items():
        run, folder = tmp_path / f"run{count}", tmp_path / str(count)
        command = ["pretrain", *arguments, "--run-dir", run, "--train.phases", PHASES]
        for steps in parts:
            started = processes(folder, *[[*command, "--train.steps", steps]] * count, command=Recorder)
            for process in started:
                assert process.wait() == 0, process.output
        found = [json.loads(line) for file in folder.glob("*.rows") for line in file.read_text().splitlines()]
        rows[count], lines[count] = sorted(found), metrics(run)
        params[count] = load_run(run).params
    numbers = [[step, row] for step in range(1, 13) for row in range(12 if step <= 5 else 4)]
    assert [row[:2] for row in rows[1]] == numbers
    assert [len(row[2]) for row in rows[1]] == [28] * 60 + [60] * 28
    for count in (2, 4):
        assert rows[count] == rows[1]
        for ours, theirs in zip(lines[count], lines[1], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)
        jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-5), params[count], params[1])
