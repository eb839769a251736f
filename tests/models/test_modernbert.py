"""ModernBERT and Ettin as published: initial weights, sizes, phases and FLOPs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.config.presets import load_preset
from jaxlm.models.modernbert import ModernBert, ModernBertDecoder
from jaxlm.training.optimizers import make_schedule
from tests.params import first_fast

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("model", first_fast([ModernBert, ModernBertDecoder]))
def test_initial_weights(model):
    """Standard deviations of the released code; a normal cut at two deviations has 0.8796 of its own."""
    own = model(vocab_size=900, hidden_size=64, num_heads=2, num_layers=5, intermediate_size=160)
    params = jax.jit(own.init)(jax.random.key(0))
    std = lambda leaf: float(jnp.std(leaf)) / 0.8796 / 0.02  # noqa: E731
    layers = params["encoder"]["layers"]
    for leaf in (params["embeddings"]["word"]["embedding"], layers["attention"]["key"]["kernel"],
                 layers["mlp"]["wi_0"]["kernel"], layers["mlp"]["wi_1"]["kernel"]):
        assert std(leaf) == pytest.approx(1.0, rel=0.03)
    out, wo = layers["attention"]["out"]["kernel"], layers["mlp"]["wo"]["kernel"]
    for leaf in (out, wo, params["head"]["dense"]["kernel"]):
        assert std(leaf) == pytest.approx(10**-0.5, rel=0.03)
    assert layers["attention_norm"]["scale"].shape == (4, 64)


# Executed with the classes; see `Warner et al. 2024, table 4` and `Weller et al. 2025, table 1` for the sizes.
COUNTS = {"modernbert_base": 149_655_232, "modernbert_large": 395_881_664} | {
    f"ettin_{kind}_{size}": count for kind in ("encoder", "decoder") for size, count in {
        "17m": 16_913_600, "32m": 32_081_344, "68m": 68_457_664, "150m": 149_655_232, "400m": 395_881_664,
        "1b": 1_031_314_112,
    }.items()
}


@pytest.mark.parametrize("name", first_fast(COUNTS))
def test_published_sizes(name):
    experiment = load_preset(str(CONFIGS / f"{name}.py"))
    shapes = jax.eval_shape(experiment.objective.init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == COUNTS[name]
    o, objective = experiment.optimizer, experiment.objective
    assert (o.b1, o.b2, o.eps, o.clip_norm) == (0.9, 0.98, 1e-6, 0.0)
    if "decoder" not in name:
        assert (objective.mask_rate, objective.mask_share, objective.random_share) == (0.15, 0.8, 0.1)
        assert objective.pair_task is None
    thetas = (160_000.0, 10_000.0 if name.startswith("modernbert") else 160_000.0)
    assert (objective.model.global_theta, objective.model.local_theta) == thetas


# Billions of tokens by length and masking rate (of decoders none), and peaks, with the decay a step at them. From the
# yamls of AnswerDotAI/ModernBERT and JHU-CLSP/ettin-encoder-vs-decoder.
BASE, LARGE = (4239, 768, 4608), (396, 448, 4928)
TOKENS = {"modernbert": [1719, 250, 50], "ettin": [1700, 250, 50], "1b": [1700, 83.333, 16.667]}
PEAKS = {
    "modernbert_base": [(8e-4, 1e-5), (3e-4, 1e-5)], "modernbert_large": [(5e-4, 1e-5), (5e-5, 1e-6)],
    "17m": [(3e-3, 3e-4), (1.5e-3, 3e-4)], "32m": [(3e-3, 3e-4), (1.5e-3, 3e-4)], "68m": [(3e-3, 3e-4), (1.5e-3, 3e-4)],
    "150m": [(8e-4, 1e-5), (4e-4, 1e-5)], "400m": [(5e-4, 1e-5), (2.5e-4, 1e-5)], "1b": [(5e-4, 5e-5), (2.5e-4, 5e-5)],
}


@pytest.mark.parametrize("name", COUNTS)
def test_published_phases(name):
    experiment = load_preset(str(CONFIGS / f"{name}.py"))
    experiment.validate()
    *first, second, third = experiment.phases
    is_ettin, size = name.startswith("ettin"), name.rpartition("_")[2]
    tokens = [
        sum(((p.last or experiment.train.steps) - p.after) * p.experiment.train.batch_size * p.experiment.data.length
            for p in part) / 1e9 for part in (first, [second], [third])
    ]
    key = size if size in TOKENS else name.partition("_")[0]
    assert tokens == pytest.approx(TOKENS[key], rel=1e-3)
    assert {p.experiment.data.length for p in first} == {1024} and third.experiment == dataclasses.replace(
        experiment, optimizer=third.experiment.optimizer, train=third.experiment.train,
        objective=third.experiment.objective if not is_ettin else experiment.objective,
    )
    theta = [p.experiment.objective.model.global_theta for p in (*first, second, third)]
    assert theta == [10_000] * len(first) + [160_000, 160_000]
    assert {p.experiment.objective.model.local_theta for p in first} == {10_000}
    if "decoder" not in name:
        masks = [p.experiment.objective.mask_rate for p in (*first, second, third)]
        assert masks == [0.3] * (len(first) + 1) + [0.15 if is_ettin else 0.3]
    optimizers = (experiment.optimizer, third.experiment.optimizer)
    peaks = [(o.learning_rate, o.learning_rate * o.weight_decay) for o in optimizers]
    assert np.allclose(peaks, PEAKS[size if is_ettin else name], rtol=2e-3)
    rates = []  # at the beginning and at the end of the last two phases
    for phase in (second, third):
        after, steps = phase.schedule_span()
        rate = make_schedule(phase.experiment.optimizer, steps, after)
        rates += [float(rate(after)), float(rate(after + steps))]
    high, low = (peak[0] for peak in PEAKS[size if is_ettin else name])
    expected = [high, high / 2, low, low * 0.04] if is_ettin else [low, low, low, low * 0.001]
    assert rates == pytest.approx(expected, rel=1e-5)


def test_the_ramp_of_the_batch_has_equal_steps():
    for name, (steps, rows, most) in (("modernbert_base", BASE), ("modernbert_large", LARGE)):
        phases = load_preset(str(CONFIGS / f"{name}.py")).phases
        ramp = [(p.last - p.after, p.experiment.train.batch_size) for p in phases[:-1] if p.last - p.after == steps]
        assert ramp == [(steps, number * rows) for number in range(1, most // rows)]
        tokens = sum(count * size for count, size in ramp) * 1024
        assert tokens == pytest.approx(50e9 if name == "modernbert_base" else 10e9, rel=1e-3)


# GFLOP of a row's forward pass with 30 % of the tokens predicted, from the formula L·n·(8h² + 6hf) + 4h·pairs +
# predicted·(2h² + 2hV), where a local layer has n(2w + 1) - w(w + 1) pairs.
@pytest.mark.parametrize(("size", "length", "expected"), [
    ("base", 512, 134.1), ("base", 1024, 281.3), ("base", 8192, 3694.6), ("large", 1024, 787.5),
    ("large", 8192, 8707.1),
])
def test_flops_count_the_window(size, length, expected):
    found = ModernBert.published(size).forward_flops(length, int(0.3 * length)) / 1e9
    assert found == pytest.approx(expected, abs=0.06)


def test_pairs_of_a_window_are_counted():
    """Against the mask itself, for rows shorter and longer than the window."""
    model = ModernBert(hidden_size=64, num_heads=1, local_attention=8)
    for length in (3, 5, 6, 20):
        near = np.abs(np.subtract.outer(np.arange(length), np.arange(length))) <= 4
        pairs = 8 * length**2 + 14 * near.sum()
        matrices = 22 * length * (8 * 64**2 + 6 * 64 * 1152)
        assert model.forward_flops(length) == matrices + 4 * 64 * pairs
