"""Pretraining text: its flags, and its tokenizer and token store in the cache folder."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from etils import epath

from jaxlm.data.base import Data, RowFormat, Source, random_tokens
from jaxlm.data.build import StoreBuild
from jaxlm.data.cache import cache_folder
from jaxlm.data.corpus import SOURCES, Corpus, open_corpus
from jaxlm.data.describe import describe_text
from jaxlm.data.duplicates import Deduplicate, repeated_documents, without_duplicates
from jaxlm.data.fingerprint import HeldOutRule, Survey, sample, survey
from jaxlm.data.mixture import Mixture, parse_mixture, shares_of
from jaxlm.data.rows import kind_of
from jaxlm.data.store import FORMAT, store_fingerprint
from jaxlm.errors import UserError
from jaxlm.fields import field
from jaxlm.paths import write_whole
from jaxlm.tokenizers.files import MARKER
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.tokenizers.training import Kind, Normalization, train_tokenizer
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import Report, TokenBatch

_SAMPLE = 10_000_000  # bytes of text for training a tokenizer: some 20 seconds of one core
_Sources = dict[str, tuple["TextData", Corpus, float]]  # with their weights, by name


@dataclasses.dataclass(frozen=True)
class TextData(Data):
    """Pretraining text and its tokenization; see `jaxlm.data.base.Data`."""

    source: str = field("python-docs", resumable=True)
    """The text: `python-docs` (the documentation in every Python), a file, folder or glob of .txt (documents end at
    blank lines, at the latest after some 65,536 characters), .jsonl, .csv or .tsv, each also .gz, .xz or .zst, or
    .parquet; `tfds:NAME[/CONFIG][:SPLIT]` or `hf:NAME[:CONFIG][:SPLIT]`. Commas separate several. Weights mix them:
    `wiki.jsonl.zst@0.7,books/*.txt@0.3` gives shares of the tokens that are read."""

    temperature: float = field(0.0, resumable=True, range="[0, inf]")
    """Above 0, mixes the sources between commas with shares in proportion to n^(1/T) of their n tokens: 1 is their
    sizes, 3.3 as in XLM-R and mT5, inf equal shares."""

    deduplicate: Deduplicate = field("off", resumable=True)
    """Leaves out documents that repeat an earlier one: `exact`, but for white space and Unicode composition; `near`,
    also those that share about 0.8 of their runs of 5 words (see jaxlm/data/duplicates.py)."""

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

    @property
    def shared_cache(self) -> epath.Path:
        return cache_folder(self.cache_dir)

    def prepare_tokenizer(self, report: Report = print, symbols: Sequence[str] = ()) -> Tokenizer:
        """Load the tokenizer, or train it; see `jaxlm.data.base.Data`.

        The cache folder keeps a trained tokenizer under the fingerprint of its inputs, so that all runs with the same
        text, settings and `symbols` share it.
        """
        self.validate()
        if self.tokenizer == "auto":
            return self._trained_tokenizer(symbols, report)
        tokenizer = Tokenizer.load(self.tokenizer)
        for name in symbols:
            tokenizer.vocabulary.id(name)
        return tokenizer

    def sample(self, report: Report = print) -> tuple[Any, Iterator[str]]:
        """Return what identifies the text, and some ten megabytes drawn evenly from it, for the words of a vocabulary.

        They have the sources of a mixture by their shares in bytes.
        """
        sources = self._sources(report)
        texts = [data._survey(corpus, report) for data, corpus, _ in sources.values()]
        weights, sizes = [weight for *_, weight in sources.values()], [text.bytes for text in texts]
        shares = shares_of(weights, sizes, self.temperature).tolist()
        identity: Any = [[text.fingerprint, share] for text, share in zip(texts, shares, strict=True)]
        identity = texts[0].fingerprint if "" in sources else identity
        opened = zip(sources.values(), sizes, shares, strict=True)
        samples = (sample(corpus.pieces(), size, round(share * _SAMPLE)) for (_, corpus, _), size, share in opened)
        return identity, itertools.chain.from_iterable(samples)

    def check_format(self, row_format: RowFormat) -> None:
        """Raise UserError for a stream of a mixture; see `jaxlm.data.base.Data`."""
        if row_format.stride and "" not in parse_mixture(self.source, self.temperature):
            raise UserError("This objective reads a text in its order; leave weights and --data.temperature out.")

    def survey(self, report: Report = print) -> None:
        """Read the text once; see `jaxlm.data.base.Data`."""
        sources = self._sources(report)
        for data, corpus, _ in sources.values():
            text = data._survey(corpus, report)
            if corpus.remark:
                report(corpus.remark)
            if text.blank:
                report(f"Rows of {corpus.source} without text, which are left out: {text.blank:,}")
        self._repeated(sources, report)

    def tokenize(self, tokenizer: Tokenizer, shard: int, shards: int, report: Report = print) -> None:
        """Tokenize a share of the text into the cache folder; see `jaxlm.data.base.Data`."""
        for build in self._builds(self._sources(report), tokenizer, report).values():
            build.tokenize(shard, shards)

    def open(self, tokenizer: Tokenizer, report: Report = print) -> Source:
        """Open the token stores of this text and tokenizer in the cache folder; build those that are missing.

        Returns:
            A `Store`, or a `Mixture` of them.
        """
        sources = self._sources(report)
        stores = {name: build.finish() for name, build in self._builds(sources, tokenizer, report).items()}
        return stores.get("") or Mixture(stores, [weight for *_, weight in sources.values()], self.temperature)

    def describe(self, tokenizer: Tokenizer, report: Report = print) -> None:
        """Report on each source, from its store and a sample; see `jaxlm.data.base.Data`."""
        sources = self._sources(report)
        stores = {name: build.finish() for name, build in self._builds(sources, tokenizer, report).items()}
        for name, (data, corpus, _) in sources.items():
            texts = sample(corpus.pieces(), data._survey(corpus, report).bytes, _SAMPLE)
            for line in describe_text(stores[name], tokenizer, texts, list(stores.values())):
                report(f"{corpus.source}: {line}")

    def _sources(self, report: Report) -> _Sources:
        """Return the sources of a mixture, without duplicates, with their weights, by name; "" is that of other text.

        Raises:
            UserError: a file is in two sources, where it might be held out of one alone; or as `parse_mixture`.
        """
        self.validate()
        if not self.source.strip():  # `jaxlm import` leaves it empty, for commands that need no text
            raise UserError(f"--data.source is empty; give {SOURCES}.")
        parsed, found = parse_mixture(self.source, self.temperature), {}
        for name, (item, _) in parsed.items() if len(parsed) > 1 else ():
            # Splits of a dataset have files in common.
            for file in () if kind_of(item) in ("tfds", "hf") else open_corpus(item, self.text_field).stats:
                if (other := found.setdefault(file, name)) != name:
                    path = json.loads(file)[0]
                    raise UserError(f"{other} and {name} of --data.source both have {path}; leave it out of one.")
        parts = [dataclasses.replace(self, source=item, temperature=0.0) for item, _ in parsed.values()]
        corpora = [data._corpus() for data in parts]
        if self.deduplicate != "off":
            corpora = without_duplicates(corpora, self.deduplicate, self.cache_dir, report)
        opened = zip(parsed.items(), parts, corpora, strict=True)
        return {name: (data, corpus, weight) for (name, (_, weight)), data, corpus in opened}

    def _repeated(self, sources: _Sources, report: Report) -> list[frozenset[int]]:
        """Return for each source the documents that leave its training text; see `repeated_documents`."""
        texts = [data._survey(corpus, report) for data, corpus, _ in sources.values()]
        rules = [HeldOutRule.of(self.held_out, text) for text in texts]
        # By its hash, a source holds out all copies of a document.
        has_tail = any(rule.tail < text.bytes and text.documents > 1 for rule, text in zip(rules, texts, strict=True))
        if self.deduplicate != "off" or not self.held_out or not (has_tail or len(sources) > 1):
            return [frozenset()] * len(sources)
        return repeated_documents([corpus for _, corpus, _ in sources.values()], rules, self.cache_dir, report)

    def _builds(self, sources: _Sources, tokenizer: Tokenizer, report: Report) -> dict[str, StoreBuild]:
        """Return the token store to build of each source."""
        builds = {}
        for (name, (data, corpus, _)), repeated in zip(sources.items(), self._repeated(sources, report), strict=True):
            text = data._survey(corpus, report)
            fingerprint = store_fingerprint(text, tokenizer.fingerprint, self.held_out, self.sentences, repeated)
            folder = cache_folder(self.cache_dir) / "stores" / f"{fingerprint[:20]}-{FORMAT}"
            builds[name] = StoreBuild(
                str(folder), [part() for part in corpus.parts], text, tokenizer, self.held_out, data.source,
                self.sentences, self.workers, repeated, report,
            )
        return builds

    def synthetic(self, rows: int, row_format: RowFormat, vocabulary: Vocabulary) -> TokenBatch:
        """Return full rows of random text tokens, one document each; see `jaxlm.data.base.Data`."""
        tokens = random_tokens(rows, row_format.length, vocabulary)
        return TokenBatch(tokens, np.indices(tokens.shape, np.int32)[0] + 1)

    def _corpus(self) -> Corpus:
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

    def _trained_tokenizer(self, symbols: Sequence[str], report: Report) -> Tokenizer:
        identity, texts = self.sample(report)
        settings = {"kind": self.tokenizer_kind, "vocab_size": self.vocab_size, "normalization": self.normalization}
        facts = json.dumps([2, identity, settings, _SAMPLE, *symbols])
        name = hashlib.sha256(facts.encode()).hexdigest()[:20]
        folder = cache_folder(self.cache_dir) / "tokenizers" / name
        if not (folder / MARKER).exists():
            report(f"Training a vocabulary of {self.vocab_size:,} ({self.tokenizer_kind}) on {self.source}")
            train_tokenizer(texts, str(folder), symbols=symbols, **settings)
        tokenizer = Tokenizer.load(str(folder))
        if self.tokenizer_kind != "bytes" and len(tokenizer) < self.vocab_size:
            sizes = f"{len(tokenizer):,} ids and not {self.vocab_size:,} (--data.vocab-size)"
            report(f"The vocabulary has {sizes}: this text has no more pieces")
        return tokenizer
