"""Goodput, the watch over runs that stall, and profiles."""

from __future__ import annotations

import json
import shutil
import threading
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.cli import main
from jaxlm.objectives.base import Term
from jaxlm.training import clock
from jaxlm.training.loop import StepLog, run_step
from jaxlm.training.metrics import Totals


@pytest.fixture
def now(monkeypatch):
    """The time of the clock, in a list."""
    time = [0.0]
    monkeypatch.setattr(clock.time, "perf_counter", lambda: time[0])
    return time


def test_every_second_belongs_to_one_phase(now):
    run = clock.Clock()
    for phase, at in (("compilation", 2), ("step", 10), ("save", 90), ("step", 95)):
        now[0] = at
        run.switch(phase)
    now[0] = 100
    assert run.figures() == {
        "goodput": 0.85, "time_startup": 2, "time_compilation": 8, "time_step": 85, "time_save": 5,
    }
    assert str(run) == "Goodput 85.0% of 100 s: step 85 s, compilation 8 s, save 5 s, startup 2 s"
    assert run.longest == 80 and run.training_seconds() == 85


def test_the_first_step_of_each_shape_is_compilation():
    """As of the length buckets of labelled rows, which come in any order and again."""
    run, phases = clock.Clock(), []

    def train_step(state, batch, constants):
        phases.append(run.phase)
        return state + 1, {}

    train_step.trace = lambda *_: None
    program = SimpleNamespace(train_step=train_step, constants=(), train=SimpleNamespace(replay_every=0))
    log = SimpleNamespace(clock=run, compiled_steps={}, running=None, next_batch=next, finish_previous=lambda: None)
    batches = iter([{"input_ids": np.zeros((2, length))} for length in (8, 8, 16, 8, 24, 16)])
    state = 0
    for step in range(1, 7):
        state = run_step(program, state, batches, log, step)
    assert state == 6 and run.phase == "step" and [*log.compiled_steps.values()] == [1, 3, 5]
    assert phases == ["compilation", "step", "compilation", "step", "compilation", "step"]


def test_speed_leaves_out_steps_that_compile(now, monkeypatch):
    """tokens_per_second = steps / their seconds · rows · length, and mfu = their FLOPs / seconds / peak of all devices.

    Steps 1 and 4 have shapes of their own and take 50 s; the others take 2 s, and the evaluation after step 6 takes 7.
    From step 10 on rows are more, so that the line of step 12 has no speed.
    """
    monkeypatch.setattr("jaxlm.training.loop.peak_flops", lambda device: 1e3)
    run, lines = clock.Clock(), {}

    def train_step(state, batch, constants):
        now[0] += 50 if run.phase == "compilation" else 2
        return state + 1, dict.fromkeys(("loss", "grad_norm"), Term(jnp.float32(1), jnp.float32(1)))

    train_step.trace = lambda *_: None
    program = SimpleNamespace(
        train_step=train_step, constants=(), schedule=lambda step: 0.0,
        at=lambda step: program,  # which phases share that differ in their batches alone
        train=SimpleNamespace(replay_every=0, log_every=6, steps=18, skip_nonfinite=0),
        step_flops=lambda length, rows: 10.0 * length * rows,
        mesh=SimpleNamespace(devices=np.array([["device"]]), size=4),
    )
    log = StepLog(SimpleNamespace(
        program=program, clock=run, progress=SimpleNamespace(show=lambda *_: None),
        feed=SimpleNamespace(shape=lambda step: (32, 3 if step < 10 else 5)),
        writer=SimpleNamespace(write=lambda step, figures: lines.update({step: figures})),
    ), 0, Totals())
    batches = iter([np.zeros((2, length)) for length in (8, 8, 8, 16, 8, 16, *[8] * 12)])
    for step in range(1, 19):
        run_step(program, step - 1, batches, log, step)
        if step in (1, 6, 12, 18):
            log.finish_previous()
            with run.during("evaluation"):
                now[0] += 7
    assert [step for step, line in lines.items() if {"tokens_per_second", "mfu"} & line.keys()] == [6, 18]
    for step, rows in ((6, 3), (18, 5)):  # 4 steps in 8 s, 6 steps in 12 s
        assert lines[step]["tokens_per_second"] == pytest.approx(0.5 * rows * 32)
        assert lines[step]["mfu"] == pytest.approx(0.5 * 10 * rows * 32 / (4 * 1e3))


@pytest.mark.slow
def test_steps_that_were_lost_are_not_useful(finished, capsys):
    """Steps 9 to 12 are computed again, and the time of the first start counts too."""
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert all(0 < line["goodput"] < 1 for line in lines[1:]) and "time_lost" not in lines[-1]
    shutil.rmtree(finished / "checkpoints" / "12")
    assert main(["pretrain", str(finished), "--train.steps", "14"]) == 0
    last = json.loads((finished / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["time_lost"] > 0 and last["time_restore"] > 0
    assert last["time_step"] > lines[-1]["time_step"] and last["time_startup"] > lines[-1]["time_startup"]
    assert last["goodput"] == pytest.approx(
        last["time_step"] / sum(value for name, value in last.items() if name.startswith("time_")), rel=0.01
    )
    assert capsys.readouterr().out.splitlines()[-2].startswith("Goodput ")


@pytest.mark.parametrize(("phase", "seconds"), [("step", 3), ("evaluation", 0.3)])
def test_a_stalled_run_shows_its_stacks_and_ends(phase, seconds, monkeypatch, capfd):
    ended, run = threading.Event(), clock.Clock()
    monkeypatch.setattr(clock.os, "_exit", lambda code: code == 1 and ended.set())
    monkeypatch.setattr(clock.sys, "__stderr__", clock.sys.stderr)  # capfd's
    monkeypatch.setattr(clock, "TICK", 0.01)
    run.switch(phase)
    with clock.watchdog(run, seconds / 10):
        assert ended.wait(20)
    said = capfd.readouterr().err
    assert f"process 0: no progress for 0 s ({phase}); it will end after" in said.replace("for 3 s", "for 0 s")
    assert "test_a_stalled_run_shows_its_stacks" in said and "This process ends" in said


def test_a_run_that_moves_is_left_alone(monkeypatch, capfd):
    monkeypatch.setattr(clock.os, "_exit", lambda code: pytest.fail("it was ended"))
    monkeypatch.setattr(clock, "TICK", 0.01)
    run = clock.Clock()
    run.switch("step")
    run.longest = 100.0  # slower than the limit
    with clock.watchdog(run, 0.02), clock.watchdog(clock.Clock(), 0):
        threading.Event().wait(0.3)
    assert not capfd.readouterr().err


@pytest.mark.slow
def test_a_profile_of_some_steps(preset, tmp_path, capsys):
    run, flags = tmp_path / "run", ["--train.steps", "4", "--train.profile-steps"]
    assert main(["pretrain", str(preset), "--run-dir", str(run), *flags, "2:3"]) == 0
    assert f"Steps 2 to 3 are profiled: tensorboard --logdir {run}" in capsys.readouterr().out
    (profile,) = run.glob("plugins/profile/*/*.xplane.pb")
    assert b"train_step" in profile.read_bytes()
    assert main(["pretrain", str(run), *flags, "3:2"]) == 2
    assert "train.profile_steps is '3:2'; it must be FIRST:LAST" in capsys.readouterr().err
