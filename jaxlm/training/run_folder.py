"""A run's folder: its configuration, its tokenizer, its lock; what later commands need to use a run."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
from pathlib import Path
from typing import Any, TextIO

from jaxlm import experiment as configuration
from jaxlm.errors import UserError
from jaxlm.experiment import Experiment
from jaxlm.text.tokenizer import Tokenizer

# Fields that may differ when a run is resumed: they change how long, how often and where, not what is computed.
FREE_FIELDS = (
    "train.steps", "train.log_every", "train.eval_every", "train.eval_batches", "train.checkpoint_every",
    "train.keep_checkpoints", "train.tensorboard", "mesh.", "data.cache_dir", "data.workers", "data.source",
    "data.tokenizer",
)


def lock(folder: Path) -> TextIO:
    """Holds the folder for this process until the returned file is closed or the process ends, however it ends."""
    handle = (folder / ".lock").open("a+")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        handle.seek(0)
        owner = handle.read().strip()
        handle.close()
        raise UserError(
            f"{folder} is in use by another process{f' ({owner})' if owner else ''}; wait for it or choose another "
            "--run-dir."
        ) from None
    handle.truncate(0)
    handle.write(f"process {os.getpid()}")
    handle.flush()
    return handle


def claim(folder: Path, experiment: Experiment) -> bool:
    """Makes the folder this experiment's: writes config.json, or checks the one that is there. True if it resumes.

    UserError when the folder holds something else, or a run of another configuration.
    """
    path = folder / "config.json"
    resuming = path.exists()
    if resuming:
        old = configuration.load_config(path)
        # A run that was imported and has not begun may still choose everything but its model.
        begun = (folder / "data.json").exists()
        changed = [
            line for line in configuration.differences(old, experiment)
            if (not line.startswith(FREE_FIELDS) if begun else line.startswith("objective"))
        ]
        if changed:
            raise UserError(
                f"{folder} holds a run of another configuration ({'; '.join(changed[:4])}"
                f"{'; …' if len(changed) > 4 else ''}); choose another --run-dir, or pass the same values."
            )
    write_json(path, configuration.to_json(experiment))
    return resuming


def create(folder: Path) -> None:
    """The folder itself; UserError when its name is taken by a file or by files that are no run's."""
    if folder.is_file():
        raise UserError(f"{folder} is a file; --run-dir needs a folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        present = [p.name for p in folder.iterdir() if p.name != ".lock"]
    except OSError as error:
        raise UserError(f"cannot make the run folder {folder}: {error.strerror}.") from error
    if present and "config.json" not in present:
        raise UserError(f"{folder} holds other files ({present[0]}, …) and no run; choose an empty --run-dir.")


def write_json(path: Path, value: Any) -> None:
    """Written beside and renamed, so that a reader never meets half of it."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}.") from error


def write_imported_run(
    folder: Path, experiment: Experiment, params: Any, tokenizer: Tokenizer, imported_from: str
) -> None:
    """A run that has done no step: its checkpoint, of step 0, holds parameters alone."""
    from jaxlm.training.checkpoints import Checkpoints

    create(folder)
    with lock(folder):
        tokenizer.save(folder / "tokenizer")
        checkpoints = Checkpoints(folder / "checkpoints")
        checkpoints.save_params(params, {"imported_from": imported_from})
        checkpoints.wait()
        checkpoints.close()
        write_json(folder / "config.json", configuration.to_json(experiment))


@dataclasses.dataclass(frozen=True)
class Run:
    """A run as later commands see it: everything comes from the folder alone."""

    folder: Path
    experiment: Experiment
    objective: Any
    tokenizer: Tokenizer
    facts: dict[str, Any]

    def params(self) -> tuple[Any, int]:
        """(parameters, step) of the newest checkpoint."""
        import jax

        from jaxlm.training.checkpoints import Checkpoints

        shapes = jax.eval_shape(self.objective.init, jax.random.key(0))
        checkpoints = Checkpoints(self.folder / "checkpoints", read_only=True)
        try:
            return checkpoints.restore_params(shapes)
        finally:
            checkpoints.close()


def open_run(folder: str | os.PathLike[str]) -> Run:
    """Opens a run folder for reading. UserError when it is none."""
    folder = Path(folder)
    if not folder.exists():
        raise UserError(f"{folder} does not exist.")
    experiment = configuration.load_config(folder / "config.json")
    if not (folder / "tokenizer").is_dir():
        raise UserError(f"{folder} has no tokenizer folder: the run has not got as far as its first step.")
    tokenizer = Tokenizer.load(folder / "tokenizer")
    facts_path = folder / "data.json"
    facts = json.loads(facts_path.read_text(encoding="utf-8")) if facts_path.exists() else {}
    objective = experiment.objective.bind(tokenizer.vocabulary, experiment.data.length)
    return Run(folder, experiment, objective, tokenizer, facts)
