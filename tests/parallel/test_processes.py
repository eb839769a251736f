"""Two processes that find each other over the network: the run that one alone would do, each reading its own rows."""

from __future__ import annotations

import signal
import socket
import time
from pathlib import Path

import numpy as np
import pytest

from jaxlm.parallel.hosts import LOST_AFTER, local_rows
from tests.training.support import Command, metrics, saved_steps


def test_a_process_reads_the_rows_of_its_devices():
    class Second:
        """The sharding of eight rows over four devices, as the second of two processes sees it."""

        def addressable_devices_indices_map(self, shape):
            return {number: (slice(2 * number, 2 * number + 2), slice(None)) for number in (2, 3)}

    assert local_rows(Second(), 8, 32) == slice(4, 8)


def pair(folder: Path, arguments: list[object]) -> list[Command]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [
        Command(
            arguments, folder / f"process{index}.log", JAX_COORDINATOR_ADDRESS=f"127.0.0.1:{port}",
            JAX_NUM_PROCESSES="2", JAX_PROCESS_ID=str(index),
        )
        for index in range(2)
    ]


def test_two_processes_do_what_one_does(finished, preset, tmp_path):
    alone, run = finished, tmp_path / "two"
    both = pair(tmp_path, ["pretrain", preset, "--run-dir", run, "--train.eval-every", 4])
    for command in both:
        assert command.wait() == 0, command.output
    assert "2 cpu devices" in both[0].output
    assert all(line.startswith("[Gloo]") for line in both[1].output.splitlines()), "one of them speaks"
    assert saved_steps(run) == saved_steps(alone) == [4, 8, 12]
    for ours, theirs in zip(metrics(run), metrics(alone), strict=True):
        assert set(ours) == set(theirs)
        np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=2e-4, atol=1e-5)


@pytest.mark.slow
def test_what_two_have_saved_one_goes_on_with(preset, tmp_path):
    """And the other way round; a damaged checkpoint is set aside once, a signal to one of them ends both."""
    run = tmp_path / "run"
    both = pair(tmp_path, ["pretrain", preset, "--run-dir", run])
    for command in both:
        assert command.wait() == 0, command.output
    single = Command(["pretrain", run, "--train.steps", 18], tmp_path / "one.log")
    assert single.wait() == 0 and "resumed at step 12" in single.output, single.output
    assert saved_steps(run)[-2:] == [16, 18]
    metadata = run / "checkpoints" / "18" / "metadata" / "metadata"  # damaged: both go on from the one before
    metadata.write_bytes(metadata.read_bytes()[:10])
    for command in pair(tmp_path, ["pretrain", run, "--train.steps", 100_000, "--train.checkpoint-every", 0]):
        both.append(command)
    both[2].wait_until(lambda: metrics(run)[-1]["step"] > 20)
    both[3].kill(signal.SIGTERM)  # one has the signal, both save the same step and end
    for command in both[2:]:
        assert command.wait() == 0, command.output
    assert "Stopped by a signal" in both[2].output
    assert "checkpoint of step 18 is damaged" in both[2].output and "resumed at step 16" in both[2].output
    assert (run / "damaged-checkpoint-18").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize(("lost", "within"), [(0, 5), (1, LOST_AFTER)], ids=["first", "second"])
def test_a_process_that_is_killed_is_named(preset, tmp_path, lost, within):
    """In one sentence, within so many seconds and some for this machine. The coordinator is lost with the first."""
    run = tmp_path / "run"
    both = pair(tmp_path, ["pretrain", preset, "--run-dir", run, "--train.steps", 1_000_000])
    both[0].wait_until(lambda: (run / "metrics.jsonl").exists() and metrics(run))
    both[lost].kill()
    start, other = time.monotonic(), both[1 - lost]
    assert other.wait(timeout=120) == 1, other.output
    assert time.monotonic() - start < within + 15
    last = other.output.splitlines()[-1]
    assert last.startswith(f"jaxlm: process {lost} of 2 has ended or cannot be reached"), other.output
    assert "Traceback" not in other.output and "Terminating process" not in other.output, other.output
    assert len(other.output.splitlines()) < 15, other.output


def test_a_mistake_ends_both(preset, tmp_path):
    (tmp_path / "run").write_text("a file")
    for index, command in enumerate(pair(tmp_path, ["pretrain", preset, "--run-dir", tmp_path / "run"])):
        assert command.wait() == 2, command.output
        said = [line for line in command.output.splitlines() if line.startswith("jaxlm: ")]
        assert len(said) == 1 and ("is a file" if index == 0 else "process 0 stopped") in said[0]
