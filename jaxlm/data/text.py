"""Pretraining text: its flags, and its tokenizer and token store in the cache folder."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence

import numpy as np
from etils import epath

from jaxlm.data.base import Data, RowFormat, Source
from jaxlm.data.cache import cache_folder
from jaxlm.data.corpus import SOURCES, Corpus, open_corpus
from jaxlm.data.describe import describe_text
from jaxlm.data.duplicates import Deduplicate, Keys, find_duplicates
from jaxlm.data.engine import Work, jobs_of, missing_jobs, run_jobs
from jaxlm.data.mixture import Mixture, parse_mixture, shares_of, weights_of_phase
from jaxlm.data.parts import Part, Reader, sample
from jaxlm.data.rows import kind_of
from jaxlm.data.shards import Shards
from jaxlm.data.splits import SplitText, leave_out_copies
from jaxlm.data.store import FORMAT, Store, is_finished, write_store
from jaxlm.data.words import Words
from jaxlm.errors import UserError
from jaxlm.fields import field
from jaxlm.tokenizers.files import MARKER
from jaxlm.tokenizers.template import Template
from jaxlm.tokenizers.tokenizer import Tokenizer, replace_surrogates
from jaxlm.tokenizers.training import Kind, Normalization, train_tokenizer
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import Report, TokenBatch

_SAMPLE = 10_000_000  # bytes of text for training a tokenizer: some 20 seconds of one core
_Sources = dict[str, tuple["TextData", Corpus, float]]  # with their weights, by name


@dataclasses.dataclass(frozen=True)
class TextData(Data):
    """Pretraining text and its tokenization; see `jaxlm.data.base.Data`. An object lists its files once."""

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
    """Kind of the vocabulary that `auto` trains: SentencePiece unigram or BPE, byte-level BPE as in GPT-2 and RoBERTa
    (combining marks stay in their words), single bytes (258 ids), or the most frequent words of all of the text."""

    vocab_size: int = field(8192, range="[108, 4194304]")
    """Size of the vocabulary that `auto` trains. A text with fewer pieces gives a smaller one: kind unigram needs some
    300 KB of text for 8,192 pieces, 100 KB for 4,096 and 1 KB for 512. Special tokens, bytes and characters need some
    460."""

    normalization: Normalization = "nmt_nfkc"
    """Text normalization of the tokenizer that `auto` trains: `nmt_nfkc`, the default of SentencePiece (Unicode NFKC
    composes accents, takes apart Thai ำ and Devanagari letters with nukta, and makes ！…² into !...2; a model writes
    text in that form; control characters are removed; zero-width spaces and non-joiners, which Persian writes within
    words, become spaces; lines and tabs stay), or `identity`, which keeps all of them."""

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
    """Number of tokenizing processes; 0 means one per core."""

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

    def sample(self) -> list[str]:
        """Return some ten megabytes of the text from evenly spaced places, for the pieces of a vocabulary.

        They have the sources of a mixture by their shares in bytes. At most ten times as much is read.
        """
        texts = [text for parts, share in self._shares for text in sample(parts, round(share * _SAMPLE))]
        if not texts:
            raise UserError(f"{self.source} holds no text; every document in it is empty.")
        return texts

    @property
    def _shares(self) -> list[tuple[list[Part], float]]:
        """The parts of each source, and its share in the vocabulary's text."""
        sources = self._sources.values()
        sizes = [sum(part.text_size for part in corpus.parts) for _, corpus, _ in sources]
        if not any(sizes):
            raise UserError(f"{self.source} holds no text; all files are empty.")
        shares = shares_of([weight for *_, weight in sources], sizes, self.temperature).tolist()
        return [(corpus.parts, share) for (_, corpus, _), share in zip(sources, shares, strict=True)]

    def check_format(self, row_format: RowFormat) -> None:
        """Raise UserError for a stream of a mixture; see `jaxlm.data.base.Data`."""
        if row_format.stride and "" not in parse_mixture(self.source, self.temperature):
            raise UserError("This objective reads a text in its order; leave weights and --data.temperature out.")

    def phase_shares(self, data: Data) -> tuple[list[float], float] | None:
        """Return the weights of the sources in a phase, and its temperature; see `jaxlm.data.base.Data`."""
        if data == dataclasses.replace(self, length=data.length):
            return None
        items = [item for item, _ in parse_mixture(self.source, self.temperature).values()]
        return weights_of_phase(items, data.source, data.temperature)

    def parts(self) -> list[Part]:
        """Return the parts of the text, of one source after the other."""
        return _parts_of(self._sources)

    def works(self, tokenizer: Tokenizer) -> list[Work]:
        """Return what tokenizes a part, and what computes its keys to find duplicates."""
        return [self._shards(tokenizer), *([self.keys] if self.deduplicate != "off" else [])]

    def missing(self, parts: Sequence[Part], tokenizer: Tokenizer) -> list[int]:
        """Return the numbers of parts that lack a shard or keys; see `jaxlm.data.base.Data`."""
        if self._is_complete(tokenizer):
            return []
        found = {part for _, part in missing_jobs(jobs_of(self.works(tokenizer), parts))}
        return [number for number, part in enumerate(parts) if part in found]

    def tokenize(self, tokenizer: Tokenizer, shard: int, shards: int, report: Report = print) -> None:
        """Tokenize a share of the text into the cache folder; see `jaxlm.data.base.Data`."""
        if not self._is_complete(tokenizer):
            self._tokenize(self._sources, tokenizer, report, slice(shard, None, shards))

    def open(self, tokenizer: Tokenizer, report: Report = print) -> Source:
        """Open the token stores of this text and tokenizer in the cache folder; make what is missing.

        Returns:
            A `Store`, or a `Mixture` of them.
        """
        sources = self._sources
        for _, corpus, _ in sources.values():
            if corpus.remark:
                report(f"{corpus.source}: {corpus.remark}" if len(sources) > 1 else corpus.remark)
        stores = self._stores(sources, tokenizer, report)
        return stores.get("") or Mixture(stores, [weight for *_, weight in sources.values()], self.temperature)

    def describe(self, tokenizer: Tokenizer, report: Report = print) -> None:
        """Report on each source, from its store and a sample; see `jaxlm.data.base.Data`."""
        sources = self._sources
        stores = self._stores(sources, tokenizer, lambda line: None)
        for name, (_, corpus, _) in sources.items():
            for line in describe_text(stores[name], tokenizer, sample(corpus.parts, _SAMPLE), list(stores.values())):
                report(f"{corpus.source}: {line}")

    @functools.cached_property  # thousands of files in a bucket take a minute to list
    def _sources(self) -> _Sources:
        """The sources of a mixture with their weights, by name; "" is that of other text.

        Raises:
            UserError: a file is in two sources, where it might be held out of one alone; or as `parse_mixture`.
        """
        self.validate()
        if not self.source.strip():  # `jaxlm import` leaves it empty, for commands that need no text
            raise UserError(f"--data.source is empty; give {SOURCES}.")
        found: _Sources = {}
        files: dict[str, str] = {}
        for name, (item, weight) in parse_mixture(self.source, self.temperature).items():
            data = dataclasses.replace(self, source=item, temperature=0.0)
            found[name] = data, open_corpus(item, data.reader), weight
            # Splits of a dataset have files in common.
            for file in () if kind_of(item) in ("tfds", "hf") else found[name][1].files:
                if (other := files.setdefault(file, name)) != name:
                    raise UserError(f"{other} and {name} of --data.source both have {file}; leave it out of one.")
        return found

    @property
    def reader(self) -> Reader:
        """How the documents are read."""
        return Reader(self.text_field)

    def _shards(self, tokenizer: Tokenizer) -> Shards:
        return Shards(str(self.shared_cache / "shards"), tokenizer, self.sentences)

    @property
    def keys(self) -> Keys:
        """What computes the keys of a part."""
        return Keys(str(self.shared_cache / "keys"), self.deduplicate == "near")

    def _tokenize(self, sources: _Sources, tokenizer: Tokenizer, report: Report, share: slice = slice(None)) -> None:
        """Tokenize a share of the parts."""
        parts = _parts_of(sources)[share]
        for verb, work in zip(("Tokenizing", "Hashing"), self.works(tokenizer), strict=False):
            run_jobs(jobs_of([work], parts), self.workers, f"{verb} {self.source}", report)

    def _is_complete(self, tokenizer: Tokenizer) -> bool:
        """Return whether the token stores need no work: to look for all other files of many parts takes minutes."""
        try:
            self._open_stores(self._sources, tokenizer)
        except UserError:
            return False
        return True

    def _open_stores(self, sources: _Sources, tokenizer: Tokenizer) -> dict[str, Store]:
        """Open the finished token store of each source; raise UserError if one lacks shards, which a bucket's may."""
        shards, begin = self._shards(tokenizer), Template(tokenizer.vocabulary.single).before(tokenizer.vocabulary)
        folders = self._folders(sources, tokenizer).items()
        found = {name: Store(folder, shards.folder, begin) for name, folder in folders}
        for name, (_, corpus, _) in sources.items():
            if cut := found[name].manifest["cut"]:  # the shard may have been deleted, as one that was damaged
                dataclasses.replace(shards, cut=cut[1]).make(corpus.parts[cut[0]])
            found[name].check_shards()
        return found

    def _stores(self, sources: _Sources, tokenizer: Tokenizer, report: Report) -> dict[str, Store]:
        """Open the token store of each source, and make what is missing."""
        try:
            found = self._open_stores(sources, tokenizer)
        except UserError:
            self._tokenize(sources, tokenizer, report)
            folders = self._folders(sources, tokenizer)
            if not all(map(is_finished, folders.values())):
                self._write_stores(sources, self._shards(tokenizer), folders, report)
            found = self._open_stores(sources, tokenizer)
        for name, (data, corpus, _) in sources.items():
            for line in found[name].remarks(corpus.source, self.deduplicate):
                report(line)
            data.check_store(found[name])
        return found

    def _folders(self, sources: _Sources, tokenizer: Tokenizer) -> dict[str, epath.Path]:
        """Return the folder of the token store of each source."""
        shards, folders = self._shards(tokenizer), {}
        names = {name: list(map(shards.name, corpus.parts)) for name, (_, corpus, _) in sources.items()}
        for number, name in enumerate(names):  # what a source holds out depends on the others
            facts = [FORMAT, self.keys.version, self.held_out, self.deduplicate, list(names.values()), number]
            key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:20]
            folders[name] = self.shared_cache / "stores" / key
        return folders

    def _write_stores(
        self, sources: _Sources, shards: Shards, folders: Mapping[str, epath.Path], report: Report
    ) -> None:
        """Decide what is held out of each source and what is left out, and write the token stores."""
        corpora = [corpus for _, corpus, _ in sources.values()]
        removed: list[list[np.ndarray]] = [[] for _ in corpora]
        if self.deduplicate != "off":
            parts = _parts_of(sources)
            report(f"Looking for {self.deduplicate} duplicates in {self.source}")
            repeats = iter(find_duplicates(self.keys, parts, self.duplicates_folder(parts)))
            removed = [list(itertools.islice(repeats, len(corpus.parts))) for corpus in corpora]
        texts = []
        for corpus, own in zip(corpora, removed, strict=True):
            texts.append(SplitText.of(corpus.parts, shards, self.held_out, own))
            if not texts[-1].totals.documents:
                repeats = any(np.any(mask) for mask in own)
                why = "repeats an earlier one; name it first, or set --data.deduplicate off" if repeats else "is empty"
                raise UserError(f"{corpus.source} holds no text; every document in it {why}.")
        # By its hash, a source holds out all copies of a document.
        is_alone = len(texts) == 1 and not texts[0].has_tail
        if self.held_out and self.deduplicate == "off" and not is_alone:
            texts = leave_out_copies(texts)
        for folder, corpus, text in zip(folders.values(), corpora, texts, strict=True):
            write_store(folder, corpus.source, self.held_out, shards, text)

    def duplicates_folder(self, parts: Sequence[Part]) -> epath.Path:
        """Return the folder of the duplicates among parts."""
        names = list(map(self.keys.name, parts))
        name = hashlib.sha256(json.dumps(names).encode()).hexdigest()[:24]
        return self.shared_cache / "duplicates" / name

    def check_store(self, store: Store) -> None:
        """Raise UserError for the store of a text that lacks what this data needs."""

    def synthetic(self, rows: int, row_format: RowFormat, vocabulary: Vocabulary) -> TokenBatch:
        """Return full rows of random text tokens, one document each; see `jaxlm.data.base.Data`."""
        text = np.setdiff1d(np.flatnonzero(~vocabulary.special), [vocabulary.unk])
        tokens = np.random.default_rng(0).choice(text, (rows, row_format.length)).astype(np.int32)
        return TokenBatch(tokens, np.indices(tokens.shape, np.int32)[0] + 1)

    def _trained_tokenizer(self, symbols: Sequence[str], report: Report) -> Tokenizer:
        settings = {"kind": self.tokenizer_kind, "vocab_size": self.vocab_size, "normalization": self.normalization}
        parts, shares = zip(*self._shares, strict=True)
        is_part = any(sum(part.text_size for part in own) > round(share * _SAMPLE)
                      for own, share in zip(parts, shares, strict=True))
        counts_all, size = is_part and self.tokenizer_kind == "words", 0
        if counts_all:
            what = [4, [[part.name for part in own] for own in parts], shares]
        else:
            texts, read = self.sample(), hashlib.sha256()
            for data in (replace_surrogates(text).encode() for text in texts):
                read.update(data + b"\0")
                size += len(data)
            what = [6 if self.tokenizer_kind in ("unigram", "bpe") else 5, read.hexdigest()]
        name = hashlib.sha256(json.dumps([*what, settings, *symbols]).encode()).hexdigest()[:20]
        folder = self.shared_cache / "tokenizers" / name
        if not (folder / MARKER).exists():
            report(f"Training a vocabulary of {self.vocab_size:,} ({self.tokenizer_kind}) on {self.source}")
            if counts_all:
                words = Words(str(self.shared_cache / "words"), self.normalization)
                run_jobs(jobs_of([words], self.parts()), self.workers, f"Counting the words of {self.source}", report)
                texts = words.merged(parts, shares)
            train_tokenizer(texts, str(folder), symbols=symbols, **settings)
        tokenizer = Tokenizer.load(str(folder))
        if self.tokenizer_kind != "bytes" and len(tokenizer) < self.vocab_size:
            sizes = f"{len(tokenizer):,} ids and not {self.vocab_size:,} (--data.vocab-size)"
            has_more = is_part and not counts_all
            text = f"the {size:,} bytes of the text that were read have" if has_more else "this text has"
            report(f"The vocabulary has {sizes}: {text} no more pieces")
        return tokenizer


def _parts_of(sources: _Sources) -> list[Part]:
    return [part for _, corpus, _ in sources.values() for part in corpus.parts]
