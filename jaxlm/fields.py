"""Properties of configuration fields, declared with the field and stored in its dataclass metadata."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Iterator
from typing import Any, NamedTuple

import typeguard

from jaxlm.errors import UserError


def field(
    default: Any = dataclasses.MISSING,
    *,
    bound: bool = False,
    resumable: bool = False,
    recipe: bool = False,
    kept: bool = False,
    weights: bool = False,
    path: bool = False,
    vocabulary: bool = False,
    range: str = "",
    compare: bool = True,
) -> Any:
    """Return a field of a frozen configuration dataclass. Marks also hold for the fields of a nested dataclass.

    Args:
        default: Default value.
        bound: Set by `bind`, never by a flag; not part of the configuration in JSON, flags and `differences`.
        resumable: May change when a run is resumed, since the result stays the same (logging, mesh, remat, kernels).
        recipe: Inside a `weights` field: affects only how the model is trained (dropout, dtype).
        kept: Of a `recipe` field: a pretrained model keeps its own value, which only a flag changes, not a preset.
        weights: Determines the parameters' shapes or meaning (a model's sizes, the tokenizer); fixed once a run has
            trained parameters, even at step 0 (`jaxlm import`). An objective's rates are not.
        path: Folder of this machine, which does not affect the result; neither written to config.json nor read from it.
        vocabulary: Fact of the vocabulary, which a run takes from its tokenizer, whatever the preset has.
        range: Interval that a number must lie in, such as "[0, 1)" or "(0, inf)"; see `check_ranges`.
        compare: Whether configurations with different values differ.
    """
    flags = {
        "bound": bound, "resumable": resumable or path, "recipe": recipe, "kept": kept, "weights": weights,
        "path": path, "vocabulary": vocabulary,
    }
    marks = frozenset(name for name, is_set in flags.items() if is_set)
    metadata = {"marks": marks, "range": range}
    return dataclasses.field(default=default, repr=not bound, compare=compare, metadata=metadata)


def marks_of(field: dataclasses.Field[Any]) -> frozenset[str]:
    """Return the names of the marks of a field; an ordinary dataclass field has none."""
    return field.metadata.get("marks", frozenset())


def check_ranges(config: Any, prefix: str) -> None:
    """Raise UserError for the first number outside its field's range, named with the prefix."""
    for item in dataclasses.fields(config):
        interval, value = item.metadata.get("range"), getattr(config, item.name)
        if not interval or not isinstance(value, (int, float)):
            continue
        low, high = map(float, interval[1:-1].split(","))
        above = value >= low if interval[0] == "[" else value > low
        if not above or not (value <= high if interval[-1] == "]" else value < high):
            raise UserError(f"{prefix}{item.name} is {value}; it must be in {interval}.")


class Setting(NamedTuple):
    """One field of a configuration tree."""

    name: str
    """Dotted name, such as "train.steps"."""
    value: Any
    type: Any
    """Annotated type."""
    marks: frozenset[str]
    """Its marks and those of the fields that contain it."""

    def decides_result(self) -> bool:
        """Return whether a resumed run must keep the value."""
        return not self.marks & {"resumable", "vocabulary"}

    def decides_weights(self) -> bool:
        """Return whether trained parameters depend on the value."""
        return "weights" in self.marks and not self.marks & {"recipe", "resumable"}

    def needs_weights(self) -> bool:
        """Return whether the value goes with trained parameters: they depend on it, or a preset does not replace it."""
        return self.decides_weights() or "kept" in self.marks


def settings(config: Any, prefix: str = "", inherited: frozenset[str] = frozenset()) -> Iterator[Setting]:
    """Yield every field that is not bound; the fields of a nested dataclass follow it."""
    types = _annotated_types(type(config))
    for item in dataclasses.fields(config):
        marks, value = inherited | marks_of(item), getattr(config, item.name)
        if "bound" in marks:
            continue
        yield Setting(f"{prefix}{item.name}", value, types[item.name], marks)
        if dataclasses.is_dataclass(value):
            yield from settings(value, f"{prefix}{item.name}.", marks)


# Strings of annotations are compiled at each call, and a command asks some hundred times.
_annotated_types = functools.cache(typing.get_type_hints)


def with_value(config: Any, name: str, value: Any) -> Any:
    """Return a copy of a configuration with another value of the field of a dotted name."""
    first, _, rest = name.partition(".")
    value = with_value(getattr(config, first), rest, value) if rest else value
    return dataclasses.replace(config, **{first: value})


def check_types(config: Any) -> None:
    """Raise UserError for a field whose value is not of its annotated type.

    Flags are checked when they are parsed; a preset or a config.json can hold anything.
    """
    for setting in settings(config):
        check_type(setting)


def check_type(setting: Setting) -> None:
    """Raise UserError unless the value of a field is of its annotated type."""
    try:
        typeguard.check_type(
            setting.value, setting.type, collection_check_strategy=typeguard.CollectionCheckStrategy.ALL_ITEMS
        )
    except typeguard.TypeCheckError:
        kind = inspect.formatannotation(setting.type)
        call = f", such as {setting.value.__name__}()" if isinstance(setting.value, type) else ""
        raise UserError(f"{setting.name} is {setting.value!r}; it must be {kind}{call}.") from None
