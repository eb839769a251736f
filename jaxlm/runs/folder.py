"""A run's folder: its configuration, its tokenizer, its lock; what later commands need to use a run."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any, TextIO

from jaxlm.config import experiment as configuration
from jaxlm.errors import UserError
from jaxlm.config.experiment import Experiment
from jaxlm.paths import local_folder
from jaxlm.data.text import TextData
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.tokenizers.vocabulary import Vocabulary

# Fields that may differ when a run is resumed: they change how long, how often and where, not what is computed. But
# train.steps is also where a linear or cosine schedule ends: the steps to come have other learning rates, as the loop
# reports.
FREE_FIELDS = (
    "train.steps", "train.log_every", "train.eval_every", "train.eval_batches", "train.checkpoint_every",
    "train.keep_checkpoints", "train.tensorboard", "mesh.", "data.cache_dir", "data.workers", "data.source",
    "objective.model.remat:", "objective.model.attention:",
)

# Fields of an imported model that say how it is computed and trained; the others say what it is.
FREE_MODEL_FIELDS = tuple(
    f"objective.model.{name}:" for name in ("dtype", "dropout", "attention_dropout", "remat", "attention")
)


def lock(folder: Path) -> TextIO:
    """Holds the folder for this process until the returned file is closed or the process ends, however it ends."""
    try:
        handle = (folder / ".lock").open("a+")
    except OSError as error:
        raise UserError(f"cannot write in the run folder {folder}: {error.strerror}.") from error
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
    with contextlib.suppress(OSError):  # a courtesy to the next process; on a full disk there is no room for it
        handle.truncate(0)
        handle.write(f"process {os.getpid()}")
        handle.flush()
    return handle


def create(folder: Path) -> None:
    """The folder itself; UserError when its name is taken by a file or by files that are no run's."""
    try:
        if folder.is_file():
            raise UserError(f"{folder} is a file; --run-dir needs a folder.")
        folder.mkdir(parents=True, exist_ok=True)
        # A start that was killed may have left half a configuration.
        own = (".lock", _temporary(folder / "config.json").name)
        present = sorted(p.name for p in folder.iterdir() if p.name not in own)
    except OSError as error:
        raise UserError(f"cannot make the run folder {folder}: {error.strerror}.") from error
    if present and "config.json" not in present:
        raise UserError(f"{folder} holds other files ({present[0]}, …) and no run; choose an empty --run-dir.")


def is_imported(folder: Path) -> bool:
    """Whether the run started from a Transformers folder: its data.json says so, also when its checkpoint of step 0 is
    long gone."""
    return "imported_from" in read_facts(folder)


def newest_step(folder: Path) -> int:
    """Of the newest checkpoint; 0 where there is none."""
    return max((int(p.name) for p in (folder / "checkpoints").glob("*") if p.name.isdigit()), default=0)


def has_begun(folder: Path) -> bool:
    """Whether there is a step of training that could be lost."""
    metrics = folder / "metrics.jsonl"
    return newest_step(folder) > 0 or (metrics.exists() and metrics.stat().st_size > 0)


def recorded_steps(folder: Path) -> int | None:
    """`train.steps` as the last start that did steps had it; None where there was none."""
    path = folder / "config.json"
    return configuration.load_config(path).train.steps if path.exists() else None


def check_configuration(folder: Path, experiment: Experiment) -> None:
    """UserError when the folder holds a run of another configuration. As long as no step is done, all may still
    change, but for what an import's parameters are and mean."""
    if not (folder / "config.json").exists():
        return
    old = configuration.load_config(folder / "config.json")
    changed = configuration.differences(old, experiment)
    if has_begun(folder):
        changed = [line for line in changed if not line.startswith(FREE_FIELDS)]
    elif is_imported(folder):
        # Beside the model, an objective has rates and the like; where it adds or leaves out a head, the shapes tell.
        same = _parameter_shapes(old.objective) == _parameter_shapes(experiment.objective)
        fixed = ("data.tokenizer:", *(("objective:", "objective.model") if same else ("objective",)))
        changed = [line for line in changed if line.startswith(fixed) and not line.startswith(FREE_MODEL_FIELDS)]
    else:
        changed = []
    if changed:
        raise UserError(
            f"{folder} holds a run of another configuration ({'; '.join(changed[:4])}"
            f"{'; …' if len(changed) > 4 else ''}); choose another --run-dir, or pass the same values."
        )


def _parameter_shapes(objective: Any) -> Any:
    import jax

    return jax.eval_shape(objective.init, jax.random.key(0))


def own_tokenizer(folder: Path) -> Path | None:
    """The tokenizer that the run is bound to, if it is: one trained anew from a changed text would change every id."""
    path = folder / "tokenizer"
    return path if path.is_dir() and (has_begun(folder) or is_imported(folder)) else None


def data_of(folder: Path, data: TextData) -> TextData:
    """Where the text comes from, tokenised as the run in the folder has it, if it is bound to a tokenizer."""
    own = own_tokenizer(folder)
    return dataclasses.replace(data, tokenizer=str(own)) if own else data


def bind(folder: Path, experiment: Experiment, vocabulary: Vocabulary) -> Any:
    """The objective, bound for training. The embedding of an imported model keeps its rows, however many are spare."""
    vocabulary = dataclasses.replace(vocabulary, keeps_rows=is_imported(folder))
    return experiment.objective.bind(vocabulary, experiment.data.length)


def check_facts(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """UserError when the data is not what the run has learnt from."""
    if saved.get("data") != now["data"]:
        raise UserError(
            f"the text has changed since this run began: it has learnt from {saved.get('source', 'other text')} (store "
            f"{str(saved.get('data'))[:12]}), and {now['source']} now gives {now['data'][:12]}; bring the old text "
            "back, or choose another --run-dir."
        )


def claim(folder: Path, experiment: Experiment, tokenizer: Tokenizer, facts: dict[str, Any]) -> None:
    """Writes what makes the folder a run: configuration, facts of the data, tokenizer. Called when nothing is left to
    refuse, so that a mistake in a flag leaves an empty folder behind. UserError when the text has changed."""
    data = folder / "data.json"
    if data.exists() and has_begun(folder):
        check_facts(read_facts(folder), facts)
    if experiment.train.steps > newest_step(folder):  # else nothing will be done, and the run stays as it was made
        write_json(folder / "config.json", configuration.to_json(experiment))
    write_json(data, read_facts(folder) | facts)
    if own_tokenizer(folder) is None:
        shutil.rmtree(folder / "tokenizer", ignore_errors=True)  # of a start that did no step
        try:
            tokenizer.save(folder / "tokenizer")
        except OSError as error:
            raise UserError(f"cannot write {folder / 'tokenizer'}: {error.strerror}.") from error


def read_facts(folder: Path) -> dict[str, Any]:
    """data.json: fingerprints of store and tokenizer, and where the text came from. Empty when there is none."""
    path = folder / "data.json"
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not readable as JSON ({error}); the run folder is damaged.") from error


def write_json(path: Path, value: Any) -> None:
    """Written beside and renamed, so that a reader never meets half of it."""
    temporary = _temporary(path)
    try:
        temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {error.strerror}.") from error


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


def write_imported_run(
    folder: Path, experiment: Experiment, params: Any, tokenizer: Tokenizer, facts: dict[str, Any]
) -> None:
    """A run that has done no step: its checkpoint, of step 0, holds parameters alone. facts: `imported_from`, the
    folder, and `fresh`, the first names of the parameters that it lacked."""
    from jaxlm.training.checkpoints import Checkpoints

    create(folder)
    with lock(folder):
        tokenizer.save(folder / "tokenizer")
        checkpoints = Checkpoints(folder / "checkpoints")
        checkpoints.save_params(params, {})
        checkpoints.wait()
        checkpoints.close()
        write_json(folder / "data.json", facts)
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
        from jaxlm.training.checkpoints import Checkpoints

        shapes = _parameter_shapes(self.objective)
        checkpoints = Checkpoints(self.folder / "checkpoints", read_only=True)
        try:
            return checkpoints.restore_params(shapes)
        finally:
            checkpoints.close()


def open_run(folder: str | os.PathLike[str]) -> Run:
    """Opens a run folder for reading. UserError when it is none."""
    folder = local_folder(folder, "runs")
    if not folder.exists():
        raise UserError(f"{folder} does not exist.")
    experiment = configuration.load_config(folder / "config.json")
    if not (folder / "tokenizer").is_dir():
        raise UserError(f"{folder} has no tokenizer folder: the run has not got as far as its first step.")
    tokenizer = Tokenizer.load(folder / "tokenizer")
    if is_imported(folder):  # it need not be fit for training: a T5 without sentinels can generate
        objective = dataclasses.replace(experiment.objective, vocabulary=tokenizer.vocabulary)
    else:
        objective = bind(folder, experiment, tokenizer.vocabulary)
    # Whoever reads a run may sit at another machine than the one that its kernel was chosen for.
    objective = dataclasses.replace(objective, model=dataclasses.replace(objective.model, attention="auto"))
    return Run(folder, experiment, objective, tokenizer, read_facts(folder))
