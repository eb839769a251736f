"""Compile the real train step for TPUs or GPUs, on a machine without them, or for the devices of this machine.

jaxlm plan CONFIG --topology v5e:16x16[,2xv5e:16x16 …] [--search] [--extrapolate] [--price USD]
    [--phase N] [--json] [--any.field VALUE …]
jaxlm plan CONFIG [--phase N] [--json] [--any.field VALUE …]

The plan says whether the step fits, and predicts its time: the TPU compiler's cycles, or on GPUs (h100:8, 2xa100:8) a
roofline, and the collectives by the published bandwidths of the links. Several topologies are printed as one table.
--search tries meshes, with more microbatches or remat where a step does not fit, and prints the fastest last.
--extrapolate compiles 2 and 4 layers and extrapolates: minutes where all layers take up to an hour. Without --topology
the plan is for the devices here, by their peak and bandwidth, with the measured time of the step beside the prediction.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from jaxlm.commands.common import (
    config_parser,
    log_line,
    output_option,
    parse_options,
    phase_option,
    resolve_config,
    start_jax,
)
from jaxlm.errors import UserError
from jaxlm.paths import check_output


def main(arguments: list[str]) -> int:
    """Run the command and return its exit code."""
    parser = config_parser("jaxlm plan", __doc__)
    parser.add_argument("--topology", default=None,
                        help="generation and chips (v5e:16x16, v4:2x2x2, …), a slice of Google Cloud (v5litepod-16, "
                             "v4-32, …) or GPUs (h100:8, 2xh100:8 on two hosts, …); several with commas between; "
                             "without it: the devices of this machine")
    parser.add_argument("--search", action="store_true", help="try meshes on one topology for the fastest that fits")
    parser.add_argument("--extrapolate", action="store_true",
                        help="compile 2 and 4 layers instead of all, and extrapolate")
    parser.add_argument("--price", type=float, default=0.0, metavar="USD", help="price of a chip for an hour")
    phase_option(parser)
    output_option(parser, "--hlo", "write the compiled module's text (of one topology)")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output, nothing else")
    options, flags = parse_options(parser, arguments)
    experiment = resolve_config(parser, options, flags, start=False).experiment
    check_output(options.hlo, "--hlo", options.overwrite)
    topologies = options.topology.split(",") if options.topology else []
    for name in ("search", "price", "extrapolate"):
        if not topologies and getattr(options, name):
            parser.error(f"--{name} needs a --topology")
    for name in ("hlo", "search", "price"):
        if getattr(options, name) and len(topologies) > 1 and not (name == "price" and options.json):
            parser.error(f"--{name} needs one --topology{', or --json' * (name == 'price')}")
    for name in ("search", "extrapolate"):
        if options.hlo and getattr(options, name):
            parser.error(f"--hlo needs one whole step; leave out --{name}")
    from jaxlm.analysis import compilation
    from jaxlm.analysis.step import open_stand_in
    from jaxlm.runs.load import constant_arrays, constant_shapes

    if topologies:
        compilation.prepare_environment()
    else:
        start_jax()
    options.facts = {"price": options.price}
    if experiment.train.steps is None and not experiment.train.phases:
        options.facts["steps"] = None  # the text's size decides how many an epoch has
    constants_of = constant_shapes if topologies else constant_arrays
    session = open_stand_in(experiment, options.config, constants_of, log_line, options.phase)
    if options.search:
        print_search(session, topologies[0], options)
    elif len(topologies) > 1:
        print_topologies(session, topologies, options)
    else:
        print_plan(session, topologies[0] if topologies else None, options)
    return 0


def print_plan(session: Any, topology: str | None, options: Any) -> None:
    """Print the plan of one topology, or without one that of the devices here."""
    import jax

    from jaxlm.analysis.local import plan_here
    from jaxlm.analysis.plan import plan
    from jaxlm.analysis.report import describe

    hlo = options.hlo and Path(options.hlo)
    if topology:
        found = plan(session, topology, hlo, options.extrapolate, log_line)
    else:
        found = plan_here(session, hlo, log_line)
    found = dataclasses.replace(found, **options.facts)
    if topology or jax.process_index() == 0:
        print(json.dumps(found.to_json()) if options.json else describe(found))


def print_topologies(session: Any, topologies: list[str], options: Any) -> None:
    """Print a table of the plans of several topologies; one that fails is a line with the reason."""
    from jaxlm.analysis.plan import plan
    from jaxlm.analysis.report import CAVEAT, heading, table_row

    rows: list[dict[str, Any]] = []
    for name in topologies:
        try:
            found = plan(session, name, extrapolate=options.extrapolate, report=log_line)
            found = dataclasses.replace(found, **options.facts)
            row, line = found.to_json(), table_row(found, name)
        except UserError as error:
            row, line = {"topology": name, "fits": None, "error": str(error)}, f"{name:<20}  -     {error}"
        if not rows and not options.json:  # after the first compilation, which finds the user's mistakes
            print(heading(session, "topology"))
        rows.append(row)
        if not options.json:
            print(line, flush=True)
    print(json.dumps({"topologies": rows}) if options.json else f"\n{CAVEAT}")


def print_search(session: Any, topology: str, options: Any) -> None:
    """Print a table of the plans of several meshes, and the fastest."""
    from jaxlm.analysis.report import describe, heading, table_row
    from jaxlm.analysis.search import fastest, search

    plans: list[Any] = []
    for found in search(session, topology, options.extrapolate, log_line):
        if not plans and not options.json:
            print(heading(session, "mesh"))
        plans.append(dataclasses.replace(found, **options.facts))
        if not options.json:
            print(table_row(found, " x ".join(map(str, found.mesh.values()))), flush=True)
    best = fastest(plans)
    if options.json:
        print(json.dumps({"plans": [one.to_json() for one in plans], "fastest": best and best.to_json()}))
    elif best is None:
        print(f"\nThe clock of {plans[0].device_kind} is not known, so none is named the fastest."
              if any(one.fits for one in plans) else "\nNone fits; take more chips.")
    else:
        print(f"\nFastest: {' '.join(f'--{name} {value}' for name, value in best.changes.items())}\n\n{describe(best)}")
