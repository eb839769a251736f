"""`--train.replay-every`: a step computed twice finds a flipped bit before the update is used."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxlm.analysis.costs import product_flops
from jaxlm.analysis.hlo import parse
from jaxlm.cli import main
from jaxlm.config.experiment import OptimizerConfig, TrainConfig
from jaxlm.training import program
from jaxlm.training.program import Program
from tests.training.support import saved_steps
from tests.training.test_step import MESH, OBJECTIVE, ROWS, batch


@pytest.fixture
def flipped(monkeypatch):
    """Flip the lowest bit of one gradient in the second computation of step 8."""
    seen, key, gradients = [], program.corruption_key, program.gradients

    def watched_key(seed, step):
        seen[:] = [step]
        return key(seed, step)

    def broken(*arguments):
        grads, terms, memory = gradients(*arguments)
        seen.append("computed")
        leaves, tree = jax.tree.flatten(grads)
        bits = jax.lax.bitcast_convert_type(leaves[3], jnp.uint32).at[(0,) * leaves[3].ndim]
        flip = jnp.uint32((seen[0] == 7) & (len(seen) == 3))
        leaves[3] = jax.lax.bitcast_convert_type(bits.set(bits.get() ^ flip), jnp.float32)
        return jax.tree.unflatten(tree, leaves), terms, memory

    monkeypatch.setattr(program, "corruption_key", watched_key)
    monkeypatch.setattr(program, "gradients", broken)


@pytest.mark.slow
def test_replay_finds_a_flipped_bit(flipped, preset, tmp_path, capsys):
    """The run ends with a code and a sentence of its own; step 4 was equal, step 8 is not saved."""
    flags = ["pretrain", str(preset), "--run-dir", str(tmp_path / "run"), "--train.replay-every", "4"]
    assert main(flags) == 3
    said = capsys.readouterr().err
    assert "step 8 was computed twice (--train.replay-every), and 1 arrays of loss and gradients differ" in said
    assert "the newest checkpoint is of step 4" in said and said.count("\n") == 1
    assert saved_steps(tmp_path / "run") == [4]


@pytest.mark.slow
def test_the_compiler_does_not_merge_the_two_computations():
    """The replayed step executes the matrix products of forward and backward pass twice."""
    steps = Program(OBJECTIVE, TrainConfig(steps=5, batch_size=ROWS, replay_every=1), OptimizerConfig(), MESH)
    assert steps.train.deterministic
    once, twice = (
        product_flops(parse(step.lower(steps.shapes, batch(1), ()).compile().as_text()))
        for step in (steps.train_step, steps.replay_step)
    )
    assert twice == 2 * once > 0
