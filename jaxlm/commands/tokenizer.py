"""Train a tokenizer with every special symbol that the objectives need, or extend a model's by the words of a text.

jaxlm tokenizer train OUT --data.source TEXT
jaxlm tokenizer extend RUN_OR_HF_DIR OUT --data.source TEXT
"""

from __future__ import annotations

import os
from pathlib import Path

from jaxlm.commands.common import Parser, count, start_jax
from jaxlm.errors import UserError
from jaxlm.paths import local_folder


def main(arguments: list[str]) -> None:
    """Run the command."""
    if arguments[:1] == ["extend"]:
        return _extend(arguments[1:])
    parser = Parser("jaxlm tokenizer", __doc__)
    parser.add_argument("action", choices=["train"], help="these options; `extend --help` lists those of extend")
    parser.add_argument("out", help="folder to write")
    text, option = "python-docs, a file, folder or glob, tfds:NAME or hf:NAME", parser.add_argument
    option("--data.source", dest="source", required=True, metavar="TEXT", help=text)
    option("--data.vocab-size", dest="vocab_size", type=int, default=8192,
           help="ids in all, special symbols included (8192)")
    option("--data.tokenizer-kind", dest="kind", choices=["unigram", "bpe", "byte-bpe", "bytes", "words"],
           default="unigram",
           help="SentencePiece, unigram (default) or BPE; byte-level BPE; bytes (258 ids); whole words")
    option("--data.normalization", dest="normalization", choices=["nmt_nfkc", "identity"], default="nmt_nfkc",
           help="what is done to a text first: nmt_nfkc (default) or nothing")
    option("--data.text-field", dest="text_field", default="text",
           help="field of JSON lines and tfds examples (text)")
    parser.add_argument("--symbols", nargs="+", default=[], help="further special symbols, such as '[R]'")
    options = parser.parse_args(arguments or ["--help"])
    out = _new_folder(options.out, "tokenizers")
    from jaxlm.data.text import TextData

    data = TextData(
        source=options.source, text_field=options.text_field, vocab_size=options.vocab_size,
        tokenizer_kind=options.kind, normalization=options.normalization,
    )
    data.validate()
    tokenizer = data.prepare_tokenizer(print, options.symbols)
    tokenizer.save(out)
    print(f"{tokenizer.vocabulary.size:,} ids ({options.kind}) in {out}; use it with --data.tokenizer {out}")


def _extend(arguments: list[str]) -> None:
    """Extend the vocabulary of a model, and write the model as a Transformers folder."""
    parser = Parser("jaxlm tokenizer extend", __doc__)
    parser.add_argument("model", help="a run folder, or a folder that Transformers saved")
    parser.add_argument("out", help="Transformers folder to write; must not exist or be empty")
    parser.add_argument("--data.source", dest="source", required=True, metavar="TEXT",
                        help="the new text: python-docs, a file, folder or glob, tfds:NAME or hf:NAME")
    parser.add_argument("--data.text-field", dest="text_field", default="text",
                        help="field of JSON lines and tfds examples (text)")
    parser.add_argument("--words", type=count, default=2000, help=(
        "largest number of words to add (2000): those with the largest count × (pieces - 1) in the text"))
    parser.add_argument("--old-text", default="python-docs", metavar="TEXT", help=(
        "a text like the model's own, for the share of words that now have other pieces (python-docs: English)"))
    options = parser.parse_args(arguments or ["--help"])
    if not options.words:
        raise UserError("--words 0 adds no word; give 1 or more.")
    out = _new_folder(options.out, "Transformers folders")
    start_jax(alone="jaxlm tokenizer extend")
    from jaxlm.data.text import TextData
    from jaxlm.huggingface import ModelCard, export_folder
    from jaxlm.runs.load import load_model
    from jaxlm.tokenizers.extension import WordModel, changed_share, extend_tokenizer

    model = load_model(options.model)
    old, vocabulary = WordModel(model.tokenizer), model.tokenizer.vocabulary
    words = old.count(TextData(source=options.source, text_field=options.text_field).sample())
    extension = extend_tokenizer(model.tokenizer, words, options.words)
    new, others = WordModel(extension.tokenizer), len(extension.pieces) - len(extension.words)
    old_words = old.count(TextData(source=options.old_text).sample())
    first = [extension.tokenizer.vocabulary.pieces.index(word) for word in extension.words[:10]]
    lines = {
        "Words added": f"{len(extension.words):,} to {vocabulary.size:,} ids; pieces between, for merges: {others:,}",
        "The most expensive ones": " ".join(extension.tokenizer.pieces(first)),
        "Pieces per word of the new text": f"{old.mean_pieces(words):.3f} before, {new.mean_pieces(words):.3f} now",
        "Words with other pieces than before": f"{changed_share(old, new, old_words):.2%} of {options.old_text}",
        "Initialized afresh, since the model lacked them": ", ".join(model.fresh),
    }
    print(*(f"{name}: {value}." for name, value in lines.items() if value), sep="\n")
    card = ModelCard(rows={"Started from": str(options.model), "Words from": options.source, **lines})
    extended = model.with_words(extension)
    vectors, stop_ids = extended.settings[:2]
    export_folder(out, extended.objective, extended.params, extended.tokenizer, card, max_length=extended.length,
                  vectors=None if extended.objective.scores_rows else vectors, stop_ids=stop_ids,
                  sampling=extended.settings.sampling, step=extended.step,
                  settings={"fresh": extended.fresh, "rows": dict(extended.settings.rows)})
    print(f"Wrote {out}; continue with `jaxlm pretrain PRESET --init-from {out} --data.source {options.source}`.")


def _new_folder(path: str, what: str) -> Path:
    """Return the path of a folder to write; raise UserError before minutes of work if that is not possible."""
    out = local_folder(path, what)
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise UserError(f"{out} exists and is not empty; choose another folder.")
    parent = next(folder for folder in (out, *out.parents) if folder.exists())
    if not (parent.is_dir() and os.access(parent, os.W_OK)):
        raise UserError(f"{out} cannot be made: {parent} is not a folder that can be written to; choose another.")
    return out
