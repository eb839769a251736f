"""Configurations as JSON: reading, writing and comparing config.json."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Callable
from typing import Any

from jaxlm.config.experiment import Experiment, OptimizerConfig, PhaseConfig, TrainConfig
from jaxlm.errors import UserError
from jaxlm.fields import Setting, marks_of, settings
from jaxlm.objectives.base import class_of
from jaxlm.systems import find_class, is_foreign, is_registered, register, type_name

register(Experiment, OptimizerConfig, PhaseConfig, TrainConfig)


def to_json(value: Any) -> Any:
    """Return a configuration as plain JSON values; "type" holds the `type_name` of a dataclass."""
    if dataclasses.is_dataclass(value):
        cls = class_of(value)
        if not is_registered(cls):
            raise UserError(f"{type_name(cls)} is not registered, so no run of it could be opened; pass it to "
                            "jaxlm.systems.register.")
        kept = [f.name for f in dataclasses.fields(value) if not marks_of(f) & {"bound", "path"}]
        return {"type": type_name(cls)} | {name: to_json(getattr(value, name)) for name in kept}
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return [to_json(item) for item in value]
    if (value is not None and not isinstance(value, (bool, int, float, str))) or isinstance(value, enum.Enum):
        raise UserError(f"{str(value)[:60]} is a {type(value).__name__}, which config.json cannot keep; "
                        "configurations hold numbers, texts, tuples and frozen dataclasses.")
    return value


def from_json(value: Any, where: str = "the configuration") -> Any:
    """Return the configuration of a JSON value: the inverse of `to_json`."""
    if isinstance(value, list):
        return tuple(from_json(item, where) for item in value)
    if not isinstance(value, dict):
        return value
    cls = find_class(str(value.get("type")), where)
    marks = {f.name: marks_of(f) for f in dataclasses.fields(cls)}
    unknown = sorted(name for name in value if name != "type" and "bound" in marks.get(name, {"bound"}))
    if unknown:
        origin = "its code" if is_foreign(cls) else "jaxlm"
        raise UserError(
            f"{where} has a field {unknown[0]!r} that {cls.__name__} does not have in this version of {origin}; "
            "export it with the version that wrote it (jaxlm export RUN OUT), and go on from the exported folder with "
            "--init-from."
        )
    fields = {name: item for name, item in value.items() if name != "type" and "path" not in marks[name]}
    try:
        return cls(**{name: from_json(item, where) for name, item in fields.items()})
    except (TypeError, ValueError, ArithmeticError) as error:
        raise UserError(f"{where} does not describe a {cls.__name__}: {error}") from error


def flatten(config: Any, keep: Callable[[Setting], bool] = lambda setting: True) -> dict[str, Any]:
    """Return {dotted name: JSON value} of the fields that `keep` accepts, with the class name for a dataclass.

    A preset's class has the same name in a file that has been renamed, and in a notebook.
    """
    return {
        s.name: to_json(s.value) if not dataclasses.is_dataclass(s.value)
        else re.sub(r"(.*\.py|__main__):", "preset:", type_name(class_of(s.value)))
        for s in settings(config) if keep(s)
    }


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return the fields in which two flattened configurations differ, as "train.steps: 100 -> 200".

    A field that only one of them has belongs to another version of jaxlm, or to a dataclass that differs as a whole.
    """
    return [
        f"{name}: {str(old[name])[:60]} -> {str(new[name])[:60]}"
        for name in old if name in new and old[name] != new[name]
    ]
