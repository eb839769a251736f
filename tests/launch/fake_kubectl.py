"""A stand-in for kubectl and the controllers of a cluster, for JobSets whose containers are processes of this machine.

`apply -f -` runs the JobSet to its end. CLUSTER/events says what happens in each attempt: "preempted" (every process
gets SIGTERM) or "killed" (one process, with SIGKILL). After these, runs come to their end (the file CLUSTER/end). The
policies are those of Kubernetes and JobSet: a failed pod that matches a rule of podFailurePolicy gives its job the
reason PodFailurePolicy, and the first rule of failurePolicy that has the reason says whether the restart counts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import yaml

CLUSTER = Path(os.environ["CLUSTER"])


def run_pods(job: dict, count: int, event: str) -> list[int]:
    """Run `count` pods at a time. Returns their exit codes, as containers show them."""
    (container,) = job["template"]["spec"]["containers"]
    env = os.environ | {variable["name"]: variable["value"] for variable in container["env"]}
    pods = [subprocess.Popen(container["command"], env=env | {"POD": str(index)}) for index in range(count)]
    if event:
        for index in range(count):
            while not (CLUSTER / f"trains-{index}").exists():
                time.sleep(0.02)
            (CLUSTER / f"trains-{index}").unlink()
        if event == "killed":  # the JobSet then deletes the other pods
            pods[0].kill()
        for pod in pods:
            pod.terminate()
    return [128 - code if code < 0 else code for code in (pod.wait() for pod in pods)]


def run(spec: dict) -> str:
    """Run a JobSet until it is completed or failed."""
    (replicated,), restarts = spec["replicatedJobs"], 0
    job, events = replicated["template"]["spec"], json.loads((CLUSTER / "events").read_text())
    while restarts <= spec["failurePolicy"]["maxRestarts"]:
        if not events:
            (CLUSTER / "end").touch()
        codes = run_pods(job, replicated["replicas"] * job["parallelism"], events.pop(0) if events else "")
        if not any(codes):
            return f"completed, {restarts} restarts counted"
        exits = [rule["onExitCodes"] for rule in job["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
        saved = any(codes[0] in rule["values"] for rule in exits)
        reason = "PodFailurePolicy" if saved else "BackoffLimitExceeded"
        rules = [rule for rule in spec["failurePolicy"]["rules"] if reason in rule["onJobFailureReasons"]]
        restarts += not (rules and rules[0]["action"] == "RestartJobSetAndIgnoreMaxRestarts")
    return f"failed with {codes}"


def main() -> None:
    words = sys.argv[1:]
    if words == ["apply", "-f", "-"]:
        jobset = yaml.safe_load(sys.stdin)
        (CLUSTER / jobset["metadata"]["name"]).write_text(run(jobset["spec"]))
    elif words[:2] == ["delete", "jobset"]:
        (CLUSTER / words[2]).unlink()
    else:
        sys.exit(f"error: unknown command {words}")


if __name__ == "__main__":
    main()
