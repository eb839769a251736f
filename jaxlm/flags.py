"""Command-line flags for every field of an Experiment, made from its types and docstrings by tyro."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import re
from typing import Any

import tyro

from jaxlm.errors import UserError
from jaxlm.experiment import Experiment


def override(experiment: Experiment, arguments: list[str], program: str) -> Experiment:
    """The experiment with `--train.steps 100`, `--data.source …` applied; `--help` prints every field and exits.

    UserError for a flag that does not exist (with the nearest one that does) or a value of the wrong type.
    """
    known = field_names(experiment)
    if not {"-h", "--help"} & set(arguments):
        _check_names(arguments, known)
    # Flags are made from the classes that this experiment really has: its objective's fields, not every objective's.
    shape = dataclasses.make_dataclass(
        "Experiment",
        [(f.name, type(getattr(experiment, f.name))) for f in dataclasses.fields(experiment)],
        frozen=True,
    )
    default = shape(**{f.name: getattr(experiment, f.name) for f in dataclasses.fields(experiment)})
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            result = tyro.cli(shape, args=arguments, default=default, prog=program, config=(tyro.conf.FlagConversionOff,))
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise UserError(_one_sentence(errors.getvalue())) from None
    return Experiment(**{f.name: getattr(result, f.name) for f in dataclasses.fields(experiment)})


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


def _one_sentence(text: str) -> str:
    """tyro's boxed message without the box."""
    text = re.sub(r"[─-╿]", " ", text)
    text = " ".join(text.split()).removeprefix("Parsing error").removeprefix("Required options").strip()
    text = text.split("For full helptext")[0].strip()
    return text[:300].rstrip(".") + "."
