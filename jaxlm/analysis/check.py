"""`jaxlm check`: whether the devices here compute what the CPU does, and how fast."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import io
import math
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxlm.analysis.bench import bench_pretraining
from jaxlm.analysis.compilation import compile_step
from jaxlm.analysis.kernel_checks import KERNELS, LIMITS, Figure, check_dropout, check_kernel, precision
from jaxlm.analysis.links import predict
from jaxlm.analysis.step import batch_shapes, open_stand_in
from jaxlm.config.experiment import Experiment, Resolved
from jaxlm.config.presets import load_preset, preset_files
from jaxlm.errors import Stopped, UserError
from jaxlm.fields import with_value
from jaxlm.keys import Purpose, purpose_key
from jaxlm.objectives.base import total_loss
from jaxlm.parallel.activations import tracing_for
from jaxlm.parallel.checksums import checksums
from jaxlm.parallel.compiler import compiler_options
from jaxlm.parallel.hosts import CLUSTER
from jaxlm.parallel.mesh import MeshConfig, make_mesh
from jaxlm.parallel.peaks import gpu_model, tpu_generation
from jaxlm.parallel.rules import batch_sharding, replicated
from jaxlm.runs.load import constant_arrays
from jaxlm.runs.pretrain import pretrain
from jaxlm.runs.session import Session
from jaxlm.training.program import TrainState, corruption_key
from jaxlm.types import Report

Check = Callable[[], Iterator[Figure]]
FIRST = ("bert_tiny", "gpt2_tiny", "t5_tiny")
"""Presets that are checked before the other tiny ones."""
BASE = ("bert_base", "gpt2", "t5_1_1_base")
"""Presets whose steps are timed, other than on CPUs."""
ROUNDING = np.float32(1 + 1e-6)
"""Factor on the parameters whose effect float32's rounding may have, as on the buckets of a Reformer."""
DECIDED_BY_ROUNDING = 0.1
"""Error of the CPU in one type from which on there is nothing to compare."""
FACTS = ("jax", "JAX", "flax", "optax", "orbax", "numpy", "libtpu", "nvidia", "XLA_", "TPU_", "LIBTPU", "NVIDIA_TF32")
"""Beginnings of the names of packages and environment variables that a report needs."""


def all_checks(names: Sequence[str]) -> dict[str, Check]:
    """Return the checks by name, the most important first; with names only those, each of a check or a preset."""
    device = jax.devices()[0]
    if jax.process_count() > 1:
        raise UserError(
            f"`jaxlm check` is for the devices of one process; set {CLUSTER}=0, and on a TPU host of four chips "
            "TPU_PROCESS_BOUNDS=1,1,1 TPU_CHIPS_PER_PROCESS_BOUNDS=2,2,1 (untried)."
        )
    try:
        cpu = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        raise UserError("jax may not use the CPU, which `jaxlm check` compares with; set JAX_PLATFORMS to "
                        f"{'cuda' if device.platform == 'gpu' else device.platform},cpu.") from None
    here = {name: kernel for name, kernel in KERNELS.items() if device.platform in kernel.platforms}
    checks: dict[str, Check] = {name: functools.partial(check_kernel, here[name], device, cpu) for name in here}
    checks["dropout"] = functools.partial(check_dropout, device, cpu)
    checks |= {"twice": check_twice, "resume": check_resume}
    of_preset = {name: functools.partial(check_preset, name, cpu) for name in (*FIRST, *preset_files(), *names)}
    checks |= {name: of_preset[name] for name in FIRST}
    timed = FIRST if device.platform == "cpu" else BASE
    checks |= {f"time:{name}": functools.partial(check_time, name) for name in timed}
    if not names:
        tiny = (name for name in preset_files() if name.endswith("_tiny") and not _needs_folder(load_preset(name)))
        return checks | {name: of_preset[name] for name in tiny}
    for name in names:
        if name not in checks and name not in preset_files() and not Path(name).is_file():
            raise UserError(f"there is no check or preset {name!r}; the checks are {', '.join(checks)}.")
    return {name: checks.get(name, of_preset[name]) for name in names}


def _needs_folder(experiment: Experiment) -> bool:
    return getattr(experiment.objective, experiment.objective.constants_field, None) == ""


def run_checks(
    checks: Mapping[str, Check], minutes: float, save: Callable[[dict[str, Any]], None], report: Report
) -> dict[str, Any]:
    """Run the checks, of which none begins when the minutes are over, and return the object of the report.

    `save` receives the object before and after each check, since a device may end the process.
    """
    device, end = jax.devices()[0], time.monotonic() + 60 * minutes
    versions = {one.name: one.version for one in importlib.metadata.distributions() if one.name}
    facts = {name: value for name, value in (versions | dict(os.environ)).items() if name.startswith(FACTS)}
    results = {name: {"result": "not reached"} for name in checks}
    found = {"device": device.device_kind, "devices": jax.device_count(), "backend": device.client.platform_version,
             "cpus": os.cpu_count(), "facts": facts, "checks": results}
    for name, check in checks.items():
        if time.monotonic() < end:
            results[name] = {"result": "running"}
            save(found)
            results[name] = _run(check)
            save(found)
        report(f"{name:<22}{results[name]['result']} {summary(results[name])}")
    return found


def _run(check: Check) -> dict[str, Any]:
    """Return the figures of a check, and the reasons for which it fails."""
    start, figures, failures, trace = time.perf_counter(), {}, [], None
    try:
        for name, value, limit in check():
            figures[name] = {"value": float(value) if math.isfinite(value) else str(value), "limit": limit}
            if limit is not None and not value <= limit:  # also what is not a number
                failures.append(f"{name} is {value:.2g}, above {limit:.2g}")
    except Exception as error:  # whatever a compiler or a device says
        failures, trace = [*failures, str(error) or repr(error)], traceback.format_exc()
    return {"result": "✗" if failures else "✓", "seconds": round(time.perf_counter() - start, 1), "figures": figures,
            "failures": failures, "traceback": trace}


def summary(result: Mapping[str, Any]) -> str:
    """Return the failures of a check, or the figure that is nearest to its limit, or those without limits."""
    if "figures" not in result:
        return ""
    figures, parts = result["figures"], result["failures"]
    if not parts:
        limited = {name: figure["value"] / figure["limit"] for name, figure in figures.items() if figure["limit"]}
        names = [max(limited, key=limited.__getitem__)] if limited else figures
        parts = [f"{name} {figures[name]['value']:.3}".removesuffix(" nan") for name in names]
        parts += [f"limit {figures[name]['limit']:.3g}" for name in names if limited]
    return f"{result['seconds']:6.1f} s  " + ", ".join(" ".join(part.split())[:300] for part in parts)


def changed_preset(name: str, changes: Mapping[str, Any]) -> Experiment:
    """Return a preset without phases and with other values of fields, by their dotted names."""
    changes = {"train.phases": (), "train.accumulate": 1, **changes}
    return functools.reduce(lambda e, field: with_value(e, field, changes[field]), changes, load_preset(name))


def open_preset(name: str, changes: Mapping[str, Any]) -> Session:
    """Open such a preset on synthetic rows."""
    return open_stand_in(changed_preset(name, changes), None, constant_arrays, lambda line: None)


def check_preset(name: str, cpu: jax.Device) -> Iterator[Figure]:
    """Compare corruption, loss and gradients of a preset, without dropout, with those of the CPU in float32."""
    home, mesh = make_mesh(MeshConfig(), [cpu]), make_mesh(MeshConfig())
    for dtype, limit in LIMITS.items():
        session = open_preset(name, {"objective.model.dtype": dtype, "train.batch_size": 8 * mesh.size})
        if dtype == "float32":
            with jax.default_device(cpu):
                params = jax.device_get(jax.jit(session.objective.init)(purpose_key(0, Purpose.INITIALIZATION)))
            exact = _evaluate(session, home, params)
            rounded = jax.tree.map(lambda x: x * ROUNDING, params)
        on_cpu = _evaluate(session, home, rounded)
        found = _evaluate(session, mesh, params)
        if dtype == "float32":
            pairs = zip(*map(jax.tree.leaves, (found[0], exact[0])), strict=True)
            yield "corrupted arrays that differ", sum(not np.array_equal(*pair) for pair in pairs), 0
        for place, what in ((1, "loss"), (2, "gradients")):
            own = _error(on_cpu[place], exact[place])
            most = max(limit, 2 * own) if own < DECIDED_BY_ROUNDING else None
            yield f"{dtype} {what}", _error(found[place], exact[place]), most


def _evaluate(session: Session, mesh: Mesh, params: Any) -> tuple[Any, Any, Any]:
    """Return the corrupted batch of a step, the loss, and its gradients, on a mesh."""
    rows = session.experiment.train.batch_size

    @functools.partial(jax.jit, compiler_options=(options := compiler_options(mesh)))
    def step(params, constants, batch):
        objective = session.objective.with_constants(constants)

        def loss(params):
            key, memory = purpose_key(0, Purpose.DROPOUT), objective.initial_memory(rows)
            return total_loss(objective.stream_loss(params, example, memory, key, False)[0])

        with tracing_for(mesh, options):
            example = objective.corrupt(corruption_key(0, 5), batch)
            return example, *jax.value_and_grad(loss)(params)

    batch = jax.device_put(session.synthetic_batch(), batch_sharding(mesh))
    params, constants = jax.device_put((params, session.objective.constants), replicated(mesh))
    with precision(session.objective.model.dtype):
        return jax.device_get(step(params, constants, batch))


def _error(found: Any, expected: Any) -> float:
    """Return the norm of the difference of two trees of arrays, relative to that of the second."""
    pairs = list(zip(*map(jax.tree.leaves, (found, expected)), strict=True))
    squares = [(np.sum((np.float64(x) - y) ** 2), np.sum(np.square(y, dtype=np.float64))) for x, y in pairs]
    return math.sqrt(sum(square for square, _ in squares) / sum(square for _, square in squares))


def check_twice() -> Iterator[Figure]:
    """Compare two computations of one step with dropout, under `train.deterministic`, bit for bit."""
    model = {"dtype": "bfloat16", "dropout": 0.1, "attention_dropout": 0.0}
    session = open_preset(
        "bert_tiny", {"train.deterministic": True, "train.batch_size": 8 * jax.device_count()}
        | {f"objective.model.{name}": value for name, value in model.items()}
    )
    program = session.program(make_mesh(MeshConfig()))
    params, batch = program.init_params(0), jax.device_put(session.synthetic_batch(), batch_sharding(program.mesh))
    states = [program.train_step(program.init_state(params), batch, program.constants)[0] for _ in range(2)]
    yield "arrays with other bits", _different(*states), 0


def _different(*states: TrainState) -> int:
    one, other = (checksums({"params": state.params, "opt_state": state.opt_state})[0] for state in states)
    return sum(one[name] != other[name] for name in one)


class _Stopper(io.StringIO):
    """Standard output that sends this process SIGTERM with the first line of metrics, which only a run prints."""

    def write(self, text: str) -> int:
        if "tokens/s" in text and "tokens/s" not in self.getvalue():
            signal.raise_signal(signal.SIGTERM)
        return super().write(text)


def check_resume() -> Iterator[Figure]:
    """Compare a run that SIGTERM stops and that is resumed with a run in one piece, bit for bit."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        words = np.random.default_rng(0).choice(["alpha", "beta", "gamma", "delta", "epsilon", "zeta"], (64, 60))
        Path(folder, "text.txt").write_text("\n\n".join(" ".join(row) for row in words))
        run = functools.partial(pretrain, Resolved(changed_preset("bert_tiny", {
            "data.source": f"{folder}/text.txt", "data.cache_dir": folder, "data.vocab_size": 512, "data.length": 32,
            "train.steps": 6, "train.batch_size": 8 * jax.device_count(), "train.log_every": 1, "train.eval_every": 0,
            "train.checkpoint_every": 0, "train.tracker": "none", "train.deterministic": True,
        })), report=lambda line: None)
        whole, was_stopped = run(Path(folder, "whole")).state, False
        try:
            with contextlib.redirect_stdout(_Stopper()):
                run(Path(folder, "pieces"))
        except Stopped:
            was_stopped = True
        yield "runs that SIGTERM does not stop", not was_stopped, 0
        yield "arrays with other bits", _different(whole, run(Path(folder, "pieces")).state), 0


def check_time(name: str) -> Iterator[Figure]:
    """Time a step, beside what `jaxlm plan` predicts of it and of its memory where it knows the device."""
    mesh, quiet = make_mesh(MeshConfig()), lambda line: None
    device = mesh.devices.flat[0]
    is_cpu = device.platform == "cpu"
    session = open_preset(name, {} if is_cpu else {"train.batch_size": 16 * mesh.size})
    yield "tokens", session.experiment.train.batch_size * session.experiment.data.length, None
    before = (device.memory_stats() or {}).get("peak_bytes_in_use")  # of the process, which never falls
    timed = bench_pretraining(session, steps=3 if is_cpu else 10, report=quiet)
    yield "ms", 1e3 * timed["step_seconds"], None
    if not (tpu_generation(device) or gpu_model(device)):
        yield "no prediction of ms", math.nan, None
        return
    step = compile_step(session.program(mesh), batch_shapes(session), "the devices here", report=quiet)
    if e := step.estimate:
        yield "ms predicted", 1e3 * predict(e.seconds, step.collectives, e.bound).seconds, None
    yield "GiB planned", step.hbm_bytes / 2**30, None
    if (peak := timed["peak_memory_bytes"]) and peak > (before or 0):
        yield "GiB at the peak", peak / 2**30, None
