"""The files of a run folder: config.json, data.json (the run's metadata), tokenizer/, checkpoints/ and its lock."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import glob
import json
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self, TextIO

import orbax.checkpoint as ocp
from etils import epath

from jaxlm import __version__, hub
from jaxlm.config.experiment import Experiment
from jaxlm.config.json import to_json
from jaxlm.config.presets import age, load_config
from jaxlm.errors import UserError
from jaxlm.parallel.checksums import digest
from jaxlm.parallel.hosts import log
from jaxlm.paths import absolute, any_path, cause, in_bucket, refuse_links, without_empty_folders, write_whole
from jaxlm.runs.lease import Lease
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.training.checkpoints import Checkpoints

METADATA = (
    "data", "tokenizer", "frozen", "source", "unigram_entropy", "configuration", "imported_from", "fresh",
    "chosen", "settings", "jaxlm",
)
"""Keys of a run's metadata, in data.json and in each of its checkpoints (see `jaxlm.runs.resume.run_metadata`). "jaxlm"
is the version that wrote the file."""
_log_once = functools.cache(log)  # a command may read a folder twice


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """State of a run folder, read once. It is empty for a path that is no run folder, such as a preset's."""

    path: epath.Path
    saved_steps: tuple[int, ...]
    """Steps of the checkpoints, oldest first; that of step 0 has only parameters."""
    has_begun: bool
    """Whether at least one training step has been done."""
    metadata: dict[str, Any]
    """Contents of data.json, or of the newest checkpoint's copy if data.json is damaged, edited or missing."""
    experiment: Experiment | None
    """Configuration in config.json, before this start replaces it; None for a folder that is no run."""
    named_steps: tuple[int, ...] = ()
    """Steps that the path names: RUN@1000, RUN@1000,1100 or RUN@last3; () for a plain folder."""

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Read the state of a folder; UserError if the path names a step without a checkpoint."""
        path, named = split_steps(path)
        path = any_path(path)
        entries = [entry for entry in (path / "checkpoints").glob("*") if entry.name.isdecimal()]
        # In a bucket a killed save leaves a folder without Orbax's mark.
        steps = sorted(int(entry.name) for entry in entries if ocp.utils.is_checkpoint_finalized(entry))
        metrics = path / "metrics.jsonl"
        has_begun = bool(steps and steps[-1]) or (metrics.exists() and bool(metrics.read_bytes()))
        config = path / "config.json"
        is_run = config.is_file() and (has_begun or (path / "checkpoints").is_dir())  # or else of a Transformers folder
        experiment = load_config(config) if is_run else None
        named_steps = _find_named_steps(path, steps, named) if named else ()
        return cls(path, tuple(steps), has_begun, _read_metadata(path, steps), experiment, named_steps)

    @property
    def newest_step(self) -> int:
        """Step of the newest checkpoint; 0 without checkpoints."""
        return max(self.saved_steps, default=0)

    @property
    def is_imported(self) -> bool:
        """Whether the run's first parameters are those of another model."""
        return "imported_from" in self.metadata

    @property
    def age(self) -> str:
        """The version of jaxlm that wrote the run, for a message; "" if it is this one or not known."""
        return age(self.metadata.get("jaxlm"))

    @property
    def tokenizer_folder(self) -> epath.Path | None:
        """Folder of the tokenizer that the parameters belong to; None while the run may still choose another."""
        folder = self.path / "tokenizer"
        return folder if folder.is_dir() and (self.has_begun or self.saved_steps) else None


NO_RUN = RunFolder(epath.Path(), (), False, {}, None)
"""State of a run without a folder."""


def split_steps(path: str | os.PathLike[str]) -> tuple[str, str]:
    """Split RUN@STEPS, which names checkpoints of a run, into both; "" for a path that names none."""
    run, _, steps = os.fspath(path).rpartition("@")
    is_named = re.fullmatch(r"\d+(,\d+)*|last[1-9]\d*", steps) and not run.startswith(hub.PREFIX)
    is_named = is_named and run and not any_path(path).exists()
    return (run, steps) if is_named else (os.fspath(path), "")


def _find_named_steps(path: epath.Path, steps: list[int], named: str) -> tuple[int, ...]:
    """Return the steps that the end of a path names, such as "1000,1100" or "last3"."""
    is_last = named.startswith("last")
    steps = [step for step in steps if step or not is_last]  # that of step 0 has a head that is not trained yet
    chosen = steps[-int(named[4:]):] if is_last else sorted({int(step) for step in named.split(",")})
    missing = [f"{step:,}" for step in chosen if step not in steps]
    if missing or (is_last and len(chosen) < int(named[4:])):
        raise UserError(
            f"{path} has no {f'checkpoint of step {missing[0]}' if missing else f'{named[4:]} checkpoints'}; it keeps "
            f"those of steps {', '.join(f'{step:,}' for step in steps) or 'none'} (--train.keep-checkpoints)."
        )
    return tuple(chosen)


def _read_metadata(folder: epath.Path, steps: list[int]) -> dict[str, Any]:
    copies = [folder / "checkpoints" / str(step) / "metadata" / "metadata" for step in reversed(steps)]
    for path in (folder / "data.json", *copies):
        try:
            if not path.is_file():
                continue
            found = dict(json.loads(path.read_bytes()))
            if found.pop("digest") != digest(found):
                raise ValueError("it does not match its digest")
            return {name: found[name] for name in METADATA if name in found}
        except (OSError, KeyError, ValueError, TypeError, RecursionError):
            _log_once(f"{path} is damaged; using the copy in a checkpoint, if there is one.")
    return {}


@contextlib.contextmanager
def hold(folder: epath.Path) -> Iterator[None]:
    """Create the folder and lock it for this process, in a bucket by a `Lease`.

    At the end the folder is removed if it is new and still empty, as after a refusal.
    """
    with without_empty_folders(folder):
        create(folder)
        with Lease(folder) if in_bucket(folder) else lock(folder):
            try:
                yield
            finally:
                if not in_bucket(folder):
                    (folder / ".lock").unlink(missing_ok=True)


def create(folder: epath.Path) -> None:
    """Create the folder.

    Raises:
        UserError: The path is a file or reads as a pattern, or the folder holds symbolic links, or files but no run.
    """
    if glob.has_magic(str(absolute(folder))):  # Orbax would take it as a pattern
        raise UserError(f"{absolute(folder)} has one of the characters *, ? and [ in it; choose another --run-dir.")
    try:
        if folder.is_file():
            raise UserError(f"{folder} is a file; --run-dir needs a folder.")
        if not in_bucket(folder):  # where gcsfs would create a bucket that is missing
            folder.mkdir(parents=True, exist_ok=True)
        refuse_links(folder)
        present = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    except (OSError, RecursionError) as error:  # the latter of thousands of folders
        raise UserError(f"cannot make the run folder {folder}: {cause(error)}.") from error
    # A start that was killed may have left its lock, half a configuration or the file of `require_shared`.
    others = [name for name in present if name != ".lock" and not name.startswith((".config.json.", ".shared-"))]
    if others and "config.json" not in others:
        raise UserError(f"{folder} holds other files ({others[0]}, …) and no run; choose an empty --run-dir.")


def lock(folder: epath.Path) -> TextIO:
    """Lock the folder for this process until the returned file is closed or the process ends."""
    try:
        handle = Path(folder, ".lock").open("a+")  # noqa: SIM115 - it is returned open
    except OSError as error:
        raise UserError(f"cannot write in the run folder {folder}: {error.strerror}.") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(handle.fileno()), os.stat(folder / ".lock")):
            raise BlockingIOError("the process that held the lock has just removed the file")
    except (BlockingIOError, FileNotFoundError):  # or it has just removed the file
        handle.seek(0)
        owner = handle.read().strip()
        handle.close()
        raise UserError(
            f"{folder} is in use by another process{f' ({owner})' if owner else ''}; wait for it or choose another "
            "--run-dir."
        ) from None
    except OSError as error:
        log(f"{folder} has no locks ({error.strerror}), so that nothing keeps a second process out of it.")
    with contextlib.suppress(OSError):  # the number is only a hint; the disk may be full
        handle.truncate(0)
        handle.write(f"process {os.getpid()} on {socket.gethostname()}")
        handle.flush()
        os.fsync(handle.fileno())  # else a network filesystem may show it only when the file is closed
    return handle


def write_metadata(folder: epath.Path, metadata: dict[str, Any]) -> None:
    """Write data.json: the metadata and, as in checkpoints, the version of jaxlm and their digest."""
    metadata = metadata | {"jaxlm": __version__}
    write_json(folder / "data.json", metadata | {"digest": digest(metadata)})


def write_imported_run(
    folder: epath.Path, experiment: Experiment, params: Any, tokenizer: Tokenizer, metadata: dict[str, Any]
) -> None:
    """Write a run that has done no step: its checkpoint, of step 0, has only parameters.

    `metadata` has `imported_from`, the Transformers folder, `fresh`, the parameters that it lacked, and its `settings`.
    """
    with hold(folder):
        try:
            tokenizer.save(folder / "tokenizer")
            with contextlib.closing(Checkpoints(folder / "checkpoints")) as checkpoints:
                checkpoints.save_params(params, metadata)
                checkpoints.wait()
            write_metadata(folder, metadata)
            write_json(folder / "config.json", to_json(experiment))
        except BaseException:  # such as a full disk, or Ctrl-C; the command takes an empty folder only
            for part in (folder / "tokenizer", folder / "checkpoints"):
                if part.exists():
                    part.rmtree()
            (folder / "data.json").unlink(missing_ok=True)
            raise


def write_json(path: epath.Path, value: Any) -> None:
    """Write a JSON file atomically."""
    write_whole(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode(errors="surrogatepass"))
