"""The benchmark of generation: what is reported adds up, and the peer writes as much."""

import json

import pytest

from jaxlm.cli import main
from tests.analysis.test_bench import needs_torch

PRESET = """
from tests.analysis.test_bench import OBJECTIVES, TrainConfig, TextData, Experiment
experiment = Experiment(
    objective=OBJECTIVES["{name}"], data=TextData(length=48), train=TrainConfig(batch_size=3, steps=1)
)
"""


@pytest.mark.slow
@needs_torch
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_reports(name, tmp_path, capsys):
    path = tmp_path / "preset.py"
    path.write_text(PRESET.format(name=name))
    assert main(["bench", str(path), "--generate", "5", "--peer", "huggingface", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["batch_size"], found["prompt"], found["new_tokens"]) == (3, 24, 5)
    assert len(found["seconds"]) == len(found["peer_seconds"]) == 5 and found["peer"].endswith(".generate")
    assert found["tokens_per_second"] == pytest.approx(15 / sorted(found["seconds"])[2])
    ratios = sorted(theirs / ours for theirs, ours in zip(found["peer_seconds"], found["seconds"], strict=True))
    assert found["ratio"] == pytest.approx(ratios[2])
    assert main(["bench", str(path), "--generate", "5"]) == 0
    out = capsys.readouterr().out
    assert "tokens_per_second" in out and "ratio" not in out


def test_what_writes_no_text_is_refused(tmp_path, capsys):
    path = tmp_path / "preset.py"
    path.write_text(PRESET.format(name="bert"))
    assert main(["bench", str(path), "--generate", "5"]) == 2
    assert "trains no model that writes text" in capsys.readouterr().err
    path.write_text(PRESET.format(name="gpt2"))
    assert main(["bench", str(path), "--generate", "0"]) == 2
    assert "max_new_tokens is 0" in capsys.readouterr().err
