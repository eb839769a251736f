"""A run small enough to be made and broken many times: one layer, width 16, generated text, rows of one document.

The pairs of next-sentence prediction would take a third of the time of tracing and compiling its step.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import subprocess
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# The schedule is constant so that runs of any number of steps are the same program, compiled once.
PRESET = """
from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.bert import Bert
from jaxlm.objectives.masked_lm import MaskedLM

experiment = Experiment(
    objective=MaskedLM(
        model=Bert(
            hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32, max_positions=32, attention_dropout=0.0
        ),
        input_format="document",
    ),
    data=TextData(source={text!r}, length=32, vocab_size=512, held_out=0.1),
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2, schedule="constant"),
    train=TrainConfig(steps=12, batch_size=8, log_every=3, eval_every=0, eval_batches=2, checkpoint_every=4,
                      tracker="none"),
)
"""

# What a later command prints besides the figures of the model depends on the machine.
TIMES = ("tokens_per_second", "mfu", "goodput")


def write_text(path: Path, seed: int = 0, documents: int = 120) -> Path:
    """Documents of a few dozen words, drawn from a small language."""
    draw = random.Random(seed)
    words = ["".join(draw.choice("bdfgklmnprst") + draw.choice("aeiou") for _ in range(draw.randint(1, 3)))
             for _ in range(400)]
    text = (" ".join(draw.choice(words) for _ in range(draw.randint(20, 80))) for _ in range(documents))
    path.write_text("\n\n".join(text) + "\n")
    return path


def write_preset(folder: Path, text: Path | None = None) -> Path:
    """tiny.py, over `text` or over text of its own beside it."""
    preset = folder / "tiny.py"
    preset.write_text(PRESET.format(text=str(text or write_text(folder / "text.txt"))))
    return preset


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what depends on time."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if name not in TIMES and not name.startswith("time_")}
        for line in lines
    ]


def saved_steps(run: Path) -> list[int]:
    return sorted(int(path.name) for path in (run / "checkpoints").glob("*") if path.name.isdigit())


def metadata(run: Path, step: int) -> dict[str, Any]:
    """The metadata of a checkpoint, which includes the checksums of every array of the state."""
    return json.loads((run / "checkpoints" / str(step) / "metadata" / "metadata").read_text())


def assert_same_arrays(one: Any, other: Any) -> None:
    import jax

    jax.tree.map(np.testing.assert_array_equal, one, other)


def stopped_after(step: int, arguments: list[str]) -> int:
    """The command with a SIGTERM that arrives during `step`."""
    from jaxlm.cli import main
    from jaxlm.training import loop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "_stop_signals", lambda after: contextlib.nullcontext(lambda now: 15 * (now == step)))
        return main(arguments)


PRELOAD = ["jaxlm.runs.pretrain", "jaxlm.runs.resolve", "tests.training.support"]


def _command(arguments: list[str], environment: dict[str, str], log: str) -> None:
    os.environ.update(environment)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which `nohup` ignores, and a run of a test does not
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    import jax
    from jax._src import compilation_cache, compiler

    from jaxlm.cli import main

    def write(key: str, seconds: float, name: str, backend: Any, executable: Any, *_: Any) -> None:
        compilation_cache.put_executable_and_time(key, name, executable, backend, int(seconds))

    # jax lets only process 0 write into the cache, but on CPUs each process has keys of its own.
    compiler._cache_write = write
    # A run has a hundred small programs, which the other commands of a test find in the cache.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    try:
        code = main(arguments)
    except BaseException:
        traceback.print_exc()
        code = 1
    jax.distributed.shutdown()  # as at Python's exit, which os._exit leaves out
    os._exit(code)


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[bool]:
    """A new folder, on a disk of its own if this process may mount one; yields whether it may."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
    is_mounted = subprocess.run(mount, capture_output=True).returncode == 0
    try:
        yield is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", "-l", folder], check=True)


class Command:
    """`jaxlm …` in a process of its own, forked from one that has imported everything already."""

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    target = staticmethod(_command)

    def __init__(self, arguments: list[Any], log: Path, **environment: str) -> None:
        self.log = log
        words = [str(argument) for argument in arguments]
        self.process = self.context.Process(target=self.target, args=(words, environment, str(log)), daemon=True)
        self.process.start()

    @property
    def output(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def wait(self, timeout: float = 240) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
        assert self.process.exitcode is not None, f"still running:\n{self.output}"
        return self.process.exitcode

    def wait_until(self, condition: Any, timeout: float = 240) -> None:
        """Until the condition holds or the process has ended."""
        end = time.monotonic() + timeout
        while not condition() and self.process.is_alive():
            assert time.monotonic() < end, f"waited too long:\n{self.output}"
            time.sleep(0.002)

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.process.pid, number)
