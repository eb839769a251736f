"""The files in launch/ that platforms read: shell scripts, the Slurm script, the SkyPilot task, the Dockerfile."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxlm.errors import Stopped
from tests.launch.test_tpu_pod import LAUNCH


def test_shell_scripts_pass_shellcheck():
    shellcheck = shutil.which("shellcheck", path=Path(sys.executable).parent) or shutil.which("shellcheck")
    if not shellcheck:
        pytest.skip("shellcheck is not installed")
    root = LAUNCH.parent
    scripts = sorted([*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch"), *root.glob(".ci/run")])
    assert len(scripts) >= 5
    done = subprocess.run([shellcheck, "--external-sources", *scripts], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["worker.sh", "gke.yaml", "slurm.sbatch", "sky.yaml"])
def test_what_starts_several_processes_says_so(name):
    text = (LAUNCH / name).read_text()
    assert "JAXLM_CLUSTER=1" in text or '{name: JAXLM_CLUSTER, value: "1"}' in text


@pytest.mark.parametrize("name", ["gke.yaml", "slurm.sbatch", "sky.yaml"])
def test_a_run_that_was_stopped_and_saved_is_started_again(name):
    codes = [str(Stopped(number).exit_code) for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)]
    text = (LAUNCH / name).read_text()
    assert f"[{', '.join(codes)}]" in text or f"{' | '.join(codes)})" in text


def test_a_task_of_slurm_sees_all_gpus_of_its_node():
    """jax gives each task the one with its local number, which would not be there among one."""
    lines = (LAUNCH / "slurm.sbatch").read_text().splitlines()
    options = dict(line[10:].split("=") for line in lines if line.startswith("#SBATCH --") and "=" in line)
    assert options["gpus-per-node"] == options["ntasks-per-node"] and "gpus-per-task" not in options


def test_skypilot_reads_its_task():
    sky, yaml = pytest.importorskip("sky"), pytest.importorskip("yaml")
    config = yaml.safe_load((LAUNCH / "sky.yaml").read_text())
    given = [("BUCKET", "gs://bucket"), ("COMMAND", "pretrain configs/bert_large.py")]
    task = sky.Task.from_yaml_config(config, env_overrides=given)
    (resources,) = task.resources
    assert resources.use_spot and resources.accelerators == {"tpu-v5litepod-16": 1}
    assert resources.job_recovery["recover_on_exit_codes"] == [129, 130, 143]
    assert list(task.storage_mounts) == ["/shared"]


def test_the_image_is_made_from_what_is_in_the_repository():
    lines = (LAUNCH / "Dockerfile").read_text().splitlines()
    steps = [line for line in lines if line and not line.startswith("#")]
    assert [step.split()[0] for step in steps] == ["FROM", "ARG", "WORKDIR", "COPY", "RUN"]
