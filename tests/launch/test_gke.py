"""launch/gke.py: its manifests against the fields of a JobSet, and in a cluster of processes (fake_kubectl.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.test_tpu_pod import LAUNCH, write_script

yaml = pytest.importorskip("yaml")

# Fields that launch/gke.yaml may use, with their types, from the CustomResourceDefinition of JobSet 0.12 (which has all
# fields of a Job and a pod too). A name with a star is required; [x] is a list of x; {} takes any names with strings.
NAMED = {"name*": str}
POD = {
    "restartPolicy": str, "terminationGracePeriodSeconds": int, "serviceAccountName": str, "nodeSelector": {},
    "containers*": [{
        **NAMED, "image": str, "command": [str], "env": [{**NAMED, "value": str}], "resources": {"limits": {}},
        "volumeMounts": [{**NAMED, "mountPath*": str}],
    }],
    "volumes": [{**NAMED, "persistentVolumeClaim": {"claimName*": str}}],
}
POD_FAILURE_RULE = {
    "action*": str, "onExitCodes": {"containerName": str, "operator*": str, "values*": [int]},
    "onPodConditions": [{"type*": str, "status": str}],
}
JOB = {
    "parallelism": int, "completions": int, "backoffLimit": int, "podFailurePolicy": {"rules*": [POD_FAILURE_RULE]},
    "template*": {"spec": POD},
}
JOBSET = {
    "apiVersion": str, "kind": str, "metadata": {"name": str, "annotations": {}},
    "spec": {
        "failurePolicy": {
            "maxRestarts": int, "rules": [{"name*": str, "action*": str, "onJobFailureReasons": [str]}],
        },
        "replicatedJobs": [{"name*": str, "replicas": int, "template*": {"spec": JOB}}],
    },
}


def check(value: object, schema: object, where: str = "JobSet") -> None:
    """Raise an AssertionError that names the first place where `value` is not as `schema` says."""
    if isinstance(schema, type):
        assert type(value) is schema, f"{where} is {value!r}, not of type {schema.__name__}"
    elif isinstance(schema, list):
        assert isinstance(value, list), f"{where} is no list"
        for index, item in enumerate(value):
            check(item, schema[0], f"{where}[{index}]")
    else:
        assert isinstance(value, dict), f"{where} is no mapping"
        fields = {name.rstrip("*"): field for name, field in schema.items()}
        missing = {name[:-1] for name in schema if name.endswith("*")} - value.keys()
        assert not missing, f"{where} lacks {missing}"
        assert not fields or value.keys() <= fields.keys(), f"{where} has {value.keys() - fields.keys()}"
        for name, item in value.items():
            check(item, fields.get(name, type(item)), f"{where}.{name}")


def gke(*words: str, command: tuple[str, ...] = ("pretrain", "configs/x.py")) -> subprocess.CompletedProcess:
    nodes = ["run", "--image=i", "--accelerator=tpu-v6e-slice"]
    line = [sys.executable, LAUNCH / "gke.py", *nodes, *words, "--", *command]
    return subprocess.run(line, capture_output=True, text=True)


@pytest.mark.parametrize(("words", "slices", "hosts", "chips"), [
    (["--topology=2x2"], 1, 1, 4),
    (["--topology=1x1"], 1, 1, 1),
    (["--topology=2x4", "--chips-per-host=8"], 1, 1, 8),
    (["--topology=4x4x8", "--slices=3", "--spot", "--volume=claim:/shared", "--service-account=reader"], 3, 32, 4),
])
def test_manifests_are_jobsets(words, slices, hosts, chips):
    command = ("pretrain", "configs/x.py", "--data.source", "gs://b/*.txt", "--x", "a 'b' \"c\" $d: {e} # f\n-")
    jobset = yaml.safe_load(gke(*words, command=command).stdout)
    check(jobset, JOBSET)
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert (replicated["replicas"], job["parallelism"], job["completions"]) == (slices, hosts, hosts)
    assert container["resources"]["limits"] == {"google.com/tpu": chips}
    assert container["command"] == ["jaxlm", *command]
    assert job["podFailurePolicy"]["rules"][0]["onExitCodes"]["containerName"] == container["name"]
    assert [volume["name"] for volume in pod["volumes"]] == [mount["name"] for mount in container["volumeMounts"]]
    assert len(pod["volumes"]) == (slices == 3)
    environment = {each["name"]: each["value"] for each in container["env"]}
    assert environment["JAX_COMPILATION_CACHE_DIR"] == ("/shared/xla" if slices == 3 else "")
    assert pod["nodeSelector"].get("cloud.google.com/gke-spot") == ("true" if slices == 3 else None)


def test_the_check_finds_what_is_wrong():
    jobset = yaml.safe_load(gke("--topology=2x2").stdout)
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    job["paralellism"] = 4
    with pytest.raises(AssertionError, match="paralellism"):
        check(jobset, JOBSET)
    del job["paralellism"], jobset["spec"]["failurePolicy"]["rules"][0]["name"]
    with pytest.raises(AssertionError, match=r"failurePolicy.rules\[0\] lacks"):
        check(jobset, JOBSET)


@pytest.mark.parametrize(("words", "said"), [
    (["--topology=4by4"], "must be of the form 4x4 or 2x2x4"),
    (["--topology=3x3"], "does not divide into hosts of 4 chips"),
    (["--topology=2x2", "--volume=claim"], "must be of the form CLAIM:/PATH"),
])
def test_values_that_make_no_manifest(words, said):
    done = gke(*words)
    assert done.returncode == 2 and said in done.stderr and not done.stdout


def test_the_price_of_an_hour():
    said = gke("--topology=4x4", "--slices=2", "--price-per-chip-hour=1.2").stderr
    assert said == "gke: an hour costs 32 chips x 1.2 = 38.40.\n"


# Trains until nothing more is to happen; pod 0 writes down each step.
JAXLM = """#!/usr/bin/env bash
mkdir -p "$4"
trap 'exit 143' TERM
step=$(cat "$4/steps" 2>/dev/null | wc -l)
[ "$POD" != 0 ] || echo "resumed from $step" >>"$4/log"
while [ ! -f "$CLUSTER/end" ] && [ "$step" -lt 1000 ]; do
    step=$((step + 1))
    [ "$POD" != 0 ] || echo "$step" >>"$4/steps"
    touch "$CLUSTER/trains-$POD"
    sleep 0.05
done
"""


@pytest.mark.slow
def test_a_jobset_outlives_preemptions_and_counts_only_other_failures(tmp_path):
    cluster, bin_folder, run = tmp_path / "cluster", tmp_path / "bin", tmp_path / "run"
    fake = Path(__file__).with_name("fake_kubectl.py")
    write_script(bin_folder / "kubectl", f'#!/bin/sh\nexec {sys.executable} {fake} "$@"\n')
    write_script(bin_folder / "jaxlm", JAXLM)
    cluster.mkdir()
    (cluster / "events").write_text('["preempted", "killed", "preempted"]')
    manifest = gke("--topology=2x4", "--slices=2", command=("pretrain", "configs/x.py", "--run-dir", str(run))).stdout

    def kubectl(*words: str) -> None:
        env = os.environ | {"PATH": f"{bin_folder}:{os.environ['PATH']}", "CLUSTER": str(cluster)}
        subprocess.run(["kubectl", *words], input=manifest, text=True, check=True, timeout=60, env=env)

    kubectl("apply", "-f", "-")
    assert (cluster / "run").read_text() == "completed, 1 restarts counted"
    resumed = [int(line.removeprefix("resumed from ")) for line in (run / "log").read_text().splitlines()]
    assert len(resumed) == 4 and resumed[0] == 0 and resumed == sorted(set(resumed))
    kubectl("delete", "jobset", "run")
    assert not (cluster / "run").exists()
