"""Tokenize the text of a configuration, or a share of it, into the token store that `jaxlm pretrain` then opens.

jaxlm tokenize CONFIG [--shard I/N] [--report] [--init-from RUN_OR_HF_DIR] [--any.field VALUE …]

N machines, or N processes of one, take a shard each: I is 0 to N - 1. They share --data.cache-dir, a folder or a
bucket. The command without --shard, or `jaxlm pretrain`, then joins what they have tokenized. A shard that was
interrupted goes on where it was.
"""

from __future__ import annotations

import re

from jaxlm.commands.common import config_parser, parse_options, resolve_config
from jaxlm.errors import UserError


def main(arguments: list[str]) -> None:
    """Run the command."""
    parser = config_parser("jaxlm tokenize", __doc__)
    parser.add_argument("--shard", default=None, metavar="I/N", help="tokenize only this share of the text, from 0/N")
    parser.add_argument("--report", action="store_true", help="describe the text and what of it is held out")
    parser.add_argument("--init-from", default=None, metavar="RUN_OR_HF_DIR", help="take the tokenizer of this model")
    options, flags = parse_options(parser, arguments)
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", options.shard or "0/1")
    if not match or int(match[1]) >= int(match[2]):
        raise UserError(f"--shard is {options.shard}; give I/N with I from 0 to N - 1, such as 0/4.")
    resolved = resolve_config(parser, options, flags, start=False)
    from jaxlm.runs.folder import RunFolder
    from jaxlm.runs.load import load_model
    from jaxlm.runs.session import set_up

    data, tokenizer = resolved.experiment.data, set_up(resolved, load_model, RunFolder.read(options.config)).tokenizer
    if options.shard:
        data.tokenize(tokenizer, int(match[1]), int(match[2]))
        print(f"Shard {options.shard} is stored.")
    else:
        print(data.open(tokenizer).summary)
        if options.report:
            data.describe(tokenizer)
