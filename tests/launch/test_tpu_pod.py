"""launch/tpu_pod.py in a cloud of folders: fake_gcloud.py is gcloud, shell scripts are jaxlm and the VMs' Python."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "launch"
FAKE = Path(__file__).with_name("fake_gcloud.py")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the workers are Linux, with flock and GNU tail")

LOG = 'ssh sed "s/^/$(hostname): /" jaxlm-run/log'

# Trains until the cloud has nothing more in store for it, and writes down each step, on worker 0 of slice 0.
JAXLM = """#!/usr/bin/env bash
echo "jaxlm $*, one of several: $JAXLM_CLUSTER"
[ -f "$2" ] || { echo "jaxlm: there is no $2." >&2; exit 2; }
mkdir -p "$4"
trap 'exit 143' TERM
step=$(cat "$4/steps" 2>/dev/null | wc -l)
echo "resumed from $step"
case "$HOME" in */0-0) echo "$step" >>"$4/starts" ;; esac
while [ ! -f "$CLOUD/end" ] && [ "$step" -lt 1000 ]; do
    step=$((step + 1))
    case "$HOME" in */0-0) echo "$step" >>"$4/steps" ;; esac
    echo "step $step"
    sleep 0.05
done
echo "finished"
"""

# The VM's Python, with a uv that makes an environment of nothing but jaxlm.
PYTHON = """#!/usr/bin/env bash
if [ "$*" = "-m uv venv --quiet --clear --python 3.12 .venv" ]; then
    mkdir -p .venv/bin
    cp "$CLOUD/jaxlm" .venv/bin/jaxlm
fi
"""


def write_script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path):
    """A repository with one commit: launch/ and a preset."""
    folder = tmp_path / "checkout"
    shutil.copytree(LAUNCH, folder / "launch", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "configs").mkdir()
    (folder / "configs" / "tiny.py").touch()
    (folder / ".gitignore").write_text("/dist/\n")
    git = ["git", "-c", "user.name=n", "-c", "user.email=e"]
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message=all"]):
        subprocess.run([*git, *words], cwd=folder, check=True)
    return folder


@pytest.fixture
def pod(checkout, tmp_path):
    """Function that runs tpu_pod.py in a cloud where `requests` and `follows` happen (see fake_gcloud.py)."""
    cloud, bin_folder = tmp_path / "cloud", tmp_path / "bin"
    write_script(cloud / "jaxlm", JAXLM)
    write_script(bin_folder / "python3", PYTHON)
    write_script(bin_folder / "gcloud", f'#!/bin/sh\nexec {sys.executable} -S {FAKE} "$@"\n')
    (cloud / "state.json").write_text('{"name": "", "request": null}')

    def run(*words: str, requests: tuple = (), follows: tuple = ()) -> tuple[int, str]:
        state = json.loads((cloud / "state.json").read_text())
        (cloud / "state.json").write_text(json.dumps(state | {"requests": requests, "follows": follows}))
        done = subprocess.run(
            [sys.executable, checkout / "launch" / "tpu_pod.py", *words], cwd=tmp_path, text=True, timeout=120,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=os.environ | {"PATH": f"{bin_folder}:{os.environ['PATH']}", "CLOUD": str(cloud)},
        )
        return done.returncode, done.stdout

    return run


SLICE = ["pod", "--zone=z", "--accelerator-type=v5litepod-8", "--spot", "--poll=0.01", "--price-per-chip-hour=1.2"]


def calls(tmp_path: Path) -> list[str]:
    return [line.strip() for line in (tmp_path / "cloud" / "calls").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_outlives_its_connection_its_processes_and_its_slices(pod, checkout, tmp_path):
    (checkout / "configs" / "tiny.py").write_text("# changed")
    code, said = pod(
        "run", *SLICE, "--", "pretrain", "configs/tiny.py", "--run-dir", str(tmp_path / "a run"),
        requests=("granted", "granted"), follows=("lost", "killed", "preempted"),
    )
    assert code == 0, said
    assert "without the uncommitted changes:  M configs/tiny.py." in said
    assert "an hour of pod costs 8 chips x 1.2 = 9.60." in said
    steps = ["the run ended with code none", "the slices were preempted", "finished", "the run is finished"]
    assert sorted(steps, key=said.index) == steps
    start = f"start pretrain configs/tiny.py --run-dir '{tmp_path / 'a run'}'"
    attempt = ["scp", "ssh install", f"ssh {start}", "ssh follow", "ssh status"]
    once = ["create", *attempt]
    assert calls(tmp_path) == [*once, *attempt, *attempt, "delete", *once, LOG, "delete"]
    starts = [int(step) for step in (tmp_path / "a run" / "starts").read_text().split()]
    assert len(starts) == 3 and starts == sorted(set(starts))  # a connection that is lost starts nothing
    for worker in ("0", "1"):
        lines = (tmp_path / "pod-logs" / "slice-0.log").read_text().splitlines()
        log = lines[len(lines) // 2 * int(worker) :][: len(lines) // 2]  # of two workers on one host here
        host = f"{socket.gethostname()}: "
        assert log[0].endswith("one of several: 1") and log[-1] == f"{host}finished"


@pytest.mark.slow
@pytest.mark.parametrize(("fate", "reason", "made"), [
    ("refused", "the slices could not be requested; gcloud says why above", ["create"]),
    ("failed", "the request failed and is deleted: no more capacity in the zone", ["create", "delete"]),
])
def test_slices_that_cannot_be_had(pod, tmp_path, fate, reason, made):
    code, said = pod("run", *SLICE, "--", "pretrain", "configs/tiny.py", requests=(fate,))
    assert code == 1 and f"tpu_pod: {reason}." in said and calls(tmp_path) == made


def test_a_mistake_in_the_command_keeps_the_slices(pod, tmp_path):
    code, said = pod("run", *SLICE, "--", "pretrain", "configs/none.py", requests=("granted",))
    assert code == 1 and "jaxlm: there is no configs/none.py." in said and "The slices are kept, and cost" in said
    assert calls(tmp_path)[-1] == "ssh status"
    code, said = pod("delete", "pod", "--zone=z", "--collect=misspelt")
    assert code == 1 and "misspelt could not be copied; the slices are kept" in said and "delete" not in calls(tmp_path)
    code, said = pod("delete", "pod", "--zone=z")
    assert code == 0 and calls(tmp_path)[-3:] == ["ssh stop", LOG, "delete"]


@pytest.mark.slow
def test_slices_that_someone_deletes_are_not_requested_again(pod, tmp_path):
    command = ["pretrain", "configs/tiny.py", "--run-dir", str(tmp_path / "run")]
    code, said = pod("run", *SLICE, "--", *command, requests=("granted",), follows=("deleted",))
    assert code == 1 and "tpu_pod: pod was deleted by someone else." in said
    assert calls(tmp_path).count("create") == 1


@pytest.mark.slow
def test_slices_on_which_every_run_fails_are_given_up(pod, tmp_path):
    (tmp_path / "cloud" / "jaxlm").write_text("#!/bin/sh\necho broken; exit 1\n")
    code, said = pod("run", *SLICE, "--failures=2", "--", "pretrain", "configs/tiny.py", requests=("granted",))
    assert code == 1 and said.count("ended with code 1") == 2 and "gave up after 2 failures in a row" in said
    assert calls(tmp_path)[-1] == "delete" and calls(tmp_path).count("create") == 1


def test_a_dry_run_prints_commands_that_gcloud_takes_and_runs_none(pod, tmp_path):
    code, said = pod("run", *SLICE, "--slices=2", "--dry-run", "--", "pretrain", "configs/tiny.py", "--x", "a b*")
    assert code == 0 and not (tmp_path / "cloud" / "calls").exists() and not (tmp_path / "pod-logs").exists()
    commands = [shlex.split(line) for line in said.splitlines() if not line.startswith("tpu_pod: ")]
    assert commands[0][:2] == ["git", "archive"]
    verbs = [words[4] for words in commands[1:]]
    assert verbs == ["create", "list", "list", "scp", *["ssh"] * 7, "delete"]
    starts = [words for words in commands if any("worker.sh start" in word for word in words)]
    start = "--command=jaxlm/launch/worker.sh start pretrain configs/tiny.py --x 'a b*'"
    assert len(starts) == 2 and all(start in words for words in starts)
    assert {"--node-count=2", "--node-prefix=pod"} < set(commands[1])
