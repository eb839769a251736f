"""Models of several steps: the moving average, the mean of checkpoints, and the decay of another run's rate."""

from __future__ import annotations

import gc
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from jaxlm.cli import main
from jaxlm.errors import UserError
from jaxlm.runs import folder
from jaxlm.runs.load import _mean, load_run
from jaxlm.runs.resolve import resolve
from jaxlm.training.checkpoints import Checkpoints
from jaxlm.training.optimizers import make_schedule
from tests.training.support import assert_same_arrays, metadata, metrics, stopped_after
from tests.training.test_run import refused

STABLE = ("--optimizer.schedule", "wsd", "--optimizer.decay-share", "0", "--optimizer.warmup-steps", "2",
          "--train.checkpoint-every", "2", "--train.eval-every", "0", "--train.keep-checkpoints", "9")


def averaging(preset) -> list[str]:
    return ["pretrain", str(preset), *STABLE, "--train.steps", "8", "--optimizer.average", "0.4"]


@pytest.fixture(scope="module")
def averaged(preset, tmp_path_factory):
    """A run of 8 steps at one rate, with a moving average and a checkpoint at each."""
    run = tmp_path_factory.mktemp("averaged") / "run"
    assert main([*averaging(preset), "--run-dir", str(run), "--train.checkpoint-every", "1"]) == 0
    return run


@pytest.mark.slow
def test_a_stop_changes_nothing(preset, averaged, tmp_path):
    run = tmp_path / "run"
    assert stopped_after(4, [*averaging(preset), "--run-dir", str(run)]) != 0
    assert main([*averaging(preset), "--run-dir", str(run)]) == 0
    assert metadata(run, 8)["checksums"] == metadata(averaged, 8)["checksums"]
    assert metrics(run)[-1] == metrics(averaged)[-1]


def params_of(run, step: int, average: bool = False):
    """The parameters or their average in a checkpoint."""
    objective = load_run(run).objective
    checkpoints = Checkpoints(run / "checkpoints", read_only=True)
    shapes = jax.eval_shape(objective.init, jax.random.key(0))
    return jax.device_get(checkpoints.restore_params(shapes, step=step, average=average)[0])


def test_moving_average(averaged):
    expected = params_of(averaged, 1, average=True)
    for step in range(2, 9):
        decay = min(0.4, step / (9 + step))  # (1 + n) / (10 + n) after n = step - 1 updates
        params = params_of(averaged, step)
        expected = jax.tree.map(lambda mean, new, d=decay: d * mean + (1 - d) * new, expected, params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), load_run(averaged).params, expected)
    gap = jax.tree.map(lambda a, b: np.abs(a - b).max(), expected, params)
    assert gap["embeddings"]["word"]["embedding"] > 1e-3  # it isn't the last step's


@pytest.mark.slow
def test_mean_of_checkpoints(averaged, capsys):
    steps = [params_of(averaged, step, average=True) for step in (6, 7, 8)]
    mean = jax.tree.map(lambda *leaves: np.mean(np.float64(leaves), axis=0).astype(np.float32), *steps)
    for name in ("last3", "6,7,8"):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-9),
            load_run(f"{averaged}@{name}").params, mean,
        )
    assert_same_arrays(load_run(f"{averaged}@7").params, steps[1])
    assert load_run(f"{averaged}@6,7").step == 7
    said = refused(capsys, "export", f"{averaged}@1,99", "out")
    assert "no checkpoint of step 99; it keeps those of steps 1, 2" in said
    assert "has no 12 checkpoints; it keeps" in refused(capsys, "fill-mask", f"{averaged}@last12", "a [MASK]")


def test_a_mean_holds_its_sum_and_one_checkpoint():
    """8 and 4 bytes a parameter: nothing but the sum is alive when a checkpoint is read."""
    gc.collect()
    size, others, held = 1 << 20, sum(array.nbytes for array in jax.live_arrays()), []

    def restore(step):
        held.append(sum(array.nbytes for array in jax.live_arrays()) - others)
        return {"kernel": jnp.full(size, step, jnp.float32)}, step

    mean, step = _mean(restore, (1, 2, 6))
    assert step == 6 and mean["kernel"].dtype == jnp.float32 and np.all(np.asarray(mean["kernel"]) == 3)
    assert held[0] == 0 and all(8 * size <= each < 8.1 * size for each in held[1:])


@pytest.mark.slow
def test_decay_from_a_checkpoint(preset, averaged, tmp_path, capsys):
    common = ["pretrain", str(preset), *STABLE, "--optimizer.average", "0.4"]
    branch, whole = tmp_path / "branch", tmp_path / "whole"
    start = [*common, "--init-from", f"{averaged}@4", "--train.decay-steps", "3", "--run-dir", str(branch)]
    assert "leave out --data.vocab-size" in refused(capsys, *start, "--data.vocab-size", "90")
    assert stopped_after(6, start) != 0
    said = capsys.readouterr()
    assert f"Going on from step 4 of {averaged}@4" in said.out and "changes" not in said.err
    assert main(["pretrain", str(branch)]) == 0
    share = ["--optimizer.decay-share", repr(3 / 7), "--train.steps", "7"]
    assert main([*common, *share, "--run-dir", str(whole)]) == 0
    assert metadata(branch, 7)["checksums"] == metadata(whole, 7)["checksums"]
    assert metrics(branch)[-1]["learning_rate"] == pytest.approx(1e-2 / 3)

    flags = ["--train.decay-steps", "3", "--run-dir", str(tmp_path / "other")]
    assert "give --init-from RUN or RUN@STEP" in refused(capsys, *common, *flags)
    assert "give --init-from RUN" in refused(capsys, *common, *flags, "--init-from", f"{averaged}@last2")
    flags += ["--init-from", str(averaged)]
    for name, value in (("name", "lion"), ("average", "0"), ("learning-rate", "0.5")):
        assert f"was trained with optimizer.{name.replace('-', '_')} " in refused(
            capsys, *common, *flags, f"--optimizer.{name}", value)
    place = common.index("--optimizer.decay-share")  # which that run has another one of
    assert "is 0.00333333 at step 6 and not at its peak" in refused(
        capsys, *common[:place], *common[place + 2 :], *flags[:-1], f"{branch}@6")
    # The same command after the other run has gone on.
    source = shutil.copytree(averaged, tmp_path / "source")
    start = [*common, "--init-from", str(source), "--train.decay-steps", "2", "--run-dir", str(tmp_path / "later")]
    assert main(start) == 0 and main(["pretrain", str(source), "--train.steps", "9"]) == 0
    assert "decays from step 8 to 10, and now it would end at 11;" in refused(capsys, *start)


@pytest.mark.parametrize(("flags", "said"), [
    ([], ""), (["--train.batch-size", "4", "--train.seed", "1"], "train.batch_size: 8 -> 4; train.seed: 0 -> 1;"),
    (["--data.source", "python-docs"], "-> python-docs;"),
])
def test_a_decay_with_other_values_is_told(preset, averaged, flags, said, capsys):
    common = [*STABLE, "--optimizer.average", "0.4", "--train.decay-steps", "3"]
    resolve(str(preset), [*common, *flags], init_from=f"{averaged}@4")
    assert said in (told := capsys.readouterr().err) and ("the decay of" in told) == bool(said)
    for name, value in (("optimizer.schedule", "cosine"), ("optimizer.decay-share", "0.5"), ("train.steps", "50")):
        with pytest.raises(UserError, match=f"leave out --{name}"):
            resolve(str(preset), [*common, f"--{name}", value], init_from=f"{averaged}@4")


def test_a_decay_of_inverse_sqrt_begins_at_its_peak(preset, averaged, tmp_path):
    """That schedule holds the peak while others warm up."""
    source = shutil.copytree(averaged, tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    config["optimizer"] |= {"schedule": "inverse-sqrt", "warmup_steps": 100}
    (source / "config.json").write_text(json.dumps(config))
    flags = ["--optimizer.average", "0.4", "--optimizer.warmup-steps", "100", "--train.decay-steps", "4"]
    found = resolve(str(preset), flags, init_from=f"{source}@4").experiment
    rates = [float(make_schedule(found.optimizer, found.train.steps)(step)) for step in (4, 6, 8)]
    np.testing.assert_allclose(rates, [found.optimizer.learning_rate * left for left in (1, 0.5, 0)], rtol=1e-5)


def test_the_last_checkpoints_are_those_of_training():
    """That of step 0 has an initial head."""
    assert folder._find_named_steps(epath.Path("run"), [0, 1000, 2000], "last2") == (1000, 2000)
    with pytest.raises(UserError, match=r"has no 3 checkpoints; it keeps those of steps 1,000, 2,000 \("):
        folder._find_named_steps(epath.Path("run"), [0, 1000, 2000], "last3")
    assert folder._find_named_steps(epath.Path("run"), [0, 1000, 2000], "0,1000") == (0, 1000)
