"""The contract of a model family for import and export."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxlm.errors import UserError
from jaxlm.huggingface.table import Table
from jaxlm.paths import read_json
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import Params

Fields = Mapping[str, tuple[str, Any]]
"""Field of our model → its key in config.json and the default of the Transformers class.

Transformers omits default values from the file.
"""
FORM = {"architectures?": [str], "id2label?": dict, "rope_scaling?": dict,
        "jaxlm?": {"fresh?": [str], "rows?": {"*": (str, int, float, bool, [str])}},
        "rope_parameters?": {"full_attention?": dict, "sliding_attention?": dict}}
"""Form of a config.json, for keys that `Source` does not check."""


@dataclasses.dataclass(frozen=True)
class TransformersModel:
    """Transformers model that an objective's parameters fill. BERT has one, ELECTRA two in separate folders."""

    architecture: str
    """Class, such as "BertForPreTraining"."""
    auto_class: str
    """Auto class that loads it, for the model card."""
    config: Mapping[str, Any]
    """Content of config.json, without "architectures"."""
    table: Table
    """Table of names; paths start at the root of the objective's parameters. Two models may share parameters."""
    folder: str = ""
    """Subfolder of the exported folder; "" for the folder itself."""
    generation_config: Mapping[str, Any] | None = None
    """Content of generation_config.json, for generative models."""
    pipeline_tag: str = "fill-mask"
    """Task of the model on the hub."""
    remark: str = ""
    """Sentence of the model card about what differs in Transformers."""
    module: str = ""
    """Module that registers a class of one's own, which the model card's code imports first."""


class Head(NamedTuple):
    """Transformers class of a task and its head.

    Attributes:
        architecture: class name.
        classifier: name of the classifier layer.
        dense: name of the layer before it; "" if there is none.
        config: fields of config.json that determine the head. An import accepts any value in place of null.
        dropout: field of config.json with the dropout rate before the classifier.
    """

    architecture: str
    classifier: str = "classifier"
    dense: str = ""
    config: Mapping[str, Any] = {}
    dropout: str = "classifier_dropout"


@dataclasses.dataclass(frozen=True)
class Source:
    """Transformers folder during import: the content of its config.json and the names of its tensors."""

    folder: Path
    config: Mapping[str, Any]
    names: Collection[str]

    def read(self, fields: Fields) -> dict[str, Any]:
        """Return the values of our fields."""
        return {ours: self.value(*theirs) for ours, theirs in fields.items()}

    def value(self, key: str, default: Any) -> Any:
        """Return a number of config.json, or our name of an activation.

        It replaces a missing or null value by `default`, and is of its type; a string means an activation.
        """
        value = self.config.get(key)
        if value is None:
            return default
        if isinstance(default, str):
            self.require(**{key: tuple(ACTIVATIONS)})
            return ACTIVATIONS[value]
        if not isinstance(value, (int, float)) or not abs(value) < 1e30 or type(default)(value) != value:
            raise UserError(f"{self.folder / 'config.json'}: {key} is {value!r}; it must be a number like {default}.")
        return type(default)(value)

    def require(self, **values: Any) -> None:
        """Raise UserError if config.json sets a key to anything but null and its value here, or one of a tuple."""
        for key, value in values.items():
            allowed, found = value if isinstance(value, tuple) else (value,), self.config.get(key)
            if found is not None and found not in allowed:
                raise UserError(
                    f"{self.folder / 'config.json'}: {key} is {found!r}, which jaxlm does not support; only models "
                    f"with {' or '.join(map(repr, allowed))} can be imported."
                )

    def has_tensor(self, ending: str) -> bool:
        """Return whether a tensor has this name, with or without a prefix."""
        return any(name == ending or name.endswith("." + ending) for name in self.names)


@dataclasses.dataclass(frozen=True)
class Family:
    """Family of Transformers (`model_type`) for one pair of objective and model in jaxlm.systems."""

    model_type: str
    """Value of `model_type` in config.json."""
    models: Callable[[Any], tuple[TransformersModel, ...]]
    """Maps a bound objective to the models that its parameters fill."""
    read_objective: Callable[[Source], Any]
    """Reads the objective and its model from config.json and the names of the tensors.

    It raises UserError for values that the model does not support.
    """
    heads: Mapping[str, Head] = dataclasses.field(default_factory=dict)
    """Heads of the fine-tuned classes by task, as in the names of auto classes ("SequenceClassification")."""
    text_params: str = ""
    """Subtree of the pretraining parameters that a task has at its root; "" if both have the same paths."""
    stored_models: Callable[[Any, Source], tuple[TransformersModel, ...]] | None = None
    """Maps an objective and its folder to the models in the folder, where that may be fewer than `models(objective)`.

    Parameters of missing models are initialized.
    """
    export_params: Callable[[Any, Params], Params] | None = None
    """Maps an objective and its parameters to the parameters that the tables name, where these are other values."""
    import_params: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] | None = None
    """Inverse of `export_params`, from path to array. It may add parameters that the folder lacks."""


# Names of activations in Transformers → ours.
ACTIVATIONS = {
    "gelu": "gelu", "gelu_python": "gelu", "relu": "relu", "silu": "silu", "swish": "silu",
    "gelu_new": "gelu_new", "gelu_pytorch_tanh": "gelu_new", "gelu_fast": "gelu_new",
}


def to_config(model: Any, fields: Fields) -> dict[str, Any]:
    """Return the fields of a model as config.json has them; `Source.read` is the inverse."""
    return {theirs: getattr(model, ours) for ours, (theirs, _) in fields.items()}


def token_id(vocabulary: Vocabulary, role: str) -> int | None:
    """Return the id of a special token as in config.json: null if the vocabulary lacks it."""
    found = getattr(vocabulary, role)
    return None if found < 0 else int(found)


def read_config(folder: Path) -> dict[str, Any]:
    """Read the config.json of a Transformers folder."""
    if not folder.is_dir():
        raise UserError(
            f"There is no folder {folder}; give the path of a folder that Transformers saved (a model of the hub has "
            "to be downloaded first, for example with `hf download NAME --local-dir FOLDER`)."
        )
    file = folder / "config.json"
    if not file.is_file():
        raise UserError(
            f"{folder} has no config.json: it is neither a folder that Transformers saved nor a run that has started."
        )
    if not isinstance((config := read_json(file, FORM)).get("model_type"), str):
        raise UserError(
            f'{file} names no "model_type", so {folder} is no Transformers folder, or a run that has no checkpoint '
            'yet; if you know the family, write it there, for example "model_type": "bert".'
        )
    return config
