"""Tokenize the text of a configuration into the token store that `jaxlm pretrain` then opens.

jaxlm tokenize CONFIG [--report] [--init-from RUN_OR_HF_DIR] [--any.field VALUE …]
jaxlm tokenize CONFIG --shard I/N …
jaxlm tokenize CONFIG --finish …
jaxlm tokenize CONFIG --beam … [-- PIPELINE_OPTIONS]

The first form uses the processes of this machine. N jobs of a scheduler, which share --data.cache-dir, take a share of
the parts each: I is 0 to N - 1; --finish then names the parts that are missing, or writes the store. --beam has Apache
Beam tokenize all parts and find duplicates; what follows -- are its pipeline options, such as --runner=DataflowRunner.
All of them write the same files, and a part that is done is not tokenized again.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxlm.commands.common import config_parser, parse_options, resolve_config
from jaxlm.errors import UserError

if TYPE_CHECKING:
    from jaxlm.data.parts import Part

_FIRST = 3  # parts that a message names


def main(arguments: list[str]) -> None:
    """Run the command."""
    place = arguments.index("--") if "--" in arguments else len(arguments)
    arguments, pipeline = arguments[:place], arguments[place:]
    parser = config_parser("jaxlm tokenize", __doc__)
    parser.add_argument("--shard", default=None, metavar="I/N", help="tokenize only this share of the text, from 0/N")
    parser.add_argument("--finish", action="store_true", help="write the token store; tokenize nothing")
    parser.add_argument("--beam", action="store_true", help="tokenize by Apache Beam (extra [beam])")
    parser.add_argument("--report", action="store_true", help="describe the text and what of it is held out")
    parser.add_argument("--init-from", default=None, metavar="RUN_OR_HF_DIR", help="take the tokenizer of this model")
    options, flags = parse_options(parser, arguments)
    shard, shards = _check(options, pipeline)
    os.environ["JAX_PLATFORMS"] = "cpu"  # the devices may be another job's, or wait for other hosts
    resolved = resolve_config(parser, options, flags, start=False)
    from jaxlm.runs.folder import RunFolder
    from jaxlm.runs.load import load_model
    from jaxlm.runs.session import set_up

    data, tokenizer = resolved.experiment.data, set_up(resolved, load_model, RunFolder.read(options.config)).tokenizer
    parts = data.parts() if options.shard or options.finish or options.beam else ()
    if options.beam:
        if not parts:
            raise UserError(f"{options.config} has no text to tokenize; change --data.source, or leave --beam out.")
        from jaxlm.data.beam import run_pipeline

        run_pipeline(data, parts, tokenizer, pipeline[1:])
    if options.shard:
        data.tokenize(tokenizer, shard, shards)
        missing = len(data.missing(parts, tokenizer))
        then = "" if missing else ": --finish writes the token store"
        own = len(parts[shard::shards])
        print(f"Shard {options.shard} is stored; it has {own:,} parts. "
              f"Missing parts: {missing:,} of {len(parts):,}{then}.")
        return
    _require_all(parts, data.missing(parts, tokenizer), getattr(data, "deduplicate", "off"))
    print(data.open(tokenizer).summary)
    if options.report:
        data.describe(tokenizer)


def _check(options: argparse.Namespace, pipeline: list[str]) -> tuple[int, int]:
    """Return the numbers of --shard; raise UserError for options that exclude each other."""
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", options.shard or "0/1")
    if not match or int(match[1]) >= int(match[2]):
        raise UserError(f"--shard is {options.shard}; give I/N with I from 0 to N - 1, such as 0/4.")
    chosen = [f"--{name}" for name in ("shard", "finish", "beam") if getattr(options, name)]
    if len(chosen) > 1:
        raise UserError(f"{' and '.join(chosen)} exclude each other; choose one.")
    if options.shard and options.report:
        raise UserError("--report describes the whole text; give it with --finish after the last --shard.")
    if pipeline and not options.beam:
        raise UserError("what follows -- are pipeline options of Beam; add --beam before it, or leave them out.")
    return int(match[1]), int(match[2])


def _require_all(parts: Sequence[Part], missing: Sequence[int], kind: str) -> None:
    """Raise UserError if parts lack their shard, or their keys for duplicates of a kind."""
    if missing:
        flag = f" with --data.deduplicate {kind}" * (kind != "off")
        first = ", ".join(f"{number} ({parts[number]})" for number in missing[:_FIRST])
        raise UserError(
            f"missing parts: {len(missing):,} of {len(parts):,}: {first}{', …' * (len(missing) > _FIRST)}; repeat "
            f"their --shard I/N{flag}, where I is the number of a part modulo N, or run the command without --finish, "
            "which tokenizes them here."
        )
