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

from jaxlm.runs.resolve import resolve
from tests.launch.test_tpu_pod import LAUNCH
from tests.params import first_fast

spec = importlib.util.spec_from_file_location("claims", LAUNCH / "tables" / "claims.py")
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


@pytest.mark.parametrize("name", first_fast(claims.names(), 3))
def test_the_flags_of_every_command_are_fields(name, tmp_path):
    plan = claims.Runner(tmp_path, "data", 1.0, 0.0).plan(claims.Claim.read(name))
    for words in (step.words for _, seed, step in plan if seed == 0 and step.words[0] in ("pretrain", "finetune")):
        flags = re.sub(r"--(init-from|objective\.model\.task-layers) \S+", "", shlex.join(words[2:]))  # of a model
        e = resolve(words[1], shlex.split(flags)).experiment
        assert not e.train.phases or e.phases[-1].after <= e.train.steps


def test_arms_share_the_runs_of_equal_commands(tmp_path):
    """The three students have one teacher, and a probe of another model is another run."""
    plan = list(claims.Runner(tmp_path, "data", 1.0, 0.0).plan(claims.Claim.read("distilled")))
    assert len({step.folder for _, _, step in plan if step.label == "teacher"}) == 1
    probes = [step.folder for arm, seed, step in plan if step.label == "ud_pos" and arm != "teacher"]
    assert len(set(probes)) == len(probes) == 6


@pytest.mark.parametrize(("margin", "expected"), [(0.0, "holds"), (0.2, "not separable"), (0.5, "does not hold")])
def test_a_verdict_is_where_the_interval_of_the_paired_t_test_lies(margin, expected):
    a, b = (0.80, 0.84, 0.82), (0.61, 0.64, 0.60)
    arms = {"a": [{"m": value} for value in a], "b": [{"m": value} for value in b]}
    one = claims.Comparison("m", "a", "b", margin)
    gap, low, high = claims.difference(one, arms)
    interval = stats.ttest_rel(a, b).confidence_interval(0.95)
    assert (gap, low, high) == pytest.approx((0.61 / 3, interval.low, interval.high))
    assert claims.verdict(one, low, high) == expected and one.label == f"m: a − b > {margin:g}"
    lower = claims.Comparison("m", "b", "a", margin, lower=True)
    assert claims.difference(lower, arms) == pytest.approx((gap, low, high)) and lower.label == one.label


def test_arms_whose_seeds_agree_have_an_interval_of_width_0():
    arms = {"a": [{"m": 2.0}] * 3, "b": [{"m": 1.0}] * 3}
    assert claims.difference(claims.Comparison("m", "a", "b", 0.0), arms) == (1.0, 1.0, 1.0)


def run(name, tmp_path):
    command = [sys.executable, str(LAUNCH / "tables" / "claims.py"), name, "--scale", "0.01", "--runs", str(tmp_path)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", claims.names())
def test_it_runs_at_a_hundredth_of_its_size(name, tmp_path, real_data):
    done = run(name, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"{name}: .* > .*\], (holds|does not hold|not separable)", done.stdout), done.stdout
    figures = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert figures and all("seconds" in one for one in figures)
    times = {path: path.stat().st_mtime for path in tmp_path.glob("*.json")}
    assert run(name, tmp_path).returncode == 0  # finished commands are not run again
    assert {path: path.stat().st_mtime for path in tmp_path.glob("*.json")} == times
