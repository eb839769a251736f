"""Damaged checkpoints: the restored state is right, or that of the checkpoint before."""

from __future__ import annotations

import gc
import json
import os
import resource
import shutil
import sys
import threading
import time
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.errors import UserError
from jaxlm.parallel.checksums import checksums
from jaxlm.parallel.mesh import MeshConfig, make_mesh
from jaxlm.parallel.rules import shardings
from jaxlm.training import checkpoints as module
from jaxlm.training.checkpoints import Checkpoints
from jaxlm.training.program import TrainState
from tests.training.support import assert_same_arrays


def state_of(step: int) -> TrainState:
    key = jax.random.key(step)
    kernel = jax.random.normal(key, (8, 6))
    params = {"dense": {"kernel": kernel, "bias": kernel[0]}}
    return TrainState(jnp.int32(step), params, {"mu": kernel * 2}, memory=None)  # as of a stream without memory


MESH = make_mesh(MeshConfig(), jax.devices()[:1])
SHAPES = jax.eval_shape(lambda: state_of(0))
LAYOUT = shardings(SHAPES, MESH)


def save(folder: Path, *steps: int) -> None:
    checkpoints = Checkpoints(folder)
    for step in steps:
        checkpoints.save(jax.device_put(state_of(step), LAYOUT), step, {"data": "text"})
    checkpoints.wait()
    checkpoints.close()


def restore(folder: Path) -> tuple[TrainState | None, list[str]]:
    said: list[str] = []
    checkpoints = Checkpoints(folder)
    try:
        restored = checkpoints.restore(SHAPES, LAYOUT, said.append)
        return (restored[0] if restored else None), said
    finally:
        checkpoints.close()


def test_a_disk_that_is_full_for_another_process_ends_all(tmp_path, monkeypatch):
    """Otherwise this one would wait in Orbax's barrier for the one that has found no space."""
    monkeypatch.setattr("jaxlm.training.checkpoints.is_true_of_any", lambda here: not here)
    with pytest.raises(UserError, match="no space is left"):
        save(tmp_path, 1)


def test_a_save_leaves_the_steps_of_a_stop_to_the_loop(tmp_path, monkeypatch):
    """jax lets the processes meet at a step after those that it has been asked for, by any thread."""
    asked = []
    monkeypatch.setattr("jax.experimental.multihost_utils.reached_preemption_sync_point", asked.append)
    save(tmp_path, 1, 2)
    assert not asked


@pytest.mark.parametrize("keep", [1, 3])
@pytest.mark.parametrize("lasts", [False, True])
def test_a_save_that_failed_is_told_and_the_next_one_tried(tmp_path, capsys, monkeypatch, keep, lasts):
    """A cause that has passed costs one checkpoint; one that lasts ends the run with the second."""
    folder, limits = tmp_path / "checkpoints", resource.getrlimit(resource.RLIMIT_FSIZE)
    checkpoints = Checkpoints(folder, keep=keep)
    large = TrainState(jnp.int32(1), {"kernel": jax.random.normal(jax.random.key(0), (500, 1000))}, ())

    def wait_for_threads() -> None:
        for thread in threading.enumerate():
            if thread.name.startswith("save_finalize"):
                threading.Thread.join(thread)  # Orbax's own raises

    checkpoints.save(large, 1, {})
    checkpoints.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # bytes of a file
    try:
        checkpoints.save(large, 2, {})
        wait_for_threads()
        if lasts and keep == 1:
            with pytest.raises(UserError, match="cannot write a checkpoint"):
                checkpoints.save(large, 3, {})
        elif lasts:  # as a disk or a bucket that is away
            monkeypatch.setattr(checkpoints.manager, "reload", lambda: os.listdir(folder / "none"))
            with pytest.raises(UserError, match="cannot write a checkpoint"):
                checkpoints.save(large, 3, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    if not lasts:
        checkpoints.save(large, 3, {})
        checkpoints.wait()
    assert "The checkpoint before that of step 3 was not written (" in (said := capsys.readouterr().err)
    # File too large; of the files that fail at once, the first one's error is told, and a long one without its middle.
    assert "os_error_code='27'" in said or "OUT_OF_RANGE" in said
    left = [1] if lasts else [1, 3][-keep:]
    assert sorted(int(path.name) for path in folder.glob("[0-9]")) == left
    assert lasts or checkpoints.steps() == left
    checkpoints.close()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    save(folder, 1, 2)
    return folder


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def delete(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    """Flip one bit in every 16th byte."""
    content = np.frombuffer(path.read_bytes(), np.uint8).copy()
    content[len(content) // 3 :: 16] ^= 4
    path.write_bytes(content.tobytes())


@pytest.mark.parametrize("damage", [delete, truncate, flip])
def test_any_damaged_file(saved, tmp_path, damage):
    files = sorted(path.relative_to(saved) for path in (saved / "2").rglob("*") if path.is_file())
    assert len(files) > 5
    fallen_back = 0
    for number, name in enumerate(files):
        folder = tmp_path / str(number) / "checkpoints"
        shutil.copytree(saved, folder)
        damage(folder / name)
        before = files_of(folder)
        state, said = restore(folder)
        step = int(state.step)
        assert_same_arrays(state, state_of(step))
        if said:
            fallen_back += 1
            assert step == 1 and len(said) == 1
            assert said[0].startswith("The checkpoint of step 2 cannot be read (")
            assert said[0].endswith("; trying the previous one.")
        assert files_of(folder) == before
    assert fallen_back >= 2


def test_without_an_average_that_can_be_read_the_imported_parameters_are(tmp_path):
    """The checkpoint of step 0 has no average. The cause is TensorStore's, not Orbax's sentence around it."""
    params = {"kernel": jax.random.normal(jax.random.key(0), (64, 64))}
    checkpoints, said = Checkpoints(tmp_path / "checkpoints"), []
    checkpoints.save_params(params, {})
    checkpoints.save(TrainState(jnp.int32(2), params, {}, average=params), 2, {})
    checkpoints.wait()
    for path in files_of(tmp_path / "checkpoints" / "2" / "state" / "ocdbt.process_0" / "d"):
        flip(path)
    found, step = checkpoints.restore_params(jax.eval_shape(lambda: params), report=said.append, average=True)
    checkpoints.close()
    assert step == 0 and "<bound method" not in said[0]
    assert "Error reading" in said[0] or "does not match its checksum" in said[0], "by the file that is read first"
    assert_same_arrays(found, params)


def test_a_flipped_number_is_seen_by_its_checksum(saved, tmp_path, monkeypatch):
    """Orbax restores flipped numbers without an error, so the test flips one between restoring and verifying.

    The damaged state is gone when the next one is read, which may need its memory.
    """
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved, folder)
    checkpoints = Checkpoints(folder)
    read, damaged = checkpoints._arrays, []

    def garbled(step, item):
        for _ in range(500):  # Orbax's threads may let go a moment later, on a busy machine
            gc.collect()
            if all(array() is None for array in damaged):
                break
            time.sleep(0.01)
        assert [array for array in damaged if array() is not None] == []
        restored = read(step, item)
        if step == 2:
            kernel = restored["params"]["dense"]["kernel"]
            restored["params"]["dense"]["kernel"] = kernel.at[3, 1].multiply(1 + 1e-7)
        damaged.extend(map(weakref.ref, jax.tree.leaves(restored)))
        return restored

    # Where a coroutine of an earlier test is collected with an error, pytest keeps its frames, thereby `garbled`'s.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    monkeypatch.setattr(checkpoints, "_arrays", garbled)
    said: list[str] = []
    state, _ = checkpoints.restore(SHAPES, LAYOUT, said.append)
    checkpoints.close()
    assert int(state.step) == 1
    assert "params/dense/kernel" in said[0] and "checksum" in said[0]


def test_changed_metadata_is_seen_by_its_digest(saved, tmp_path):
    """The metadata is valid JSON with another value."""
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved, folder)
    path = folder / "2" / "metadata" / "metadata"
    metadata = json.loads(path.read_text())
    path.write_text(json.dumps(metadata | {"data": "other"}))
    state, said = restore(folder)
    assert int(state.step) == 1
    assert "step 2 cannot be read (its metadata does not match its digest)" in said[0]


def test_when_none_can_be_read_nothing_is_touched(saved, tmp_path):
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved, folder)
    for step in (1, 2):
        truncate(folder / str(step) / "metadata" / "metadata")
    before = files_of(folder)
    with pytest.raises(UserError, match=r"no checkpoint of step 2, 1 in .* can be read \(.*\); .* to start over\."):
        restore(folder)
    assert files_of(folder) == before


def test_a_step_that_could_not_be_read_is_saved_again(tmp_path):
    """Earlier steps are saved too, and an unreadable one counts as older than them."""
    folder = tmp_path / "checkpoints"
    save(folder, 1, 4)
    losses = {1: 1.0, 2: 2.0, 4: 4.0}
    for keep, kept in ((1, [1, 2]), (3, [1, 2, 4])):
        shutil.copytree(folder, tmp_path / str(keep) / "checkpoints")
        truncate(tmp_path / str(keep) / "checkpoints" / "4" / "metadata" / "metadata")
        checkpoints = Checkpoints(tmp_path / str(keep) / "checkpoints", keep)
        said: list[str] = []
        assert int(checkpoints.restore(SHAPES, LAYOUT, said.append)[0].step) == 1 and len(said) == 1
        checkpoints.save(jax.device_put(state_of(2), LAYOUT), 2, {}, losses)
        checkpoints.wait()
        assert checkpoints.steps() == kept
        checkpoints.save(jax.device_put(state_of(4), LAYOUT), 4, {}, losses)
        checkpoints.wait()
        checkpoints.close()
        state, said = restore(tmp_path / str(keep) / "checkpoints")
        assert not said
        assert_same_arrays(state, state_of(4))


def test_a_half_written_checkpoint_is_no_checkpoint(saved, tmp_path):
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved, folder)
    (folder / "3.orbax-checkpoint-tmp").mkdir()
    (folder / "3.orbax-checkpoint-tmp" / "state").write_text("half")
    state, said = restore(folder)
    assert int(state.step) == 2 and not said


def test_parameters_alone_fall_back_too(saved, tmp_path, capsys):
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved, folder)
    truncate(folder / "2" / "metadata" / "metadata")
    checkpoints = Checkpoints(folder, read_only=True)
    params, step = checkpoints.restore_params(SHAPES.params)
    assert step == 1
    assert_same_arrays(params, state_of(1).params)
    said = capsys.readouterr()
    assert not said.out and said.err.count("\n") == 1
    assert "step 2 cannot be read" in said.err
    lines: list[str] = []
    checkpoints.restore_params(SHAPES.params, report=lines.append)
    checkpoints.close()
    assert [f"jaxlm: {line}" for line in lines] == [said.err.strip()] and not capsys.readouterr().err
    assert (folder / "2").is_dir()


def test_all_processes_read_the_step_that_the_first_one_lists(saved, monkeypatch):
    """A network filesystem may show the newest checkpoint to some of them only, which would mix the shards of two."""
    monkeypatch.setattr(module, "from_main", lambda steps: [1])
    state, said = restore(saved)
    assert int(state.step) == 1 and not said
    opened = Checkpoints(saved, read_only=True)
    assert opened.restore_params(SHAPES.params)[1] == opened.restore_params(SHAPES.params, step=2)[1] == 1
    opened.close()


def test_the_best_is_kept_besides_the_newest(tmp_path):
    losses: dict[int, float] = {}
    for steps in (((1, 3.0), (2, 1.0), (3, None)), ((4, 2.0), (5, 2.5), (6, None))):  # resumed after step 3
        checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
        for step, loss in steps:
            losses |= {} if loss is None else {step: loss}
            checkpoints.save(state_of(step), step, {}, losses)
        checkpoints.wait()
        checkpoints.close()
    assert checkpoints.steps() == [2, 5, 6]


def test_a_state_that_is_not_finite_is_never_saved(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    bad = state_of(1)._replace(opt_state={"mu": jnp.full((8, 6), jnp.inf)})
    with pytest.raises(FloatingPointError):
        checkpoints.save(bad, 1, {})
    checkpoints.wait()
    assert checkpoints.steps() == []
    checkpoints.close()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, jnp.bool_, jnp.int8])
def test_checksums_see_every_change(dtype):
    array = (jnp.arange(30) % 2).reshape(2, 3, 5).astype(dtype)
    numbers, finite = checksums({"a": array, "b": array.T})
    assert finite and numbers["a"] != numbers["b"]
    seen = {numbers["a"]}
    for index in np.ndindex(2, 3, 5):
        changed = array.at[index].set((1 - array[index].astype(jnp.int32)).astype(dtype))
        seen.add(checksums({"a": changed, "b": array})[0]["a"])
    assert len(seen) == 31
    assert not checksums({"a": jnp.array([1.0, jnp.nan])})[1]


def test_an_import_is_no_way_back_from_damage(tmp_path):
    """Falling back to step 0 would silently discard the training since."""
    folder = tmp_path / "checkpoints"
    checkpoints = Checkpoints(folder)
    checkpoints.save_params(state_of(0).params, {})
    checkpoints.wait()
    checkpoints.close()
    assert restore(folder) == (None, [])
    save(folder, 1)
    truncate(folder / "1" / "metadata" / "metadata")
    before = sorted(folder.rglob("*"))
    with pytest.raises(UserError, match=r"no checkpoint of step 1 in .* can be read"):
        restore(folder)
    assert sorted(folder.rglob("*")) == before
