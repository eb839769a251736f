"""Faults: kills, stop signals, two processes in one run folder, full disks."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from jaxlm.runs.pretrain import pretrain
from jaxlm.runs.resolve import resolve
from jaxlm.training import loop
from tests.training.support import Command, assert_same_arrays, metadata, metrics, saved_steps, small_disk, write_preset


def killed_and_resumed(preset: Path, folder: Path, steps: int, kills: int) -> None:
    """Kill a run at random instants, every second time during a save; compare it with an uninterrupted run."""
    arguments = ["pretrain", preset, "--train.steps", steps, "--train.checkpoint-every", 3, "--train.eval-every", 9]
    alone, run = folder / "alone", folder / "run"
    first = Command([*arguments, "--run-dir", alone], folder / "alone.log")
    assert first.wait() == 0, first.output
    draw, during_save = random.Random(0), 0
    for number in range(kills):
        before = max(saved_steps(run), default=0)
        command = Command([*arguments, "--run-dir", run], folder / f"{number}.log")
        command.wait_until(lambda before=before: max(saved_steps(run), default=0) > before)
        if number % 2:
            command.wait_until(lambda: list((run / "checkpoints").glob("*tmp*")))
            during_save += bool(list((run / "checkpoints").glob("*tmp*")))
        else:
            time.sleep(draw.uniform(0, 0.1))
        assert command.process.is_alive(), "it finished before it was killed: give it more steps"
        command.kill()
        command.process.join()
        assert command.process.exitcode == -signal.SIGKILL
    last = Command([*arguments, "--run-dir", run], folder / "last.log")
    assert last.wait() == 0, last.output
    assert "resumed at step" in last.output and "cannot be read" not in last.output
    assert metadata(run, steps)["checksums"] == metadata(alone, steps)["checksums"]
    assert metrics(run) == metrics(alone)
    assert during_save or kills < 2


@pytest.mark.slow
def test_killed_twice(preset, tmp_path):
    killed_and_resumed(preset, tmp_path, steps=36, kills=2)


STREAMS = {
    "xlnet": """
from jaxlm.models.xlnet import Xlnet
from jaxlm.objectives.permutation_lm import PermutationLM
objective = PermutationLM(
    Xlnet(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32), memory_length=24
)
""",
    "xlnet_alone": """
from jaxlm.models.xlnet import Xlnet
from jaxlm.objectives.permutation_lm import PermutationLM
objective = PermutationLM(Xlnet(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32), memory_length=0)
""",
    "elmo": """
from jaxlm.models.elmo import Elmo
from jaxlm.objectives.bidirectional_lm import BidirectionalLM
objective = BidirectionalLM(Elmo(hidden_size=8, cell_size=16, num_highways=1, filter_widths=2), noise_words=64)
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STREAMS)
def test_killed_with_a_memory(name, tmp_path):
    preset = write_preset(tmp_path)
    code = "import dataclasses\nexperiment = dataclasses.replace(experiment, objective=objective)\n"
    preset.write_text(preset.read_text() + STREAMS[name] + code)
    killed_and_resumed(preset, tmp_path, steps=60, kills=2)
    has_memory = any(path.startswith("memory") for path in metadata(tmp_path / "run", 60)["checksums"])
    assert has_memory == (name != "xlnet_alone")


@pytest.mark.parametrize("number", [
    signal.SIGTERM, *(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGINT, signal.SIGHUP))
])
def test_a_signal_saves_and_ends(preset, tmp_path, number):
    run = tmp_path / "run"
    arguments = ["pretrain", preset, "--run-dir", run, "--train.steps", 100_000, "--train.checkpoint-every", 0]
    command = Command(arguments, tmp_path / "log")
    command.wait_until(lambda: (run / "metrics.jsonl").exists() and metrics(run))
    command.kill(number)
    assert command.wait() == 128 + number, command.output
    (step,) = saved_steps(run)
    assert f"Stopped by a signal after step {step:,}; saved" in command.output
    assert metrics(run)[-1]["step"] <= step


@pytest.mark.slow  # starts an interpreter
def test_ctrl_c_saves_where_the_reader_of_the_output_has_ended(preset, tmp_path):
    """As in `jaxlm pretrain … 2>&1 | tee log`, whose tee the same Ctrl-C ends."""
    run = tmp_path / "run"
    arguments = ["pretrain", preset, "--run-dir", run, "--train.steps", "100000", "--train.checkpoint-every", "0"]
    command = [sys.executable, "-m", "jaxlm.cli", *map(str, arguments), "--train.log-every", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0) as process:
        while not (line := process.stdout.readline()).startswith(b"step"):
            assert line, "it has ended"
        process.stdout.close()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    assert len(saved_steps(run)) == 1


def test_a_signal_during_the_last_save_is_for_what_follows(preset, tmp_path, monkeypatch):
    """The run is whole and says so; `jaxlm finetune` then leaves out its evaluation and other seeds."""
    save = loop._save
    monkeypatch.setattr(loop, "_save", lambda *args: (save(*args), signal.raise_signal(signal.SIGTERM)))
    trained = pretrain(resolve(str(preset), ["--train.steps", "4"]), tmp_path / "run", lambda line: None)
    assert trained.signal == signal.SIGTERM and saved_steps(tmp_path / "run") == [4]


def test_a_second_process_is_refused(preset, tmp_path):
    run = tmp_path / "run"
    arguments = ["pretrain", preset, "--run-dir", run, "--train.steps", 100_000]
    first = Command(arguments, tmp_path / "first.log")
    first.wait_until(lambda: (run / "config.json").exists())
    second = Command(arguments, tmp_path / "second.log")
    assert second.wait() == 2
    lines = [line for line in second.output.splitlines() if line]
    assert len(lines) == 1 and "in use by another process" in lines[0] and str(first.process.pid) in lines[0]
    assert first.process.is_alive()
    first.kill()
    first.process.join()


@pytest.fixture(name="small_disk")
def _small_disk(tmp_path):
    with small_disk(tmp_path / "disk", "3m") as is_mounted:
        if not is_mounted:
            pytest.skip("needs the right to mount a small disk: root, or `unshare --map-root-user --mount`")
        yield tmp_path / "disk"


@pytest.mark.slow
def test_a_full_disk(preset, tmp_path, small_disk):
    """A full disk ends the run with one sentence; with more space it resumes from the last checkpoint."""
    run = small_disk / "run"
    arguments = ["pretrain", preset, "--run-dir", run, "--train.keep-checkpoints", 20, "--train.steps", 40,
                 "--train.tracker", "tensorboard", "--train.checkpoint-every", 2]
    command = Command(arguments, tmp_path / "log")
    assert command.wait() == 2, command.output
    told = command.output.splitlines()
    assert told[-1].startswith("jaxlm: ") and ("space" in told[-1] or "No space" in told[-1])
    assert "Traceback" not in command.output and "Exception" not in command.output, command.output
    kept = max(saved_steps(run))
    assert shutil.disk_usage(small_disk).free < 1_500_000
    subprocess.run(["mount", "-o", "remount,size=20m", small_disk], check=True)
    again = Command(arguments, tmp_path / "again.log")
    assert again.wait() == 0, again.output
    assert f"resumed at step {kept}" in again.output and "cannot be read" not in again.output


def test_a_disk_that_fills_up_during_a_save(small_disk, monkeypatch):
    """The free space is gone by the time of the write, as when other processes fill the disk."""
    import jax.numpy as jnp

    from jaxlm.errors import UserError
    from jaxlm.training.checkpoints import Checkpoints
    from jaxlm.training.program import TrainState

    def state(step):
        key = jax.random.key(step)
        return TrainState(jnp.int32(step), {str(i): jax.random.normal(key, (200, 200)) for i in range(12)}, {})

    checkpoints = Checkpoints(small_disk / "checkpoints")
    checkpoints.save(state(1), 1, {"data": "text"})
    checkpoints.wait()
    usage = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(path)._replace(free=1 << 40))
    with pytest.raises(UserError, match=r"cannot write a checkpoint in .*; free disk space"):
        checkpoints.save(state(2), 2, {"data": "text"})
        checkpoints.wait()
    checkpoints.close()
    again = Checkpoints(small_disk / "checkpoints")
    assert again.steps() == [1]
    params, _ = again.restore_params(jax.eval_shape(lambda: state(1).params))
    assert_same_arrays(params, state(1).params)
    again.close()


@pytest.fixture
def nobody():
    """Drop root's right to write anywhere."""
    if os.geteuid() == 0:
        os.seteuid(65534)
        yield
        os.seteuid(0)
    else:
        yield


def test_a_folder_that_cannot_be_written(tmp_path, request, capsys):
    from jaxlm.errors import UserError
    from jaxlm.runs import folder as run_folder

    folder = tmp_path / "locked"
    folder.mkdir()
    for path in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        path.chmod(0o755)
    folder.chmod(0o555)
    request.getfixturevalue("nobody")
    with pytest.raises(UserError, match=r"cannot write in the run folder .*locked: Permission denied"):
        run_folder.lock(folder)
    with pytest.raises(UserError, match=r"cannot make the run folder .*new: Permission denied"):
        run_folder.create(folder / "new")


def test_nohup_keeps_a_run_from_ending_with_its_terminal():
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with loop._stop_signals(0) as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop(1) == 0
            signal.raise_signal(signal.SIGTERM)
            assert stop(2) == signal.SIGTERM
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, previous)
