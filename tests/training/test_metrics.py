"""What a run says of its figures: the baseline beside the losses that it suits, and curves that no full disk undoes."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure

from jaxlm.analysis.curves import draw_curves
from jaxlm.config.experiment import Experiment, TrainConfig
from jaxlm.config.json import to_json
from jaxlm.data.text import TextData
from jaxlm.objectives.causal_lm import CausalLM
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.objectives.replaced_tokens import ReplacedTokens
from jaxlm.objectives.span_corruption import SpanCorruption
from jaxlm.runs.folder import write_json
from jaxlm.training.loop import evaluation_line
from jaxlm.training.metrics import MetricsWriter, best_step, is_out_of_patience, last_evaluation, read_metrics


@pytest.mark.parametrize(("objective", "name", "has"), [
    (MaskedLM(), "mlm_loss", True), (CausalLM(), "lm_loss", True), (ReplacedTokens(), "generator_loss", True),
    (SpanCorruption(), "span_loss", False),
])
def test_the_unigram_entropy_stands_beside_losses_over_the_text_alone(objective, name, has):
    program = SimpleNamespace(eval_objective=objective, train=TrainConfig())
    feed = SimpleNamespace(source=SimpleNamespace(statistics=SimpleNamespace(unigram_entropy=2.0)))
    line = evaluation_line(7, {"loss": 3.5, name: 3.0, "accuracy": 0.25}, program, feed, {7: 3.5})
    assert f"{name} 3.0000" in line and "accuracy 0.2500" in line
    assert ("(unigram entropy 2.0000)" in line) == has


def test_curves_that_cannot_be_written_are_no_failure(tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 2.0}) + "\n")
    told = []

    def full(path, target):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        assert draw_curves(tmp_path, told.append) is None
    assert told == [
        f"The curves are not drawn: {tmp_path / 'curves.png'} cannot be written (No space left on device); free some "
        "space, or choose another folder."
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert draw_curves(tmp_path, told.append) == tmp_path / "curves.png" and len(told) == 1


def test_damaged_lines_are_left_out_and_mended(tmp_path):
    """One bad byte, a line that is no object, one without a step; the last line may be cut off by a kill."""
    path = tmp_path / "metrics.jsonl"
    good = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5, "eval_loss": 1.75}, {"step": 4, "loss": 1.0}]
    first, second, last = (json.dumps(line).encode() + b"\n" for line in good)
    path.write_bytes(first + b'{"step": 2, "lo\xffss": 1}\n' + b"3\n" + second + b'{"loss": 1}\n' + last + b'{"ste')
    assert read_metrics(tmp_path) == good
    assert last_evaluation(tmp_path) == (2, {"loss": 1.75}) and last_evaluation(tmp_path, up_to=1) == (0, {})
    MetricsWriter(tmp_path, tracker="none", after_step=3).close()
    assert path.read_bytes() == first + second
    assert last_evaluation(tmp_path / "none") == (0, {})


def test_patience_ends_with_evaluations_that_are_not_the_best():
    patient = TrainConfig(patience=2, best_by="loss")
    assert not is_out_of_patience({1: 3.0, 2: 2.0, 3: 2.5}, patient)
    assert is_out_of_patience({1: 3.0, 2: 2.0, 3: 2.5, 4: 2.1}, patient)
    assert not is_out_of_patience({1: 3.0, 2: 2.0, 3: 2.5, 4: 1.9}, patient)
    assert not is_out_of_patience({1: 1.0, 2: 2.0, 3: 3.0}, TrainConfig(patience=0))


def test_a_lower_rank_is_better():
    ranks = {100: 900.0, 200: 500.0, 300: 300.0}
    assert best_step(ranks, "mean_rank") == 300
    assert not is_out_of_patience(ranks, TrainConfig(patience=2, best_by="mean_rank"))


def test_lines_are_forced_to_the_disk_at_checkpoints(tmp_path, monkeypatch):
    forced = []
    monkeypatch.setattr(os, "fsync", forced.append)
    with contextlib.closing(MetricsWriter(tmp_path, tracker="none", after_step=0)) as writer:
        monkeypatch.setattr(time, "monotonic", lambda: 1e9)
        for step in (1, 2, 3):
            writer.write(step, {"loss": 1.0})
        assert not forced
        monkeypatch.setattr(writer.tracker, "flush", lambda: forced.append("tracker"))
        writer.sync()
        assert len(forced) == 2 and forced[1] == "tracker"


def test_curves_have_metrics_that_the_first_step_lacks(tmp_path, monkeypatch):
    """A metric that has no weight at step 1, and one that only evaluations have."""
    lines = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5, "nsp_loss": 0.7, "eval_nsp_accuracy": 0.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, dpi: drawn.extend(a.get_title() for a in figure.axes))
    assert draw_curves(tmp_path, pytest.fail)
    assert drawn[:3] == ["loss", "nsp_loss", "nsp_accuracy"]


def test_curves_of_a_mixture_in_phases(tmp_path, monkeypatch):
    """The title names the run, sources share a panel, the learning rate has one, and a line marks a phase."""
    run = tmp_path / "wiki_and_books"
    experiment = Experiment(MaskedLM(), TextData(length=32), train=TrainConfig(steps=3, phases="1x16, 1, 1"))
    write_json(run / "config.json", to_json(experiment))
    (run / "checkpoints").mkdir()
    sources = {"eval_mlm_loss": 2.0, "eval_wiki_mlm_loss": 1.5, "eval_books_mlm_loss": 2.5}
    lines = [{"step": 1, "loss": 2.5, "mlm_loss": 2.0, "learning_rate": 0.1}, {"step": 2, "loss": 1.5} | sources]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, dpi: drawn.append(figure))
    assert draw_curves(run, pytest.fail)
    panels = {axis.get_title(): axis for axis in drawn[0].axes}
    assert drawn[0].get_suptitle() == "wiki_and_books" and [*panels][:3] == ["loss", "mlm_loss", "learning_rate"]
    labels = [line.get_label() for line in panels["mlm_loss"].lines]
    assert labels[:4] == ["training", "held out", "held out (wiki)", "held out (books)"]
    assert all([line.get_xdata()[0] for line in axis.lines if line.get_linestyle() == "--"] == [1]
               for name, axis in panels.items() if name)
