"""What ties a run to its configuration, tokenizer and text, and what may change when it is resumed."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import jax

from jaxlm.config.experiment import Experiment, Resolved
from jaxlm.config.json import CLASSES, differences, flatten, to_json
from jaxlm.config.presets import load_config
from jaxlm.data.base import Data, Source, Statistics
from jaxlm.data.labelled import LabelledData
from jaxlm.errors import UserError
from jaxlm.fields import Setting
from jaxlm.objectives.base import Constants
from jaxlm.runs.folder import (
    has_begun,
    is_imported,
    newest_step,
    own_tokenizer,
    read_metadata,
    write_json,
    write_metadata,
)
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.training.checkpoints import digest
from jaxlm.training.checksums import checksums


def check_configuration(folder: Path, experiment: Experiment) -> None:
    """UserError when the folder holds a run of another configuration. Before the first step everything may change,
    except for what the parameters of an imported model are and mean."""
    if not (folder / "config.json").exists():
        return
    if has_begun(folder):
        keep = Setting.decides_result
    elif is_imported(folder):
        keep = Setting.decides_weights
    else:
        return
    old = load_config(folder / "config.json")
    _refuse(folder, differences(flatten(old, keep), flatten(experiment, keep)))


def check_source(folder: Path, resolved: Resolved) -> None:
    """UserError when the folder holds parameters that are not those of the pretrained model, or, without one, when it
    was to begin from another model and was stopped before it held that model's parameters."""
    init_from = resolved.pretrained and resolved.pretrained.path
    command = "finetune" if isinstance(resolved.experiment.data, LabelledData) else "pretrain"
    source = read_metadata(folder).get("imported_from")
    holds_parameters = any((folder / "checkpoints").glob("[0-9]*"))
    if init_from is None and source is not None and not holds_parameters:
        raise UserError(f"{folder} has not got as far as its first parameters; pass --init-from {source} again.")
    if command == "finetune" and holds_parameters and source is None:
        raise UserError(f"{folder} is a run of pretraining; choose another --run-dir.")
    if init_from is not None and holds_parameters and (source is None or not _same_path(source, init_from)):
        raise UserError(
            f"{folder} began from {source or 'fresh parameters'}, not from {init_from}; resume it with "
            f"`jaxlm {command} {folder}`, or choose another --run-dir."
        )


def _same_path(one: str, other: str) -> bool:
    return Path(one).resolve() == Path(other).resolve()


def _refuse(run: object, changed: list[str]) -> None:
    if changed:
        more = "; …" if len(changed) > 4 else ""
        raise UserError(
            f"{run} holds a run of another configuration ({'; '.join(changed[:4])}{more}); "
            "pass the same values, or choose another --run-dir and start from this one with --init-from."
        )


def data_of(folder: Path, data: Data) -> Data:
    """The data configuration with the run's own tokenizer, where the run is tied to one."""
    own = own_tokenizer(folder)
    return dataclasses.replace(data, tokenizer=str(own)) if own else data


def bind(
    folder: Path, experiment: Experiment, vocabulary: Vocabulary, imported: bool = False,
    statistics: Statistics | None = None,
) -> Any:
    """The objective, bound for training. The embedding of a model that is `imported`, now or when the run began, keeps
    its number of rows."""
    vocabulary = dataclasses.replace(vocabulary, preserve_rows=imported or is_imported(folder))
    return experiment.objective.bind(vocabulary, experiment.data.length, statistics)


def run_metadata(
    folder: Path, experiment: Experiment, text: Source, tokenizer: Tokenizer, constants: Constants,
    begun_from: dict[str, Any],
) -> dict[str, Any]:
    """The metadata that data.json and every checkpoint hold: fingerprints of token store, tokenizer and constants
    (on their devices), where the text came from, its unigram entropy in nats, the value of each field that decides the
    result, and where the first parameters came from (`begun_from`, where they are not fresh: imported_from and fresh).
    """
    return read_metadata(folder) | begun_from | {
        "data": text.fingerprint,
        "tokenizer": tokenizer.fingerprint,
        "frozen": digest(checksums(constants)[0]) if jax.tree.leaves(constants) else None,
        "source": experiment.data.source,
        "unigram_entropy": text.statistics.unigram_entropy,
        "configuration": flatten(experiment, Setting.decides_result),
    }


def check_metadata(saved: dict[str, Any], now: dict[str, Any], run: object = "the checkpoint") -> None:
    """UserError when the text or the configuration is not that of the checkpoint, as after an edit of config.json."""
    if saved.get("data") != now["data"]:
        raise UserError(
            "the text has changed since this run began, or other parts of it are held out: it has learnt from "
            f"{saved.get('source', 'other text')} (store {str(saved.get('data'))[:12]}), and {now['source']} now gives "
            f"{now['data'][:12]}; bring the old text back, or choose another --run-dir and start from this run with "
            "--init-from."
        )
    _check_teacher(saved, now)
    _refuse(run, differences(saved.get("configuration", {}), now["configuration"]))


def _check_teacher(saved: dict[str, Any], now: dict[str, Any]) -> None:
    if saved.get("frozen") != now["frozen"]:
        raise UserError(
            "the teacher's weights are not those that this run began with; give objective.teacher the same model, or "
            "choose another --run-dir and start from this run with --init-from."
        )


def claim(folder: Path, experiment: Experiment, tokenizer: Tokenizer, metadata: dict[str, Any]) -> None:
    """Writes configuration, metadata and tokenizer: what makes the folder a run. To be called when nothing is left to
    refuse, so that a mistake in a flag leaves no run behind. UserError as from `check_metadata`."""
    for part in (experiment.objective, experiment.objective.model):
        if CLASSES.get(type(part).__name__) is not type(part):
            raise UserError(f"{type(part).__name__} is not in jaxlm/systems.py, so no run of it can be opened; add it.")
    if has_begun(folder):
        check_metadata(read_metadata(folder), metadata, folder)
    elif any((folder / "checkpoints").glob("[0-9]*")):  # of step 0: what a student begins with may be its teacher's
        _check_teacher(read_metadata(folder), metadata)
    if experiment.train.steps > newest_step(folder):  # otherwise nothing will be done, and the run stays as it is
        write_json(folder / "config.json", to_json(experiment))
    write_metadata(folder, metadata)
    if own_tokenizer(folder) is None:
        shutil.rmtree(folder / "tokenizer", ignore_errors=True)  # of a start that did no step
        tokenizer.save(folder / "tokenizer")
