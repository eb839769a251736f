"""Choices of a sweep, and the rows of --test, without training."""

from __future__ import annotations

import contextlib

import pytest

from jaxlm.config.experiment import Experiment, Resolved, TrainConfig
from jaxlm.runs import sweep
from jaxlm.tasks.classification import Classification, TextRows
from jaxlm.training.loop import NotFinite


def test_rows_of_a_test_with_another_use_are_told(tmp_path):
    for name, texts in (("train", "abc"), ("dev", "cde"), ("test", "bcd")):
        (tmp_path / f"{name}.tsv").write_text("text\tlabel\n" + "".join(f"{text}\tx\n" for text in texts))
    train, dev, test = (str(tmp_path / f"{name}.tsv") for name in ("train", "dev", "test"))
    told = [f"2 of 3 rows of {test} are also in {train}, which is trained on",
            f"2 of 3 rows of {test} are also in {dev}, which is for choices"]
    for data, expected in ((TextRows(source=train, dev=dev), told), (TextRows(source=train), told[:1])):
        assert sweep.test_remark(test, Resolved(Experiment(Classification(), data))) == "; ".join(expected)


@pytest.mark.parametrize(("best_by", "said"), [
    ("", "accuracy"), ("f1", "f1"), ("task_loss", "accuracy (--train.best-by task_loss is no metric of the task)"),
])
def test_a_sweep_names_the_metric_of_its_choice(best_by, said, monkeypatch):
    figures = {"a": {"accuracy": 0.5, "f1": 0.2}, "b": {"accuracy": 0.4, "f1": 0.3}}
    monkeypatch.setattr(sweep, "_train", lambda training, *_: {"metrics": figures[training.folder]})
    resolved, lines = Resolved(Experiment(Classification(), train=TrainConfig(best_by=best_by))), []
    groups = {value: [sweep.Training(resolved, value, None)] for value in figures}
    sweep.fine_tune_all(groups, "data.length", 0, None, "", print, lines.append)
    chosen = "b" if best_by == "f1" else "a"
    assert lines[-1] == f"Chosen by {said}: --data.length {chosen}, {chosen}"


@pytest.mark.parametrize("is_any_left", [True, False])
def test_a_sweep_goes_on_without_a_value_that_diverges(is_any_left, monkeypatch):
    def train(training, *_):
        if training.folder == "b" and is_any_left:
            return {"metrics": {"accuracy": 0.5}}
        raise NotFinite("the loss of step 3 is not finite.")

    monkeypatch.setattr(sweep, "_train", train)
    resolved = Resolved(Experiment(Classification()))
    groups, said = {value: [sweep.Training(resolved, value, None)] for value in "abc"}, []
    with contextlib.nullcontext() if is_any_left else pytest.raises(NotFinite):
        found = sweep.fine_tune_all(groups, "data.length", 0, None, "", print, said.append)
        assert found["chosen"] == {"data.length": "b"} and [*found["sweep"]] == ["b"]
    left_out = [f"--data.length {value} is left out: the loss of step 3 is not finite." for value in "abc"]
    assert said[:2] == ([left_out[0], left_out[2]] if is_any_left else left_out[:2])
