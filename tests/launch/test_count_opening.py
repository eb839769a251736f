"""The way from the shell to the program of the train step is short enough to read."""

from __future__ import annotations

import pytest

from launch.count_opening import opened


@pytest.mark.slow
def test_few_functions_open_a_run(tmp_path):
    found = opened(["bert_tiny", "--run-dir", str(tmp_path / "run"), "--train.steps", "3"])
    followed = [name for name, calls_another in found.items() if calls_another]
    assert followed[0] == "cli.py: main" and followed[-1] == "training/program.py: Program.__init__"
    assert len(followed) <= 20 and len({name.partition(":")[0] for name in followed}) <= 15
    assert not (tmp_path / "run").exists(), "nothing is written before the program"
