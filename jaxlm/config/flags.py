"""Command-line flags for every field of an Experiment, made from its types and docstrings by tyro."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import os
import re
from collections.abc import Iterator
from typing import Annotated, Any

import tyro

from jaxlm.config.experiment import Experiment
from jaxlm.errors import UserError


def override(experiment: Experiment, arguments: list[str], program: str) -> Experiment:
    """The experiment with `--train.steps 100`, `--data.source …` applied; `--help` prints every field and exits.

    UserError for a flag that does not exist (with the nearest one that does) or a value of the wrong type.
    """
    known = field_names(experiment)
    if not {"-h", "--help"} & set(arguments):
        _check_names(arguments, known)
    # Flags are made from the classes that this experiment really has: its objective's fields, not every objective's.
    objective = _without_vocabulary(experiment.objective)
    fields = {f.name: getattr(experiment, f.name) for f in dataclasses.fields(experiment)} | {"objective": objective}
    shape = dataclasses.make_dataclass("Experiment", [(name, type(v)) for name, v in fields.items()], frozen=True)
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), _unwrapped():
            result = tyro.cli(
                shape, args=arguments, default=shape(**fields), prog=program, config=(tyro.conf.FlagConversionOff,)
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise UserError(_one_sentence(errors.getvalue(), known)) from None
    chosen = {f.name: getattr(result, f.name) for f in dataclasses.fields(experiment)}
    values = {f.name: getattr(chosen["objective"], f.name) for f in dataclasses.fields(experiment.objective)}
    return Experiment(**chosen | {"objective": type(experiment.objective)(**values)})


@contextlib.contextmanager
def _unwrapped() -> Iterator[None]:
    """tyro fits its errors into a box as wide as the terminal; here each keeps to its line. (Help goes to standard
    output, which is as wide as it is.)"""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "4000"
    try:
        yield
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before


def _without_vocabulary(objective: Any) -> Any:
    """The objective as an instance of a subclass whose `vocabulary` is no flag: `bind` sets it, never the user."""
    hidden = [("vocabulary", Annotated[Any, tyro.conf.Suppress], dataclasses.field(default=None))]
    cls = dataclasses.make_dataclass(type(objective).__name__, hidden, bases=(type(objective),), frozen=True)
    return cls(**{f.name: getattr(objective, f.name) for f in dataclasses.fields(objective)})


def field_names(value: Any, prefix: str = "") -> dict[str, Any]:
    """Every field that a flag can set, by its dotted name."""
    names: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        if dataclasses.is_dataclass(item):
            names |= field_names(item, f"{prefix}{field.name}.")
        elif field.name != "vocabulary":
            names[f"{prefix}{field.name}"] = item
    return names


def _check_names(arguments: list[str], known: dict[str, Any]) -> None:
    for argument in arguments:
        if not argument.startswith("--"):
            continue
        name = argument[2:].split("=", 1)[0].replace("-", "_")
        if name in known:
            continue
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        if not close:  # the right field under the wrong heading, as in --steps for --train.steps
            last = name.rsplit(".", 1)[-1]
            close = [other for other in known if other.rsplit(".", 1)[-1] == last][:1]
        hint = f"did you mean --{close[0].replace('_', '-')}?" if close else "--help lists the fields that there are."
        raise UserError(f"there is no field {argument.split('=', 1)[0]}; {hint}")


def _one_sentence(text: str, known: dict[str, Any]) -> str:
    """What tyro says in a box, as a sentence."""
    text = " ".join(re.sub(r"[\u2500-\u257f]|-{3,}", " | ", text).split())
    parts = [part.strip() for part in text.split("|") if part.strip()]
    text = parts[1] if len(parts) > 1 else text
    if match := re.match(r"Error parsing --([\w.-]+): .*?('.*')$", text):
        name, given = match.groups()
        kind = {int: "a whole number", float: "a number"}.get(type(known.get(name.replace("-", "_"))), "another kind")
        return f"--{name} takes {kind}, not {given}."
    if match := re.match(r"invalid choice ('.*') for argument '(.*)'. Expected one of \((.*?),?\)", text):
        given, name, choices = match.groups()
        return f"{name} is one of {choices.replace(chr(39), '')}, not {given}."
    if match := re.match(r"Unrecognized options: (.*)", text):
        return f"{match[1]} belongs to no field; fields are given as in --train.steps 100."
    if match := re.match(r"Missing value for argument '(.*?)'", text):
        return f"{match[1]} needs a value."
    return text[:300].rstrip(".") + "."
