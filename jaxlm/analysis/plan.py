"""What a train step will need on a TPU topology: the real step, compiled on this machine by TPU's own compiler."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxlm.analysis.hlo import Traffic, traffic
from jaxlm.config.experiment import Experiment
from jaxlm.errors import UserError
from jaxlm.tokenizers.vocabulary import Vocabulary

TABLE = ("v4:2x2x2", "v4:4x4x4", "v5e:2x2", "v5e:4x4", "v5e:16x16", "v5p:2x2x1", "v5p:4x4x4", "v6e:4x4")
"""The topologies of `jaxlm plan` without --topology."""
EXAMPLES = "v4:2x2x2, v5e:4x4, v5e:16x16, v5p:4x4x4 or v6e:16x16"
ASSUMED_MFU = 0.4
"""Share of the peak at which the estimated time of a step is computed; a stated assumption, not a measurement."""

ENVIRONMENT = {
    # A compiler needs no chip, hence no lock against others and no questions to a cloud's metadata server.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_STDERR_LOG_LEVEL": "3", "TPU_MIN_LOG_LEVEL": "3",
}
_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Plan:
    """A step on a topology; sizes in bytes for one chip (one device, as jax counts them) and one step.

    hbm_by_kind: parameters, optimizer_state and batch as the step holds them on entry; activations_and_workspace, the
    compiler's temporaries at their peak; program, the code itself; other, what layouts add by padding. Known in full
    only for what fits: else hbm_bytes is the compiler's figure and the kinds are those that follow from the shapes.
    """

    topology: str
    devices: int
    device_kind: str
    mesh: dict[str, int]
    batch_size: int
    length: int
    vocabulary: str
    parameters: int
    fits: bool
    hbm_bytes: int
    hbm_limit: int
    hbm_by_kind: dict[str, int]
    flops: float
    peak_flops: float
    traffic: dict[str, Traffic]
    message: str = ""

    @property
    def headroom(self) -> int:
        return self.hbm_limit - self.hbm_bytes

    @property
    def flops_per_device(self) -> float:
        return self.flops / self.devices

    @property
    def seconds(self) -> float | None:
        """Of one step, at ASSUMED_MFU of the peak."""
        return self.flops_per_device / (self.peak_flops * ASSUMED_MFU) if self.peak_flops else None

    def to_json(self) -> dict[str, Any]:
        seconds = self.seconds
        return {
            "topology": self.topology, "devices": self.devices, "device_kind": self.device_kind, "mesh": self.mesh,
            "batch_size": self.batch_size, "length": self.length, "vocabulary": self.vocabulary,
            "parameters": self.parameters,
            "fits": self.fits, "hbm_bytes_per_chip": self.hbm_bytes, "hbm_limit_bytes": self.hbm_limit,
            "headroom_bytes": max(self.headroom, 0), "bytes_over": max(-self.headroom, 0),
            "hbm_by_kind": self.hbm_by_kind,
            "flops_per_step": self.flops, "flops_per_step_per_chip": self.flops_per_device,
            "peak_flops_per_chip": self.peak_flops, "assumed_mfu": ASSUMED_MFU,
            "step_seconds_at_assumed_mfu": seconds,
            "tokens_per_second_at_assumed_mfu": self.batch_size * self.length / seconds if seconds else None,
            "collectives": {kind: dataclasses.asdict(item) for kind, item in self.traffic.items()},
            "compiler_message": self.message or None,
        }


def prepare_environment() -> None:
    """Lets TPU's compiler work where there is no TPU, without its warnings, and leaves alone what accelerators there
    are. Call before jax is first used."""
    import jax

    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_platforms", "cpu")  # which jax has read from the environment when it was imported
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def require_compiler() -> None:
    """UserError where libtpu is not installed."""
    if importlib.util.find_spec("libtpu") is None:
        raise UserError("`jaxlm plan` needs TPU's compiler, libtpu; install it with `pip install 'jaxlm[tpu]'`.")


def plan(experiment: Experiment, topology: str, vocabulary: Vocabulary | None = None) -> Plan:
    """Compiles the experiment's train step for a topology such as "v5e:16x16".

    vocabulary: by default a stand-in of the size in the preset's model. What does not fit is an answer (`fits` is
    False), not an error. UserError for a topology that does not exist, a mesh or a batch that does not suit it.
    """
    import jax
    import jax.numpy as jnp

    from jaxlm.parallel.mesh import check_batch, make_mesh
    from jaxlm.parallel.peaks import peak_flops
    from jaxlm.parallel.rules import batch_sharding
    from jaxlm.training.optimizers import make_optimizer
    from jaxlm.training.step import make_init, make_train_step
    from jaxlm.types import TokenBatch

    experiment.validate()
    devices = topology_devices(topology)
    mesh = make_mesh(experiment.mesh, devices)
    t, length = experiment.train, experiment.data.length
    check_batch(t.batch_size, t.accumulate, mesh)
    objective = experiment.objective.bind(vocabulary or published_vocabulary(experiment.objective), length)
    optimizer = make_optimizer(experiment.optimizer, t.steps)
    _, shapes, layout = make_init(objective, optimizer, mesh)
    step = make_train_step(objective, optimizer, mesh, layout, seed=t.seed, accumulate=t.accumulate)
    row = jax.ShapeDtypeStruct((t.batch_size, objective.raw_length(length)), jnp.int32)
    batch = TokenBatch(row, row)
    by_kind = {
        "parameters": _held(shapes.params, layout.params),
        "optimizer_state": _held(shapes.opt_state, layout.opt_state),
        "batch": _held(batch, TokenBatch(batch_sharding(mesh), batch_sharding(mesh))),
    }
    limit = hbm_limit(devices[0])
    facts = dict(
        topology=topology, devices=len(devices), device_kind=devices[0].device_kind, mesh=dict(mesh.shape),
        batch_size=t.batch_size, length=length, hbm_limit=limit, vocabulary=described(experiment.objective, vocabulary),
        parameters=sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes.params)),
        flops=3.0 * objective.flops(length) * t.batch_size, peak_flops=peak_flops(devices[0]),
    )
    try:
        with _without_cache():
            compiled = step.lower(shapes, batch).compile()
    except jax.errors.JaxRuntimeError as error:
        message = _first_sentence(str(error))
        used = _used_bytes(str(error))
        if used is None:
            raise
        if "temporaries" in message:  # the compiler gave up before it added what the step holds anyway
            used += sum(by_kind.values())
        return Plan(**facts, fits=False, hbm_bytes=used, hbm_by_kind=by_kind, traffic={}, message=message)
    memory = compiled.memory_analysis()
    # Donated buffers are counted in the arguments and again in the output, of which only the rest is new.
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    by_kind |= {
        "activations_and_workspace": memory.temp_size_in_bytes,
        "program": memory.generated_code_size_in_bytes,
        "other": held - sum(by_kind.values()),
    }
    used = sum(by_kind.values())
    return Plan(
        **facts, fits=used <= limit, hbm_bytes=used, hbm_by_kind=by_kind, traffic=traffic(compiled.as_text())
    )


def topology_devices(name: str) -> Sequence[Any]:
    """The devices of a topology "GENERATION:AxB[xC]" (chips along each axis), abstract ones. UserError for another."""
    from jax.experimental import topologies

    match = re.fullmatch(r"(v\d+\w*|tpu\d+\w*):(\d+(?:x\d+){1,2})", name.strip().lower())
    if match is None:
        raise UserError(f"{name!r} is not a TPU topology; write the generation and its chips, as {EXAMPLES}.")
    generation, chips = match[1], match[2]
    options: dict[str, Any] = {}
    if generation == "v7x":
        generation = "tpu7x"
    if generation == "v4":
        options["chip_config_name"] = "megacore"  # as jax runs on v4: one device a chip
    if math.prod(map(int, chips.split("x"))) == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=f"{generation}:{chips}", **options).devices
    except Exception as error:  # libtpu answers with runtime errors of several kinds
        raise UserError(
            f"there is no TPU topology {name} ({_first_sentence(str(error)).rstrip('.')}); try {EXAMPLES}."
        ) from error


def run_vocabulary(config: str) -> Vocabulary | None:
    """The vocabulary that the run in the folder `config` is bound to. None for a preset, which has none before it is
    given a text."""
    from jaxlm.runs.folder import is_imported, own_tokenizer
    from jaxlm.tokenizers.tokenizer import Tokenizer

    own = own_tokenizer(Path(config))
    if own is None:
        return None
    return dataclasses.replace(Tokenizer.load(own).vocabulary, keeps_rows=is_imported(Path(config)))


def described(objective: Any, vocabulary: Vocabulary | None) -> str:
    """For a report: how large the vocabulary is that a model is planned or measured with, and whose."""
    if vocabulary is None:
        return f"vocabulary of {vocabulary_size(objective):,}: the preset's own"
    return f"vocabulary of {vocabulary.size:,}: the run's own"


def published_vocabulary(objective: Any) -> Vocabulary:
    """A stand-in of the size that a preset's model is published with."""
    return Vocabulary.stand_in(vocabulary_size(objective))


def vocabulary_size(objective: Any) -> int:
    """The vocabulary that a preset's model is published with: the first field `vocab_size` in the objective."""
    for value in _dataclasses_in(objective):
        if hasattr(value, "vocab_size"):
            return int(value.vocab_size)
    raise UserError(f"{type(objective).__name__} says nowhere how large its vocabulary is (a field vocab_size).")


def _dataclasses_in(value: Any) -> Iterator[Any]:
    yield value
    for field in dataclasses.fields(value):
        if dataclasses.is_dataclass(inner := getattr(value, field.name)):
            yield from _dataclasses_in(inner)


def hbm_limit(device: Any) -> int:
    """Bytes of memory that a program may use on such a device, asked of the compiler with a program that is too big."""
    import jax
    import jax.numpy as jnp

    place = jax.sharding.SingleDeviceSharding(device)
    with _without_cache():
        try:
            huge = jax.ShapeDtypeStruct((2**20, 2**20), jnp.float32)
            jax.jit(lambda x: x + 1, in_shardings=place, out_shardings=place).lower(huge).compile()
        except jax.errors.JaxRuntimeError as error:
            if match := re.search(r"(?:available HBM \(| of )([\d.]+)([KMGT]?)", str(error)):
                return _bytes(match)
            raise
    raise RuntimeError("the compiler says that four terabytes fit one chip")


def _used_bytes(message: str) -> int | None:
    """What the compiler says that a program would need, or None where it speaks of something else than memory."""
    if "RESOURCE_EXHAUSTED" not in message:
        return None
    match = re.search(r"Used ([\d.]+)([KMGT]?) of", message) or re.search(
        r"required for [\w ]+\(([\d.]+)([KMGT]?)\)", message
    )
    return _bytes(match) if match else None


def _bytes(match: re.Match[str]) -> int:
    return round(float(match[1]) * _UNITS[match[2]])


def _held(shapes: Any, layout: Any) -> int:
    """Bytes of one device's share."""
    import jax

    def share(leaf: Any, sharding: Any) -> int:
        return math.prod(sharding.shard_shape(tuple(leaf.shape))) * leaf.dtype.itemsize

    return sum(jax.tree.leaves(jax.tree.map(share, shapes, layout)))


def _first_sentence(text: str) -> str:
    line = text.strip().splitlines()[0] if text.strip() else "no reason given"
    return line.removeprefix("RESOURCE_EXHAUSTED: ").removeprefix("INVALID_ARGUMENT: ")[:300]


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
    """The compilation cache holds programs that can be loaded; these cannot."""
    import jax

    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
