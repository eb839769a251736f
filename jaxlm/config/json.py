"""Configurations as JSON: how config.json holds one, and how two are compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxlm import systems
from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.errors import UserError
from jaxlm.fields import Setting, marks_of, settings
from jaxlm.parallel.mesh import MeshConfig

# The only classes that a configuration file may name; nothing in it is ever an import path.
CLASSES: dict[str, type] = {
    cls.__name__: cls for cls in (Experiment, TextData, OptimizerConfig, TrainConfig, MeshConfig, *systems.CLASSES)
}


def to_json(value: Any) -> Any:
    """A configuration as plain JSON values; dataclasses carry their class name under "type"."""
    if dataclasses.is_dataclass(value):
        kept = [f.name for f in dataclasses.fields(value) if not marks_of(f) & {"bound", "path"}]
        return {"type": type(value).__name__} | {name: to_json(getattr(value, name)) for name in kept}
    if isinstance(value, (tuple, list)):
        return [to_json(item) for item in value]
    return value


def from_json(value: Any, where: str = "the configuration") -> Any:
    """The inverse of `to_json`; UserError for a class, a field or a value that this version cannot take."""
    if isinstance(value, list):
        return tuple(from_json(item, where) for item in value)
    if not isinstance(value, dict):
        return value
    cls = CLASSES.get(str(value.get("type")))
    if cls is None:
        raise UserError(f"{where} names a type {value.get('type')!r} that this version of jaxlm does not know.")
    marks = {f.name: marks_of(f) for f in dataclasses.fields(cls)}
    unknown = sorted(name for name in value if name != "type" and "bound" in marks.get(name, {"bound"}))
    if unknown:
        raise UserError(
            f"{where} has a field {unknown[0]!r} that {cls.__name__} does not have in this version of jaxlm."
        )
    given = {name: item for name, item in value.items() if name != "type" and "path" not in marks[name]}
    try:
        return cls(**{name: from_json(item, where) for name, item in given.items()})
    except (TypeError, ValueError, ArithmeticError) as error:
        raise UserError(f"{where} does not describe a {cls.__name__}: {error}") from error


def flatten(config: Any, keep: Callable[[Setting], bool] = lambda setting: True) -> dict[str, Any]:
    """{dotted name: JSON value} of the fields that `keep` accepts; a dataclass has its class name as its value."""
    def plain(value: Any) -> Any:
        return type(value).__name__ if dataclasses.is_dataclass(value) else to_json(value)

    return {setting.name: plain(setting.value) for setting in settings(config) if keep(setting)}


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The fields in which two flattened configurations differ, as "train.steps: 100 -> 200". A field that only one
    of them has is of another version of jaxlm, or inside a dataclass that differs as a whole."""
    return [
        f"{name}: {_short(old[name])} -> {_short(new[name])}"
        for name in old if name in new and old[name] != new[name]
    ]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
