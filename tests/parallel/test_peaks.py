"""The table of peaks: chips are found by whole words of what jax calls them."""

from types import SimpleNamespace

import pytest

from jaxlm.parallel.peaks import peak_flops


@pytest.mark.parametrize(("kind", "peak"), [
    ("NVIDIA L4", 121e12), ("NVIDIA L40S", 362e12), ("NVIDIA L40", 0.0), ("NVIDIA A10", 125e12), ("NVIDIA A10G", 0.0),
    ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12),
    ("Tesla V100-SXM2-16GB", 125e12), ("NVIDIA GeForce RTX 4090", 165e12), ("cpu", 0.0),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", 0.0), ("NVIDIA GeForce RTX 4090 D", 0.0),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 0.0),
    ("TPU v5 lite", 197e12), ("TPU v5", 459e12), ("TPU v5p", 459e12), ("TPU v6 lite", 918e12), ("TPU7x", 1153.5e12),
    ("TPU v4", 275e12), ("TPU v3", 61.5e12), ("TPU v2", 23e12),
])
def test_peaks(kind, peak):
    assert peak_flops(SimpleNamespace(device_kind=kind)) == peak
