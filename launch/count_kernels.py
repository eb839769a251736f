#!/usr/bin/env python3
"""Counts the Mosaic kernels of presets' train steps and adds them to jaxlm/analysis/kernels.json, which `plan` reads.

    .venv/bin/python launch/count_kernels.py configs/bert_base.py [--topology v5e:1x1] [--rows 16] [--again]
        [--any.field VALUE …]

Needs libtpu, but no TPU. A step of two layers and a few rows is compiled in about a minute; counts are proportional to
the rows. The compiler estimates no cycles for a kernel, but it can write the kernel's final bundles as text
(bundles.py), with flags that it reads once, and then it writes those of every fusion of the step too. So a second
process compiles each distinct kernel alone. Kernels of the record are left out, unless --again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bundles import Work, count

from jaxlm.analysis.compilation import prepare_environment, topology_devices
from jaxlm.analysis.extrapolate import stack_depths
from jaxlm.analysis.hlo import Instruction, Module, array_shapes, operand_shapes, parse
from jaxlm.analysis.kernels import RECORD, Count, head_padding, kernel_key, num_rows, recorded_counts, stated_flops
from jaxlm.parallel.peaks import peak_flops, tpu_generation

SECONDS = 120
"""Time limit of the second process, and of each kernel that it compiles."""

_CONFIG: dict[str, Any] = {"custom_call_config": {}, "scoped_memory_configs": []}  # the kernel, and its VMEM limit
_ONE_DELAY_SLOT = ("TPU v2", "TPU v3", "TPU v4")


def main() -> int:
    """Count the kernels of the presets that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("presets", nargs="+", metavar="CONFIG")
    parser.add_argument("--topology", default="v5e:1x1", help="generation and chips that the step is compiled for")
    parser.add_argument("--rows", type=int, default=16, help="rows of the batch")
    parser.add_argument("--again", action="store_true", help="count recorded kernels again")
    options, flags = parser.parse_known_args()
    prepare_environment()
    device = topology_devices(options.topology)[0]
    for preset in options.presets:
        module = compiled_step(preset, flags, options.topology, options.rows)
        known = {} if options.again else recorded_counts().get(device.device_kind, {})
        record(device.device_kind, found := count_kernels(module, options.topology, device, known))
        print(f"{preset}: {len(found)} of {len(list(kernels_of(module)))} kernels are new", flush=True)
        recorded_counts.cache_clear()
    return 0


def compiled_step(preset: str, flags: list[str], topology: str, rows: int) -> Module:
    """Compile the train step of a preset with two layers in every stack over a few rows."""
    from jaxlm.analysis.step import batch_shapes, open_stand_in
    from jaxlm.parallel.mesh import MeshConfig, make_mesh
    from jaxlm.runs.resolve import resolve

    experiment = resolve(preset, flags).experiment
    objective = experiment.objective
    model = dataclasses.replace(objective.model, **dict.fromkeys(stack_depths(objective.model), 2))
    session = open_stand_in(dataclasses.replace(
        experiment, objective=dataclasses.replace(objective, model=model), mesh=MeshConfig(),
        train=dataclasses.replace(experiment.train, batch_size=rows, accumulate=1),
    ))
    lowered = session.program(make_mesh(MeshConfig(), topology_devices(topology))).lower(batch_shapes(session))
    return parse(lowered.compile().as_text())


def kernels_of(module: Module) -> Iterator[tuple[str, Instruction, list[Instruction]]]:
    """Yield each different kernel of a module: its key, the instruction and its computation."""
    keys = set()
    for computation in module.computations.values():
        for one in computation:
            if one.is_kernel and (key := kernel_key(one)) not in keys:
                keys.add(key)
                yield key, one, computation


def count_kernels(module: Module, topology: str, device: Any, known: dict[str, Count]) -> dict[str, Count]:
    """Count the work of the kernels of a module.

    Args:
        module: The compiled step.
        topology: Name of the topology that it is compiled for.
        device: Its first device.
        known: Kernels to leave out.

    Returns:
        The counts by `kernel_key`. Kernels that could not be counted are missing.
    """
    kernels = {key: pair for key, *pair in kernels_of(module) if key not in known}
    if not kernels:
        return {}
    descriptions = {key: _description(kernel) for key, (kernel, _) in kernels.items()}
    done = subprocess.run(
        [sys.executable, __file__, "--count"], input=json.dumps({"topology": topology, "kernels": descriptions}),
        stdout=subprocess.PIPE, text=True, timeout=SECONDS * (1 + len(kernels)), check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    return {
        key: on_device(*(Work(*work) for work in numbers), *kernels[key], device) for key, numbers in found.items()
    }


def on_device(
    certain: Work, conditional: Work, kernel: Instruction, computation: list[Instruction], device: Any
) -> Count:
    """Return the count of a kernel whose bundles are counted.

    No part is faster than its matrix products at the peak. The FLOPs are those of the matrix units, without the padding
    of attention heads narrower than a unit, and at most those of the kernel's own cost estimate.
    """
    chip, cycles, flops = tpu_generation(device), 0.0, 0.0
    for work, share in ((certain, 1.0), (conditional, computed_share(kernel, computation))):
        products = 2.0 * work.rows * chip.mxu_width**2 * chip.cores
        cycles += share * max(work.cycles, products / peak_flops(device) * chip.clock)
        flops += share * products / head_padding(kernel, chip.mxu_width)
    return Count(num_rows(kernel), cycles, min(flops, stated_flops(kernel) or flops))


def computed_share(kernel: Instruction, computation: list[Instruction]) -> float:
    """Return the share of a kernel's conditional work that runs.

    Splash attention skips the blocks that its mask (operand 1) has as 0. If the mask is not in the module's text, it is
    assumed causal in a name scope with "causal", and full otherwise. Other kernels count all conditional work.
    """
    if "splash" not in kernel.name:
        return 1.0
    definitions = {one.name: one for one in computation}
    mask = definitions.get(kernel.operand_names[1])
    while mask is not None and mask.opcode in ("bitcast", "copy", "copy-start", "copy-done", "broadcast"):
        mask = definitions.get(mask.operand_names[0])
    blocks = re.findall(r"\d+", mask.operands) if mask is not None and mask.opcode == "constant" else []
    if blocks:
        return sum(block != "0" for block in blocks) / len(blocks)
    rows, columns = array_shapes(operand_shapes(kernel))[1][1][-2:]
    return (rows + 1) / (2 * rows) if "causal" in kernel.op_name and rows == columns else 1.0


def record(device_kind: str, counts: dict[str, Count]) -> None:
    """Add counts to the record, sorted by key, one a line."""
    chips = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    chips.setdefault(device_kind, {}).update({
        key: [count.rows, round(count.cycles), round(count.flops)] for key, count in counts.items()
    })
    parts = (
        json.dumps(chip) + ": {\n" + ",\n".join(
            f"  {json.dumps(key)}: {json.dumps(count)}" for key, count in sorted(kernels.items())
        ) + "\n }" for chip, kernels in sorted(chips.items())
    )
    RECORD.write_text("{\n " + ",\n ".join(parts) + "\n}\n")


def _description(kernel: Instruction) -> dict[str, Any]:
    """Return what the second process needs to compile the kernel."""
    text = kernel.attributes.partition("backend_config=")[2]
    config = json.JSONDecoder().raw_decode(text)[0] if text else {}
    return {
        "config": {name: config.get(name) or default for name, default in _CONFIG.items()},
        "operands": array_shapes(operand_shapes(kernel)),
        "results": array_shapes(kernel.shape),
        "is_tuple": kernel.shape.startswith("("),
    }


def answer() -> int:
    """Compile and count the kernels of the request on standard input; write the counts to standard output."""
    request = json.load(sys.stdin)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LIBTPU_INIT_ARGS"] = (
            f"{os.environ.get('LIBTPU_INIT_ARGS', '')} --xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true "
            "--xla_jf_dump_llo_pass_label_regex=^final_bundles$"
        )
        import jax

        prepare_environment()
        jax.config.update("jax_enable_compilation_cache", False)  # a program from the cache would leave no dump
        device = topology_devices(request["topology"])[0]
        delay_slots = 1 if device.device_kind in _ONE_DELAY_SLOT else 4
        counts = {}
        for key, description in request["kernels"].items():
            try:
                counts[key] = count(_dump(description, device, Path(folder)), delay_slots)
            except Exception as error:  # the compiler's errors have several types; the kernel stays without a count
                print(f"{key}: {error}", file=sys.stderr)
    print(json.dumps(counts))
    return 0


def _dump(description: dict[str, Any], device: Any, folder: Path) -> str:
    """Compile a kernel alone and return the dump of its final bundles."""
    import jax

    for file in folder.iterdir():
        file.unlink()
    sharding = jax.sharding.SingleDeviceSharding(device)
    operands, results = (
        [jax.ShapeDtypeStruct(shape, _dtype(name), sharding=sharding) for name, shape in description[kind]]
        for kind in ("operands", "results")
    )
    call = jax.ffi.ffi_call(
        "tpu_custom_call", results if description["is_tuple"] else results[0], has_side_effect=True,
        custom_call_api_version=1, legacy_backend_config=json.dumps(description["config"]),
    )
    module = parse(jax.jit(call).lower(*operands).compile().as_text())
    kernel = next(one for computation in module.computations.values() for one in computation if one.is_kernel)
    return next(folder.glob(f"*-{kernel.name}-*-final_bundles.txt")).read_text()


def _dtype(name: str) -> str:
    """Return jax's name of an HLO type."""
    if name in ("pred", "bf16"):
        return {"pred": "bool", "bf16": "bfloat16"}[name]
    return {"s": "int", "u": "uint", "f": "float", "c": "complex"}[name[0]] + name[1:]


if __name__ == "__main__":
    sys.exit(answer() if sys.argv[1:] == ["--count"] else main())
