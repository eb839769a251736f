"""What ties a run to its configuration, tokenizer and text, and what may change when it is resumed."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

from jaxlm.config.experiment import Experiment
from jaxlm.config.json import differences, flatten, to_json
from jaxlm.config.presets import load_config
from jaxlm.data.store import Store
from jaxlm.data.text import DataConfig
from jaxlm.errors import UserError
from jaxlm.fields import Setting
from jaxlm.runs.folder import has_begun, is_imported, newest_step, own_tokenizer, read_metadata, write_json
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.tokenizers.vocabulary import Vocabulary


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


def _refuse(run: object, changed: list[str]) -> None:
    if changed:
        named = "; ".join([*changed[:4], *(["…"] if len(changed) > 4 else [])])
        raise UserError(
            f"{run} holds a run of another configuration ({named}); "
            "pass the same values, or choose another --run-dir and start from this one with --init-from."
        )


def data_of(folder: Path, data: DataConfig) -> DataConfig:
    """The data configuration with the run's own tokenizer, where the run is tied to one."""
    own = own_tokenizer(folder)
    return dataclasses.replace(data, tokenizer=str(own)) if own else data


def bind(folder: Path, experiment: Experiment, vocabulary: Vocabulary) -> Any:
    """The objective, bound for training. An imported embedding keeps its number of rows."""
    vocabulary = dataclasses.replace(vocabulary, keeps_rows=is_imported(folder))
    return experiment.objective.bind(vocabulary, experiment.data.length)


def run_metadata(folder: Path, experiment: Experiment, store: Store, tokenizer: Tokenizer) -> dict[str, Any]:
    """The metadata that data.json and every checkpoint hold: fingerprints of token store and tokenizer, where the text
    came from, its unigram entropy in nats, the value of each field that decides the result, and the origin of imported
    parameters."""
    return read_metadata(folder) | {
        "data": store.fingerprint,
        "tokenizer": tokenizer.fingerprint,
        "source": experiment.data.source,
        "unigram_entropy": store.unigram_entropy("held_out"),
        "configuration": flatten(experiment, Setting.decides_result),
    }


def check_metadata(saved: dict[str, Any], now: dict[str, Any], run: object = "the checkpoint") -> None:
    """UserError when the text or the configuration is not that of the checkpoint, as after an edit of config.json."""
    if saved.get("data") != now["data"]:
        raise UserError(
            f"the text has changed since this run began: it has learnt from {saved.get('source', 'other text')} (store "
            f"{str(saved.get('data'))[:12]}), and {now['source']} now gives {now['data'][:12]}; bring the old text "
            "back, or choose another --run-dir and start from this run with --init-from."
        )
    _refuse(run, differences(saved.get("configuration", {}), now["configuration"]))


def claim(folder: Path, experiment: Experiment, tokenizer: Tokenizer, metadata: dict[str, Any]) -> None:
    """Writes configuration, metadata and tokenizer: what makes the folder a run. To be called when nothing is left to
    refuse, so that a mistake in a flag leaves an empty folder behind. UserError as from `check_metadata`."""
    if has_begun(folder):
        check_metadata(read_metadata(folder), metadata, folder)
    if experiment.train.steps > newest_step(folder):  # otherwise nothing will be done, and the run stays as it is
        write_json(folder / "config.json", to_json(experiment))
    write_json(folder / "data.json", metadata)
    if own_tokenizer(folder) is None:
        shutil.rmtree(folder / "tokenizer", ignore_errors=True)  # of a start that did no step
        try:
            tokenizer.save(folder / "tokenizer")
        except OSError as error:
            raise UserError(f"cannot write {folder / 'tokenizer'}: {error.strerror}.") from error
