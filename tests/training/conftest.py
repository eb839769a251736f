"""One text, one preset and one finished run for all tests that only read or copy them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.training.support import write_preset


@pytest.fixture(scope="session")
def preset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_preset(tmp_path_factory.mktemp("preset"))


@pytest.fixture(scope="session")
def _finished(preset: Path) -> Path:
    from jaxlm.cli import main

    run = preset.parent / "run"
    assert main(["pretrain", str(preset), "--run-dir", str(run), "--train.eval-every", "4"]) == 0
    return run


@pytest.fixture
def finished(_finished: Path, tmp_path: Path) -> Path:
    """A run of 12 steps with checkpoints and evaluations at 4, 8 and 12, to do with as one likes."""
    return Path(shutil.copytree(_finished, tmp_path / "run"))
