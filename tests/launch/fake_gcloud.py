"""A stand-in for gcloud, whose TPU VMs are folders: `CLOUD/SLICE-WORKER` is the home of a worker.

CLOUD/state.json says what is to happen, and what has been requested:
  requests  what becomes of each request in turn: "granted", "failed" (as no capacity is left) or "refused" (by gcloud)
  follows   what becomes of each connection that follows a run: it is "lost", the run is "killed" or "preempted", the
            slices are "deleted". After these, runs come to their end (the file CLOUD/end).
Flags are those of gcloud 578.0.0, as far as launch/tpu_pod.py gives them; any other is an error.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

CLOUD = Path(os.environ["CLOUD"])
WORKERS = 2
FOLLOWING = {"WAITING_FOR_RESOURCES": "PROVISIONING", "PROVISIONING": "ACTIVE"}
COMMANDS = {  # flags that end in = take a value
    "create": "name --node-id= --node-count= --node-prefix= --accelerator-type= --runtime-version= --spot",
    "list": "--format=",
    "scp": "source target --node= --worker= --scp-flag= --recurse",
    "ssh": "name --node= --worker= --ssh-flag= --command=",
    "delete": "name --force",
}


def parse(words: list[str]) -> argparse.Namespace:
    assert words[:2] == ["compute", "tpus"] and words[2] in ("queued-resources", "tpu-vm"), words
    parser = argparse.ArgumentParser(allow_abbrev=False)
    commands = parser.add_subparsers(dest="verb", required=True)
    for verb, flags in COMMANDS.items():
        command = commands.add_parser(verb, allow_abbrev=False)
        for flag in [*flags.split(), "--zone=", "--quiet"]:
            switch = flag.startswith("--") and not flag.endswith("=")
            command.add_argument(flag.rstrip("="), **{"action": "store_true"} if switch else {})
    args = parser.parse_args(words[3:])
    args.group = words[2]
    return args


def homes(args: argparse.Namespace, count: int) -> list[Path]:
    slices = range(count) if args.node == "all" else [int(args.node or 0)]
    workers = range(WORKERS) if args.worker == "all" else [int(args.worker or 0)]
    return [CLOUD / f"{index}-{worker}" for index in slices for worker in workers]


def signal_runs(number: int, group: str) -> list[Path]:
    """Signal every run. Group "--parent" leaves out the shell that has started jaxlm. Returns the workers' homes."""
    workers = sorted(CLOUD.glob("*-*"))
    for home in workers:
        subprocess.run(["pkill", f"-{number}", group, (home / "jaxlm-run/pid").read_text().strip()])
    return workers


def ssh(args: argparse.Namespace, request: dict, state: dict) -> int:
    event = ""
    if args.command.endswith("follow"):
        if state["follows"]:
            event = state["follows"].pop(0)
            save(state)
        else:
            (CLOUD / "end").touch()
    codes, targets = [], homes(args, request["slices"])
    for home in targets:
        process = subprocess.Popen(
            ["bash", "-c", args.command], cwd=home, env=os.environ | {"HOME": home}, start_new_session=True,
        )
        if event:
            for worker in CLOUD.glob("*-*"):
                while "step" not in re.split("resumed|was killed", (worker / "jaxlm-run/log").read_text())[-1]:
                    time.sleep(0.02)
            os.killpg(process.pid, signal.SIGKILL)
            if event == "preempted":
                preempt(request, state)
            elif event != "lost":
                for home in signal_runs(signal.SIGKILL, "--session"):
                    with (home / "jaxlm-run/log").open("a") as log:  # so that the next event waits for a start
                        log.write("was killed\n")
            if event == "deleted":
                delete(state)
            return 1  # as gcloud does when it has tried to connect again for a while
        codes.append(process.wait())
    return next(filter(None, codes), 0)


def preempt(request: dict, state: dict) -> None:
    """Give every run the time to save, then take the slices away."""
    for home in signal_runs(signal.SIGTERM, "--parent"):
        subprocess.run(["flock", home / "jaxlm-run/lock", "true"])
        shutil.rmtree(home)
    request["state"] = "SUSPENDED"
    save(state)


def delete(state: dict) -> None:
    for home in CLOUD.glob("*-*"):
        shutil.rmtree(home)
    save(state | {"request": None})


def listing(args: argparse.Namespace, state: dict) -> list[dict]:
    name, request = state["name"], state["request"]
    if not request:
        return []
    nodes = [f"{name}-{index}" for index in range(request["slices"])] if request["slices"] > 1 else [name]
    if args.group == "tpu-vm":
        return [{"name": f"projects/p/locations/z/nodes/{node}", "state": "READY"} for node in nodes]
    request["state"] = FOLLOWING.get(request["state"], request["state"])
    if request["state"] == "ACTIVE" and request["fate"] == "failed":
        request["state"] = "FAILED"
    save(state)
    failed = {"failedData": {"error": {"code": 8, "message": "no more capacity in the zone"}}}
    return [
        {"name": "projects/p/locations/z/queuedResources/other", "state": {"state": "FAILED"}, "tpu": {"nodeSpec": []}},
        {
            "name": f"projects/p/locations/z/queuedResources/{name}",
            "state": {"state": request["state"]} | (failed if request["state"] == "FAILED" else {}),
            "tpu": {"nodeSpec": [{"nodeId": node} for node in nodes]},
        },
    ]


def save(state: dict) -> None:
    (CLOUD / "state.json").write_text(json.dumps(state))


def main() -> int:
    args, state = parse(sys.argv[1:]), json.loads((CLOUD / "state.json").read_text())
    request = state["request"]
    if args.verb != "list":
        with (CLOUD / "calls").open("a") as calls:
            print(args.verb, getattr(args, "command", "").split("worker.sh ")[-1], file=calls)
    if args.verb == "create":
        assert not request and args.accelerator_type == "v5litepod-8" and args.runtime_version == "v2-alpha-tpuv5-lite"
        fate = state["requests"].pop(0)
        if fate == "refused":
            print("ERROR: (gcloud.compute.tpus.queued-resources.create) quota exceeded", file=sys.stderr)
            return 1
        slices = int(args.node_count or 1)
        state |= {"name": args.name, "request": {"state": "WAITING_FOR_RESOURCES", "fate": fate, "slices": slices}}
        for home in homes(argparse.Namespace(node="all", worker="all"), slices):
            home.mkdir()
        save(state)
    elif args.verb == "list":
        print(json.dumps(listing(args, state)))
    elif args.verb == "delete":
        assert request and args.force
        delete(state)
    elif not request or request["state"] != "ACTIVE":
        print("Could not prepare all nodes, attempting to ssh into the rest.", file=sys.stderr)
    elif args.verb == "scp":
        for home in homes(args, request["slices"]):
            shutil.copy(args.source, home)
    else:
        return ssh(args, request, state)
    return 0


if __name__ == "__main__":
    sys.exit(main())
