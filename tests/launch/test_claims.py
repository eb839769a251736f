"""The claims: their files, their verdicts, and that they run at a hundredth of their size."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys

import pytest
from scipy import stats

from jaxlm.tasks.resolve import resolve
from tests.launch.test_tpu_pod import LAUNCH

spec = importlib.util.spec_from_file_location("claims", LAUNCH / "claims.py")
claims = importlib.util.module_from_spec(spec)
sys.modules["claims"] = claims  # dataclasses look their module up
spec.loader.exec_module(claims)


@pytest.mark.parametrize("name", claims.names())
def test_every_claim_names_its_arms_and_metrics(name, tmp_path):
    claim = claims.Claim.read(name)
    labels = {step.label for _, _, step in claims.Runner(tmp_path, "data", 1.0, 0.0).plan(claim)}
    assert claim.compare and claim.seeds >= 3
    for one in claim.compare:
        assert {one.better, one.than} <= set(claim.arms)
        assert one.metric.partition(".")[0] in labels


@pytest.mark.parametrize("name", claims.names())
def test_the_flags_of_every_command_are_fields(name, tmp_path):
    plan = claims.Runner(tmp_path, "data", 1.0, 0.0).plan(claims.Claim.read(name))
    for words in (step.words for _, seed, step in plan if seed == 0 and step.words[0] in ("pretrain", "finetune")):
        flags = re.sub(r"--(init-from|objective\.model\.task-layers) \S+", "", shlex.join(words[2:]))  # of a model
        t = resolve(words[1], shlex.split(flags)).experiment.train
        assert t.short_steps <= t.steps or not t.steps


def test_arms_share_the_runs_of_equal_commands(tmp_path):
    """The three students have one teacher, and a probe of another model is another run."""
    plan = list(claims.Runner(tmp_path, "data", 1.0, 0.0).plan(claims.Claim.read("distilled")))
    assert len({step.folder for _, _, step in plan if step.label == "teacher"}) == 1
    probes = [step.folder for arm, seed, step in plan if step.label == "ud_pos" and arm != "teacher"]
    assert len(set(probes)) == len(probes) == 6


@pytest.mark.parametrize(("margin", "expected"), [(0.0, "holds"), (0.2, "not separable"), (0.5, "does not hold")])
def test_a_verdict_is_where_welchs_interval_lies(margin, expected):
    arms = {"a": [{"m": value} for value in (0.80, 0.84, 0.82)], "b": [{"m": value} for value in (0.6, 0.64, 0.61)]}
    one = claims.Comparison("m", "a", "b", margin)
    gap, low, high = claims.difference(one, arms)
    # Welch (1947): t with the Welch-Satterthwaite degrees of freedom, variances 0.0004 and 0.000433.
    squares = 0.0004 / 3, 0.00043333 / 3
    freedom = sum(squares) ** 2 / sum(square**2 / 2 for square in squares)
    half = stats.t.ppf(0.975, freedom) * sum(squares) ** 0.5
    assert (gap, low, high) == pytest.approx((0.20333, 0.20333 - half, 0.20333 + half), abs=1e-4)
    assert claims.verdict(one, low, high) == expected
    lower = claims.Comparison("m", "b", "a", margin, lower=True)
    assert claims.difference(lower, arms) == pytest.approx((gap, low, high))


def run(name, tmp_path):
    command = [sys.executable, str(LAUNCH / "claims.py"), name, "--scale", "0.01", "--runs", str(tmp_path)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", claims.names())
def test_it_runs_at_a_hundredth_of_its_size(name, tmp_path, real_data):
    done = run(name, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{name}:" in done.stdout and "margin" in done.stdout
    figures = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert figures and all("seconds" in one for one in figures)
    times = {path: path.stat().st_mtime for path in tmp_path.glob("*.json")}
    assert run(name, tmp_path).returncode == 0  # finished commands are not run again
    assert {path: path.stat().st_mtime for path in tmp_path.glob("*.json")} == times
