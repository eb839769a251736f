#!/usr/bin/env python3
"""Print the manifest of one run on GKE, for one TPU slice or several: launch/gke.yaml with its values filled in.

    ./launch/gke.py bert-large --image IMAGE --accelerator tpu-v5-lite-podslice --topology 4x4 --slices 2 --spot \
        --volume CLAIM:/shared -- pretrain configs/bert_large.py --run-dir /shared/bert_large \
        --data.cache-dir /shared/cache | kubectl apply -f -

What stands after `--` is a command of jaxlm. Run folder and --data.cache-dir must be on the volume, which all
hosts share.
"""

from __future__ import annotations

import argparse
import json
import math
import string
import sys
from pathlib import Path


def parse(words: list[str]) -> argparse.Namespace:
    end = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("name")
    add("--image", required=True, help="made from launch/Dockerfile")
    add("--accelerator", required=True, help="label of the nodes: tpu-v5-lite-podslice, tpu-v5p-slice, tpu-v6e-slice")
    add("--topology", required=True, help="chips of a slice: 4x4, 2x2x4")
    add("--chips-per-host", type=int, help="4, or all of a smaller slice, if not given")
    add("--slices", type=int, default=1)
    add("--spot", action="store_true", help="on Spot nodes")
    add("--volume", help="CLAIM:PATH, a persistent volume claim and where it is mounted")
    add("--service-account", default="default", help="Kubernetes service account that may read the buckets")
    add("--price-per-chip-hour", type=float, default=0.0)
    args = parser.parse_args(words[:end])
    args.command = ["jaxlm", *words[end + 1 :]]
    try:
        args.chips = math.prod(int(side) for side in args.topology.split("x"))
    except ValueError:
        parser.error(f"--topology {args.topology} must be of the form 4x4 or 2x2x4")
    args.chips_per_host = args.chips_per_host or min(4, args.chips)
    if args.chips < 1 or args.chips % args.chips_per_host:
        parser.error(f"--topology {args.topology} does not divide into hosts of {args.chips_per_host} chips")
    if args.volume and ":/" not in args.volume:
        parser.error(f"--volume {args.volume} must be of the form CLAIM:/PATH")
    if len(args.command) == 1:
        parser.error("a command of jaxlm must stand after --: -- pretrain configs/bert_large.py --run-dir …")
    return args


def manifest(args: argparse.Namespace) -> str:
    """Return gke.yaml with its values, each written as JSON, which is YAML too."""
    selector = {
        "cloud.google.com/gke-tpu-accelerator": args.accelerator, "cloud.google.com/gke-tpu-topology": args.topology,
    } | ({"cloud.google.com/gke-spot": "true"} if args.spot else {})
    claim, _, path = (args.volume or "").partition(":")
    values = {
        "name": args.name, "image": args.image, "command": args.command, "service_account": args.service_account,
        "slices": args.slices, "hosts": args.chips // args.chips_per_host, "chips_per_host": args.chips_per_host,
        "node_selector": selector, "compilation_cache": f"{path}/xla" if claim else "",
        "volumes": [{"name": "shared", "persistentVolumeClaim": {"claimName": claim}}] if claim else [],
        "volume_mounts": [{"name": "shared", "mountPath": path}] if claim else [],
    }
    template = string.Template(Path(__file__).with_name("gke.yaml").read_text("utf-8"))
    return template.substitute({key: json.dumps(value) for key, value in values.items()})


def main() -> None:
    args = parse(sys.argv[1:])
    print(manifest(args), end="")
    chips, price = args.chips * args.slices, args.price_per_chip_hour
    cost = f"{price:g} = {chips * price:.2f}" if price else "the price of one"
    print(f"gke: an hour costs {chips} chips x {cost}.", file=sys.stderr)


if __name__ == "__main__":
    main()
