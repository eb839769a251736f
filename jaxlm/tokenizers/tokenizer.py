"""The tokenizer: text to ids and back, with the same ids in Transformers after an export.

The work is done by SentencePiece or by the `tokenizers` library.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import sentencepiece
import tokenizers
from etils import epath

from jaxlm.errors import UserError
from jaxlm.paths import any_path, reading
from jaxlm.tokenizers import files, sentencepiece_json
from jaxlm.tokenizers.files import DATA_FILE, JSON, MARKER, SENTENCEPIECE, Definition
from jaxlm.tokenizers.normalizer import normalize
from jaxlm.tokenizers.vocabulary import Vocabulary

# Characters of a segment. Long texts go to the library in groups of segments, so that memory does not grow with them.
# SentencePiece sums its scores in float32 from the beginning of a text, so that far into a long one the rounding
# decides; short segments keep the sums right.
_LONG = {SENTENCEPIECE: sentencepiece_json.EXACT, JSON: 1 << 16}
_GROUP = 1 << 22
_MOST_IDS = 1 << 24
_between_words = re.compile(r"(?<=[A-Za-z0-9]) (?=[A-Za-z0-9])")
_sentinel = re.compile(r"<extra_id_(\d+)>")
# Punctuation whose last sign but quotes and brackets ends a sentence, in any script.
_sentence_end = re.compile(r"""\W*[.!?…。！？｡؟۔।॥։።။។]["'”’»)\]}」』）】]*""")
# Scripts that are written without spaces: each piece is taken for a word.
_unspaced = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)


class Tokenizer:
    """An immutable tokenizer. Make one by `Tokenizer.load` or `jaxlm.tokenizers.training.train_tokenizer`.

    vocabulary: the facts that objectives need.
    fingerprint: SHA-256 (hex) of all that determines the ids of a text.
    """

    def __init__(self, definition: Definition) -> None:
        self._definition = definition
        self._processor: sentencepiece.SentencePieceProcessor | None = None
        self._begins_lines = self._normalizes = False
        self._boundary: re.Pattern[str] | None = None  # where a long text may be cut
        try:
            (self._load_sentencepiece if definition.kind == SENTENCEPIECE else self._load_json)()
        except Exception as error:  # both libraries raise bare RuntimeError or Exception
            raise UserError(f"{definition.name} is not a tokenizer that can be read ({error}).") from error
        self.vocabulary = self._make_vocabulary()
        self.fingerprint = definition.fingerprint

    def _load_sentencepiece(self) -> None:
        proto = sentencepiece_json.parse(self._definition.data)
        self._pieces = [piece.piece for piece in proto.pieces]
        self._special = set(sentencepiece_json.symbol_pieces(proto))
        self._style = "marks"
        spec = proto.normalizer_spec
        if sentencepiece_json.is_trained_here(proto):
            self._begins_lines, self._boundary = True, sentencepiece_json.WORD_END
            self._normalizes = sentencepiece_json.is_normalized(proto)
            spec.add_dummy_prefix = False  # `begin_lines` adds it
        elif spec.remove_extra_whitespaces and spec.add_dummy_prefix:
            self._boundary = _between_words
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())

    def _load_json(self) -> None:
        facts = json.loads(self._definition.data)
        numbers = self._plain.get_vocab(with_added_tokens=True)
        if (largest := max(numbers.values())) >= _MOST_IDS:
            raise ValueError(f"it has the id {largest:,}")
        self._pieces = [""] * (largest + 1)
        for piece, number in numbers.items():
            self._pieces[number] = piece
        self._special = {token["content"] for token in facts.get("added_tokens") or [] if token["special"]}
        self._special |= set(self._definition.symbols.values())
        types = _types(facts.get("pre_tokenizer")) | _types(facts.get("decoder"))
        self._style = "wordpiece" if facts["model"].get("type") in ("WordPiece", "WordLevel") else (
            "bytes" if "ByteLevel" in types else "marks"
        )
        if _ids(self._plain, "so far") == _ids(self._plain, "so") + _ids(self._plain, " far"):
            self._boundary = _between_words

    def _make_vocabulary(self) -> Vocabulary:
        numbers = {piece: number for number, piece in enumerate(self._pieces)}
        ids = {role: numbers.get(piece, -1) for role, piece in self._definition.symbols.items()}
        if ids.get("pad", -1) < 0 and ids.get("eos", -1) >= 0:
            ids["pad"] = ids["eos"]  # GPT-2 has no [PAD]; by custom its end symbol fills the rows
        sentinels = {int(m[1]): numbers[p] for p in self._special if (m := _sentinel.fullmatch(p)) and p in numbers}
        count = 0
        while count in sentinels and sentinels[count] == sentinels[0] - count:
            count += 1
        special = np.array([piece in self._special for piece in self._pieces])
        start = np.array([_starts_word(piece, self._style) for piece in self._pieces]) & ~special
        end = np.array([bool(_sentence_end.fullmatch(_readable(piece, self._style))) for piece in self._pieces])
        unknown = ids.get("unk", -1)
        if unknown >= 0 and list(ids.values()).count(unknown) == 1:  # it stands for a word; in GPT-2 it is also the end
            special[unknown], start[unknown] = False, True
        return Vocabulary(
            size=len(self._pieces), special=special, word_start=start, sentence_end=end & ~special,
            sentinel=sentinels[0] if count else -1, num_sentinels=count,
            symbols={piece: numbers[piece] for piece in sorted(self._special & numbers.keys())},
            name=self._definition.name, pieces=tuple(self._pieces), **ids,
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, lowercase: bool | None = None) -> Tokenizer:
        """Reads a tokenizer.

        path: a folder written by `save` (or a run folder that has one), a SentencePiece .model (unigram or BPE), a
            BERT vocab.txt, byte-level BPE files (folder with vocab.json or encoder.json, and merges.txt or vocab.bpe;
            with fairseq's dict.txt beside them, RoBERTa's ids), a tokenizer.json, or a Transformers folder.
        lowercase: for a vocab.txt or .model; by default as tokenizer_config.json beside it says, else for a vocab.txt
            whether it has no capital letter.
        Raises UserError if there is none, or it is damaged or of an unknown kind.
        """
        with reading(path):
            return cls(files.read(any_path(path), lowercase))

    @functools.cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """The `tokenizers` library's form, blind to special symbols."""
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(self.to_json(), ensure_ascii=False))
        tokenizer.encode_special_tokens = True
        return tokenizer

    @functools.cached_property
    def _marked(self) -> tokenizers.Tokenizer:
        """The same, in which special symbols are recognised: what an export holds."""
        return tokenizers.Tokenizer.from_str(json.dumps(self.to_json(), ensure_ascii=False))

    def to_json(self) -> dict[str, Any]:
        """The tokenizer as a `tokenizer.json`, without post-processor."""
        if self._definition.kind == JSON:
            return json.loads(self._definition.data)
        return sentencepiece_json.to_tokenizer_json(sentencepiece_json.parse(self._definition.data))

    def encode(self, text: str) -> list[int]:
        """The ids of `text` alone: none is added, and symbols such as "[MASK]" written in it are plain characters.

        Half surrogate pairs, which no UTF-8 file can hold, become U+FFFD.
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str], *, num_threads: int = 0) -> list[list[int]]:
        """`encode` for many texts at once, in parallel threads (num_threads: 0 for all cores; the `tokenizers` library
        takes its number from RAYON_NUM_THREADS instead)."""
        return [ids.tolist() for ids in self.encode_arrays(texts, num_threads=num_threads)]

    def encode_arrays(self, texts: Sequence[str], *, num_threads: int = 0) -> list[np.ndarray]:
        """`encode_batch` with int32 arrays in place of lists: an eighth of the memory."""
        found: list[list[np.ndarray]] = [[] for _ in texts]
        segments = ((i, segment) for i, text in enumerate(texts) for segment in self._segments(mend_surrogates(text)))
        for group in _groups(segments):
            encoded = self._encode_segments([segment for _, segment in group], num_threads)
            for (number, _), ids in zip(group, encoded, strict=True):
                found[number].append(np.asarray(ids, np.int32))
        return [arrays[0] if len(arrays) == 1 else np.concatenate(arrays) for arrays in found]

    def _segments(self, text: str) -> Iterator[str]:
        """Segments whose ids, joined, are those of the text; at least one."""
        if self._normalizes:
            text = normalize(text)
        if self._begins_lines:
            text = sentencepiece_json.begin_lines(text)
        start, long = 0, _LONG[self._definition.kind]
        while self._boundary and len(text) - start > long and (cut := self._boundary.search(text, start + long)):
            yield text[start : cut.start()]
            start = cut.start()
        yield text[start:]

    def _encode_segments(self, segments: list[str], num_threads: int) -> list[Sequence[int]]:
        if self._processor is not None:
            return self._processor.encode(segments, num_threads=num_threads or -1, return_type="numpy")
        return [encoding.ids for encoding in self._plain.encode_batch_fast(segments, add_special_tokens=False)]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each text its ids, int32 [tokens], and where each token begins and ends in its characters, int32
        [tokens, 2]. It does without the cuts of `encode`, so texts should not be very long."""
        return [
            (np.array(encoding.ids, np.int32), np.array(encoding.offsets, np.int32).reshape(-1, 2))
            for group in _groups(enumerate(map(mend_surrogates, texts)))
            for encoding in self._plain.encode_batch([text for _, text in group], add_special_tokens=False)
        ]

    def encode_with_symbols(self, text: str) -> list[int]:
        """The ids of `text`, in which special symbols such as "[MASK]" are recognised (for fill-mask; never for a
        corpus). They take the space before them, as the word would that they stand for."""
        return _ids(self._marked, mend_surrogates(text))

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of `ids`; special symbols are left out, or written by name. Bytes that are no UTF-8 give U+FFFD."""
        return self._marked.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Each id as a short readable string: "▁" is a space, "⏎" a newline, "<0xE3>" a byte of a longer character."""
        return [_readable(self._pieces[int(i)], self._style) if 0 <= i < len(self._pieces) else f"<{i}?>" for i in ids]

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes the tokenizer into `folder`, for `load`. The same tokenizer there already is left as it is; another
        is never overwritten (UserError)."""
        folder = epath.Path(folder)
        if (folder / MARKER).exists():
            if Tokenizer.load(folder).fingerprint == self.fingerprint:
                return
            raise UserError(f"{folder} holds another tokenizer; choose another folder, or remove it first.")
        definition = self._definition
        facts = {
            "kind": definition.kind, "name": definition.name, "symbols": dict(definition.symbols),
            "fingerprint": self.fingerprint,
        }
        # The marker comes last: a folder without it holds no tokenizer, whatever a crash has left there.
        write_whole(folder / DATA_FILE[definition.kind], definition.data)
        write_whole(folder / MARKER, json.dumps(facts, ensure_ascii=False, indent=1).encode())

    def with_symbols(self, names: Sequence[str]) -> Tokenizer:
        """This tokenizer with more special symbols behind its last id; itself where it has them all."""
        missing = [name for name in names if name not in self.vocabulary.symbols]
        if not missing:
            return self
        facts = self.to_json()
        rest = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        facts["added_tokens"] = [
            *(facts.get("added_tokens") or []),
            *({"id": len(self) + place, "content": name} | rest for place, name in enumerate(missing)),
        ]
        data = json.dumps(facts, ensure_ascii=False).encode()
        return Tokenizer(dataclasses.replace(self._definition, kind=JSON, data=data))

    def piece(self, number: int) -> str:
        """The piece of an id as its library writes it; `pieces` is for people."""
        return self._pieces[number]

    @property
    def is_byte_level(self) -> bool:
        """Whether pieces are of bytes in GPT-2's alphabet."""
        return self._style == "bytes"

    def __len__(self) -> int:
        return self.vocabulary.size

    def __repr__(self) -> str:
        return f"Tokenizer({self._definition.name!r}, {len(self)} ids, {self.fingerprint[:12]})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokenizer) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __reduce__(self) -> tuple[Any, ...]:
        return Tokenizer, (self._definition,)


def write_whole(path: epath.Path, data: bytes) -> None:
    """Writes a file, and the folders that it needs, so that it is there whole or not at all."""
    partial = path.parent / f".{path.name}.{os.getpid()}.partial"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(data)
        partial.replace(path)
    except Exception as error:  # of a disk, of what reads a bucket, or of a path that is none
        with contextlib.suppress(Exception):
            partial.unlink(missing_ok=True)
        what = getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be written ({what}); choose another folder.") from error


def _groups(texts: Iterable[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    """Numbered texts in groups of about _GROUP characters, whose encodings are held at a time."""
    group: list[tuple[int, str]] = []
    size = 0
    for number, text in texts:
        group.append((number, text))
        size += len(text)
        if size >= _GROUP:
            yield group
            group, size = [], 0
    if group:
        yield group


def _ids(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def mend_surrogates(text: str) -> str:
    """The text with halves of surrogate pairs, which UTF-8 cannot hold, joined, or if lone replaced by U+FFFD."""
    try:
        if not text.isascii():
            text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _types(part: Any) -> set[str]:
    """The types of a normalizer, pre-tokenizer or decoder and of all inside it."""
    if isinstance(part, list):
        return set().union(*map(_types, part))
    if not isinstance(part, dict):
        return set()
    return {part.get("type", "")} | set().union(*map(_types, part.values()))


def _starts_word(piece: str, style: str) -> bool:
    """As BERT, RoBERTa, XLNet and ALBERT have it for whole-word masking."""
    if style == "wordpiece":
        return not piece.startswith("##")
    text = _readable(piece, style)
    if text.startswith((sentencepiece_json.SPACE, "⏎", "⇥", "␍", "\r")) or _unspaced.match(text):
        return True
    # Punctuation does, but apostrophes.
    return style == "marks" and all(unicodedata.category(char)[0] in "PS" and char not in "'’" for char in text)


@functools.cache
def byte_of_char() -> dict[str, int]:
    """GPT-2's table: printable bytes stand for themselves, the others for the characters from U+0100 on."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in set(shown)]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


def _readable(piece: str, style: str) -> str:
    if style == "bytes" and all(char in byte_of_char() for char in piece):
        data = bytes(byte_of_char()[char] for char in piece)
        piece = data.decode("utf-8", "backslashreplace")
        piece = re.sub(r"\\x([0-9a-f]{2})", lambda m: f"<0x{m[1].upper()}>", piece) if b"\\" not in data else piece
        piece = piece.replace(" ", sentencepiece_json.SPACE)
    return {"<0x0A>": "⏎", "<0x09>": "⇥", "<0x0D>": "␍"}.get(piece, piece).replace("\n", "⏎").replace("\t", "⇥")
