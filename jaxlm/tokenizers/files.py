"""Readers of every tokenizer file format.

Each format becomes one `Definition`: a SentencePiece model or a `tokenizer.json`, and the roles of its special tokens.
Only text, JSON and SentencePiece's protocol buffer are parsed. Nothing in a file is ever executed.
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from etils import epath

from jaxlm.errors import UserError
from jaxlm.tokenizers import sentencepiece_json
from jaxlm.tokenizers.sentencepiece_json import added_token

MARKER = "jaxlm_tokenizer.json"
SENTENCEPIECE, JSON = "sentencepiece", "tokenizers"
DATA_FILE = {SENTENCEPIECE: "spiece.model", JSON: "tokenizer.json"}
ROLES = ("pad", "unk", "cls", "sep", "mask", "bos", "eos")
_NAMES = {
    "pad": ("[PAD]", "<pad>"), "unk": ("[UNK]", "<unk>"), "cls": ("[CLS]", "<cls>"), "sep": ("[SEP]", "<sep>"),
    "mask": ("[MASK]", "<mask>"), "bos": ("<s>", "<|endoftext|>", "[BOS]"), "eos": ("</s>", "<|endoftext|>", "[EOS]"),
}
_MERGES, _BYTE_BPE_VOCAB = ("merges.txt", "vocab.bpe"), ("vocab.json", "encoder.json")


@dataclasses.dataclass(frozen=True)
class Definition:
    """Everything that determines a tokenizer.

    Attributes:
        kind: `SENTENCEPIECE` (data is a .model) or `JSON` (data is a tokenizer.json without truncation, padding and
            post-processor).
        data: content of the file.
        symbols: role ("pad", "mask", ...) → piece.
        name: name for error messages; not part of the fingerprint.
    """

    kind: str
    data: bytes
    symbols: Mapping[str, str]
    name: str

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of all fields except the name."""
        fields = json.dumps([self.kind, dict(self.symbols)], sort_keys=True).encode()
        return hashlib.sha256(fields + b"\n" + self.data).hexdigest()


def read(path: epath.Path) -> Definition:
    """Read the tokenizer at `path`, a file or folder in any of the formats of `Tokenizer.load`."""
    if not path.exists():
        raise UserError(f"there is no tokenizer at {path}; give a tokenizer's file or folder.")
    file = _find(path) if path.is_dir() else path
    name = file.name.removesuffix(".gz")
    readers = {MARKER: _read_saved, **dict.fromkeys((*_MERGES, *_BYTE_BPE_VOCAB), _read_byte_bpe)}
    kinds = {"model": _read_sentencepiece, "json": _read_json, "txt": _read_wordpiece}
    reader = readers.get(name) or kinds.get(name.rpartition(".")[2])
    if reader is None:
        raise UserError(
            f"{path} is not a known tokenizer file; give a SentencePiece .model, a vocab.txt, a tokenizer.json, or a "
            "folder with a tokenizer in it."
        )
    return reader(file)


def _find(folder: epath.Path) -> epath.Path:
    """Return the file that defines the tokenizer of a folder."""
    found = _first(folder, MARKER, f"tokenizer/{MARKER}", "tokenizer.json", "vocab.txt", *_MERGES, "spiece.model",
                   "sentencepiece.bpe.model", "tokenizer.model")
    models = [found] if found else list(folder.glob("*.model"))
    if len(models) != 1:
        raise UserError(
            f"{folder} has {'several tokenizers' if models else 'no tokenizer'} in it; give a folder with "
            "tokenizer.json, vocab.txt, merges.txt (or vocab.bpe) and vocab.json (or encoder.json), or the path of a "
            "SentencePiece .model."
        )
    return models[0]


def _first(folder: epath.Path, *names: str) -> epath.Path | None:
    return next((folder / file for name in names for file in (name, name + ".gz") if (folder / file).exists()), None)


def _read_bytes(path: epath.Path) -> bytes:
    data = path.read_bytes()
    return gzip.decompress(data) if path.name.endswith(".gz") else data


def _read_lines(path: epath.Path) -> list[str]:
    return [line.removesuffix("\r") for line in _read_bytes(path).decode().removesuffix("\n").split("\n")]


def _read_settings(folder: epath.Path) -> dict[str, Any]:
    """Read the settings of a Transformers folder; an empty dictionary if it has none."""
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).exists():
            found = json.loads((folder / name).read_bytes())
            settings |= {key: value for key, value in found.items() if value is not None}
    return settings


def _read_saved(path: epath.Path) -> Definition:
    saved = json.loads(path.read_bytes())
    data = path.parent / DATA_FILE[saved["kind"]]
    definition = Definition(saved["kind"], data.read_bytes(), saved["symbols"], saved["name"])
    if definition.fingerprint != saved["fingerprint"]:
        raise UserError(f"{data} is not what was saved there; it is damaged or was exchanged, so save it again.")
    return definition


def _read_sentencepiece(path: epath.Path) -> Definition:
    data, settings = _read_bytes(path), _read_settings(path.parent)
    proto = sentencepiece_json.parse(data)
    symbols = guess_symbols(sentencepiece_json.symbol_pieces(proto))
    if "do_lower_case" not in settings:
        return Definition(SENTENCEPIECE, data, symbols, path.name)
    # ALBERT and XLNet preprocess the text before SentencePiece.
    steps = [{"type": "Replace", "pattern": {"String": quotes}, "content": '"'} for quotes in ("``", "''")]
    steps += [] if settings.get("keep_accents") else [{"type": "NFKD"}, {"type": "StripAccents"}]
    steps += [{"type": "Lowercase"}] if settings["do_lower_case"] else []
    tokenizer_json = sentencepiece_json.to_tokenizer_json(proto)
    tokenizer_json["normalizer"]["normalizers"][:0] = steps
    return json_definition(tokenizer_json, symbols, path.name)


def _read_json(path: epath.Path) -> Definition:
    tokenizer_json = json.loads(_read_bytes(path))
    special = [token["content"] for token in tokenizer_json.get("added_tokens") or [] if token.get("special")]
    symbols = guess_symbols(special) | _configured_symbols(_read_settings(path.parent), set(special))
    return json_definition(tokenizer_json, symbols, path.name)


def json_definition(tokenizer_json: dict[str, Any], symbols: Mapping[str, str], name: str) -> Definition:
    """Return the definition of a `tokenizer.json`.

    Truncation, padding and templates are dropped: batches and objectives apply their own.
    """
    tokenizer_json = tokenizer_json | {"truncation": None, "padding": None, "post_processor": None}
    data = json.dumps(tokenizer_json, ensure_ascii=False, sort_keys=True).encode("utf-8", "surrogatepass")
    return Definition(JSON, data, symbols, name)


def _configured_symbols(settings: Mapping[str, Any], pieces: Collection[str]) -> dict[str, str]:
    """Return the roles that a Transformers folder assigns to any of `pieces`."""
    tokens = {role: settings.get(f"{role}_token") for role in ROLES}
    names = {role: token.get("content") if isinstance(token, dict) else token for role, token in tokens.items()}
    return {role: name for role, name in names.items() if name in pieces}


def guess_symbols(pieces: Iterable[str]) -> dict[str, str]:
    """Assign roles by the names that published vocabularies use."""
    present = set(pieces)
    symbols = {role: next((n for n in names if n in present), None) for role, names in _NAMES.items()}
    if symbols["mask"] == "<mask>" and symbols["cls"] is None:  # RoBERTa uses <s> as [CLS] and </s> as [SEP]
        symbols["cls"], symbols["sep"] = symbols["bos"], symbols["eos"]
    return {role: piece for role, piece in symbols.items() if piece is not None}


def _read_wordpiece(path: epath.Path) -> Definition:
    pieces = _read_lines(path)
    vocab = {piece: token_id for token_id, piece in enumerate(pieces)}
    if "[UNK]" not in vocab:
        raise UserError(f"{path} has no line [UNK], so it is not a WordPiece vocabulary (one piece a line).")
    settings, symbols = _read_settings(path.parent), guess_symbols(vocab)
    special = set(symbols.values())
    is_cased = any(piece != piece.lower() for piece in pieces if piece not in special)
    return json_definition(
        {
            "version": "1.0",
            "added_tokens": [added_token(vocab[piece], piece) for piece in dict.fromkeys(symbols.values())],
            "normalizer": {
                "type": "BertNormalizer", "clean_text": True, "lowercase": settings.get("do_lower_case", not is_cased),
                "handle_chinese_chars": settings.get("tokenize_chinese_chars", True),
                "strip_accents": settings.get("strip_accents"),
            },
            "pre_tokenizer": {"type": "BertPreTokenizer"},
            "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
            "model": {
                "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 100, "vocab": vocab,
            },
        },
        symbols, path.name,
    )


def _read_byte_bpe(path: epath.Path) -> Definition:
    folder = path.parent
    merges_file, vocab_file = _first(folder, *_MERGES), _first(folder, *_BYTE_BPE_VOCAB)
    if not merges_file or not vocab_file:
        raise UserError(
            f"{folder} has only half of a byte-level BPE; add vocab.json (or encoder.json) and merges.txt (or "
            "vocab.bpe)."
        )
    vocab = json.loads(_read_bytes(vocab_file))
    merges = [line.split(" ") for line in _read_lines(merges_file) if line and not line.startswith("#version")]
    if dictionary := _first(folder, "dict.txt"):
        vocab = _fairseq_order(vocab, dictionary)
    settings = _read_settings(folder)
    symbols = guess_symbols(vocab) | _configured_symbols(settings, vocab)
    prefix = bool(settings.get("add_prefix_space", False))
    return byte_bpe(vocab, merges, set(symbols.values()), symbols, vocab_file.name, add_prefix_space=prefix)


def byte_bpe(
    vocab: dict[str, int], merges: list[Any], special: Iterable[str], symbols: dict[str, str], name: str,
    *, add_prefix_space: bool = False, normalizer: dict[str, Any] | None = None,
) -> Definition:
    """Return the definition of a byte-level BPE like GPT-2's and RoBERTa's.

    Args:
        vocab: piece → id.
        merges: pairs of pieces, the first to merge first.
        special: special tokens among the pieces of `vocab`.
        symbols: role → piece.
        name: name for error messages.
        add_prefix_space: whether a text begins with a space.
        normalizer: normalizer of the `tokenizer.json`.
    """
    byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    pieces = sorted(special, key=vocab.__getitem__)
    tokenizer_json = {
        "version": "1.0",
        "added_tokens": [added_token(vocab[piece], piece, lstrip=piece == "<mask>") for piece in pieces],
        "normalizer": normalizer,
        "pre_tokenizer": byte_level | {"add_prefix_space": add_prefix_space},
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
            "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False, "vocab": vocab, "merges": merges,
        },
    }
    return json_definition(tokenizer_json, symbols, name)


def _fairseq_order(vocab: dict[str, int], dictionary: epath.Path) -> dict[str, int]:
    """Return RoBERTa's ids: fairseq's four symbols, then GPT-2's pieces in the order of dict.txt, then <mask>.

    Each line of dict.txt is `<GPT-2 id> <count>`.
    """
    piece = {str(token_id): text for text, token_id in vocab.items()}
    names = [line.split(" ")[0] for line in _read_lines(dictionary) if line]
    ordered = ["<s>", "<pad>", "</s>", "<unk>", *(piece.get(name, name) for name in names), "<mask>"]
    return {text: token_id for token_id, text in enumerate(ordered)}
