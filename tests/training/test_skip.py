"""Steps whose loss or gradient is not finite: left out up to a limit, counted, the same after a resume."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxlm.cli import main
from jaxlm.training import program
from tests.training.support import metadata, metrics, stopped_after

SKIPPING = ["--train.skip-nonfinite", "2", "--train.checkpoint-every", "1", "--train.keep-checkpoints", "12",
            "--train.log-every", "1", "--optimizer.warmup-steps", "12"]
RATE = "opt_state/2/count"
"""The step of the learning rate."""


@pytest.fixture
def bad(monkeypatch):
    """The 0-based steps in which one gradient is not a number, in a list to fill before the run."""
    steps, seen = [], []
    key, gradients = program.corruption_key, program.gradients

    def watched_key(seed, step):
        seen.append(step)
        return key(seed, step)

    def broken(*arguments):
        grads, terms, memory = gradients(*arguments)
        factor = jnp.where(jnp.isin(seen[-1], jnp.array(steps)), jnp.nan, 1.0)
        leaves, tree = jax.tree.flatten(grads)
        return jax.tree.unflatten(tree, [leaves[0] * factor, *leaves[1:]]), terms, memory

    monkeypatch.setattr(program, "corruption_key", watched_key)
    monkeypatch.setattr(program, "gradients", broken)
    return steps


@pytest.mark.slow
def test_a_skipped_step_changes_nothing_but_the_rate(bad, preset, tmp_path, capsys):
    bad += [4, 5, 8]
    whole = tmp_path / "whole"
    assert main(["pretrain", str(preset), *SKIPPING, "--run-dir", str(whole)]) == 0
    said = capsys.readouterr().out
    assert "Step 5 is skipped: the gradient is not finite (1 of 2 in a row)." in said and "(2 of 2 in a row)" in said
    assert "Step 9 is skipped: the gradient is not finite (1 of 2 in a row)." in said
    assert [line["step"] for line in metrics(whole) if line["skipped"] == 1 and "loss" not in line] == [5, 6, 9]
    assert [line["learning_rate"] for line in metrics(whole)] == pytest.approx(
        [1e-2 * step / 12 for step in range(12)]
    ), "the rate goes on, so that phases and decays begin at their steps"
    sums = {step: metadata(whole, step)["checksums"] for step in range(4, 13)}
    state = {step: {name: value for name, value in sums[step].items() if name not in ("step", RATE)} for step in sums}
    assert len({sums[step][RATE] for step in sums}) == len(sums)
    assert state[4] == state[5] == state[6] != state[7] and state[8] == state[9] != state[10]


@pytest.mark.slow
def test_stopping_among_skipped_steps_changes_nothing(bad, preset, tmp_path):
    bad += [4, 5, 8]
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    flags = ["pretrain", str(preset), *SKIPPING]
    assert main([*flags, "--run-dir", str(whole)]) == 0
    assert stopped_after(5, [*flags, "--run-dir", str(pieces)]) == 143
    assert main([*flags, "--run-dir", str(pieces)]) == 0
    assert metadata(pieces, 12) == metadata(whole, 12) and metrics(pieces) == metrics(whole)


@pytest.mark.slow
def test_one_more_in_a_row_ends_the_run(bad, preset, tmp_path, capsys):
    """Though the row began before the run was stopped."""
    bad += [4, 5, 6]
    arguments = ["pretrain", str(preset), "--run-dir", str(tmp_path / "run"), "--train.skip-nonfinite", "2"]
    assert stopped_after(6, arguments) == 143
    assert main(arguments) == 2
    assert "jaxlm: the gradient of step 7 is not finite; the newest checkpoint is of step 6" in capsys.readouterr().err
    assert main([*arguments[:-1], "3", "--train.steps", "8"]) == 0  # a higher limit goes on
