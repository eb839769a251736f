"""launch/quickstart.sh with a `jaxlm` that only leaves the traces of its commands: what is exported, and when; and the
environment of launch/test.sh."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# `pretrain` gets to step $REACHED and exits with $CODE, `export` notes the step that it has exported.
JAXLM = """#!/usr/bin/env bash
case "$1" in
pretrain)
    mkdir -p "runs/quickstart/checkpoints/$REACHED"
    exit "$CODE" ;;
export) mkdir "$3" && ls "$2/checkpoints" | sort -n | tail -1 >"$3/step" ;;
esac
"""


@pytest.fixture
def quickstart(tmp_path):
    shutil.copytree(Path(__file__).parents[1] / "launch", tmp_path / "launch")
    binaries = tmp_path / ".venv" / "bin"
    binaries.mkdir(parents=True)
    (tmp_path / ".venv" / "installed-base").touch()
    (binaries / "python").symlink_to(sys.executable)
    (binaries / "jaxlm").write_text(JAXLM)
    (binaries / "jaxlm").chmod(0o755)

    def run(reached: int, code: int = 0) -> tuple[int, str]:
        done = subprocess.run(
            ["bash", str(tmp_path / "launch" / "quickstart.sh")], capture_output=True, text=True,
            env=os.environ | {"REACHED": str(reached), "CODE": str(code)},
        )
        return done.returncode, done.stdout + done.stderr

    return run


def test_only_finished_runs_are_exported_each_time_they_have_grown(quickstart, tmp_path):
    exported = tmp_path / "runs" / "quickstart-transformers"
    for stopped in (130, 143):
        code, said = quickstart(90, stopped)
        assert code == stopped and "run the same command again" in said and not exported.exists()
    for step, learnt in ((400, True), (400, False), (2000, True)):
        code, said = quickstart(step)
        assert code == 0 and str(exported.name) in said, said
        assert ("What it has learnt" in said) == learnt
        assert (exported / "step").read_text() == f"{step}\n"


def test_a_folder_of_others_is_left_alone(quickstart, tmp_path):
    other = tmp_path / "runs" / "quickstart-transformers" / "notes.txt"
    other.parent.mkdir(parents=True)
    other.write_text("mine")
    code, said = quickstart(400)
    assert code == 2 and "was not made by this script" in said and other.read_text() == "mine"


# Stands for the machine's Python: it makes an environment whose own Python has pip. It never installs anything.
PYTHON = """#!/usr/bin/env bash
[ "$1" = -c ] && echo 3.12
if [ "$1 $2" = "-m venv" ]; then
    [ "$3" = --clear ] && rm -rf "$4"
    mkdir -p "$4/bin"
    printf '#!/usr/bin/env bash\\nexit 0\\n' >"$4/bin/python"
    cp "$4/bin/python" "$4/bin/ruff"
    chmod +x "$4/bin/"*
fi
"""


@pytest.mark.parametrize("pip", [False, True])
def test_the_tests_make_an_environment_of_their_own_and_a_half_made_one_anew(tmp_path, pip):
    shutil.copytree(Path(__file__).parents[1] / "launch", tmp_path / "launch")
    folder = tmp_path / ".venv-test-3.12"
    old, machine = folder / "bin" / "python", tmp_path / "machine" / "python3"
    broken = f"#!/usr/bin/env bash\nexit {0 if pip else 1}\n"
    for path, text in ((old, broken), (old.with_name("ruff"), broken), (machine, PYTHON)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    (folder / "rest").touch()
    done = subprocess.run(
        ["bash", str(tmp_path / "launch" / "test.sh")], capture_output=True, text=True,
        env=os.environ | {"PATH": f"{machine.parent}:{os.environ['PATH']}", "PYTHON": "python3"},
    )
    assert done.returncode == 0, done.stderr
    assert ("Making a virtual environment" in done.stdout) == (not pip)
    assert (folder / "rest").exists() == pip
    assert (folder / "installed-test,tpu").exists() and not (tmp_path / ".venv").exists()
