"""Adafactor as T5 uses it, against its formulas written out in numpy (Shazeer & Stern 2018, algorithms 4 and 5)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxlm.config.experiment import OptimizerConfig
from jaxlm.training.optimizers import make_optimizer

EPS1, EPS2 = 1e-30, 1e-3


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


def reference(x: np.ndarray, gradients: list[np.ndarray], rates: list[float], factored: bool) -> np.ndarray:
    x, rows, columns, whole = x.astype(np.float64), 0.0, 0.0, 0.0
    for t, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        decay = 1.0 - t**-0.8
        square = np.square(gradient.astype(np.float64)) + EPS1
        if factored:
            rows = decay * rows + (1 - decay) * square.mean(1)
            columns = decay * columns + (1 - decay) * square.mean(0)
            second = np.outer(rows, columns) / rows.mean()
        else:
            whole = second = decay * whole + (1 - decay) * square
        update = gradient / np.sqrt(second)
        update = update / max(1.0, rms(update) / 1.0)
        x = x - rate * max(EPS2, rms(x)) * update
    return x


def test_updates_are_those_of_the_formulas():
    rng = np.random.default_rng(0)
    start = {
        "wi": {"kernel": rng.normal(size=(140, 130)) * 0.05},  # factored: both sides have at least 128
        "small": {"kernel": rng.normal(size=(20, 9))},
        "norm": {"scale": np.ones(30)},
        "almost_zero": {"scale": np.full(12, 1e-6)},
    }
    start = jax.tree.map(lambda x: x.astype(np.float32), start)
    config = OptimizerConfig(
        name="adafactor", learning_rate=0.01, warmup_steps=3, schedule="inverse-sqrt", weight_decay=0.0, clip_norm=0.0
    )
    rates = [0.01 * np.sqrt(3 / max(step, 3)) for step in range(8)]
    # Large and small in turn, so that the clipping of updates takes part.
    gradients = [
        jax.tree.map(lambda x, s=s: (rng.normal(size=x.shape) * 10.0 ** (s % 3)).astype(np.float32), start)
        for s in range(8)
    ]
    optimizer = make_optimizer(config, 100)
    params = jax.tree.map(jnp.asarray, start)
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for gradient in gradients:
        updates, state = update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    for name, tree in params.items():
        (leaf,) = tree
        expected = reference(start[name][leaf], [g[name][leaf] for g in gradients], rates, name == "wi")
        moved = np.abs(expected - start[name][leaf]).max()
        assert moved > 0
        np.testing.assert_allclose(tree[leaf], expected, rtol=2e-5, atol=1e-4 * moved, err_msg=name)
