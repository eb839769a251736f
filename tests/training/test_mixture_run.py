"""Runs on a mixture: stopped and resumed anywhere, evaluated on each source, on one process and on several."""

from __future__ import annotations

import re

import pytest

from jaxlm.cli import main
from tests.parallel.test_processes import train_to
from tests.training.support import metadata, metrics, stopped_after, write_preset, write_text


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
        overall = 0.7 * line["eval_wiki_loss"] + 0.3 * line["eval_books_loss"]
        assert line["eval_loss"] == pytest.approx(overall, rel=1e-9)
        assert line["eval_loss"] == pytest.approx(line["eval_mlm_loss"] + line["eval_nsp_loss"], rel=1e-6)
        assert line["eval_wiki_loss"] != line["eval_books_loss"]


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
    assert re.search(r"held out: mlm_loss .* wiki_loss \d\.\d+  books_loss \d\.\d+", said)


def test_other_weights_are_another_text(arguments, whole, capsys):
    other = [words.replace("@0.3", "@0.4") for words in arguments]
    assert main(["pretrain", *other, "--run-dir", str(whole), "--train.steps", "14"]) == 2
    assert "the text has changed since this run began" in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_do_what_one_does(arguments, whole, tmp_path):
    preset, *flags = arguments
    train_to(preset, tmp_path / "run", tmp_path, 12, *flags)
    for ours, theirs in zip(metrics(tmp_path / "run"), metrics(whole), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
