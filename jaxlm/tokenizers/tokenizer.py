"""The tokenizer: text to ids and back, with the same ids in Transformers after an export.

The `tokenizers` library encodes text. SentencePiece does so, faster, for vocabularies that jaxlm trained with it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import sentencepiece
import tokenizers
from etils import epath

from jaxlm import hub
from jaxlm.errors import UserError
from jaxlm.paths import any_path, reading, write_whole
from jaxlm.tokenizers import files, sentencepiece_json
from jaxlm.tokenizers.files import DATA_FILE, JSON, MARKER, SENTENCEPIECE, Definition, byte_of_char
from jaxlm.tokenizers.normalizer import normalize
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.tokenizers.words import WordEncoder, longest_text

_MAX_IDS = 1 << 24
_GROUP = 1024  # texts that `tokenizers` encodes at a time, since its encodings take some 100 bytes a token
# Sentence-final punctuation of any script, and closing quotes and brackets.
_FINAL, _CLOSING = ".!?…。！？｡．؟۔।॥։።፧။។།༎", r"""["'”’»)\]}」』）】›》〉］〕]*"""
_LOW = "[“‘«]?"  # which close what „, ‚ and » have opened, and open in other languages
_sentence_end = re.compile(rf"\W*(?:[{_FINAL}]{_CLOSING}|[.!?…]{_CLOSING}{_LOW})")
# The end of a sentence in running text and the white space after it, which full-width punctuation does without.
_between_sentences = re.compile(
    rf"(?:[།༎](?:\s*[།༎])+|[{_FINAL}]{_CLOSING}{_LOW}(?=\s)|(?:[。！？｡]|(?<![\dA-Za-zＡ-Ｚａ-ｚ])．)+{_CLOSING}|\n)\s*"
)
_mt5_sentinel = re.compile(r"(?:^|\s+)(<extra_id_\d+>)")
# Pieces that continue a word of an n-gram, as in ALBERT's create_pretraining_data.py.
_continues_ngram = re.compile(r"""[A-Za-z]|[A-Za-z!"#$%&()*+,./:;?@[\\\]^_`{|}~-]{2,}""")
# Scripts written without spaces, in which every piece counts as a word.
_unspaced = re.compile(  # also the bytes with which Kana, Han and the planes above begin
    "<0x(?:E[3-9]|F0)>|[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)


UNSPACED = (
    "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao and Tibetan, Burmese, Khmer
    "\u2e80-\u30ff\u31f0-\u31ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Chinese and Japanese
)
"""Characters of texts without spaces between words, as ranges of a regular expression."""


class Tokenizer:
    """An immutable tokenizer, made by `Tokenizer.load` or `jaxlm.tokenizers.training.train_tokenizer`.

    Attributes:
        vocabulary: size, special tokens and word starts, for the objectives.
        fingerprint: SHA-256 (hex) of everything that determines the ids of a text.
        settings: what the ids do not depend on, see `jaxlm.tokenizers.files.Definition`.
    """

    def __init__(self, definition: Definition) -> None:
        """Build the tokenizer that a file defines."""
        self._definition = definition
        self.settings = definition.settings
        self._processor: sentencepiece.SentencePieceProcessor | None = None
        self._is_trained_here = self._has_single_bytes = False
        if definition.kind == SENTENCEPIECE:
            self._load_sentencepiece()
        else:
            self._load_json()
        self.vocabulary = self._make_vocabulary()
        self.fingerprint = definition.fingerprint

    def _load_sentencepiece(self) -> None:
        proto = sentencepiece_json.parse(self._definition.data)
        self._pieces = [piece.piece for piece in proto.pieces]
        self._special = set(sentencepiece_json.symbol_pieces(proto))
        self._style = "marks"
        self._is_normalized = sentencepiece_json.is_normalized(proto)
        self._is_trained_here = sentencepiece_json.is_trained_here(proto)
        if self._is_trained_here:
            proto.normalizer_spec.add_dummy_prefix = False  # `prefix_lines` adds it
        has_ties = not self._is_trained_here and proto.trainer_spec.model_type == proto.trainer_spec.UNIGRAM
        self._scores = np.array([piece.score if has_ties else np.nan for piece in proto.pieces])
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
        if not self._is_trained_here:
            self.require_equal_ids(sentencepiece_json.probes(self._pieces))

    def _load_json(self) -> None:
        definition = json.loads(self._definition.data)
        vocab = self._plain.get_vocab(with_added_tokens=True)
        if (largest := max(vocab.values())) >= _MAX_IDS:  # a list of so many pieces may not fit into memory
            raise ValueError(f"it has the id {largest:,}")
        self._pieces = [""] * (largest + 1)
        for piece, token_id in vocab.items():
            self._pieces[token_id] = piece
        self._special = {token["content"] for token in definition.get("added_tokens") or [] if token["special"]}
        self._special |= set(self._definition.symbols.values())
        is_byte_level = '"ByteLevel"' in json.dumps([definition.get("pre_tokenizer"), definition.get("decoder")])
        words = (tokenizers.models.WordPiece, tokenizers.models.WordLevel)  # older files, such as BERT's, name no type
        self._style = "wordpiece" if isinstance(self._plain.model, words) else "bytes" if is_byte_level else "marks"
        self._has_single_bytes = is_byte_level and not definition["model"].get("merges")

    def _make_vocabulary(self) -> Vocabulary:
        vocab = {piece: token_id for token_id, piece in enumerate(self._pieces)}
        ids = {role: vocab.get(piece, -1) for role, piece in self._definition.symbols.items()}
        if ids.get("pad", -1) < 0 and ids.get("eos", -1) >= 0:
            ids["pad"] = ids["eos"]  # GPT-2 has no [PAD] and pads with its end-of-text token
        self._special |= {piece for piece in self._pieces if piece.startswith(f"{sentencepiece_json.SPACE}<extra_id_")}
        symbols = {piece: vocab[piece] for piece in sorted(self._special & vocab.keys())}
        sentinels = self._find_sentinels(symbols)
        special = np.array([piece in self._special for piece in self._pieces])
        start = np.array([_starts_word(piece, self._style) for piece in self._pieces]) & ~special
        ngram_start = start
        if self._style == "marks":
            ngram_start = np.array([not _continues_ngram.fullmatch(piece) for piece in self._pieces]) & ~special
        end = np.array([bool(_sentence_end.fullmatch(_readable(piece, self._style))) for piece in self._pieces])
        num_bytes = np.array([_num_bytes(piece, self._style) for piece in self._pieces], np.int64) * ~special
        unknown = ids.get("unk", -1)
        if unknown >= 0 and list(ids.values()).count(unknown) == 1:  # [UNK] is a word; GPT-2's end-of-text is not
            special[unknown], start[unknown], ngram_start[unknown], num_bytes[unknown] = False, True, True, 0
        return Vocabulary(
            size=len(self._pieces), special=special, word_start=start, sentence_end=end & ~special,
            ngram_start=ngram_start, sentinel=sentinels.start, sentinel_step=sentinels.step,
            num_sentinels=len(sentinels), symbols=symbols, num_bytes=num_bytes,
            name=self._definition.name, separators=self._definition.separators, pieces=tuple(self._pieces),
            single=self.settings.get("single", ""), pair=self.settings.get("pair", ""), **ids,
        )

    def _find_sentinels(self, symbols: Mapping[str, int]) -> range:
        """Return the ids of the sentinels, in their order and without gaps; -1 as the start if there are none."""
        is_mt5 = f"{sentencepiece_json.SPACE}<extra_id_0>" in symbols
        name = f"{sentencepiece_json.SPACE * is_mt5}<extra_id_{{}}>".format
        first = symbols.get(name(0), -1)
        if first >= 0 and self._has_single_bytes:  # ByT5 was pretrained with the bytes that UTF-8 lacks, from 255 down
            return range(self._pieces.index("ÿ"), self._pieces.index("ÿ") - files.NUM_UNUSED_BYTES, -1)
        step = 1 if symbols.get(name(1)) == first + 1 else -1
        count = next(k for k in itertools.count() if first < 0 or symbols.get(name(k)) != first + step * k)
        return range(first, first + step * count, step)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Load a tokenizer.

        Args:
            path: a folder written by `save` (or a run folder that has one), a SentencePiece .model (unigram or BPE), a
                BERT vocab.txt, byte-level BPE files (folder with vocab.json or encoder.json, and merges.txt or
                vocab.bpe; with fairseq's dict.txt beside them, RoBERTa's ids), a tokenizer.json, or a Transformers
                folder, with the settings of its other files and the defaults of its class. Without a setting, a
                vocab.txt with small letters and no capital ones means that text is lowercased, and pieces with accents
                or composed Hangul that those are kept. `hf:ORG/NAME[@REVISION]`: that of the hub.

        Raises:
            UserError: there is no tokenizer at `path`, it is damaged or of an unknown kind, or it is a SentencePiece
                model that an export would not reproduce.
        """
        if not os.fspath(path):  # which would be the working directory
            raise UserError("data.tokenizer is empty; leave the flag out for its default.")
        with reading(path):
            definition = files.read(any_path(hub.local(path, hub.TOKENIZER)))
        with reading(f"the model of {definition.name} ({os.fspath(path)})"):
            return cls(definition)

    @functools.cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """The `tokenizers` form, which reads special tokens in a text as plain characters."""
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(self.to_json(), ensure_ascii=False))
        tokenizer.encode_special_tokens = True
        return tokenizer

    @functools.cached_property
    def _marked(self) -> tokenizers.Tokenizer:
        """The `tokenizers` form that recognizes special tokens, as an export does."""
        return tokenizers.Tokenizer.from_str(json.dumps(self.to_json(), ensure_ascii=False))

    def to_json(self) -> dict[str, Any]:
        """Return the tokenizer as a `tokenizer.json` without post-processor."""
        if self._definition.kind == JSON:
            return json.loads(self._definition.data)
        return sentencepiece_json.to_tokenizer_json(sentencepiece_json.parse(self._definition.data))

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without a template; special tokens in it, such as "[MASK]", are plain characters.

        Unpaired surrogates, which UTF-8 cannot hold, become U+FFFD.
        """
        return self.encode_arrays([text])[0].tolist()

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode many texts, as `encode` does, into int32 arrays.

        There is a thread a core, or $RAYON_NUM_THREADS, which the `tokenizers` library reads too.
        """
        if self._is_trained_here:
            return self._by_sentencepiece(texts, int(os.environ.get("RAYON_NUM_THREADS", -1)))
        return self._by_tokenizers(texts) if self._processor is None else self._words.encode(texts)

    def _by_tokenizers(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array(encoding.ids, np.int32) for encoding in _encodings(self._plain.encode_batch_fast, texts)]

    @functools.cached_property
    def _words(self) -> WordEncoder:
        longest = longest_text(sentencepiece_json.parse(self._definition.data))
        return WordEncoder(self._by_tokenizers, self._pieces, longest)

    def _by_sentencepiece(self, texts: Sequence[str], num_threads: int) -> list[np.ndarray]:
        segments = [list(self._segments(replace_surrogates(text))) for text in texts]
        encoded = iter(self._processor.encode(
            list(itertools.chain.from_iterable(segments)), num_threads=num_threads, return_type="numpy"
        ))
        return [np.concatenate(list(itertools.islice(encoded, len(parts)))) for parts in segments]

    def _segments(self, text: str) -> Iterator[str]:
        """Preprocess a text and cut it into segments, at least one, whose joined ids are those of the text.

        SentencePiece sums scores in float32 from the start of a text, so rounding would change the ids of a long one.
        """
        start, length = 0, len(text)
        if self._is_trained_here:
            text = sentencepiece_json.prefix_lines(normalize(text) if self._is_normalized else text)
            length = sentencepiece_json.EXACT
        while len(text) - start > length and (cut := sentencepiece_json.WORD_END.search(text, start + length)):
            yield text[start : cut.start()]
            start = cut.start()
        yield text[start:]

    def require_equal_ids(self, texts: Sequence[str]) -> None:
        """Raise UserError if a text gets other ids from SentencePiece than from the exported form.

        Where both segmentations have the same score in a published model, SentencePiece's rounding decides.
        """
        if self._processor is None:
            return
        pairs = zip(texts, self._by_sentencepiece(texts, 1), self.encode_with_offsets(texts), strict=True)
        for text, ids, (exported, _) in pairs:
            is_tie = np.isclose(self._scores[ids].sum(), self._scores[exported].sum(), 1e-6)
            if not np.array_equal(ids, exported) and not is_tie:
                raise UserError(
                    f"{self._definition.name} cannot be exported: SentencePiece encodes {text!r} as {ids.tolist()}, "
                    f"but Transformers would as {exported.tolist()}; use another vocabulary."
                )

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Encode texts and locate their tokens.

        Returns:
            For each text its ids, int32 [tokens], and the start and end of each token in characters, int32 [tokens, 2].
        """
        return [
            (np.array(encoding.ids, np.int32), np.array(encoding.offsets, np.int32).reshape(-1, 2))
            for encoding in _encodings(self._plain.encode_batch, texts)
        ]

    def encode_with_symbols(self, text: str) -> list[int]:
        """Return the ids of `text`, recognizing special tokens such as "[MASK]"; never use it for a corpus.

        A special token takes the space before it, like the word that it replaces.
        """
        if f"{sentencepiece_json.SPACE}<extra_id_0>" in self.vocabulary.symbols:  # mT5's have it in their names
            text = _mt5_sentinel.sub(rf"{sentencepiece_json.SPACE}\1", text)
        return self._marked.encode(replace_surrogates(text), add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of `ids`, without or with the names of special tokens. Invalid UTF-8 becomes U+FFFD."""
        return self._marked.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def spelled(self, text: str) -> str:
        """Return a text as a model writes it, normalized and without space around it; itself if it cannot."""
        ids = self.encode(text)
        return text if self.vocabulary.unk in ids else self.decode(ids).strip() or text

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return readable pieces: "▁" is a space, "⏎" a newline, "<0xE3>" a byte of a longer character."""
        return [_readable(self._pieces[int(i)], self._style) if 0 <= i < len(self._pieces) else f"<{i}?>" for i in ids]

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Save the tokenizer for `load`. It never overwrites another tokenizer.

        Raises:
            UserError: the folder holds another tokenizer or cannot be written.
        """
        folder = epath.Path(folder)
        if (folder / MARKER).exists():
            if Tokenizer.load(folder).fingerprint == self.fingerprint:
                return
            raise UserError(f"{folder} holds another tokenizer; choose another folder, or remove it first.")
        definition = self._definition
        saved = {
            "kind": definition.kind, "name": definition.name, "symbols": dict(definition.symbols),
            "fingerprint": self.fingerprint, "separators": definition.separators, "settings": dict(definition.settings),
        }
        # The marker comes last, so that a folder with it is complete even after a crash.
        write_whole(folder / DATA_FILE[definition.kind], definition.data)
        write_whole(folder / MARKER, json.dumps(saved, ensure_ascii=False, indent=1).encode())

    def with_symbols(self, names: Sequence[str]) -> Tokenizer:
        """Append the special tokens that the tokenizer lacks, and return the result."""
        missing = [name for name in names if name not in self.vocabulary.symbols]
        if not missing:
            return self
        tokenizer_json = self.to_json()
        added = [sentencepiece_json.added_token(len(self) + i, name) for i, name in enumerate(missing)]
        tokenizer_json["added_tokens"] = [*(tokenizer_json.get("added_tokens") or []), *added]
        return self.with_json(tokenizer_json)

    def without_spare(self, rows: int) -> Tokenizer:
        """Return the tokenizer without special tokens beyond an embedding of `rows` rows; roles and sentinels stay."""
        if len(self) <= rows:
            return self
        tokenizer_json, needed = self.to_json(), {*self._definition.symbols.values()}
        added = tokenizer_json.get("added_tokens") or []
        kept = [
            token for token in added if token["id"] < rows or not token["special"] or token["content"] in needed
            or "extra_id_" in token["content"]
        ]
        return self.with_json(tokenizer_json | {"added_tokens": kept})

    def with_roles(self, roles: Mapping[str, str]) -> Tokenizer:
        """Return the tokenizer with special tokens in further roles ("mask"); those that it lacks are appended."""
        tokenizer_json = self.with_symbols([*roles.values()]).to_json()
        for token in tokenizer_json["added_tokens"]:  # a mask takes the space before it, like the word in its place
            token["lstrip"] |= token["content"] == roles.get("mask")
        symbols, definition = {**self._definition.symbols, **roles}, self.with_json(tokenizer_json)._definition
        return Tokenizer(dataclasses.replace(definition, symbols=symbols))

    def with_json(self, tokenizer_json: dict[str, Any]) -> Tokenizer:
        """Return the tokenizer of a changed `to_json`, with the same roles of special tokens."""
        data = json.dumps(tokenizer_json, ensure_ascii=False).encode()
        return Tokenizer(dataclasses.replace(self._definition, kind=JSON, data=data))

    def with_settings(self, **settings: Any) -> Tokenizer:
        """Return the tokenizer with further `settings`."""
        return Tokenizer(dataclasses.replace(self._definition, settings={**self.settings, **settings}))

    def piece(self, token_id: int) -> str:
        """Return the piece of an id as in the vocabulary file; `pieces` returns readable ones."""
        return self._pieces[token_id]

    @property
    def is_byte_level(self) -> bool:
        """Whether pieces consist of bytes in GPT-2's alphabet."""
        return self._style == "bytes"

    def __len__(self) -> int:
        return self.vocabulary.size

    def __repr__(self) -> str:
        return f"Tokenizer({self._definition.name!r}, {len(self)} ids, {self.fingerprint[:12]})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokenizer) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __reduce__(self) -> tuple[Callable[[Definition], Tokenizer], tuple[Definition]]:
        return _build, (self._definition,)


@functools.lru_cache(maxsize=1)  # a process that tokenizes gets the same one with every part
def _build(definition: Definition) -> Tokenizer:
    return Tokenizer(definition)


def _encodings(encode_batch: Callable[..., list[tokenizers.Encoding]], texts: Sequence[str]) -> Iterator[Any]:
    """Yield the encoding of each text, group by group."""
    for start in range(0, len(texts), _GROUP):
        group = [replace_surrogates(text) for text in texts[start : start + _GROUP]]
        yield from encode_batch(group, add_special_tokens=False)


def split_sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text, at least one, each with the white space after it.

    A sentence ends at the end of a line, or with sentence-final punctuation before white space, the full stop of an
    abbreviation included.
    """
    start = 0
    for boundary in _between_sentences.finditer(text):
        yield text[start : boundary.end()]
        start = boundary.end()
    if start < len(text) or not start:
        yield text[start:]


def replace_surrogates(text: str) -> str:
    """Join surrogate pairs, and replace unpaired surrogates, which UTF-8 cannot hold, by U+FFFD."""
    try:
        if not text.isascii():
            text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _starts_word(piece: str, style: str) -> bool:
    """Return whether a piece starts a word, as in the whole-word masking of BERT, RoBERTa and XLNet."""
    if style == "wordpiece":
        return not piece.startswith("##")
    text = _readable(piece, style)
    if text.startswith((sentencepiece_json.SPACE, " ", "⏎", "⇥", "␍", "\r")) or _unspaced.match(text):
        return True
    # Punctuation starts a word, except apostrophes.
    return style == "marks" and all(unicodedata.category(char)[0] in "PS" and char not in "'’" for char in text)


def _num_bytes(piece: str, style: str) -> int:
    """Return the UTF-8 bytes of the text that a piece stands for, without the spaces that WordPiece drops."""
    if style == "bytes" and all(char in byte_of_char() for char in piece):
        return len(piece)
    if style == "wordpiece":
        piece = piece.removeprefix("##")
    elif re.fullmatch("<0x[0-9A-F]{2}>", piece):
        return 1
    return len(piece.replace(sentencepiece_json.SPACE, " ").replace("</w>", " ").encode())


def _readable(piece: str, style: str) -> str:
    if style == "bytes" and all(char in byte_of_char() for char in piece):
        data = bytes(byte_of_char()[char] for char in piece)
        piece = data.decode("utf-8", "backslashreplace")
        piece = re.sub(r"\\x([0-9a-f]{2})", lambda m: f"<0x{m[1].upper()}>", piece) if b"\\" not in data else piece
        piece = piece.replace(" ", sentencepiece_json.SPACE)
    return {"<0x0A>": "⏎", "<0x09>": "⇥", "<0x0D>": "␍"}.get(piece, piece).replace("\n", "⏎").replace("\t", "⇥")
