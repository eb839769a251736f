#!/usr/bin/env python3
"""Counts the Mosaic kernels of presets' train steps and adds them to jaxlm/analysis/kernels.json, which `plan` reads.

    .venv/bin/python launch/tables/count_kernels.py configs/bert_base.py [--topology v5e:1x1] [--rows 16] [--again]
        [--any.field VALUE …]

Needs libtpu, but no TPU. A step of two layers and a few rows is traced, and each different kernel of it compiled
alone, which takes seconds; counts are proportional to the rows. The compiler estimates no cycles for a kernel, but it
can write the kernel's final bundles as text (bundles.py). Kernels of the record are left out, unless --again.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from bundles import Work, count

from jaxlm.analysis.compilation import prepare_environment, topology_devices
from jaxlm.analysis.extrapolate import stack_depths
from jaxlm.analysis.hlo import Instruction, parse
from jaxlm.analysis.kernels import RECORD, Count, head_padding, kernel_key, num_rows, recorded_counts, stated_flops
from jaxlm.errors import UserError
from jaxlm.parallel.peaks import peak_flops, tpu_generation

ONE_DELAY_SLOT = ("TPU v2", "TPU v3", "TPU v4")


def main() -> int:
    """Count the kernels of the presets that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("presets", nargs="+", metavar="CONFIG")
    parser.add_argument("--topology", default="v5e:1x1", help="generation and chips that the step is traced for")
    parser.add_argument("--rows", type=int, default=16, help="rows of the batch")
    parser.add_argument("--again", action="store_true", help="count recorded kernels again")
    options, flags = parser.parse_known_args()
    prepare_environment()
    with tempfile.TemporaryDirectory() as folder:
        dump_bundles(folder)
        device = topology_devices(options.topology)[0]
        for preset in options.presets:
            jaxpr = traced_step(preset, flags, options.topology, options.rows)
            known = {} if options.again else recorded_counts().get(device.device_kind, {})
            record(device.device_kind, found := count_kernels(jaxpr, device, Path(folder), known))
            print(f"{preset}: {len(found)} new kernels", *sorted(found), sep="\n  ", flush=True)
            recorded_counts.cache_clear()
    return 0


def dump_bundles(folder: str) -> None:
    """Let libtpu write the final bundles of what it compiles into a folder. It reads the flags when it is loaded."""
    os.environ["LIBTPU_INIT_ARGS"] = (
        f"{os.environ.get('LIBTPU_INIT_ARGS', '')} --xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true "
        "--xla_jf_dump_llo_pass_label_regex=^final_bundles$"
    )


def traced_step(preset: str, flags: list[str], topology: str, rows: int) -> Any:
    """Return the jaxpr of the train step of a preset over a few rows, with two layers in every stack if that can be."""
    from jaxlm.analysis.step import batch_shapes, open_stand_in
    from jaxlm.parallel.mesh import MeshConfig, make_mesh
    from jaxlm.runs.resolve import resolve

    experiment = resolve(preset, flags).experiment
    objective, model = experiment.objective, experiment.objective.model
    with contextlib.suppress(UserError):
        model = dataclasses.replace(model, **dict.fromkeys(stack_depths(model), 2))
    session = open_stand_in(dataclasses.replace(
        experiment, objective=dataclasses.replace(objective, model=model), mesh=MeshConfig(),
        train=dataclasses.replace(experiment.train, batch_size=rows, accumulate=1),
    ))
    program = session.program(make_mesh(MeshConfig(), topology_devices(topology)))
    return program.train_step.trace(program.shapes, batch_shapes(session), program.constants).jaxpr


def calls_of(jaxpr: Any) -> Iterator[Any]:
    """Yield the equations of a jaxpr that call a kernel, those of inner jaxprs too."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if equation.primitive.name == "pallas_call":
            yield equation
            continue
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns"):
                yield from calls_of(inner)


def count_kernels(jaxpr: Any, device: Any, folder: Path, known: dict[str, Count]) -> dict[str, Count]:
    """Count the work of the kernels of a step.

    Args:
        jaxpr: The traced step.
        device: The device that it is traced for.
        folder: Folder in which the compiler writes bundles.
        known: Kernels to leave out.

    Returns:
        The counts by `kernel_key`. Kernels that could not be counted are missing.
    """
    counts: dict[str, Count] = {}
    delay_slots, seen = 1 if device.device_kind in ONE_DELAY_SLOT else 4, set()
    for call in calls_of(jaxpr):
        scope = "causal_attention" if "causal" in str(call.source_info.name_stack) else "attention"
        # The cost estimate tells a band from a causal kernel.
        estimate = call.params["cost_estimate"]
        description = (scope, call.params["name"], str(estimate), *(str(variable.aval) for variable in call.invars))
        if description in seen:
            continue
        seen.add(description)
        kernel, text = compiled_alone(call, scope, device, folder)
        key = kernel_key(kernel)
        if key in known or key in counts:
            continue
        try:
            counts[key] = on_device(*count(text, delay_slots), kernel, device)
        except ValueError as error:
            print(f"{key}: {error}", file=sys.stderr)
    return counts


def compiled_alone(call: Any, scope: str, device: Any, folder: Path) -> tuple[Instruction, str]:
    """Compile a kernel alone; return it and the dump of its final bundles."""
    for file in folder.iterdir():
        file.unlink()

    def run(*operands: jax.Array) -> Any:
        with jax.named_scope(scope), jax.named_scope(call.params["name"]):  # the compiler names the kernel by it
            return call.primitive.bind(*operands, **call.params)

    sharding = jax.sharding.SingleDeviceSharding(device)
    operands = [
        jax.ShapeDtypeStruct(variable.aval.shape, variable.aval.dtype, sharding=sharding) for variable in call.invars
    ]
    module = parse(jax.jit(run).lower(*operands).compile().as_text())
    kernel = next(one for one in module.computations[module.entry] if one.is_kernel)
    return kernel, next(folder.glob(f"*-{kernel.name}-*-final_bundles.txt")).read_text()


def on_device(certain: Work, conditional: Work, kernel: Instruction, device: Any) -> Count:
    """Return the count of a kernel whose bundles are counted.

    No part is faster than its matrix products at the peak. The FLOPs are those of the matrix units, without the padding
    of attention heads narrower than a unit, and at most those of the kernel's own cost estimate.
    """
    chip, figures = tpu_generation(device), []
    for work in (certain, conditional):
        products = 2.0 * work.rows * chip.mxu_width**2 * chip.cores
        flops = products / head_padding(kernel, chip.mxu_width)
        figures += [
            max(work.cycles, products / peak_flops(device) * chip.clock), min(flops, stated_flops(kernel) or flops)
        ]
    return Count(num_rows(kernel), *figures)


def record(device_kind: str, counts: dict[str, Count]) -> None:
    """Add counts to the record, sorted by key, one a line."""
    chips = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    chips.setdefault(device_kind, {}).update({
        key: [round(figure) for figure in count] for key, count in counts.items()
    })
    parts = (
        json.dumps(chip) + ": {\n" + ",\n".join(
            f"  {json.dumps(key)}: {json.dumps(count)}" for key, count in sorted(kernels.items())
        ) + "\n }" for chip, kernels in sorted(chips.items())
    )
    RECORD.write_text("{\n " + ",\n ".join(parts) + "\n}\n")


if __name__ == "__main__":
    sys.exit(main())
