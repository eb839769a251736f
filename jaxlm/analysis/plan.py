"""Plan of a train step on a TPU topology: the real step, compiled by libtpu on a machine without TPUs.

The plan has memory, FLOPs, collectives and the estimated time of a step (estimate.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxlm.analysis.estimate import KERNEL_PEAK_SHARE, Estimate, estimate
from jaxlm.analysis.hlo import Module, asynchronous_share, parse, traffic
from jaxlm.analysis.kernels import count_kernels
from jaxlm.analysis.links import collective_timer, predict
from jaxlm.config.experiment import Experiment
from jaxlm.data.text import compilation_cache
from jaxlm.errors import UserError
from jaxlm.parallel.peaks import peak_flops, tpu_generation
from jaxlm.tokenizers.vocabulary import Vocabulary

EXAMPLES = "v4:2x2x2, v5e:4x4, v5e:16x16, v5p:4x4x4, v6e:16x16 or, for two slices, 2xv5e:16x16"

ENVIRONMENT = {
    # Without a chip there is nothing to lock, and no metadata server to query.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_STDERR_LOG_LEVEL": "3", "TPU_MIN_LOG_LEVEL": "3",
}
_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def prepare_environment() -> None:
    """Restrict jax to the CPU and let the TPU compiler run without a TPU. Must be called before jax is first used."""
    import jax

    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_platforms", "cpu")  # jax has read the environment at import
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def require_compiler() -> None:
    """Raise UserError if libtpu is not installed."""
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            "`jaxlm plan` needs the TPU compiler (libtpu); in the clone, run `pip install -e '.[tpu]'`."
        )


def plan(
    experiment: Experiment, topology: str, vocabulary: Vocabulary | None = None, hlo: Path | None = None
) -> dict[str, Any]:
    """Compile a train step for a topology and return its memory, FLOPs, collectives and estimated time.

    Args:
        experiment: The preset or run.
        topology: Name of a topology, such as "v5e:16x16".
        vocabulary: The run's vocabulary; None for a stand-in of the preset's size.
        hlo: File for the text of the compiled module.

    Returns:
        The object that `jaxlm plan --json` prints. A chip is one device, as jax counts them. For a step that does not
        fit in HBM, `fits` is False, `hbm_bytes_per_chip` is from the compiler's message, `hbm_by_kind` has only the
        step's inputs, and there is no estimate.

    Raises:
        UserError: Topology, mesh or batch size are impossible, or the compiler refuses the step otherwise.
    """
    from jaxlm.objectives.base import constant_shapes
    from jaxlm.parallel.mesh import make_mesh
    from jaxlm.runs.load import load_teacher
    from jaxlm.training.program import Program

    experiment.validate()
    devices, t, length = topology_devices(topology), experiment.train, experiment.data.length
    mesh, limit, peak = make_mesh(experiment.mesh, devices), hbm_limit(devices[0]), peak_flops(devices[0])
    objective = experiment.objective.bind(vocabulary or stand_in_vocabulary(experiment.objective), length)
    program = Program(objective, t, experiment.optimizer, mesh, constant_shapes(objective, load_teacher))
    batch = synthetic_batch(experiment, objective)
    by_kind, flops = input_bytes(program, batch), program.step_flops(length, t.batch_size)
    start = time.perf_counter()
    compiled, message, used = _compile(program, batch, topology)
    seconds = time.perf_counter() - start
    if compiled is None:
        # The message about temporaries does not count the step's inputs.
        used += sum(by_kind.values()) if "temporaries" in message else 0
        totals, e, predicted = {}, None, None
    else:
        text = compiled.as_text()
        if hlo is not None:
            hlo.write_text(text)
        by_kind = memory_by_kind(compiled.memory_analysis(), by_kind)
        used, module = sum(by_kind.values()), parse(text)
        e = _estimate(module, topology, devices[0], flops / len(devices))
        totals = traffic(module, collective_timer(mesh.devices.flatten().tolist()))
        predicted = e and predict(e.seconds, totals)
    tokens_per_second = predicted and t.batch_size * length / predicted.seconds
    return {
        "topology": topology, "devices": len(devices), "device_kind": devices[0].device_kind, "mesh": dict(mesh.shape),
        "batch_size": t.batch_size, "length": length, "vocabulary": described(experiment.objective, vocabulary),
        "parameters": program.num_params,
        "fits": compiled is not None and used <= limit, "hbm_bytes_per_chip": used, "hbm_limit_bytes": limit,
        "headroom_bytes": max(limit - used, 0), "bytes_over": max(used - limit, 0), "hbm_by_kind": by_kind,
        "flops_per_step": flops, "flops_per_step_per_chip": flops / len(devices), "peak_flops_per_chip": peak,
        "estimated_step_seconds": e and e.seconds, "estimated_mfu": e and flops / len(devices) / e.seconds / peak,
        "executed_flops_per_chip": e and e.executed_flops,
        "estimated_executed_mfu": e and e.executed_flops / e.seconds / peak,
        "estimated_tokens_per_second": e and t.batch_size * length / e.seconds,
        "predicted_step_seconds": predicted and predicted.seconds,
        "predicted_mfu": predicted and flops / len(devices) / predicted.seconds / peak,
        "predicted_bound": predicted and predicted.bound,
        "exposed_collective_seconds": predicted and predicted.collective_seconds,
        "tokens_per_day": tokens_per_second and 86400 * tokens_per_second,
        "steps": t.steps, "days": predicted and t.steps and t.steps * predicted.seconds / 86400,
        "chip_hours": predicted and t.steps and len(devices) * t.steps * predicted.seconds / 3600,
        "estimated_kernel_seconds": e and e.kernel_seconds, "counted_kernels": e and e.counted_kernels,
        "charged_kernels": e and e.charged_kernels, "kernel_peak_share": KERNEL_PEAK_SHARE,
        "roofline_seconds": e and e.roofline_seconds, "bytes_accessed_per_chip": e and e.bytes_accessed,
        "top_operations": e.top if e else [],
        "collectives": {kind: item._asdict() for kind, item in totals.items()},
        "asynchronous_share": asynchronous_share(totals),
        "compile_seconds": seconds, "compiler_message": message or None,
    }


def _estimate(module: Module, topology: str, device: Any, flops: float) -> Estimate | None:
    if tpu_generation(device) is None:
        return None
    counts = count_kernels(module, topology, device.device_kind, Path(compilation_cache()).parent / "kernels")
    return estimate(module, device, flops, counts)


def _compile(program: Any, batch: Any, topology: str) -> tuple[Any, str, int]:
    """Return (compiled step, "", 0), or (None, the compiler's message, bytes needed) if it does not fit in HBM."""
    import jax

    lowered = program.lower(jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), batch))
    try:
        with _without_cache():
            return lowered.compile(), "", 0
    except Exception as error:  # the compiler raises errors of several types
        used = _used_bytes(str(error))
        if used is None:
            raise UserError(refusal(topology, str(error))) from error
        return None, _first_line(str(error)), used


def synthetic_batch(experiment: Experiment, objective: Any) -> Any:
    """Return full rows of random tokens, as the host provides them."""
    row_format = objective.row_format(experiment.data.length)
    return experiment.data.synthetic(experiment.train.batch_size, row_format, objective.vocabulary)


def input_bytes(program: Any, batch: Any) -> dict[str, int]:
    """Return the bytes of the step's inputs on one device, by kind."""
    import jax

    from jaxlm.parallel.rules import batch_sharding, shardings

    def held(shapes: Any, placement: Any) -> int:
        def share(leaf: Any, sharding: Any) -> int:
            return math.prod(sharding.shard_shape(tuple(leaf.shape))) * leaf.dtype.itemsize

        return sum(jax.tree.leaves(jax.tree.map(share, shapes, placement)))

    return {
        "parameters": held(program.shapes.params, program.shardings.params),
        "optimizer_state": held(program.shapes.opt_state, program.shardings.opt_state),
        "recurrence_memory": held(program.shapes.memory, program.shardings.memory),
        "constants": held(program.constants, shardings(program.constants, program.mesh)),
        "batch": held(batch, jax.tree.map(lambda _: batch_sharding(program.mesh), batch)),
    }


def memory_by_kind(memory: Any, held: dict[str, int]) -> dict[str, int]:
    """Return HBM of a compiled step by kind: inputs, temporaries at their peak, code, and layout padding."""
    # Arguments and output both count donated buffers.
    arguments = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return held | {
        "activations_and_workspace": memory.temp_size_in_bytes,
        "program": memory.generated_code_size_in_bytes,
        "other": arguments - sum(held.values()),
    }


def topology_devices(name: str) -> Sequence[Any]:
    """Return the abstract devices of a topology "[SLICESx]GENERATION:AxB[xC]" (chips along each axis).

    Raises:
        UserError: The topology does not exist.
    """
    from jax.experimental import topologies

    match = re.fullmatch(r"(?:(\d+)x)?(v\d+\w*|tpu\d+\w*):(\d+(?:x\d+){1,2})", name.strip().lower())
    if match is None:
        raise UserError(f"{name!r} is not a TPU topology; write the generation and its chips, such as {EXAMPLES}.")
    slices, generation, chips = match.groups()
    options: dict[str, Any] = {"num_slices": int(slices)} if slices else {}
    if generation == "v7x":
        generation = "tpu7x"
    if generation == "v4":
        options["chip_config_name"] = "megacore"  # jax has one device per v4 chip
    if math.prod(map(int, chips.split("x"))) == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=f"{generation}:{chips}", **options).devices
    except Exception as error:  # libtpu raises runtime errors of several types
        raise UserError(
            f"there is no TPU topology {name} ({_first_line(str(error)).rstrip('.')}); try {EXAMPLES}."
        ) from error


def run_vocabulary(config: str) -> Vocabulary | None:
    """Return the vocabulary of the run folder `config`; None for a preset."""
    from jaxlm.runs.folder import RunFolder
    from jaxlm.tokenizers.tokenizer import Tokenizer

    run = RunFolder.read(config)
    if run.tokenizer_folder is None:
        return None
    return dataclasses.replace(Tokenizer.load(run.tokenizer_folder).vocabulary, preserve_rows=run.is_imported)


def described(objective: Any, vocabulary: Vocabulary | None) -> str:
    """Describe the size and origin of a vocabulary. None means the stand-in of a preset."""
    if vocabulary is None:
        return f"vocabulary of {objective.model.vocab_size:,}: the preset's own"
    return f"vocabulary of {vocabulary.size:,}: the run's own"


def stand_in_vocabulary(objective: Any) -> Vocabulary:
    """Return a stand-in vocabulary of the published size of the objective's model."""
    return Vocabulary.stand_in(objective.model.vocab_size, objective.symbols)


def hbm_limit(device: Any) -> int:
    """Return the HBM of a device in bytes, from the compiler's message about a program that is too large."""
    import jax
    import jax.numpy as jnp

    sharding = jax.sharding.SingleDeviceSharding(device)
    with _without_cache():
        try:
            huge = jax.ShapeDtypeStruct((2**20, 2**20), jnp.float32)
            jax.jit(lambda x: x + 1, in_shardings=sharding, out_shardings=sharding).lower(huge).compile()
        except jax.errors.JaxRuntimeError as error:
            if match := re.search(r"(?:available HBM \(| of )([\d.]+)([KMGT]?)", str(error)):
                return _bytes(match)
            raise
    raise RuntimeError("the TPU compiler accepted a program of four terabytes")


def _used_bytes(message: str) -> int | None:
    """Return the HBM in bytes that a program needs, from the compiler's error message; None for other errors."""
    if "RESOURCE_EXHAUSTED" not in message:
        return None
    match = re.search(r"Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm", message) or re.search(
        r"required for [\w ]+\(([\d.]+)([KMGT]?)\) exceeds available HBM", message
    )
    return _bytes(match) if match else None


def refusal(topology: str, message: str) -> str:
    """Return an error message for a step that the compiler refuses for another reason than HBM."""
    sentence = f"the TPU compiler refuses this step for {topology}: {_first_line(message).rstrip('.')}"
    space = re.search(r"\b[vs]mem\b", message)
    if "RESOURCE_EXHAUSTED" not in message or space is None:
        return f"{sentence}."
    return (
        f"{sentence}. {space[0].upper()} is on-chip memory for one operation at a time; this says nothing about HBM. "
        "If the operation is an attention kernel, set --objective.model.attention xla."
    )


def _bytes(match: re.Match[str]) -> int:
    return round(float(match[1]) * _UNITS[match[2]])


def _first_line(text: str) -> str:
    text = re.sub(r"^[A-Z_]+: (E\d+: \w+:\s+)?", "", text.strip())  # drop error codes
    text = re.sub(r" = \(.*?(?=Scoped allocation)", ": ", text, flags=re.DOTALL)  # drop the operation's text
    return (text.splitlines() or ["no reason given"])[0][:300]


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
    """Disable the compilation cache, which can only store programs that this machine can load."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    before = jax.config.jax_enable_compilation_cache
    try:
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # jax reads the setting once
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()
