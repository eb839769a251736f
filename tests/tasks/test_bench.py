"""Benchmark of fine-tuning: both sides process the same rows, and the reported figures are consistent."""

import json

import pytest

from jaxlm.cli import main


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["classify", "squad"])
def test_reports(preset, models, rows, capsys):
    flags = ["--data.length", "64", "--train.batch-size", "4"]
    assert main(["bench", f"configs/tasks/{preset}.py", "--init-from", models("bert"), "--data.source",
                 str(rows[preset]), "--steps", "2", "--peer", "huggingface", "--json", *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["steps"], found["batch_size"]) == (2, 4) and found["peer"].startswith("Trainer, Bert")
    assert found["rows_per_second"] == pytest.approx(8 / sorted(found["seconds"])[2])
    ratios = sorted(theirs / ours for theirs, ours in zip(found["peer_seconds"], found["seconds"], strict=True))
    assert found["ratio"] == pytest.approx(ratios[2])


def test_a_task_without_a_recipe_is_refused(models, rows, capsys):
    assert main(["bench", "configs/tasks/choose.py", "--init-from", models("bert"), "--data.source",
                 str(rows["choose"]), "--data.length", "64", "--steps", "1", "--peer", "huggingface"]) == 2
    assert "no recipe to fine-tune multiple_choice" in capsys.readouterr().err
