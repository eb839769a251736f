"""Reads every form of tokenizer file into one definition: a SentencePiece model or a `tokenizer.json`, and roles.

Only text, JSON and SentencePiece's protocol buffer are read, and nothing in them is ever run.
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from etils import epath

from jaxlm.errors import UserError
from jaxlm.tokenizers import sentencepiece_json

MARKER = "jaxlm_tokenizer.json"
SENTENCEPIECE, JSON = "sentencepiece", "tokenizers"
DATA_FILE = {SENTENCEPIECE: "spiece.model", JSON: "tokenizer.json"}
ROLES = ("pad", "unk", "cls", "sep", "mask", "bos", "eos")
_NAMES = {
    "pad": ("[PAD]", "<pad>"), "unk": ("[UNK]", "<unk>"), "cls": ("[CLS]", "<cls>"), "sep": ("[SEP]", "<sep>"),
    "mask": ("[MASK]", "<mask>"), "bos": ("<s>", "<|endoftext|>", "[BOS]"), "eos": ("</s>", "<|endoftext|>", "[EOS]"),
}
_LOOKED_FOR = (
    "tokenizer.json, vocab.txt, vocab.json (or encoder.json) with merges.txt (or vocab.bpe), or spiece.model"
)


@dataclasses.dataclass(frozen=True)
class Definition:
    """What determines a tokenizer.

    kind: SENTENCEPIECE (data is the .model) or JSON (data is a tokenizer.json without truncation, padding or template).
    symbols: role ("pad", "mask", ...) → piece.
    name: for messages; determines nothing.
    """

    kind: str
    data: bytes
    symbols: Mapping[str, str]
    name: str

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of all but the name."""
        facts = json.dumps([self.kind, dict(self.symbols)], sort_keys=True).encode()
        return hashlib.sha256(facts + b"\n" + self.data).hexdigest()


def read(path: epath.Path, lowercase: bool | None) -> Definition:
    """The definition at `path`, a file or folder in any of the forms that `Tokenizer.load` names."""
    if not path.exists():
        raise UserError(f"there is no tokenizer at {path}; give a tokenizer's file or folder.")
    if path.is_dir():
        return _read_folder(path, lowercase)
    name = path.name.removesuffix(".gz")
    if name in ("merges.txt", "vocab.bpe", "vocab.json", "encoder.json"):
        return _read_byte_bpe(path.parent)
    if name.endswith(".model"):
        return _read_sentencepiece(path, lowercase)
    if name.endswith(".json"):
        return _read_json(path)
    if name.endswith(".txt"):
        return _read_wordpiece(path, lowercase)
    raise UserError(
        f"{path} is no tokenizer file that is known here; give a SentencePiece .model, a vocab.txt, a tokenizer.json, "
        "or a folder with a tokenizer in it."
    )


def _read_folder(folder: epath.Path, lowercase: bool | None) -> Definition:
    if (folder / MARKER).exists():
        return _read_own(folder)
    if (folder / "tokenizer" / MARKER).exists():
        return _read_own(folder / "tokenizer")
    if (folder / "tokenizer.json").exists():
        return _read_json(folder / "tokenizer.json")
    if vocab := _first(folder, "vocab.txt"):
        return _read_wordpiece(vocab, lowercase)
    if _first(folder, "merges.txt", "vocab.bpe"):
        return _read_byte_bpe(folder)
    models = [file for name in ("spiece.model", "sentencepiece.bpe.model", "tokenizer.model")
              if (file := folder / name).exists()] or sorted(folder.glob("*.model"))
    if len(models) == 1:
        return _read_sentencepiece(models[0], lowercase)
    if models:
        names = ", ".join(file.name for file in models)
        raise UserError(f"{folder} has several SentencePiece models ({names}); give the path of one of them.")
    raise UserError(f"{folder} has no tokenizer in it: looked for {_LOOKED_FOR}.")


def _first(folder: epath.Path, *names: str) -> epath.Path | None:
    return next((folder / file for name in names for file in (name, name + ".gz") if (folder / file).exists()), None)


def _read_text(path: epath.Path) -> str:
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.name.endswith(".gz") else data).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as UTF-8 text ({error}); is the file whole?") from error


def _read_object(path: epath.Path) -> dict[str, Any]:
    try:
        value = json.loads(_read_text(path))
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}); is the file whole?") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object; is it the right file?")
    return value


def _settings(folder: epath.Path) -> dict[str, Any]:
    """tokenizer_config.json, empty if there is none."""
    path = folder / "tokenizer_config.json"
    return _read_object(path) if path.exists() else {}


def _read_own(folder: epath.Path) -> Definition:
    facts = _read_object(folder / MARKER)
    kind, symbols = facts.get("kind"), facts.get("symbols")
    if kind not in DATA_FILE or not isinstance(symbols, dict):
        raise UserError(f"{folder / MARKER} was not written by this version of jaxlm; save the tokenizer again.")
    data = folder / DATA_FILE[kind]
    if not data.exists():
        raise UserError(f"{folder} lacks {data.name}, without which its tokenizer cannot be read; save it again.")
    definition = Definition(kind, data.read_bytes(), symbols, str(facts.get("name", "the tokenizer")))
    if definition.fingerprint != facts.get("fingerprint"):
        raise UserError(f"{data} is not what was saved there; it is damaged or was exchanged, so save it again.")
    return definition


def _read_sentencepiece(path: epath.Path, lowercase: bool | None) -> Definition:
    data = path.read_bytes()
    try:
        proto = sentencepiece_json.parse(data)
    except ValueError as error:
        raise UserError(f"{path} is not a SentencePiece model; is the file whole?") from error
    if not (sentencepiece_json.is_unigram(proto) or sentencepiece_json.is_bpe(proto)):
        raise UserError(f"{path} is a SentencePiece model of words or characters; only unigram and BPE are supported.")
    symbols, settings = guess_symbols(sentencepiece_json.symbol_pieces(proto)), _settings(path.parent)
    lowercase = settings.get("do_lower_case") if lowercase is None else lowercase
    if lowercase is None:
        return Definition(SENTENCEPIECE, data, symbols, path.name)
    # What ALBERT and XLNet do to a text before SentencePiece has it.
    steps = [{"type": "Replace", "pattern": {"String": quotes}, "content": '"'} for quotes in ("``", "''")]
    steps += [] if settings.get("keep_accents") else [{"type": "NFKD"}, {"type": "StripAccents"}]
    steps += [{"type": "Lowercase"}] if lowercase else []
    facts = sentencepiece_json.to_tokenizer_json(proto)
    facts["normalizer"]["normalizers"][:0] = steps
    return json_definition(facts, symbols, path.name)


def _read_json(path: epath.Path) -> Definition:
    facts = _read_object(path)
    if not isinstance(facts.get("model"), dict) or "vocab" not in facts["model"]:
        raise UserError(f"{path} is not a tokenizer.json of the tokenizers library: it has no model with a vocabulary.")
    special = [token["content"] for token in facts.get("added_tokens") or [] if token.get("special")]
    symbols = guess_symbols(special) | _configured_symbols(path.parent, set(special))
    return json_definition(facts, symbols, path.name)


def json_definition(facts: dict[str, Any], symbols: Mapping[str, str], name: str) -> Definition:
    """A definition of kind JSON."""
    # Windows, padding and templates are the business of batches and objectives, not of the ids of a text.
    facts = facts | {"truncation": None, "padding": None, "post_processor": None}
    data = json.dumps(facts, ensure_ascii=False, sort_keys=True).encode("utf-8", "surrogatepass")
    return Definition(JSON, data, symbols, name)


def _configured_symbols(folder: epath.Path, known: set[str]) -> dict[str, str]:
    symbols: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if not (folder / name).exists():
            continue
        facts = _read_object(folder / name)
        for role in ROLES:
            token = facts.get(f"{role}_token")
            token = token.get("content") if isinstance(token, dict) else token
            if token in known:
                symbols[role] = token
    return symbols


def guess_symbols(pieces: Iterable[str]) -> dict[str, str]:
    """Roles by the names that published vocabularies use."""
    present = set(pieces)
    symbols = {role: next((n for n in names if n in present), None) for role, names in _NAMES.items()}
    if symbols["mask"] == "<mask>" and symbols["cls"] is None:  # RoBERTa's names: its [CLS] is <s>, its [SEP] </s>
        symbols["cls"], symbols["sep"] = symbols["bos"], symbols["eos"]
    return {role: piece for role, piece in symbols.items() if piece is not None}


def _read_wordpiece(path: epath.Path, lowercase: bool | None) -> Definition:
    pieces = _read_text(path).removesuffix("\n").split("\n")
    pieces = [piece.removesuffix("\r") for piece in pieces]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    if "[UNK]" not in vocab:
        raise UserError(f"{path} has no line [UNK], so it is not a WordPiece vocabulary (one piece a line).")
    settings = _settings(path.parent)
    symbols = guess_symbols(vocab)
    if lowercase is None:
        lowercase = settings.get("do_lower_case")
    if lowercase is None:
        special = set(symbols.values())
        lowercase = not any(char != char.lower() for piece in pieces if piece not in special for char in piece)
    return json_definition(
        {
            "version": "1.0",
            "added_tokens": [_added(vocab[piece], piece) for piece in dict.fromkeys(symbols.values())],
            "normalizer": {
                "type": "BertNormalizer", "clean_text": True, "lowercase": bool(lowercase),
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


def _read_byte_bpe(folder: epath.Path) -> Definition:
    merges_file, vocab_file = _first(folder, "merges.txt", "vocab.bpe"), _first(folder, "vocab.json", "encoder.json")
    if not merges_file or not vocab_file:
        raise UserError(
            f"{folder} has only half of a byte-level BPE: it needs vocab.json (or encoder.json) and merges.txt "
            "(or vocab.bpe)."
        )
    vocab = _read_object(vocab_file)
    lines = [line for line in _read_text(merges_file).split("\n") if line and not line.startswith("#version")]
    merges = [line.rstrip("\r").split(" ") for line in lines]
    if any(len(pair) != 2 or "".join(pair) not in vocab for pair in merges):
        raise UserError(f"{merges_file} and {vocab_file} do not belong together: a merge makes a piece that has no id.")
    if dictionary := _first(folder, "dict.txt"):
        vocab = _fairseq_order(vocab, dictionary)
    settings = _settings(folder)
    known = [piece for names in _NAMES.values() for piece in names if piece in vocab]
    symbols = guess_symbols(known) | _configured_symbols(folder, set(vocab))
    prefix = bool(settings.get("add_prefix_space", False))
    return byte_bpe(vocab, merges, set(symbols.values()), symbols, vocab_file.name, add_prefix_space=prefix)


def byte_bpe(
    vocab: dict[str, int], merges: list[Any], special: Iterable[str], symbols: dict[str, str], name: str,
    *, add_prefix_space: bool = False, normalizer: dict[str, Any] | None = None,
) -> Definition:
    """A byte-level BPE as GPT-2 and RoBERTa have it. special: every piece of `vocab` that stands for no text."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    pieces = sorted(special, key=vocab.__getitem__)
    facts = {
        "version": "1.0",
        "added_tokens": [_added(vocab[piece], piece, lstrip=piece == "<mask>") for piece in pieces],
        "normalizer": normalizer,
        "pre_tokenizer": byte_level | {"add_prefix_space": add_prefix_space},
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
            "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False, "vocab": vocab, "merges": merges,
        },
    }
    return json_definition(facts, symbols, name)


def _fairseq_order(vocab: dict[str, int], dictionary: epath.Path) -> dict[str, int]:
    """RoBERTa's ids: fairseq's four symbols, then GPT-2's pieces in the order of dict.txt (`<GPT-2 id> <count>`)."""
    piece = {str(number): text for text, number in vocab.items()}
    names = [line.split(" ")[0] for line in _read_text(dictionary).split("\n") if line]
    ordered = ["<s>", "<pad>", "</s>", "<unk>", *(piece.get(name, name) for name in names), "<mask>"]
    return {text: number for number, text in enumerate(ordered)}


def _added(number: int, content: str, *, lstrip: bool = False) -> dict[str, Any]:
    return {
        "id": number, "content": content, "single_word": False, "lstrip": lstrip, "rstrip": False,
        "normalized": False, "special": True,
    }
