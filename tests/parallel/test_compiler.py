"""Compiler options: what the TPU compiler makes of them in a small data-parallel step."""

import importlib.util
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxlm.analysis import compilation
from jaxlm.analysis.hlo import asynchronous_share, parse, traffic
from jaxlm.parallel.compiler import compiler_options
from jaxlm.parallel.mesh import MeshConfig, make_mesh


def test_other_platforms_have_the_compilers_defaults():
    assert compiler_options(make_mesh(MeshConfig(data=1), jax.devices("cpu")[:1]), deterministic=True) is None


def test_gpus_time_nothing_where_the_bits_have_to_be_the_same():
    mesh = SimpleNamespace(devices=np.array([SimpleNamespace(platform="gpu")]), shape={})
    assert not compiler_options(mesh)["xla_gpu_enable_triton_gemm"] and len(compiler_options(mesh)) == 2
    assert compiler_options(mesh, deterministic=True)["xla_gpu_deterministic_ops"]


@pytest.mark.parametrize(("kind", "fuses"), [
    ("TPU v2", False), ("TPU v3", False), ("TPU v4", False), ("TPU v5 lite", True), ("TPU v5", False),
    ("TPU v6 lite", False), ("TPU7x", False),
])
def test_all_reduces_are_fused_on_v5e_only_and_products_stay_whole_over_fsdp(kind, fuses):
    """The compiler refuses "continuation fusion for AllReduce" for the others."""
    for fsdp in (1, 4):
        devices = np.array([SimpleNamespace(platform="tpu", device_kind=kind)])
        options = compiler_options(SimpleNamespace(devices=devices, shape={"fsdp": fsdp}))
        assert options.get("xla_tpu_enable_async_collective_fusion_fuse_all_reduce", False) == fuses
        assert ("xla_tpu_enable_all_reduce_scatter_fusion" in options) == (fuses and fsdp > 1)
        whole = [f"xla_tpu_enable_windowed_einsum_for_{kind}" for kind in ("all_gather", "reduce_scatter")]
        assert [options.get(name, True) for name in whole] == [fsdp == 1] * 2
        assert len(options) == (0 if fsdp == 1 else 2) or fuses


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
def test_gradient_all_reduces_overlap_with_the_backward_pass(monkeypatch):
    """Four matrices of 2 MiB in bfloat16: by default one all-reduce at the end, with the options most overlap."""
    for name, value in compilation.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    devices = compilation.topology_devices("v5e:2x2")
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=devices)
    replicated = NamedSharding(mesh, PartitionSpec())
    weights = [jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=replicated)] * 4
    rows = jax.ShapeDtypeStruct((16384, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec("data")))

    def loss(weights, x):
        for weight in weights:
            x = jax.nn.relu(x @ weight.astype(jnp.bfloat16))
        return (x.astype(jnp.float32) ** 2).mean()

    step = jax.jit(jax.grad(loss), out_shardings=[replicated] * 4).lower(weights, rows)
    shares = [
        asynchronous_share(traffic(parse(step.compile(compiler_options=options).as_text())))
        for options in (None, compiler_options(mesh))
    ]
    assert shares[0] == 0 and shares[1] >= 0.5
