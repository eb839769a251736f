#!/usr/bin/env python3
"""Prints a table of MB of text per second of one core, by kind of tokenizer, and of the keys that find duplicates.

    RAYON_NUM_THREADS=1 .venv/bin/python launch/tables/tokenizer_speeds.py TEXT.jsonl [TOKENIZER …]

It makes the shards of the text, reading included, and counts CPU time. Vocabularies of each kind that jaxlm trains come
first, then those in files, such as a published .model or BERT's vocab.txt. SentencePiece's own speed is that of its
`encode` on the same documents.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence

import sentencepiece

from jaxlm.data.corpus import open_corpus
from jaxlm.data.duplicates import Keys
from jaxlm.data.engine import Work
from jaxlm.data.parts import Part
from jaxlm.data.shards import Shards
from jaxlm.data.text import TextData
from jaxlm.tokenizers.tokenizer import Tokenizer

KINDS = ("unigram", "bpe", "byte-bpe", "bytes", "words")


def seconds(work: Work, parts: Sequence[Part]) -> float:
    """Return the CPU time that the folders of the parts take."""
    start = time.process_time()
    for part in parts:
        work.make(part)
    return time.process_time() - start


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text")
    parser.add_argument("tokenizers", nargs="*", metavar="TOKENIZER")
    options = parser.parse_args(arguments)
    parts = open_corpus(options.text).parts
    documents = [piece.text for part in parts for piece in part.pieces()]
    size = sum(len(text.encode()) for text in documents)
    print(f"| {size / 1e6:,.1f} MB of {options.text} | MB/s a core |\n|---|---|")
    with tempfile.TemporaryDirectory() as cache:
        data = TextData(source=options.text, cache_dir=cache, vocab_size=8192)
        for kind in KINDS:
            tokenizer = TextData(**vars(data) | {"tokenizer_kind": kind}).prepare_tokenizer(lambda line: None)
            print(f"| {kind}, {len(tokenizer):,} ids | {size / seconds(Shards(cache, tokenizer), parts) / 1e6:.1f} |")
        for path in options.tokenizers:
            tokenizer = Tokenizer.load(path)
            print(f"| {path} | {size / seconds(Shards(cache, tokenizer), parts) / 1e6:.1f} |")
            if path.endswith(".model"):
                start, own = time.process_time(), sentencepiece.SentencePieceProcessor(path)
                own.encode(documents, num_threads=1)
                print(f"| SentencePiece alone with it | {size / (time.process_time() - start) / 1e6:.1f} |")
        for is_near in (False, True):
            kind = "near" if is_near else "exact"
            print(f"| keys of {kind} duplicates | {size / seconds(Keys(cache, is_near), parts) / 1e6:.1f} |")


if __name__ == "__main__":
    main()
