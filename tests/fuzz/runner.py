"""Runs one command after another, and keeps what none of them must do."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import pkgutil
import signal
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import jax

import jaxlm
from jaxlm.cli import main

SECONDS = 60
REMARKS = ("using the copy in a checkpoint", "settings of vectors are not kept")
"""Of what is damaged and not needed; what is wrong otherwise may follow."""


class Hang(BaseException):
    """Raised in a command that takes too long; nothing but the fuzzer catches it."""


class Fuzzer:
    """counts: how many commands ended in which way. failures: for each different one its traceback and its input."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.counts: Counter[str] = Counter()
        self.failures: dict[str, str] = {}

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """A folder for one input."""
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            yield Path(name)

    def run(self, *arguments: object) -> None:
        """One command, as the console script runs it: its output takes UTF-8 only, and the system hands on bytes that
        are not UTF-8 as halves of surrogate pairs, and no NUL."""
        if self.counts.total() % 50 == 49:  # programs of a thousand commands would reach the limit of the memory
            jax.clear_caches()
        words = [os.fsdecode(str(a).encode("utf-8", "surrogatepass").replace(b"\0", b"")) for a in arguments]
        out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _limited():
                code = main(words)
        except SystemExit as stop:  # after --help
            code = stop.code or 0
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return self._failed(words, error)
        err.flush()
        said = err.buffer.getvalue().decode()
        lines = [line for line in said.splitlines() if line.startswith("jaxlm: ")]
        sentences = [line for line in lines if not any(remark in line for remark in REMARKS)]
        is_told = len(sentences) == 1 or "For full helptext" in said  # tyro's box of a flag
        is_outage = code == 1 and is_told and "run the same command again" in said  # no way to a bucket
        if (code not in (0, 2) and not is_outage) or (code == 2 and not is_told) or "Traceback" in said:
            return self._failed(words, AssertionError(f"exit code {code}, standard error: {said[-2000:]}"))
        self.counts[f"exit code {code}"] += 1

    def _failed(self, words: list[str], error: BaseException) -> None:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "/jaxlm/" in f.filename]
        place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else str(error)[:200]
        key = f"{type(error).__name__} at {place}"
        self.counts[key] += 1
        story = "".join(traceback.format_exception(error))[-3000:]
        self.failures.setdefault(key, f"jaxlm {' '.join(map(repr, words))[:3000]}\n{story}")


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    def give_up(*_: object) -> None:
        raise Hang(f"it took more than {SECONDS} seconds")

    previous = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@contextlib.contextmanager
def nobody() -> Iterator[None]:
    """Root may read everything, so it gives that up for a while; what is imported later may lie in root's folders."""
    if os.geteuid():
        yield
        return
    for module in pkgutil.walk_packages(jaxlm.__path__, "jaxlm."):
        importlib.import_module(module.name)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
