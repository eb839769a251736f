"""A run of one or several processes that is watched, disturbed, and started again."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import random
import re
import shutil
import signal
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path

from jaxlm.analysis import curves
from jaxlm.parallel import hosts
from jaxlm.runs import lease
from jaxlm.training import checkpoints
from tests.chaos.proxy import Proxy
from tests.training import support
from tests.training.servers import free_port

LIMIT = 120.0
"""Seconds within which a disturbed run has to end or to go on."""
HEARTBEAT = 10
"""Seconds after which jax takes a process as lost, JAXLM_HEARTBEAT_SECONDS."""
LEASE = 8.0
"""`lease.SECONDS` of the runs: with 4, one of four runs at once on two cores could not always renew its lock."""
JOIN = 20
"""Seconds to wait for other processes at the start, JAXLM_JOIN_SECONDS."""
JAX_SENTENCE = "Terminating process because the JAX distributed service detected fatal errors."
STEPS = 80
# eps keeps Adam from turning the rounding of a gradient near 0, which depends on the mesh, into a step of full size.
FLAGS = ("--train.steps", STEPS, "--train.checkpoint-every", 4, "--train.eval-every", 0, "--optimizer.eps", 1e-2)


def _command(arguments: list[str], environment: dict[str, str], log: str) -> None:
    lease.SECONDS = LEASE
    hosts.LEAVE_SECONDS = 10.0
    checkpoints.SAVE_SECONDS = 40
    curves.draw_curves = lambda *_: None  # takes as long as the steps
    faulthandler.register(signal.SIGUSR1)  # the stacks of a hang
    support._command(arguments, environment, log)


class Command(support.Command):
    """`jaxlm …` in a process with the short time limits of these tests."""

    context = support.Command.context
    context.set_forkserver_preload([*support.PRELOAD, "gcsfs", "tests.chaos.run"])
    target = staticmethod(_command)


class Failed(AssertionError):
    """A run has hung, ended without a sentence, lost a checkpoint or come to other parameters."""


@dataclasses.dataclass
class Place:
    """Where a run, its text and its token store are."""

    files: Path
    """Folder of their files; of a bucket, the emulator's."""
    address: str
    """The same folder as the run is told it."""
    proxy: Proxy | None = None
    """Proxy before the bucket; None on a disk."""
    is_small: bool = False
    """Whether the disk is small enough to be filled."""

    def upload(self, path: Path) -> None:
        """Bring a new file of `files` to the notice of the emulator, which knows its own uploads only."""
        if self.proxy is not None:
            name = urllib.parse.quote(f"{self.address.removeprefix('gs://bucket/')}/{path.name}", safe="")
            server = f"http://127.0.0.1:{self.proxy.target}/upload/storage/v1/b/bucket/o?uploadType=media&name={name}"
            urllib.request.urlopen(urllib.request.Request(server, path.read_bytes())).close()

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the processes."""
        if self.proxy is None:
            return {}
        server = f"http://127.0.0.1:{self.proxy.server_address[1]}"
        return {"STORAGE_EMULATOR_HOST": server, "TENSORSTORE_GCS_HTTP_URL": server,
                "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token"}


class Run:
    """Supervisor of a run: starts its processes and knows what they have saved."""

    def __init__(self, place: Place, preset: Path, logs: Path, processes: int, draw: random.Random) -> None:
        """Name the run; nothing is started."""
        self.place, self.draw, self.processes = place, draw, processes
        self.folder = place.files / "run"
        self.commands: list[Command] = []
        self.saved_before = 0
        """Step of the newest checkpoint at this start."""
        self.meshes: set[int] = set()
        """Numbers of processes that have trained it."""
        self.killed: set[int] = set()
        """Processes of this start that were killed."""
        self.damaged: dict[int, int] = {}
        """Damaged checkpoints: step -> time of their metadata, which a new save changes."""
        self._preset, self._logs, self._starts = preset, logs, 0

    def start(self) -> None:
        """Start all processes."""
        self._starts += 1
        self.killed.clear()
        self.meshes.add(self.processes)
        self.saved_before = self.newest()
        environment = self.place.environment | {
            "JAXLM_HEARTBEAT_SECONDS": str(HEARTBEAT), "JAXLM_JOIN_SECONDS": str(JOIN)
        }
        if self.processes > 1:
            environment |= {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
                            "JAX_NUM_PROCESSES": str(self.processes)}
        arguments = ["pretrain", self._preset, "--run-dir", f"{self.place.address}/run", "--data.cache-dir",
                     f"{self.place.address}/cache", "--data.source", f"{self.place.address}/text.txt", *FLAGS]
        self.commands = [
            Command(arguments, self._logs / f"{self._starts}-{index}.log",
                    **environment | ({"JAX_PROCESS_ID": str(index)} if self.processes > 1 else {}))
            for index in range(self.processes)
        ]
        self.started = time.monotonic()

    # What it has done.

    def alive(self) -> list[int]:
        """Return the indices of the processes that have not ended."""
        return [index for index, command in enumerate(self.commands) if command.process.is_alive()]

    def codes(self) -> list[int | None]:
        """Return the exit codes."""
        return [command.process.exitcode for command in self.commands]

    def whole(self) -> list[int]:
        """Return the steps of the checkpoints that are complete and undamaged."""
        return [step for step in self._complete() if self._time(step) not in (0, self.damaged.get(step))]

    def newest(self) -> int:
        """Return the step of the newest complete and undamaged checkpoint, or 0."""
        return max(self.whole(), default=0)

    def _complete(self) -> list[int]:
        steps = support.saved_steps(self.folder)
        if self.place.proxy is None:
            return steps
        return [step for step in steps if (self.folder / "checkpoints" / str(step) / "commit_success.txt").exists()]

    def _time(self, step: int) -> int:
        """Return when the metadata of a checkpoint was written; 0 while it is being deleted."""
        path = self.folder / "checkpoints" / str(step) / "metadata" / "metadata"
        with contextlib.suppress(FileNotFoundError):
            return path.stat().st_mtime_ns
        return 0

    def is_saving(self) -> bool:
        """Return whether a checkpoint is being written."""
        if self.place.proxy is None:
            return any((self.folder / "checkpoints").glob("*tmp*"))
        return len(self._complete()) < len(support.saved_steps(self.folder))

    def output(self) -> str:
        """Return the output of all processes of this start."""
        return "\n".join(f"--- process {index}\n{command.output}" for index, command in enumerate(self.commands))

    def sentence(self) -> str:
        """Return the last sentence of jaxlm in the output of process 0, else of another one."""
        for command in self.commands:
            lines = [line for line in command.output.splitlines() if re.match("jaxlm: |Stopped by a signal", line)]
            told = [line for line in lines if "gave up" in line or
                    not re.search("waiting |waits for|process 0 stopped", line)]
            if told:
                return told[-1]
        return JAX_SENTENCE if JAX_SENTENCE in self.output() else ""

    # What is done to it.

    def send(self, number: int, indices: list[int]) -> None:
        """Send a signal to some of the processes."""
        for index in indices:
            if self.commands[index].process.is_alive():
                self.commands[index].kill(number)
            if number == signal.SIGKILL:
                self.killed.add(index)

    def some(self) -> list[int]:
        """Return one process, or all of them."""
        everyone = [*range(self.processes)]
        return everyone if self.draw.random() < 0.5 else [self.draw.choice(everyone)]

    def mark_damaged(self, step: int) -> None:
        """Take a checkpoint as damaged until it is saved again."""
        self.damaged[step] = self._time(step)

    def renew(self) -> None:
        """Forget a finished run, and remove its folder."""
        shutil.rmtree(self.folder)
        self.commands = []
        self.damaged.clear()
        self.meshes.clear()

    def kill(self) -> None:
        """End all processes at once."""
        self.send(signal.SIGKILL, [*range(len(self.commands))])
        for command in self.commands:
            command.process.join()

    # Waiting.

    def wait_until(self, condition: Callable[[], bool], seconds: float = LIMIT) -> bool:
        """Wait until the condition holds or all processes have ended; return whether it holds.

        Raises:
            Failed: Neither happens within the limit.
        """
        end = time.monotonic() + seconds
        while not condition():
            if not self.alive():
                self.check_resumed()
                return condition()
            if time.monotonic() > end:
                self.send(signal.SIGUSR1, self.alive())
                time.sleep(1)
                output = self.output()
                self.kill()
                raise Failed(f"it neither ends nor goes on within {seconds:.0f} s\n{output}")
            time.sleep(0.01)
        self.check_resumed()
        return True

    def wait_for_progress(self) -> bool:
        """Wait for another checkpoint; return False if the processes have ended without one."""
        before = self.newest()
        return self.wait_until(lambda: self.newest() > before and len(self.alive()) == len(self.commands))

    def has_finished(self) -> bool:
        """Return whether all processes have ended, and the parameters of the last step are saved."""
        return not self.alive() and self.newest() == STEPS

    def check_resumed(self) -> None:
        """Raise Failed if this start did not resume at the newest checkpoint that was whole."""
        output = self.commands[0].output
        resumed = re.search(r"resumed at step ([\d,]+)", output)
        step = int(resumed[1].replace(",", "")) if resumed else 0
        if step > self.saved_before:  # its arrays were intact: the damage was in a file that is not read
            self.damaged.pop(step, None)
        if (resumed or "Compiling the step" in output) and step < self.saved_before:
            raise Failed(f"it resumed at step {step}, but {self.saved_before} was saved\n{output}")

    def check_end(self) -> str:
        """Return the sentence of a start whose processes have all ended by themselves; "" if they were all killed.

        Raises:
            Failed: They ended in silence, or with a traceback.
        """
        own = [index for index in range(len(self.commands)) if index not in self.killed]
        codes = self.codes()
        if all(codes[index] == 0 for index in own):
            return ""
        stopped = all(codes[index] in (-signal.SIGTERM, 128 + signal.SIGTERM) for index in own)
        sentence = self.sentence()
        if not sentence and not stopped:
            raise Failed(f"it ended with {codes} and without a sentence\n{self.output()}")
        if self.killed and any(codes[index] == 2 for index in own) and "gave up after" not in sentence:
            raise Failed(f"a lost process was taken as a mistake\n{self.output()}")
        last = [self.commands[index].output.rstrip().rpartition("\n")[2] for index in own if codes[index] == 2]
        if not all(line.startswith("jaxlm: ") for line in last):  # Orbax's threads may fail after the first of them
            raise Failed(f"it ended with a mistake, but its last line is no sentence\n{self.output()}")
        return sentence
