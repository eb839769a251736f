"""Command-line flags for the fields of an Experiment; tyro makes them from its types and docstrings."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from typing import Annotated, Any

import tyro

from jaxlm.config.experiment import Experiment, PhaseConfig, parse_phases
from jaxlm.errors import UserError
from jaxlm.fields import marks_of, settings

PHASES = Annotated[tuple[PhaseConfig, ...], tyro.constructors.PrimitiveConstructorSpec(
    nargs=1, metavar="STEPSxLENGTHxBATCH,…", instance_from_str=lambda texts: parse_phases(texts[0]),
    is_instance=lambda value: isinstance(value, tuple), str_from_instance=lambda phases: [", ".join(map(str, phases))],
)]
"""Type of `train.phases`, which one flag sets."""


def override(experiment: Experiment, arguments: list[str], command: str) -> Experiment:
    """Return the experiment with `--train.steps 100`, `--data.source …` applied.

    `--help` prints every field and exits with 0; tyro prints a value that it refuses and exits with 2.
    """
    registry = tyro.constructors.ConstructorRegistry()
    asked: list[type] = []

    @registry.struct_rule
    def without_hidden(info: tyro.constructors.StructTypeInfo) -> tyro.constructors.StructConstructorSpec | None:
        """Hide the fields that no flag sets from tyro's own rule for dataclasses; they keep their value."""
        if not dataclasses.is_dataclass(info.type) or info.type in asked:
            return None
        asked.append(info.type)
        spec = registry.get_struct_spec(info)
        asked.remove(info.type)
        hidden = {f.name for f in dataclasses.fields(info.type) if "bound" in marks_of(f)}
        shown = tuple(
            dataclasses.replace(f, type=PHASES) if f.name == "phases" else f for f in spec.fields
            if f.name not in hidden and (f.name == "phases" or not _is_list_of_structs(f.default))
        )

        @functools.wraps(info.type, updated=())  # help shows the class's docstring
        def instantiate(**values: Any) -> Any:
            return dataclasses.replace(info.default, **values)

        return dataclasses.replace(spec, instantiate=instantiate, fields=shown)

    if {"-h", "--help"} & set(arguments):
        arguments = ["--help"]
    # The default decides the class of a field that may have several. As subcommands they would take the flags away.
    config = (tyro.conf.FlagConversionOff, tyro.conf.AvoidSubcommands)
    result, unknown = tyro.cli(
        Experiment, args=arguments, default=experiment, prog=command, config=config, registry=registry,
        return_unknown_args=True,
    )
    if unknown:
        names = [s.name for s in settings(experiment) if s.name == "train.phases" or not _is_struct(s.value)]
        raise UserError(_unknown_field(unknown[0], names))
    return result


def _is_list_of_structs(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and any(map(dataclasses.is_dataclass, value))


def _is_struct(value: Any) -> bool:
    return dataclasses.is_dataclass(value) or _is_list_of_structs(value)


def _unknown_field(argument: str, names: list[str]) -> str:
    """Return a sentence with the closest field."""
    if not argument.startswith("--"):
        return f"{argument} belongs to no field; fields are given as in --train.steps 100."
    name = argument.split("=", 1)[0].removeprefix("--").replace("-", "_")
    # First a field of another group, as in --steps for --train.steps, or one with these initials, as in --lr.
    last = name.rsplit(".", 1)[-1]
    fields = {other: other.rsplit(".", 1)[-1] for other in names}
    close = [other for other, field in fields.items() if field == last]
    close = close or [other for other, field in fields.items() if "".join(w[0] for w in field.split("_") if w) == last]
    close = close or [other for other in difflib.get_close_matches(name, names, n=1)
                      if difflib.get_close_matches(last, [fields[other]])]
    hint = f"did you mean --{close[0].replace('_', '-')}?" if close else "--help lists the fields."
    return f"there is no field {argument.split('=', 1)[0]}; {hint}"
