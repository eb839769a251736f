"""Pretraining text: its flags, and its tokenizer and token store in the cache folder."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence

import numpy as np

from jaxlm.data.base import Data, RowFormat, random_tokens
from jaxlm.data.build import StoreBuild
from jaxlm.data.cache import cache_folder
from jaxlm.data.corpus import SOURCES, Corpus, open_corpus
from jaxlm.data.fingerprint import Survey, sample, survey
from jaxlm.data.store import FORMAT, Store, store_fingerprint
from jaxlm.errors import UserError
from jaxlm.fields import field
from jaxlm.paths import write_whole
from jaxlm.tokenizers.files import MARKER
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.tokenizers.training import Kind, Normalization, train_tokenizer
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import Report, TokenBatch

_SAMPLE = 10_000_000  # bytes of text for training a tokenizer: some 20 seconds of one core


@dataclasses.dataclass(frozen=True)
class TextData(Data):
    """Pretraining text and its tokenization; see `jaxlm.data.base.Data`."""

    source: str = field("python-docs", resumable=True)
    """The text: `python-docs` (the documentation in every Python), a file, folder or glob of .txt (documents end at
    blank lines, at the latest after some 65,536 characters), .jsonl, .csv or .tsv, each also .gz, .xz or .zst, or
    .parquet; `tfds:NAME[/CONFIG][:SPLIT]` or `hf:NAME[:CONFIG][:SPLIT]`. Commas separate several."""

    text_field: str = "text"
    """Name of the text field in .jsonl, tables and datasets."""

    length: int = field(128, range="[8, inf)")
    """Sequence length of the model, including special tokens."""

    tokenizer: str = field("auto", weights=True)
    """`auto` trains one on the source; otherwise a tokenizer's folder, .model, vocab.txt or tokenizer.json, or
    `hf:ORG/NAME[@REVISION]`."""

    tokenizer_kind: Kind = "unigram"
    """Kind of the vocabulary that `auto` trains: SentencePiece unigram or BPE, byte-level BPE as in GPT-2 and RoBERTa,
    single bytes (258 ids), or whole words."""

    vocab_size: int = field(8192, range="[108, 4194304]")
    """Size of the vocabulary that `auto` trains. A text with fewer pieces gives a smaller one: kind unigram needs some
    300 KB of text for 8,192 pieces, 100 KB for 4,096 and 1 KB for 512. Special tokens, bytes and characters need some
    460."""

    normalization: Normalization = "nmt_nfkc"
    """Text normalization of the tokenizer that `auto` trains: `nmt_nfkc`, the default of SentencePiece (Unicode NFKC
    composes accents and turns full-width letters into plain ones; control characters are removed; zero-width spaces and
    non-joiners, which Persian writes within words, become spaces; lines and tabs stay), or `identity`, which keeps all
    of them."""

    held_out: float = field(0.01, range="[0, 0.5]")
    """Share of the documents, selected by a hash of their text, that is held out for evaluation. A text with few
    documents holds out its end. At least 32 KB (some 8,000 tokens of English) are held out, but of a small text a
    tenth; whole documents make it a little more."""

    sentences: bool = False
    """Whether each sentence counts as a document of the rows (ELMo). A sentence ends with a line, or with punctuation
    before white space. Whole documents are held out all the same."""

    cache_dir: str = field("", path=True)
    """Folder of tokenizers and token stores; by default $JAXLM_CACHE, else ~/.cache/jaxlm."""

    workers: int = field(0, resumable=True, range="[0, inf)")
    """Number of tokenizing threads; 0 means one per core, up to 8."""

    def prepare_tokenizer(self, report: Report = print, symbols: Sequence[str] = ()) -> Tokenizer:
        """Load the tokenizer, or train it; see `jaxlm.data.base.Data`.

        The cache folder keeps a trained tokenizer under the fingerprint of its inputs, so that all runs with the same
        text, settings and `symbols` share it.
        """
        self.validate()
        if self.tokenizer == "auto":
            corpus = self._corpus()
            text = self._survey(corpus, report)
            return self._trained_tokenizer(corpus, text, symbols, report)
        tokenizer = Tokenizer.load(self.tokenizer)
        for name in symbols:
            tokenizer.vocabulary.id(name)
        return tokenizer

    def survey(self, report: Report = print) -> None:
        """Read the text once; see `jaxlm.data.base.Data`."""
        corpus = self._corpus()
        text = self._survey(corpus, report)
        if corpus.remark:
            report(corpus.remark)
        if text.blank:
            report(f"Rows of {self.source} without text, which are left out: {text.blank:,}")

    def tokenize(self, tokenizer: Tokenizer, shard: int, shards: int, report: Report = print) -> None:
        """Tokenize a share of the text into the cache folder; see `jaxlm.data.base.Data`."""
        self._build(tokenizer, report).tokenize(shard, shards)

    def open(self, tokenizer: Tokenizer, report: Report = print) -> Store:
        """Open the token store of this text and tokenizer in the cache folder; build it if it is missing."""
        return self._build(tokenizer, report).finish()

    def _build(self, tokenizer: Tokenizer, report: Report) -> StoreBuild:
        self.validate()
        corpus = self._corpus()
        text = self._survey(corpus, report)
        fingerprint = store_fingerprint(text, tokenizer.fingerprint, self.held_out, self.sentences)
        folder = cache_folder(self.cache_dir) / "stores" / f"{fingerprint[:20]}-{FORMAT}"
        return StoreBuild(
            str(folder), [part() for part in corpus.parts], text, tokenizer, self.held_out, self.source,
            self.sentences, self.workers, report,
        )

    def synthetic(self, rows: int, row_format: RowFormat, vocabulary: Vocabulary) -> TokenBatch:
        """Return full rows of random text tokens, one document each; see `jaxlm.data.base.Data`."""
        tokens = random_tokens(rows, row_format.length, vocabulary)
        return TokenBatch(tokens, np.indices(tokens.shape, np.int32)[0] + 1)

    def _corpus(self) -> Corpus:
        if not self.source.strip():  # `jaxlm import` leaves it empty, for commands that need no text
            raise UserError(f"--data.source is empty; give {SOURCES}.")
        return open_corpus(self.source, self.text_field)

    def _survey(self, corpus: Corpus, report: Report) -> Survey:
        """Return the survey of a text, which is cached under the state of its files."""
        remembered = cache_folder(self.cache_dir) / "sources" / f"{corpus.stamp[:20]}.json"
        try:
            return Survey(**json.loads(remembered.read_text()))
        except (OSError, ValueError, TypeError):  # there is none, or a damaged one
            report(f"Reading {corpus.source}")
        text = survey(*(part() for part in corpus.parts))
        if text.documents == 0:
            raise UserError(f"{corpus.source} holds no text; every document in it is empty.")
        write_whole(remembered, json.dumps(dataclasses.asdict(text)).encode())
        return text

    def _trained_tokenizer(self, corpus: Corpus, text: Survey, symbols: Sequence[str], report: Report) -> Tokenizer:
        settings = {"kind": self.tokenizer_kind, "vocab_size": self.vocab_size, "normalization": self.normalization}
        facts = json.dumps([2, text.fingerprint, settings, _SAMPLE, *symbols])
        name = hashlib.sha256(facts.encode()).hexdigest()[:20]
        folder = cache_folder(self.cache_dir) / "tokenizers" / name
        if not (folder / MARKER).exists():
            report(f"Training a vocabulary of {self.vocab_size:,} ({self.tokenizer_kind}) on {self.source}")
            texts = sample(corpus.pieces(), text.bytes, _SAMPLE)
            train_tokenizer(texts, str(folder), symbols=symbols, **settings)
        tokenizer = Tokenizer.load(str(folder))
        if self.tokenizer_kind != "bytes" and len(tokenizer) < self.vocab_size:
            sizes = f"{len(tokenizer):,} ids and not {self.vocab_size:,} (--data.vocab-size)"
            report(f"The vocabulary has {sizes}: this text has no more pieces")
        return tokenizer
