"""What import and export need to know of a model family: one `Family`, in a file of its own."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from jaxlm.errors import UserError
from jaxlm.huggingface.table import Table
from jaxlm.paths import reading
from jaxlm.tokenizers.template import Template
from jaxlm.tokenizers.vocabulary import Vocabulary

Number = TypeVar("Number", int, float)


@dataclasses.dataclass(frozen=True)
class TransformersModel:
    """A model of Transformers that an objective's parameters fill. BERT has one; ELECTRA two, with a folder each."""

    architecture: str
    """The class, such as "BertForPreTraining"."""
    auto_class: str
    """The Auto class that loads it, for the model card."""
    config: Mapping[str, Any]
    """config.json, without "architectures"."""
    table: Table
    """Paths from the root of the objective's parameters. Two models may share parameters."""
    folder: str = ""
    """Subfolder of the exported folder; "" is that folder itself."""
    generation_config: Mapping[str, Any] | None = None
    """generation_config.json, for a model that generates."""
    pipeline_tag: str = "fill-mask"
    """The hub's name of its use."""


@dataclasses.dataclass(frozen=True)
class Source:
    """A Transformers folder while it is imported: what its config.json and the names of its tensors say."""

    folder: Path
    config: Mapping[str, Any]
    names: Collection[str]

    def number(self, key: str, default: Number) -> Number:
        """A number of config.json, of the type of `default`, which stands where the key is missing or null."""
        value = self.config.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or type(default)(value) != value:
            kind = "whole number" if isinstance(default, int) else "number"
            raise UserError(f"{self.folder / 'config.json'}: {key} is {value!r}; it must be a {kind}.")
        return type(default)(value)

    def refuse(self, key: str, *allowed: Any) -> None:
        """UserError when config.json sets `key` to anything but null and the `allowed` values."""
        value = self.config.get(key)
        if value is not None and value not in allowed:
            raise UserError(
                f"{self.folder / 'config.json'}: {key} is {value!r}, which jaxlm does not have; only models with "
                f"{' or '.join(map(repr, allowed))} can be imported."
            )

    def holds(self, ending: str) -> bool:
        """Whether a tensor has this name, with or without a prefix."""
        return any(name == ending or name.endswith("." + ending) for name in self.names)


@dataclasses.dataclass(frozen=True)
class Family:
    """A `model_type` of Transformers, for one pair of objective and model in jaxlm.systems."""

    model_type: str
    """As in config.json."""
    template: Template
    """What the exported tokenizer puts around a text."""
    models: Callable[[Any], tuple[TransformersModel, ...]]
    """objective → the models that its parameters fill; `objective.vocabulary` may be None."""
    read_objective: Callable[[Source], Any]
    """The objective with its model as config.json and the names of the tensors say. UserError for what the model
    cannot do."""
    max_length: Callable[[Any], int]
    """objective → the longest sequence that the model takes, for the tokenizer."""
    stored_models: Callable[[Any, Source], tuple[TransformersModel, ...]] | None = None
    """(objective, source) → the models that this folder holds, where they are not always `models(objective)`; the
    parameters of the others are initialized."""


# Names that Transformers has for one function, each with ours.
ACTIVATIONS = {
    "gelu": "gelu", "gelu_python": "gelu", "relu": "relu",
    "gelu_new": "gelu_new", "gelu_pytorch_tanh": "gelu_new", "gelu_fast": "gelu_new",
}


def activation(source: Source, key: str = "hidden_act", default: str = "gelu") -> str:
    """Our name of the activation that config.json asks for."""
    source.refuse(key, *ACTIVATIONS)
    return ACTIVATIONS[source.config.get(key) or default]


def symbol(vocabulary: Vocabulary | None, name: str) -> int | None:
    """The id of a special symbol as config.json has it: null where there is none."""
    number = -1 if vocabulary is None else getattr(vocabulary, name)
    return None if number < 0 else int(number)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a Transformers folder. UserError where there is none, or none of Transformers."""
    if not folder.is_dir():
        raise UserError(
            f"There is no folder {folder}; give the path of a folder that Transformers saved (a model of the hub has "
            "to be downloaded first, for example with `hf download NAME --local-dir FOLDER`)."
        )
    file = folder / "config.json"
    if not file.is_file():
        raise UserError(
            f"{folder} has no config.json: it is neither a folder that Transformers saved nor a run that has begun."
        )
    with reading(file):
        config = json.loads(file.read_text(encoding="utf-8"))
    if isinstance(config, dict) and {"objective", "train"} <= config.keys():
        raise UserError(
            f"{folder} is a run of jaxlm, of which `jaxlm export` makes a Transformers folder once it has a checkpoint."
        )
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise UserError(
            f'{file} names no "model_type", so it is not a Transformers folder; if you know the family, write it '
            'there, for example "model_type": "bert".'
        )
    return config
