"""Trackers without a network: Weights & Biases offline, trackio in a local database. Skipped without the packages."""

from __future__ import annotations

import contextlib
import errno
import json
import sqlite3
import sys
import threading
import types

import pytest

from jaxlm.cli import main
from jaxlm.training.metrics import read_metrics
from jaxlm.training.trackers import TensorBoard
from tests.params import first_fast
from tests.training.support import stopped_after


def in_two_starts(preset, run, tracker):
    """Train to step 12, stopped after step 5."""
    arguments = ["pretrain", str(preset), "--run-dir", str(run), "--train.tracker", tracker]
    assert stopped_after(5, arguments) == 143
    name = json.loads((run / "tracker.json").read_text())
    assert main(arguments) == 0
    assert json.loads((run / "tracker.json").read_text()) == name
    return name["name"]


class Package(types.SimpleNamespace):
    """Stand-in of a tracker's package, which notes its calls; `error` is raised by `log` after step 3."""

    __name__, __spec__ = "wandb", object()

    def __init__(self, error=None):
        super().__init__(calls=[], error=error)

    def init(self, **options):
        self.calls.append(("init", options))

    def log(self, values, step):
        self.calls.append(("log", step))
        if self.error and step > 3:
            raise self.error

    def finish(self):
        self.calls.append(("finish", None))


@pytest.mark.parametrize("name", first_fast(["wandb", "trackio"]))
def test_both_starts_are_one_run_there(name, preset, tmp_path, monkeypatch):
    """Weights & Biases resumes by id, which its documentation asks to be unique in a project; trackio by name."""
    monkeypatch.setitem(sys.modules, name, package := Package())
    run = in_two_starts(preset, tmp_path / "run", name)
    (_, first), (_, second) = (call for call in package.calls if call[0] == "init")
    for options in (first, second):
        config = options.pop("config")
        assert options == dict(project="jaxlm", name=run, resume="allow") | ({"id": run} if name == "wandb" else {})
        assert config["train.checkpoint_every"] == 4 and config["objective.model.hidden_size"] == 16
        assert not [value for value in config.values() if isinstance(value, dict)]
    assert run.startswith("run-")
    steps = {name: [step for kind, step in package.calls if kind == name] for name in ("log", "finish")}
    assert steps == {"log": [1, 3, 6, 9, 12], "finish": [None, None]}
    starts = [place for place, (kind, _) in enumerate(package.calls) if kind == "init"]
    assert starts[0] == 0 and package.calls[starts[1] - 1][0] == package.calls[-1][0] == "finish"


def test_wandb_offline(preset, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    name = in_two_starts(preset, tmp_path / "run", "wandb")
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2 and all(file.name == f"run-{name}.wandb" for file in files)
    first, second = (file.read_bytes() for file in files)
    assert b"grad_norm" in first and b"grad_norm" in second and b"train.checkpoint_every" in first
    secret = b"0123456789" * 4
    assert not [path for path in (tmp_path / "run").rglob("*") if path.is_file() and secret in path.read_bytes()]


def test_trackio_on_this_machine(preset, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))  # read when it is imported
    pytest.importorskip("trackio")
    name = in_two_starts(preset, tmp_path / "run", "trackio")
    with contextlib.closing(sqlite3.connect(tmp_path / "jaxlm.db")) as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics").fetchall()
        (config,) = database.execute("SELECT config FROM configs").fetchone()
    assert [row[:2] for row in rows] == [(name, step) for step in (1, 3, 6, 9, 12)]
    assert all({"loss", "grad_norm"} <= set(json.loads(row[2])) for row in rows)
    assert json.loads(config)["train.checkpoint_every"] == 4


def test_tensorboard_goes_on_after_a_full_disk(tmp_path, monkeypatch):
    """An error would end its thread, after which a full queue of ten values would block training."""
    def write(data):
        raise OSError(errno.ENOSPC, "No space left on device")

    tracker = TensorBoard(tmp_path, 0)
    file = tracker._events.file_writer.event_writer._ev_writer._py_recordio_writer
    monkeypatch.setattr(file, "write", write)
    thread = threading.Thread(target=lambda: [tracker.log(step, {"loss": 1.0}) for step in range(50)], daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    tracker.close()


@pytest.mark.slow
def test_a_tracker_that_fails_does_not_end_the_run(preset, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", package := Package(ConnectionError("no route to host")))
    assert main(["pretrain", str(preset), "--run-dir", str(tmp_path / "run"), "--train.tracker", "wandb"]) == 0
    assert [step for kind, step in package.calls if kind != "init"] == [1, 3, 6]
    assert capsys.readouterr().err.count("wandb gets no further metrics (no route to host)") == 1
    assert read_metrics(tmp_path / "run")[-1]["step"] == 12


def test_a_missing_package_is_told_before_anything_else(preset, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("jaxlm.training.trackers.importlib.util.find_spec", lambda name: None)
    assert main(["pretrain", str(preset), "--run-dir", str(tmp_path / "run"), "--train.tracker", "wandb"]) == 2
    assert "wandb needs a package; in the clone, run `pip install -e '.[wandb]'`" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
