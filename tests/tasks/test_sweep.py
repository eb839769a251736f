"""Seeds, sweeps, and the rows of --test."""

from __future__ import annotations

import contextlib
import shutil

import numpy as np
import pytest

from jaxlm.cli import main
from jaxlm.config.experiment import Experiment, Resolved, TrainConfig
from jaxlm.runs import resolve as resolution
from jaxlm.runs import sweep
from jaxlm.runs.load import load_model
from jaxlm.tasks.classification import Classification, TextRows
from jaxlm.training.loop import NotFinite, train
from tests.tasks.support import finetune, result


def test_rows_of_a_test_with_another_use_are_told(tmp_path):
    for name, texts in (("train", "abc"), ("dev", "cde"), ("test", "bcd")):
        (tmp_path / f"{name}.tsv").write_text("text\tlabel\n" + "".join(f"{text}\tx\n" for text in texts))
    train, dev, test = (str(tmp_path / f"{name}.tsv") for name in ("train", "dev", "test"))
    told = [f"2 of 3 rows of {test} are also in {train}, which is trained on",
            f"2 of 3 rows of {test} are also in {dev}, which is for choices"]
    for data, expected in ((TextRows(source=train, dev=dev), told), (TextRows(source=train), told[:1])):
        assert sweep.test_remark(test, Resolved(Experiment(Classification(), data))) == "; ".join(expected)


@pytest.mark.parametrize(("best_by", "said"), [
    ("", "accuracy"), ("f1", "f1"), ("word_error", "word_error"),
    ("task_loss", "accuracy (--train.best-by task_loss is no metric of the task)"),
])
def test_a_sweep_names_the_metric_of_its_choice(best_by, said, monkeypatch):
    """The lowest error is the best one."""
    figures = {"a": dict(accuracy=0.5, f1=0.2, word_error=0.9), "b": dict(accuracy=0.4, f1=0.3, word_error=0.7)}
    monkeypatch.setattr(sweep, "_train", lambda training, *_: {"metrics": figures[training.folder]})
    resolved, lines = Resolved(Experiment(Classification(), train=TrainConfig(best_by=best_by))), []
    groups = {value: [sweep.Training(resolved, value, None)] for value in figures}
    sweep.fine_tune_all(groups, "data.length", 0, None, "", print, lines.append)
    chosen = "b" if best_by in ("f1", "word_error") else "a"
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


@pytest.mark.slow
def test_seeds_and_another_fine_tuned_run(models, rows, tmp_path, capsys, monkeypatch):
    seeds = ["classify", rows["classify"], models("bert"), tmp_path / "runs", "--seeds", "2"]
    with monkeypatch.context() as patch:  # a signal in the last step stops the other seeds
        patch.setattr("jaxlm.runs.pretrain.train", lambda *arguments: (*train(*arguments)[:2], 15))
        assert finetune(*seeds) == 143 and not (tmp_path / "runs" / "seed_1").exists()
    capsys.readouterr()
    assert finetune(*seeds) == 0
    found = result(capsys)
    assert found["seeds"] == 2 and set(found["deviations"]) == set(found["metrics"])
    assert (tmp_path / "runs" / "seed_1" / "config.json").exists()
    # Begun from that run, whose head has the same labels, and distilled from it.
    first = str(tmp_path / "runs" / "seed_0")
    assert finetune("classify", rows["classify"], first, tmp_path / "more", "--data.held-out", "0") == 0
    assert result(capsys) == {"task": "classification", "metrics": {}, "examples": 0}
    flags = ["--objective.teacher", first, "--objective.layer-weight", "1", "--objective.teacher-hidden-size", "16"]
    assert finetune("distil", rows["classify"], models("bert"), tmp_path / "distilled", *flags) == 0
    lines = (tmp_path / "distilled" / "metrics.jsonl").read_text()
    assert "soft_loss" in lines and "attention_loss" in lines and "hidden_loss" in lines
    capsys.readouterr()
    assert main(["evaluate", first, "--data.source", "a.tsv", "--data.dev", "b.tsv"]) == 2
    assert "give one of them" in capsys.readouterr().err
    assert main(["evaluate", first, "--data.held-out", "0.5"]) == 2
    assert "has learnt from would be scored" in capsys.readouterr().err


@pytest.mark.slow
def test_runs_share_rows_and_are_evaluated_from_memory(models, rows, tmp_path, capsys, monkeypatch):
    """Rows are encoded once for all values and seeds; `evaluate` on a run gives the same result."""
    encoded, encode = [], Classification.encode

    def counted(self, records, *arguments):
        encoded.append(len(records))
        return encode(self, records, *arguments)

    def fail(path):
        raise AssertionError(path)

    monkeypatch.setattr(Classification, "encode", counted)
    flags = ["--sweep", "optimizer.learning-rate=1e-8,1e-2", "--seeds", "2", "--data.length", "40"]
    with monkeypatch.context() as patch:
        patch.setattr("jaxlm.runs.sweep.load_run", fail)
        assert finetune("classify", rows["classify"], models("bert"), tmp_path / "runs", *flags) == 0
    assert encoded == [36, 4]
    figures, found = result(capsys)["sweep"], []
    for seed in (0, 1):
        assert main(["evaluate", str(tmp_path / "runs" / "learning-rate_1e-2" / f"seed_{seed}"), "--json"]) == 0
        found.append(result(capsys)["metrics"]["accuracy"])
    assert figures["1e-2"]["accuracy"] == np.mean(found)
    # Rows of another length are encoded again.
    encoded.clear()
    flags = ["--sweep", "data.length=16,24"]
    assert finetune("classify", rows["classify"], models("bert"), tmp_path / "more", *flags) == 0
    capsys.readouterr()
    assert encoded == [36, 4] * 2
    # A file of held-out rows is encoded once too. The row without text is not one of its rows.
    encoded.clear()
    train = tmp_path / "train.tsv"
    train.write_text(rows["classify"].read_text() + "\tyes\n")
    assert finetune("classify", train, models("bert"), tmp_path / "dev", "--data.dev", str(rows["classify"])) == 0
    assert encoded == [40, 40] and "skipped" not in result(capsys)


@pytest.mark.slow
def test_the_best_of_a_sweep_is_evaluated_on_other_rows(models, rows, tmp_path, capsys, monkeypatch):
    loaded = []
    monkeypatch.setattr(resolution, "load_model", lambda path, *place: loaded.append(path) or load_model(path, *place))
    flags = ["--sweep", "optimizer.learning-rate=1e-8,3e-3", "--train.steps", "120", "--train.batch-size", "16",
             "--data.dev", str(rows["same"]), "--bootstrap", "50"]
    flags += ["--test", str(shutil.copy(rows["same"], tmp_path / "test.tsv"))]
    assert finetune("classify", rows["classify"], models("bert"), tmp_path / "sweep", *flags) == 0
    found = result(capsys)
    assert loaded.count(models("bert")) == 1
    assert found["chosen"] == {"optimizer.learning-rate": "3e-3"}
    assert found["run"] == str(tmp_path / "sweep" / "learning-rate_3e-3")
    chosen = found["sweep"]["3e-3"]["accuracy"]
    assert found["sweep"]["1e-8"]["accuracy"] < chosen == found["test"]["metrics"]["accuracy"]
    low, high = found["test"]["intervals"]["accuracy"]
    assert low <= found["test"]["metrics"]["accuracy"] <= high
    other = str(tmp_path / "sweep" / "learning-rate_1e-8")
    assert main(["evaluate", str(tmp_path / "sweep")]) == 2
    assert f"is no run but holds runs: {other}, {found['run']}; give one of them" in capsys.readouterr().err
    assert main(["evaluate", found["run"], "--against", other, "--data.source", str(rows["classify"]), "--json"]) == 0
    compared = result(capsys)
    assert compared["intervals"]["accuracy"][0] > 0 and compared["against"] == found["sweep"]["1e-8"]
    for wrong in ("optimizer.learning-rate", "learning-rate=1,1"):
        assert finetune("classify", rows["classify"], models("bert"), tmp_path / "no", "--sweep", wrong) == 2
        assert "is not FIELD=V1,V2" in capsys.readouterr().err


def test_what_a_sweep_and_a_test_need_is_checked_before_training(models, rows, tmp_path, capsys):
    flags = ["--sweep", "optimizer.learning-rate=1e-4,1e-3", "--data.held-out", "0"]
    assert finetune("classify", rows["classify"], models("bert"), tmp_path / "run", *flags) == 2
    assert "--sweep chooses by the held-out rows, and there are none" in capsys.readouterr().err
    assert finetune("classify", rows["classify"], models("bert"), tmp_path / "run", "--test", "nothere.csv") == 2
    assert "--test nothere.csv does not exist" in capsys.readouterr().err
    same = str(rows["classify"])
    assert finetune("classify", rows["classify"], models("bert"), tmp_path / "run", "--test", same) == 2
    assert f"--test is the file of --data.source, {same}, which is trained on" in capsys.readouterr().err
    flags = ["--data.dev", str(rows["same"]), "--test", str(rows["same"])]
    assert finetune("classify", rows["classify"], models("bert"), tmp_path / "run", *flags) == 2
    assert f"--test is the file of --data.dev, {rows['same']}, which is for choices; give" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
