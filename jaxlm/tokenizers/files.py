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

import tokenizers
from etils import epath

from jaxlm.errors import UserError
from jaxlm.paths import read_json, reading
from jaxlm.tokenizers import classes, sentencepiece_json
from jaxlm.tokenizers.sentencepiece_json import added_token

MARKER = "jaxlm_tokenizer.json"
SENTENCEPIECE, JSON = "sentencepiece", "tokenizers"
DATA_FILE = {SENTENCEPIECE: "spiece.model", JSON: "tokenizer.json"}
_NAMES = {
    "pad": ("[PAD]", "<pad>"), "unk": ("[UNK]", "<unk>"), "cls": ("[CLS]", "<cls>"), "sep": ("[SEP]", "<sep>"),
    "mask": ("[MASK]", "<mask>", "<|mask|>"), "bos": ("<s>", "<|endoftext|>", "[BOS]", "<bos>", "<|begin_of_text|>"),
    "eos": ("</s>", "<|endoftext|>", "[EOS]", "<eos>", "<|end_of_text|>"),
}
_SETTINGS = {"lowercase": "do_lower_case", "strip_accents": "strip_accents", "add_prefix_space": "add_prefix_space",
             "handle_chinese_chars": "tokenize_chinese_chars"}
"""Field of a `tokenizer.json` → the setting of tokenizer_config.json that replaces it."""
_MERGES, _BYTE_BPE_VOCAB = ("merges.txt", "vocab.bpe"), ("vocab.json", "encoder.json")
_FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), bool)
_FORM = {"model": {"vocab": (dict, list)}, "added_tokens?": [{"id": int, "content": str, **_FLAGS}],
         "normalizer?": dict, "pre_tokenizer?": dict, "post_processor?": dict}
"""Form of a `tokenizer.json`; `tokenizers` checks the rest."""
NUM_UNUSED_BYTES = 11
"""Number of bytes, 245 to 255, that never occur in UTF-8."""


@dataclasses.dataclass(frozen=True)
class Definition:
    """Everything that determines a tokenizer.

    Attributes:
        kind: `SENTENCEPIECE` (data is a .model) or `JSON` (data is a tokenizer.json without truncation, padding and
            post-processor).
        data: content of the file.
        symbols: role ("pad", "mask", ...) → piece.
        name: name for error messages; not part of the fingerprint.
        separators: number of separators between two texts; 0 for that of the model's family.
        settings: `jaxlm.tokenizers.classes.OTHERS`; and `single` and `pair`, the special tokens that a decoder's
            tokenizer adds (see `jaxlm.tokenizers.template.Template`). Not part of the fingerprint.
    """

    kind: str
    data: bytes
    symbols: Mapping[str, str]
    name: str
    separators: int = 0
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of all that determines the ids of a text."""
        fields = json.dumps([self.kind, dict(self.symbols)], sort_keys=True).encode()
        return hashlib.sha256(fields + b"\n" + self.data).hexdigest()

    def __hash__(self) -> int:
        return hash(self.fingerprint)


def read(path: epath.Path) -> Definition:
    """Read the tokenizer at `path`, a file or folder in any of the formats of `Tokenizer.load`."""
    if not path.exists():
        raise UserError(f"there is no tokenizer at {path}; give a tokenizer's file or folder.")
    if path.is_dir() and classes.read_class(path) == "ByT5Tokenizer":
        return _read_bytes_only(path)
    file = _find(path) if path.is_dir() else path
    name = file.name.removesuffix(".gz")
    readers = {MARKER: _read_saved, **dict.fromkeys((*_MERGES, *_BYTE_BPE_VOCAB), _read_byte_bpe)}
    kinds = {"model": _read_sentencepiece, "json": _read_json, "txt": _read_wordpiece}
    reader = readers.get(name) or kinds.get(name.rpartition(".")[2])
    if reader is None:
        raise UserError(f"{path} is not a known tokenizer file; give a SentencePiece .model, a vocab.txt, a "
                        "tokenizer.json, or a folder with a tokenizer in it.")
    with reading(file):
        found = reader(file)
        is_saved = reader is _read_saved
        return found if is_saved else dataclasses.replace(found, settings=classes.other_settings(file.parent))


def _find(folder: epath.Path) -> epath.Path:
    """Return the file that defines the tokenizer of a folder."""
    found = _first(folder, MARKER, f"tokenizer/{MARKER}", "tokenizer.json", "vocab.txt", *_MERGES, "spiece.model",
                   "sentencepiece.bpe.model", "tokenizer.model")
    models = [found] if found else list(folder.glob("*.model"))
    if len(models) != 1:
        raise UserError(f"{folder} has {'several tokenizers' if models else 'no tokenizer'} in it; give a folder with "
                        "tokenizer.json, vocab.txt, merges.txt (or vocab.bpe) and vocab.json (or encoder.json), or the "
                        "path of a SentencePiece .model.")
    return models[0]


def _first(folder: epath.Path, *names: str) -> epath.Path | None:
    return next((folder / file for name in names for file in (name, name + ".gz") if (folder / file).exists()), None)


def _read_bytes(path: epath.Path) -> bytes:
    data = path.read_bytes()
    return gzip.decompress(data) if path.name.endswith(".gz") else data


def _read_lines(path: epath.Path) -> list[str]:
    return [line.removesuffix("\r") for line in _read_bytes(path).decode().removesuffix("\n").split("\n")]


def _read_saved(path: epath.Path) -> Definition:
    saved = read_json(path, {"kind": str, "fingerprint": str})
    data = path.parent / DATA_FILE[saved["kind"]]
    fingerprint = saved.pop("fingerprint")
    definition = Definition(data=data.read_bytes(), **saved)
    if definition.fingerprint != fingerprint:
        raise UserError(f"{data} is not what was saved there; it is damaged or was exchanged, so save it again.")
    return definition


def _read_sentencepiece(path: epath.Path) -> Definition:
    data = _read_bytes(path)
    proto = sentencepiece_json.parse(data)
    if sentencepiece_json.is_trained_here(proto):
        return Definition(SENTENCEPIECE, data, guess_symbols(sentencepiece_json.symbol_pieces(proto)), path.name)
    pieces = [piece.piece for piece in proto.pieces]
    folder = classes.read_folder(path.parent, classes.SENTENCEPIECE_MODEL, path.name, pieces)
    settings, options, spec = folder.settings, folder.kind.options, proto.normalizer_spec
    has_sentinels = not {"<extra_id_0>", "▁<extra_id_0>"}.isdisjoint(pieces)  # the second one is mT5's
    num_sentinels = settings["extra_ids"] if "extra_ids" in options and not has_sentinels else 0
    special = [*(folder.kind.roles | folder.roles).values(), *(f"<extra_id_{k}>" for k in range(num_sentinels)[::-1])]
    sentencepiece_json.arrange_pieces(proto, folder.kind.head.split(), special)
    spec.add_dummy_prefix = settings.get("add_prefix_space", spec.add_dummy_prefix)
    steps = [{"type": "Lowercase"}] if "do_lower_case" in options and settings["do_lower_case"] else []
    if "keep_accents" in options:  # ALBERT and XLNet preprocess the text before SentencePiece
        steps[:0] = [] if settings["keep_accents"] else [{"type": "NFKD"}, {"type": "StripAccents"}]
        steps[:0] = [{"type": "Replace", "pattern": {"String": marks}, "content": '"'} for marks in ("``", "''")]
    tokenizer_json = sentencepiece_json.to_tokenizer_json(proto)
    tokenizer_json["normalizer"]["normalizers"][:0] = steps
    special = sentencepiece_json.symbol_pieces(proto)
    if has_words := not {*folder.special, *(token["content"] for token in folder.tokens)} <= {*special}:
        # Text between added tokens is encoded like a text of its own.
        metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": False}
        tokenizer_json["pre_tokenizer"]["pretokenizers"][:2] = [{"type": "WhitespaceSplit"}, metaspace]
    definition = _define(tokenizer_json, special, folder, path)
    data = data if proto == sentencepiece_json.parse(data) else proto.SerializeToString()
    return definition if steps or has_words else dataclasses.replace(definition, kind=SENTENCEPIECE, data=data)


def _read_json(path: epath.Path) -> Definition:
    content = classes.rebuilt(path.parent, read_json(path, _FORM, _read_bytes(path)))
    folder = classes.read_folder(path.parent, classes.JSON_FILE)
    folder = folder if folder.kind.format else folder._replace(settings={})  # without a class, only the file counts
    special = [token["content"] for token in content.get("added_tokens") or [] if token["special"]]
    return _define(content, special, folder, path)


def _define(content: dict[str, Any], candidates: Iterable[str], folder: classes.Folder, path: epath.Path) -> Definition:
    """Return the definition of a `tokenizer.json` with the special and added tokens of its folder.

    It changes `content`. Pieces among `candidates` may have a role by their names.
    """
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        model, step = {"type": "WordLevel", "vocab": {}, "unk_token": ""}, content.get(part)
        with reading(f"the {part} {json.dumps(step)[:120]} of {path}"):
            tokenizers.Tokenizer.from_str(json.dumps({"model": model, part: step}))
    steps = [step for part in ("normalizer", "pre_tokenizer") if (step := content.get(part))]
    for step in [*steps, *(s for outer in steps for s in outer.get("normalizers") or outer.get("pretokenizers") or ())]:
        step |= {f: folder.settings[name] for f, name in _SETTINGS.items() if f in step and name in folder.settings}
    if dropout := content["model"].get("dropout"):
        raise UserError(f"{path} merges pieces at random (dropout {dropout}), so that each reading would have "
                        "other ids; set it to null.")
    vocab = content["model"]["vocab"]
    added = {token["content"]: token for token in content.get("added_tokens") or []}
    ids = dict(vocab) if isinstance(vocab, dict) else {entry[0]: i for i, entry in enumerate(vocab)}
    _check_accents(content, ids, path)
    ids |= {piece: token["id"] for piece, token in added.items()}
    for token in folder.tokens:
        if (found := ids.setdefault(token["content"], len(ids))) != token["id"]:
            raise UserError(f"{path.parent} gives the added token {token['content']!r} the id {token['id']}, but after "
                            f"{path.name} it is {found}; repair added_tokens.json or tokenizer_config.json.")
        added.setdefault(token["content"], token)
    roles = {r: p for r, p in folder.kind.roles.items() if p in ids} | folder.roles
    symbols = {role: piece for role, piece in guess_symbols(candidates, roles).items() if piece}
    for piece in [*(symbols[role] for role in classes.ROLES if role in symbols), *folder.special]:
        token = added.get(piece) or added_token(ids.setdefault(piece, len(ids)), piece)
        added[piece] = token | {"special": True}
    content["added_tokens"] = sorted(added.values(), key=lambda token: token["id"])
    if isinstance(vocab, list):
        _hide_special(content, {piece for piece, token in added.items() if token["special"]})
    separators = classes.num_separators(content.get("post_processor") or {}) or folder.kind.separators
    return dataclasses.replace(json_definition(content, symbols, path.name), separators=separators)


def _hide_special(content: dict[str, Any], special: Collection[str]) -> None:
    """Keep a unigram `tokenizer.json`, where special tokens have the best score, from finding their names in a text."""
    score = {piece: value for piece, value in content["model"]["vocab"] if piece not in special}
    low = min(score.values(), default=0.0)
    content["model"]["vocab"] = [
        [piece, score.get(piece, low + sum(score.get(char, 0.0) for char in piece))]
        for piece, _ in content["model"]["vocab"]
    ]
    names = [piece for piece, _ in content["model"]["vocab"] if piece not in score and not score.keys() >= set(piece)]
    cuts, step = sentencepiece_json.cut_names(names, score.keys()), content.get("pre_tokenizer") or {}
    steps = step.get("pretokenizers") or [step] * bool(step)
    if cuts and cuts[0] not in steps:  # an export has them
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*steps, *cuts]}


def json_definition(tokenizer_json: dict[str, Any], symbols: Mapping[str, str], name: str) -> Definition:
    """Return the definition of a `tokenizer.json`.

    Truncation, padding and templates are dropped: batches and objectives apply their own.
    """
    tokenizer_json = tokenizer_json | {"truncation": None, "padding": None, "post_processor": None}
    data = json.dumps(tokenizer_json, ensure_ascii=False, sort_keys=True).encode("utf-8", "surrogatepass")
    return Definition(JSON, data, symbols, name)


def guess_symbols(pieces: Iterable[str], roles: Mapping[str, str] | None = None) -> dict[str, str]:
    """Add to the known roles those of the names that published vocabularies use."""
    present = set(pieces)
    symbols = {role: name for role, names in _NAMES.items() for name in reversed(names) if name in present}
    symbols |= roles or {}
    if "mask" in symbols and "cls" not in symbols:  # RoBERTa, EuroBERT and mmBERT use <s> as [CLS] and </s> as [SEP]
        symbols |= {role: symbols[end] for role, end in (("cls", "bos"), ("sep", "eos")) if end in symbols}
    return symbols


def _read_wordpiece(path: epath.Path) -> Definition:
    pieces, folder = _read_lines(path), classes.read_folder(path.parent, classes.WORDPIECE)
    vocab = {piece: token_id for token_id, piece in enumerate(pieces)}
    unknown = folder.roles.get("unk", "[UNK]")
    is_sentencepiece = any(piece.startswith("▁") for piece in pieces) and "##" not in "".join(pieces)
    if unknown not in vocab or is_sentencepiece:
        raise UserError(f"{path} has {'pieces with ▁' if is_sentencepiece else 'no line ' + unknown}, so it is not a "
                        "WordPiece vocabulary (one piece a line).")
    words = [piece for piece in pieces if not piece.startswith(("[", "<"))]
    # A script without case is no evidence of lower-casing, and a few capitals, such as added words, none against it.
    cased = [piece for piece in words if piece.lower() != piece.title()]  # Georgian has capitals, but not in titles
    is_uncased = bool(cased) and sum(piece != piece.lower() for piece in cased) <= len(cased) / 100
    keeps_accents = is_uncased and "do_lower_case" not in folder.settings and _has_accents(vocab)
    model = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token=unknown, max_input_chars_per_word=100))
    model.normalizer = tokenizers.normalizers.BertNormalizer(True, True, False if keeps_accents else None, is_uncased)
    model.pre_tokenizer, model.decoder = tokenizers.pre_tokenizers.BertPreTokenizer(), tokenizers.decoders.WordPiece()
    return _define(json.loads(model.to_str()), vocab, folder, path)


def _has_accents(pieces: Collection[str]) -> bool:
    """Return whether more than 1 % of the pieces have accents or composed Hangul, which BERT removes with the case."""
    strip = tokenizers.normalizers.BertNormalizer(False, False, True, False)  # keeps the spacing marks of Indic scripts
    return sum(strip.normalize_str(piece) != piece for piece in pieces) > len(pieces) / 100


def _check_accents(content: Mapping[str, Any], pieces: Collection[str], path: epath.Path) -> None:
    """Raise UserError if BERT's normalizer removes the accents of a vocabulary that has them, unless told so."""
    normalizer, is_bytes = content.get("normalizer") or {}, '"ByteLevel"' in json.dumps(content.get("pre_tokenizer"))
    is_implied = normalizer.get("lowercase") and normalizer.get("strip_accents") is None
    if normalizer.get("type") == "BertNormalizer" and is_implied and (is_bytes or _has_accents(pieces)):
        what = "byte-level BPE, which spells accents and Hangul," if is_bytes else "pieces with accents or Hangul"
        where = "its normalizer" if ".json" in path.name else "tokenizer_config.json"
        raise UserError(f"{path} has {what} after a BertNormalizer, whose lower-casing takes them apart; set "
                        f'"strip_accents" in {where}: false to keep them, true to remove accents.')


def _read_byte_bpe(path: epath.Path) -> Definition:
    folder = path.parent
    merges_file, vocab_file = _first(folder, *_MERGES), _first(folder, *_BYTE_BPE_VOCAB)
    if not merges_file or not vocab_file:
        raise UserError(f"{folder} has only half of a byte-level BPE; add vocab.json (or encoder.json) and merges.txt "
                        "(or vocab.bpe).")
    vocab = read_json(vocab_file, {"*": int}, _read_bytes(vocab_file))
    merges = [line.split(" ") for line in _read_lines(merges_file) if line and not line.startswith("#version")]
    if dictionary := _first(folder, "dict.txt"):
        vocab = _fairseq_order(vocab, dictionary)
    characters = {char for pair in merges for piece in pair for char in piece}
    if any(piece.endswith("</w>") for piece in vocab) or not characters <= byte_of_char().keys():
        raise UserError(f"{vocab_file} is no byte-level BPE (</w> ends its words, or its merges have characters that "
                        "stand for no byte); save it as a tokenizer.json.")
    definition = byte_bpe(vocab, merges, set(guess_symbols(vocab).values()), {}, vocab_file.name)
    settings = classes.read_folder(folder, classes.BYTE_BPE)
    return _define(json.loads(definition.data), vocab, settings, vocab_file)


@functools.cache
def byte_of_char() -> dict[str, int]:
    """Return GPT-2's table: printable bytes map to themselves, all others to the characters from U+0100 on."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in set(shown)]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


def byte_bpe(
    vocab: dict[str, int], merges: list[Any], special: Iterable[str], symbols: dict[str, str], name: str,
    *, normalizer: dict[str, Any] | None = None, pre_tokenizer: dict[str, Any] | None = None,
) -> Definition:
    """Return the definition of a byte-level BPE, by default with the words of GPT-2's and RoBERTa's.

    Special tokens are among the pieces of `vocab`; `symbols` maps a role to its piece. Errors name the file `name`.
    """
    byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    pieces = sorted(special, key=vocab.__getitem__)
    tokenizer_json = {
        "version": "1.0",
        "added_tokens": [added_token(vocab[piece], piece, lstrip=piece == "<mask>") for piece in pieces],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer or byte_level | {"add_prefix_space": False},
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
            "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False, "vocab": vocab, "merges": merges,
        },
    }
    return json_definition(tokenizer_json, symbols, name)


def _read_bytes_only(path: epath.Path) -> Definition:
    """Read the folder of ByT5's tokenizer, which has no vocabulary file: byte b has the id b + 3."""
    folder = classes.read_folder(path, classes.BYTES)
    symbols = ["<pad>", "</s>", "<unk>"]
    vocab = {piece: i for i, piece in enumerate(symbols)} | {char: byte + 3 for char, byte in byte_of_char().items()}
    definition = byte_bpe(vocab, [], symbols, {}, "the vocabulary of bytes")
    sentinels = [f"<extra_id_{k}>" for k in range(folder.settings.get("extra_ids", 0))]
    folder = folder._replace(special=list(dict.fromkeys((*folder.special, *sentinels))))
    return _define(json.loads(definition.data), symbols, folder, path / "tokenizer_config.json")


def _fairseq_order(vocab: dict[str, int], dictionary: epath.Path) -> dict[str, int]:
    """Return RoBERTa's ids: fairseq's four symbols, then GPT-2's pieces in the order of dict.txt, then <mask>.

    Each line of dict.txt is `<GPT-2 id> <count>`.
    """
    piece = {str(token_id): text for text, token_id in vocab.items()}
    names = [line.split(" ")[0] for line in _read_lines(dictionary) if line]
    ordered = ["<s>", "<pad>", "</s>", "<unk>", *(piece.get(name, name) for name in names), "<mask>"]
    return {text: token_id for token_id, text in enumerate(ordered)}
