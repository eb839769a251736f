#!/usr/bin/env python3
"""One run on a Cloud TPU slice, or on several, from a laptop: create, install, start, follow, resume, collect, delete.

    ./launch/tpu_pod.py run NAME --zone us-west4-a --accelerator-type v5litepod-16 --spot -- \
        pretrain configs/bert_large.py --run-dir /shared/bert_large --data.cache-dir /shared/cache \
        --data.source 'gs://bucket/text/*.jsonl.zst'
    ./launch/tpu_pod.py collect NAME --zone us-west4-a      # the logs of all workers, into NAME-logs
    ./launch/tpu_pod.py delete NAME --zone us-west4-a       # stops the run, which saves, and deletes the slices

What stands after `--` is a command of jaxlm. The run goes on when this script or its connection ends: the same command
follows it again. When the slices are preempted they are requested anew, and the run resumes from its run folder.
`--dry-run` prints every command and runs none.

Needs git, gcloud and Python 3.9; no package. The flags are those of gcloud 578.0.0 (August 2026).
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
RUNTIMES = {"v5litepod": "v2-alpha-tpuv5-lite", "v5p": "v2-alpha-tpuv5", "v6e": "v2-alpha-tpuv6e"}
"""Software versions of TPU VMs. The older generations share `tpu-ubuntu2204-base`."""
CHIP_TYPES = ("v5litepod", "v6e")
"""Generations whose accelerator types count chips. Those of the others count cores, two per chip."""


class Problem(Exception):
    """Why the script cannot go on, in a sentence."""


def say(sentence: str) -> None:
    print(f"tpu_pod: {sentence}.", file=sys.stderr, flush=True)


class Pod:
    """The slices of one queued resource, and the run on them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args

    def call(self, *words: str, capture: bool = False) -> tuple[int, str]:
        """Run a command, or print it in a dry run. Returns its exit code, and its standard output if captured."""
        if self.args.dry_run:
            print(shlex.join(words), flush=True)
            return 0, "[]"
        out = subprocess.PIPE if capture else None
        done = subprocess.run(words, cwd=CHECKOUT, text=True, encoding="utf-8", errors="replace", stdout=out)
        return done.returncode, done.stdout or ""

    def gcloud(self, group: str, verb: str, *words: str, capture: bool = False) -> tuple[int, str]:
        zone = f"--zone={self.args.zone}"
        return self.call("gcloud", "compute", "tpus", group, verb, *words, zone, "--quiet", capture=capture)

    def ssh(self, slices: str, workers: str, command: str, capture: bool = False) -> tuple[int, str]:
        """Run a shell command on workers. gcloud returns 0 for slices that are gone, so only output is proof."""
        flags = ["--ssh-flag=-oConnectTimeout=20", "--ssh-flag=-oServerAliveInterval=30", *self.args.ssh_flags]
        words = [self.args.name, f"--node={slices}", f"--worker={workers}", *flags, f"--command={command}"]
        return self.gcloud("queued-resources", "ssh", *words, capture=capture)

    def scp(self, source: str, target: str, *more: str) -> int:
        words = [source, target, *more, "--scp-flag=-oConnectTimeout=20", *self.args.ssh_flags]
        return self.gcloud("queued-resources", "scp", *words)[0]

    def state(self) -> tuple[str, str]:
        """Return the state of the request ("": there is none, "UNKNOWN": gcloud failed) and its error message."""
        code, requests = self.gcloud("queued-resources", "list", "--format=json", capture=True)
        nodes_code, nodes = self.gcloud("tpu-vm", "list", "--format=json", capture=True)
        if code or nodes_code:
            return "UNKNOWN", ""
        for request in json.loads(requests):
            if request["name"].endswith(f"/{self.args.name}"):
                slices = {spec.get("nodeId") for spec in request["tpu"]["nodeSpec"]}
                # A preempted slice may show it before the request does.
                ended = [node for node in json.loads(nodes) if node["state"] in ("PREEMPTED", "TERMINATED")]
                if any(node["name"].split("/")[-1] in slices for node in ended):
                    return "SUSPENDED", ""
                state = request["state"]
                return state["state"], state.get("failedData", {}).get("error", {}).get("message", "")
        return "", ""

    def create(self) -> None:
        args, generation = self.args, self.args.accelerator_type.rpartition("-")[0]
        runtime = args.runtime_version or RUNTIMES.get(generation, "tpu-ubuntu2204-base")
        several = [f"--node-count={args.slices}", f"--node-prefix={args.name}"]
        code, _ = self.gcloud(
            "queued-resources", "create", args.name, *(several if args.slices > 1 else [f"--node-id={args.name}"]),
            f"--accelerator-type={args.accelerator_type}", f"--runtime-version={runtime}",
            *(["--spot"] if args.spot else []), *args.create_flags,
        )
        if code:
            raise Problem("the slices could not be requested; gcloud says why above")

    def delete(self) -> None:
        if self.gcloud("queued-resources", "delete", self.args.name, "--force")[0]:
            raise Problem(f"{self.args.name} could not be deleted and may go on costing; gcloud says why above")

    def attempt(self, archive: str) -> str:
        """Install, start unless it runs already, and follow the run.

        Returns its exit code; "running" if the connection was lost; "none" if the run was killed; "" if the workers
        could not be reached or the installation failed.
        """
        folder, start = archive.removesuffix(".tar.gz"), f"jaxlm/launch/worker.sh start {shlex.join(self.args.command)}"
        install = [f"mkdir -p {folder}", f"tar -xzf {archive} -C {folder}", f"ln -sfn {folder} jaxlm"]
        install += ["jaxlm/launch/worker.sh install", *([self.args.setup] if self.args.setup else [])]
        if self.scp(f"dist/{archive}", f"{self.args.name}:", "--node=all", "--worker=all"):
            return ""
        if self.ssh("all", "all", " && ".join(install))[0]:
            return ""
        for index in range(self.args.slices):
            code, said = self.ssh(str(index), "all", start, capture=True)
            if code or not said:
                return ""
        self.ssh("0", "0", "jaxlm/launch/worker.sh follow")
        return self.ssh("0", "0", "jaxlm/launch/worker.sh status", capture=True)[1].strip()

    def collect(self) -> None:
        """Copy the log of every worker, and the folders of worker 0 that `--collect` names."""
        logs = Path(f"{self.args.name}-logs").absolute()
        if not self.args.dry_run:
            logs.mkdir(parents=True, exist_ok=True)
        for index in range(self.args.slices):
            _, text = self.ssh(str(index), "all", 'sed "s/^/$(hostname): /" jaxlm-run/log', capture=True)
            if text and not self.args.dry_run:
                (logs / f"slice-{index}.log").write_text(text, encoding="utf-8")
            elif not text:
                say(f"the workers of slice {index} give no log")
        lost = [p for p in self.args.collect if self.scp(f"{self.args.name}:{p}", str(logs), "--recurse")]
        if lost:
            raise Problem(f"{', '.join(lost)} could not be copied; the slices are kept, and cost")


def hourly_cost(args: argparse.Namespace) -> str:
    """Return chips x price with their figures."""
    generation, size = args.accelerator_type.split("-")
    chips, price = args.slices * int(size) // (1 if generation in CHIP_TYPES else 2), args.price_per_chip_hour
    return f"{chips} chips x {price:g} = {chips * price:.2f}" if price else f"{chips} chips x the price of one"


def pack_commit(pod: Pod) -> str:
    """Pack the commit that is checked out into dist/. Returns the name of the archive."""
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=CHECKOUT, text=True, capture_output=True, check=True).stdout

    try:
        commit, changes = git("rev-parse", "--short=12", "HEAD").strip(), git("status", "--porcelain").splitlines()
    except subprocess.CalledProcessError:
        raise Problem(f"{CHECKOUT} must be a git checkout: a commit is what is installed") from None
    if changes:
        say(f"commit {commit} is installed, without the uncommitted changes: {', '.join(changes[:5])}")
    archive = f"jaxlm-{commit}.tar.gz"
    if not pod.args.dry_run:
        (CHECKOUT / "dist").mkdir(exist_ok=True)
    if pod.call("git", "archive", "--format=tar.gz", f"--output=dist/{archive}", commit)[0]:
        raise Problem("git could not pack the commit")
    return archive


def run(pod: Pod) -> int:
    """See the run through to its end, however often the slices are lost. Returns the exit code."""
    args, archive, failures, before, had_slices = pod.args, pack_commit(pod), 0, "", False
    say(f"an hour of {args.name} costs {hourly_cost(args)}")
    if args.dry_run:  # the commands of a run that is not preempted; after a preemption: delete, create and so on
        pod.create(), pod.state(), pod.attempt(archive), finish(pod)
        return 0
    while True:
        state, message = pod.state()
        if state == "UNKNOWN" and before:  # for a while, perhaps: the run does not need this script
            time.sleep(args.poll)
            continue
        if state not in ("", before):
            say(f"{args.name} is {state}")
        if state == "UNKNOWN":
            raise Problem("gcloud cannot list the queued resources; it says why above")
        if state == "" and before not in ("", "SUSPENDED"):
            raise Problem(f"{args.name} was deleted by someone else")
        if state == "":
            pod.create()
            time.sleep(args.poll)
        elif state == "FAILED":
            pod.delete()
            if had_slices:
                say(f"no slices are free ({message or 'no reason is given'}): they are requested again")
                time.sleep(args.poll)
                before = "SUSPENDED"
                continue
            raise Problem(f"the request failed and is deleted: {message or 'no reason is given'}")
        elif state == "SUSPENDED":
            say("the slices were preempted: they are requested again, and the run resumes")
            pod.delete()
            failures = 0
        elif state == "ACTIVE":
            started, had_slices = time.time(), True
            code = pod.attempt(archive)
            if code == "0":
                finish(pod)
                say("the run is finished")
                return 0
            if code != "running":
                say(f"the run ended with code {code}" if code else "the run could not be started or reached")
                failures = failures + 1 if time.time() - started < 600 else 1
                check_failure(pod, code, failures)
                time.sleep(args.poll)
        else:
            time.sleep(args.poll)
        before = state


def check_failure(pod: Pod, code: str, failures: int) -> None:
    """Raise a Problem if a run that has failed is not to be started again."""
    if pod.state()[0] != "ACTIVE":  # preempted
        return
    kept = f"The slices are kept, and cost: repeat the command, or {sys.argv[0]} delete {pod.args.name}"
    if code == "2":
        raise Problem(f"jaxlm says above what is wrong with the command. {kept}")
    if failures >= pod.args.failures:
        if not code:  # the run itself may be going on
            raise Problem(f"the workers cannot be reached, or the installation fails. {kept}")
        finish(pod)
        raise Problem(f"gave up after {failures} failures in a row")


def finish(pod: Pod) -> None:
    pod.collect()
    if not pod.args.keep:
        pod.delete()


def parse(words: list[str]) -> argparse.Namespace:
    end = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("action", choices=("run", "collect", "delete"))
    add("name", help="of the queued resource, and of its TPU VMs")
    add("--zone", required=True)
    add("--slices", type=int, default=1, help="TPU slices that train together (multislice)")
    add("--collect", action="append", default=[], metavar="PATH", help="a folder of worker 0 to copy with the logs")
    add("--ssh-flags", type=shlex.split, default=[], help="for gcloud's ssh and scp: '--tunnel-through-iap'")
    add("--dry-run", action="store_true", help="print every command and run none")
    add = parser.add_argument_group("run").add_argument
    add("--accelerator-type", default="", help="v5litepod-16, v6e-64, v5p-128, …")
    add("--runtime-version", help="software of the TPU VMs, if not the usual one of the accelerator type")
    add("--spot", action="store_true", help="cheaper, and may be preempted")
    add("--create-flags", type=shlex.split, default=[], help="for gcloud's create: '--network=mine --internal-ips'")
    add("--setup", help="repeatable shell command for every worker before a start, such as mounting a disk")
    add("--price-per-chip-hour", type=float, default=0.0)
    add("--failures", type=int, default=5, help="failures in a row after which the run is given up")
    add("--keep", action="store_true", help="do not delete the slices at the end")
    add("--poll", type=float, default=30.0, help="seconds between looks at the state")
    args = parser.parse_args(words[:end])
    args.command = words[end + 1 :]
    if args.action == "run" and not (re.fullmatch(r"[a-z0-9]+-[1-9]\d*", args.accelerator_type) and args.command):
        parser.error("run needs --accelerator-type v5litepod-16, and a command: -- pretrain configs/bert_large.py …")
    return args


def main() -> int:
    args = parse(sys.argv[1:])
    pod = Pod(args)
    try:
        if args.action == "run":
            return run(pod)
        state = "ACTIVE" if args.dry_run else pod.state()[0]
        if state == "UNKNOWN":
            raise Problem("gcloud cannot list the queued resources; nothing is copied or deleted")
        has_workers = state == "ACTIVE"
        if has_workers and args.action == "delete":
            pod.ssh("0", "0", "jaxlm/launch/worker.sh stop")
        if has_workers:
            pod.collect()
        if args.action == "delete":
            pod.delete()
        return 0
    except Problem as problem:
        say(str(problem))
    except FileNotFoundError as error:
        say(f"{error.filename} is not installed")
    except KeyboardInterrupt:
        say(f"{args.name} and its run go on: the same command follows them, {sys.argv[0]} delete {args.name} ends them")
        return 130
    return 1


if __name__ == "__main__":
    sys.exit(main())
