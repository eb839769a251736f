"""Counts of the Mosaic kernels of a compiled module, from libtpu's own schedule of each kernel.

The compiler estimates no cycles for a Mosaic kernel (`pallas_call` on TPU). It can write the kernel's final bundles as
text (bundles.py), but only with flags that it reads once, and then it writes those of every fusion of the step too. So
a second process compiles each distinct kernel alone. Counts are cached by kernel, chip and version of the compiler.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from jaxlm.analysis.bundles import Count, Work, count
from jaxlm.analysis.hlo import Instruction, Module, array_shapes, operand_shapes, parse

FORMAT = 1
"""Version of the cached counts: change it when the same dump gives another count."""
SECONDS = 120
"""Time limit of the second process, and of each kernel that it compiles."""

_CONFIG: dict[str, Any] = {"custom_call_config": {}, "scoped_memory_configs": []}  # the kernel, and its VMEM limit
_ONE_DELAY_SLOT = ("TPU v2", "TPU v3", "TPU v4")


def count_kernels(module: Module, topology: str, device_kind: str, cache: Path) -> dict[str, Count]:
    """Count the work of the kernels of a module.

    Args:
        module: The compiled step.
        topology: Name of the topology that it is compiled for.
        device_kind: Kind of its devices.
        cache: Folder of the cached counts.

    Returns:
        The counts by the kernel's `kernel_digest`. Kernels that could not be counted are missing.
    """
    kernels = {
        kernel_digest(one): one for computation in module.computations.values() for one in computation if one.is_kernel
    }
    files = {digest: cache / f"{_cache_key(digest, device_kind)}.json" for digest in kernels}
    counts = {digest: cached for digest, file in files.items() if (cached := _read(file)) is not None}
    missing = {digest: _description(kernel) for digest, kernel in kernels.items() if digest not in counts}
    if missing:
        found = _compile_elsewhere({"topology": topology, "kernels": missing})
        for digest, numbers in found.items():
            counts[digest] = _decode(numbers)
            with contextlib.suppress(OSError):  # the cache only saves time
                cache.mkdir(parents=True, exist_ok=True)
                files[digest].write_text(json.dumps(numbers))
    return counts


def kernel_digest(kernel: Instruction) -> str:
    """Return a name of the kernel by its program and the shapes of its arrays."""
    return hashlib.sha256(json.dumps(_description(kernel), sort_keys=True).encode()).hexdigest()


def _cache_key(digest: str, device_kind: str) -> str:
    version = importlib.metadata.version("libtpu")
    return hashlib.sha256(f"{FORMAT} {version} {device_kind} {digest}".encode()).hexdigest()[:32]


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


def _read(path: Path) -> Count | None:
    try:
        return _decode(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _decode(numbers: Any) -> Count:
    certain, conditional = numbers
    return Count(Work(*certain), Work(*conditional))


def _compile_elsewhere(request: dict[str, Any]) -> dict[str, Any]:
    """Return the counts of the requested kernels by digest, from another process; {} if it fails."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "jaxlm.analysis.kernels"], input=json.dumps(request), capture_output=True,
            text=True, timeout=SECONDS * (1 + len(request["kernels"])), check=True,
        )
        return json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return {}


def main() -> None:
    """Compile and count the kernels of the request on standard input; write the counts to standard output."""
    request = json.load(sys.stdin)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LIBTPU_INIT_ARGS"] = (
            f"{os.environ.get('LIBTPU_INIT_ARGS', '')} --xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true "
            "--xla_jf_dump_llo_pass_label_regex=^final_bundles$"
        )
        import jax

        from jaxlm.analysis.compilation import prepare_environment, topology_devices

        prepare_environment()
        jax.config.update("jax_enable_compilation_cache", False)  # a program from the cache would leave no dump
        device = topology_devices(request["topology"])[0]
        delay_slots = 1 if device.device_kind in _ONE_DELAY_SLOT else 4
        counts = {}
        for digest, description in request["kernels"].items():
            try:
                counts[digest] = count(_dump(description, device, Path(folder)), delay_slots)
            except Exception as error:  # the compiler's errors have several types; the kernel stays without a count
                print(error, file=sys.stderr)
    print(json.dumps(counts))


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
    main()
