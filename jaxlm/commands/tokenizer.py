"""Train a tokenizer with every special symbol that the objectives need.

jaxlm tokenizer train SOURCE OUT
"""

from __future__ import annotations

import os

from jaxlm.commands.common import Parser
from jaxlm.errors import UserError
from jaxlm.paths import local_folder


def main(arguments: list[str]) -> None:
    """Run the command."""
    parser = Parser("jaxlm tokenizer", __doc__)
    parser.add_argument("action", choices=["train"])
    parser.add_argument("source", help="python-docs, a file, folder or glob, tfds:NAME or hf:NAME")
    parser.add_argument("out", help="folder to write")
    parser.add_argument("--vocab-size", type=int, default=8192, help="ids in all, special symbols included (8192)")
    parser.add_argument("--kind", choices=["unigram", "bpe", "byte-bpe", "bytes", "words"], default="unigram",
                        help="SentencePiece, unigram (default) or BPE; byte-level BPE; bytes (258 ids); whole words")
    parser.add_argument("--normalization", choices=["nmt_nfkc", "identity"], default="nmt_nfkc",
                        help="what is done to a text first: nmt_nfkc (default) or nothing")
    parser.add_argument("--text-field", default="text", help="field of JSON lines and tfds examples (text)")
    parser.add_argument("--symbols", nargs="+", default=[], help="further special symbols, such as '[R]'")
    options = parser.parse_args(arguments or ["--help"])
    out = local_folder(options.out, "tokenizers")
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise UserError(f"{out} exists and is not empty; choose another folder.")
    # Check this before minutes of training.
    parent = next(folder for folder in (out, *out.parents) if folder.exists())
    if not (parent.is_dir() and os.access(parent, os.W_OK)):
        raise UserError(f"{out} cannot be made: {parent} is not a folder that can be written to; choose another.")
    from jaxlm.data.text import TextData

    data = TextData(
        source=options.source, text_field=options.text_field, vocab_size=options.vocab_size,
        tokenizer_kind=options.kind, normalization=options.normalization,
    )
    data.validate()
    tokenizer = data.prepare_tokenizer(print, options.symbols)
    tokenizer.save(out)
    print(f"{tokenizer.vocabulary.size:,} ids ({options.kind}) in {out}; use it with --data.tokenizer {out}")
