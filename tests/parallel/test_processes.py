"""Two processes that find each other over the network: the run that one alone would do, each reading its own rows."""

from __future__ import annotations

import itertools
import signal
import socket
import time
from pathlib import Path

import numpy as np
import pytest

from jaxlm.analysis import bench
from jaxlm.data.text import TextData
from jaxlm.parallel.rules import local_rows
from jaxlm.training.metrics import Totals
from tests.training.support import Command, metadata, metrics, saved_steps


@pytest.mark.parametrize("devices", [((0, 1), (2, 3)), ((0, 2), (1, 3))])
def test_a_process_reads_the_rows_of_its_devices(devices):
    """Those alone, also where the devices of two hosts alternate in the mesh, as on the torus of a TPU slice."""

    class Sharding:
        """That of eight rows over four devices, as one process sees it."""

        def __init__(self, own: tuple[int, ...]) -> None:
            self.own = own

        def addressable_devices_indices_map(self, shape: tuple[int, ...]) -> dict[int, tuple[slice, ...]]:
            return {number: (slice(2 * number, 2 * number + 2), *map(slice, shape[1:])) for number in self.own}

    for own in devices:
        assert local_rows(Sharding(own), 8).tolist() == [row for i in own for row in (2 * i, 2 * i + 1)]


def processes(folder: Path, *arguments: list[object], command: type[Command] = Command) -> list[Command]:
    """One process for each list of arguments."""
    folder.mkdir(exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [
        command(
            words, folder / f"process{index}.log", JAX_COORDINATOR_ADDRESS=f"127.0.0.1:{port}",
            JAX_NUM_PROCESSES=str(len(arguments)), JAX_PROCESS_ID=str(index),
        )
        for index, words in enumerate(arguments)
    ]


def pair(folder: Path, arguments: list[object]) -> list[Command]:
    return processes(folder, arguments, arguments)


def until_stopped(preset: Path, run: Path, folder: Path, number: int, targets: tuple[int, ...]) -> int:
    """Signals `targets` while two processes train, and returns the step at which both have saved.

    A run that is resumed gets the signal before its first step.
    """
    is_new, both = not run.exists(), pair(folder, ["pretrain", preset, "--run-dir", run, "--train.steps", 100_000])
    both[0].wait_until(lambda: metrics(run) if (run / "metrics.jsonl").exists() and is_new else
                       ", resumed at step" in both[0].output)
    for index in targets:
        both[index].kill(number)
    for command in both:
        assert command.wait() == 128 + number, command.output
    step = saved_steps(run)[-1]
    assert f"Stopped by a signal after step {step:,}; saved" in both[0].output
    return step


def train_to(preset: Path, run: Path, folder: Path, steps: int, *flags: object) -> list[str]:
    """The output of two processes that train to the last step."""
    both = pair(folder, ["pretrain", preset, "--run-dir", run, "--train.steps", steps, *flags])
    for command in both:
        assert command.wait() == 0, command.output
    return [command.output for command in both]


@pytest.mark.slow
def test_two_processes_do_what_one_does_and_a_signal_to_one_saves(finished, preset, tmp_path):
    """The run in one piece is that of one process, and bit for bit the run that a signal to the second had stopped."""
    alone, stopped, whole = finished, tmp_path / "stopped", tmp_path / "whole"
    first = until_stopped(preset, stopped, tmp_path / "1", signal.SIGINT, (1,))
    step = until_stopped(preset, stopped, tmp_path / "early", signal.SIGTERM, (1,))
    assert first < step <= first + 3
    last = max(step + 2, 12)
    output, _ = train_to(preset, stopped, tmp_path / "2", last)
    assert f"resumed at step {step:,}" in output
    first, second = train_to(preset, whole, tmp_path / "3", last, "--train.eval-every", 4)
    assert "2 cpu devices" in first and "process 0 of 2 waits for the others" in first
    told = [line for line in second.splitlines() if not line.startswith("[Gloo]")]
    assert len(told) == 1 and told[0].startswith("jaxlm: process 1 of 2 waits for process 0")
    assert metadata(stopped, last)["checksums"] == metadata(whole, last)["checksums"]
    for ours, theirs in zip(metrics(whole), metrics(alone), strict=False):
        assert set(ours) == set(theirs)
        np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=2e-4, atol=1e-5)


@pytest.mark.slow  # four processes on two cores; test_meshes.py has the move between meshes in one process
def test_two_then_four_then_one(finished, preset, tmp_path):
    """A run goes on from its checkpoints on any number of processes."""
    run = tmp_path / "moved"
    for count, steps in ((2, 4), (4, 8), (1, 12)):
        flags = ["pretrain", preset, "--run-dir", run, "--train.steps", steps, "--train.eval-every", 4]
        for command in processes(tmp_path / str(count), *[flags] * count):
            assert command.wait() == 0, command.output
    for ours, theirs in zip(metrics(run), metrics(finished), strict=True):
        assert set(ours) == set(theirs)
        np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=2e-4, atol=1e-5)


@pytest.mark.slow  # test_checkpoints.py has it with one process
def test_a_checkpoint_that_one_process_cannot_read_is_skipped_by_both(preset, tmp_path):
    """The process that has read its own shards waits in no collective that the other one never reaches."""
    run, flags = tmp_path / "run", ("--mesh.fsdp", 2, "--train.checkpoint-every", 2)
    train_to(preset, run, tmp_path / "1", 4, *flags)
    for path in (run / "checkpoints" / "4" / "state" / "ocdbt.process_1" / "d").iterdir():
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    output, _ = train_to(preset, run, tmp_path / "2", 6, *flags)
    assert "The checkpoint of step 4 cannot be read (by another process)" in output and "resumed at step 2" in output


@pytest.mark.slow
def test_the_first_of_two_processes_exports_what_both_hold(preset, tmp_path):
    """The folder is that of one process, which has the whole of every array."""
    run = tmp_path / "run"
    train_to(preset, run, tmp_path / "1", 1, "--mesh.fsdp", 2)
    both = pair(tmp_path / "2", ["export", run, tmp_path / "two"])
    for command in both:
        assert command.wait() == 0, command.output
    assert ["Wrote step 1" in command.output for command in both] == [True, False]
    (alone,) = processes(tmp_path / "3", ["export", run, tmp_path / "one"])
    assert alone.wait() == 0, alone.output
    assert not [*tmp_path.glob(".two*")]
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert "model.safetensors" in names and sorted(path.name for path in (tmp_path / "two").iterdir()) == names
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two")]
    assert weights[0] == weights[1]


@pytest.mark.slow  # test_hosts.py has it with one process
def test_an_output_is_checked_where_it_is_written(finished, tmp_path):
    """Hosts share the run's folder, not their working directories."""
    out, there = tmp_path / "out.npy", tmp_path / "there.npy"
    there.write_text("mine")
    embed, missing = ["embed", finished, "a text", "--out"], tmp_path / "missing" / "out.npy"
    for command in processes(tmp_path / "1", [*embed, out], [*embed, missing]):
        assert command.wait() == 0, command.output
    assert np.load(out).shape == (1, 16) and not missing.parent.exists()
    both = processes(tmp_path / "2", [*embed, there], [*embed, tmp_path / "other.npy"])
    for command, words in zip(both, ("is there already", "process 0 stopped"), strict=True):
        assert command.wait() == 2 and words in command.output, command.output


@pytest.mark.slow
def test_a_file_that_one_process_cannot_read_ends_both(finished, tmp_path):
    """The other one would wait for it in a collective until jax ends it."""
    text = tmp_path / "text.txt"
    text.write_text("a text\n")
    embed = ["embed", finished, "--data.source"]
    both = processes(tmp_path / "1", [*embed, text], [*embed, tmp_path / "missing.txt"])
    for command, words in zip(both, ("process 1 stopped", "missing.txt"), strict=True):
        assert command.wait() == 2 and words in command.output, command.output


@pytest.mark.slow  # three processes; test_hosts.py has the sentence
def test_a_process_with_another_flag_is_named_by_all(preset, tmp_path):
    arguments = ["pretrain", preset, "--run-dir", tmp_path / "run"]
    for command in processes(tmp_path, arguments, arguments, [*arguments, "--train.seed", 1]):
        assert command.wait() == 2, command.output
        said = command.output.splitlines()[-1]
        assert said.startswith("jaxlm: the 3 processes of this run differ (train.seed: 1 in process 2 on ")
        assert f"on {socket.gethostname()}, 0 in the others)" in said
    assert not (tmp_path / "run").exists()


class Disagreeing(Command):
    """A `Command` whose process 0 sees every evaluation improve, while the other's get worse."""

    @staticmethod
    def target(arguments: list[str], environment: dict[str, str], log: str) -> None:
        real, sign = Totals.loss, 2 * int(environment["JAX_PROCESS_ID"]) - 1
        evaluations = itertools.count()
        Totals.loss = lambda self: real(self) + sign * 10 * next(evaluations)
        Command.target(arguments, environment, log)


@pytest.mark.slow
def test_processes_stop_by_the_figures_of_the_first(preset, tmp_path):
    """Metrics that each computes alone differ by a rounding; if one stopped earlier, the other would wait for it."""
    run = tmp_path / "run"
    flags = ["--train.steps", 3, "--train.eval-every", 1, "--train.patience", 1, "--train.stall-seconds", 30]
    both = processes(tmp_path, *[["pretrain", preset, "--run-dir", run, *flags]] * 2, command=Disagreeing)
    for command in both:
        assert command.wait() == 0, command.output
    assert saved_steps(run)[-1] == 3 and "Best: step 3, loss" in both[0].output


class Tokenizing(Command):
    """A `Command` that tokenizes for ten minutes."""

    @staticmethod
    def target(arguments: list[str], environment: dict[str, str], log: str) -> None:
        TextData.tokenize = lambda *_: (print("Tokenizing", flush=True), time.sleep(600))
        Command.target(arguments, environment, log)


@pytest.mark.slow
def test_a_signal_while_the_text_is_tokenized_ends_a_process_at_once(preset, tmp_path):
    """Slurm sends it two minutes before the time limit."""
    both = processes(tmp_path, *[["pretrain", preset, "--run-dir", tmp_path / "run"]] * 2, command=Tokenizing)
    for command in both:
        command.wait_until(lambda command=command: "Tokenizing" in command.output)
    for command in both:
        command.kill(signal.SIGTERM)
        assert command.wait() in (-signal.SIGTERM, 128 + signal.SIGTERM), command.output


class Timed(Command):
    """A `Command` whose process 1 would time up to 200 steps in a round, process 0 one."""

    @staticmethod
    def target(arguments: list[str], environment: dict[str, str], log: str) -> None:
        bench.ROUND_SECONDS = 0.01 * 3000 ** int(environment["JAX_PROCESS_ID"])
        Command.target(arguments, environment, log)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["bench", "plan"])
def test_processes_time_the_same_steps_and_the_first_prints(preset, tmp_path, command):
    both = processes(tmp_path, *[[command, preset, "--json"]] * 2, command=Timed)
    for process in both:
        assert process.wait() == 0, process.output
    assert ["_step_seconds" in process.output for process in both] == [True, False]


@pytest.mark.slow
@pytest.mark.parametrize(("flag", "other"), [("--data.cache-dir", "--run-dir"), ("--run-dir", "--data.cache-dir")])
def test_processes_that_share_no_folder_say_so(preset, tmp_path, flag, other):
    """Instead of preparing the whole text twice, one after the other, or waiting for checkpoints elsewhere."""
    arguments = ["pretrain", preset, other, tmp_path / "other", flag]
    for command in processes(tmp_path, [*arguments, tmp_path / "a"], [*arguments, tmp_path / "b"]):
        assert command.wait() == 2, command.output
        assert "jaxlm: process 1 does not see what process 0 writes into" in command.output
        assert f"give all processes one {flag}" in command.output and "Tokenizing" not in command.output
    assert not [path for name in ("a", "other") for path in tmp_path.glob(f"{name}/*")]


@pytest.mark.slow
@pytest.mark.parametrize("targets", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_any_signal_to_any_process_saves(preset, tmp_path, number, targets):
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    step = until_stopped(preset, stopped, tmp_path / "1", number, targets)
    train_to(preset, stopped, tmp_path / "2", step + 2)
    train_to(preset, whole, tmp_path / "3", step + 2)
    assert metadata(stopped, step + 2)["checksums"] == metadata(whole, step + 2)["checksums"]


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_process_ends_the_other(preset, tmp_path, lost):
    """At once, with a sentence, so that what has started them can start them again."""
    run = tmp_path / "run"
    both = pair(tmp_path, ["pretrain", preset, "--run-dir", run, "--train.steps", 1_000_000])
    both[0].wait_until(lambda: (run / "metrics.jsonl").exists() and metrics(run))
    both[lost].kill()
    assert both[1 - lost].wait(timeout=60) not in (0, 2)  # jax's own limit is 100 s; 2 would be a user's mistake
    said = both[1 - lost].output
    assert "has lost another process" in said or "most likely indicates that another task died" in said, said


@pytest.mark.slow  # test_checkpoints.py has it with one process
def test_a_mistake_ends_both(preset, tmp_path):
    (tmp_path / "run").write_text("a file")
    for index, command in enumerate(pair(tmp_path, ["pretrain", preset, "--run-dir", tmp_path / "run"])):
        assert command.wait() == 2, command.output
        waits, *said = [line for line in command.output.splitlines() if line.startswith("jaxlm: ")]
        assert "waiting up to" in waits
        assert len(said) == 1 and ("is a file" if index == 0 else "process 0 stopped") in said[0]
