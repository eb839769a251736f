"""Settings of a folder that Transformers saved, with the defaults of its tokenizer class."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from etils import epath

from jaxlm.errors import UserError
from jaxlm.paths import read_json
from jaxlm.tokenizers.sentencepiece_json import added_token

GENERIC = ("", "PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes that take a `tokenizer.json` as it is."""
OTHERS = ("chat_template", "padding_side", "truncation_side")
ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
"""In the order in which Transformers appends the special tokens that a vocabulary lacks."""
JSON_FILE, SENTENCEPIECE_MODEL, WORDPIECE, BYTE_BPE = "tokenizer.json", "SentencePiece", "WordPiece", "byte-level BPE"
BYTES = "single bytes"


class TokenizerClass(NamedTuple):
    """What a class adds to its vocabulary file.

    Attributes:
        format: format of the file; "" for a class that adds nothing.
        separators: number of separators between two texts; 0 for that of the model's family.
        roles: role → special token, where names do not tell it. A SentencePiece model gets those that it lacks.
        options: settings of a SentencePiece class that change ids → their defaults.
        head: special tokens at the first ids, before the other pieces of a SentencePiece model, separated by spaces.
    """

    format: str = ""
    separators: int = 0
    roles: Mapping[str, str] = {}
    options: Mapping[str, Any] = {}
    head: str = ""


_SYMBOLS = {"cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]", "bos": "[CLS]", "eos": "[SEP]"}
_CLASSES = {
    **dict.fromkeys(("pretrained", "tokenizersbackend", "pythonbackend"), TokenizerClass()),
    **dict.fromkeys(("bert", "electra", "distilbert", "mobilebert", "convbert", "ernie", "nomic_bert"),
                    TokenizerClass(WORDPIECE, 1)),
    **dict.fromkeys(("roberta", "bart", "longformer"), TokenizerClass(BYTE_BPE, 2)),
    **dict.fromkeys(("t5", "mt5"), TokenizerClass(SENTENCEPIECE_MODEL, 0, {}, {"extra_ids": 100})),
    "byt5": TokenizerClass(BYTES, 0, {}, {"extra_ids": 125}),
    "gpt2": TokenizerClass(BYTE_BPE, 0, {"unk": "<|endoftext|>"}),
    "albert": TokenizerClass(SENTENCEPIECE_MODEL, 1, _SYMBOLS, {"do_lower_case": True, "keep_accents": False}),
    "xlnet": TokenizerClass(SENTENCEPIECE_MODEL, 1, {}, {"do_lower_case": False, "keep_accents": False}),
    "debertav2": TokenizerClass(SENTENCEPIECE_MODEL, 1, _SYMBOLS, {"do_lower_case": False}),
    "reformer": TokenizerClass(SENTENCEPIECE_MODEL),
    "xlmroberta": TokenizerClass(SENTENCEPIECE_MODEL, 2, {"mask": "<mask>"}, {}, "<s> <pad> </s> <unk>"),
    "camembert": TokenizerClass(
        SENTENCEPIECE_MODEL, 2, {"mask": "<mask>"}, {}, "<s>NOTUSED <pad> </s>NOTUSED <unk> <unk>NOTUSED"),
}
"""Name of a class, or `model_type` of its models, in small letters without "Tokenizer", "Fast" and hyphens → class."""
_PUBLISHED = {("spiece.model", "<pad>", "</s>", "<unk>"): "t5",
              ("sentencepiece.bpe.model", "<unk>", "<s>", "</s>"): "xlmroberta"}
"""File name and first pieces of a SentencePiece model → class, for a folder that names none."""
_QWEN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
         r"\s+(?!\S)|\s+")
_REBUILT = {
    "llama": {"normalizer": None, "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "split": False}},
    "qwen2": {"normalizer": {"type": "NFC"}, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": _QWEN}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]}},
}
"""Class that has parts of its own in place of those in a `tokenizer.json` → these parts."""
_SUPPORTED = {"word_tokenizer_type": "basic", "subword_tokenizer_type": "wordpiece", "do_basic_tokenize": True,
              "split_by_punct": False, "enable_sampling": False, "reverse": False, "add_bos": False, "add_eos": False}
"""Setting of tokenizer_config.json or its sp_model_kwargs → the only value that jaxlm supports."""
_CODE = ("PhobertTokenizer", "BertweetTokenizer", "BertJapaneseTokenizer")
"""Classes of Transformers that read no `tokenizer.json`."""
_TOKEN = (str, {"content": str})
_FORM = {"model_max_length?": (int, float)} | {f"{role}_token?": _TOKEN for role in ROLES} | {
    "chat_template?": (str, list), "padding_side?": str, "truncation_side?": str,
    "additional_special_tokens?": [_TOKEN], "tokenizer_class?": str, "model_type?": str, "extra_ids?": int,
    "extra_special_tokens?": ([_TOKEN], {"*": _TOKEN}), "added_tokens_decoder?": {"*": {"content": str}},
    **dict.fromkeys(["do_lower_case?", "strip_accents?", "add_prefix_space?", "tokenize_chinese_chars?"], bool),
}


class Folder(NamedTuple):
    """Settings of a Transformers folder.

    Attributes:
        kind: class of the tokenizer.
        settings: options of the class, and content of tokenizer_config.json and special_tokens_map.json.
        tokens: added tokens as a `tokenizer.json` has them, in the order of their ids.
        roles: role → special token, as the files say; "" for a begin symbol that they say is none, as Qwen's do.
        special: all special tokens in the files; Transformers appends those that the vocabulary lacks.
    """

    kind: TokenizerClass
    settings: dict[str, Any]
    tokens: list[dict[str, Any]]
    roles: dict[str, str]
    special: list[str]


def read_folder(folder: epath.Path, file_format: str, file: str = "", pieces: Collection[str] = ()) -> Folder:
    """Read the settings of a Transformers folder."""
    settings = _read(folder, "tokenizer_config.json")
    if "added_tokens_decoder" not in settings:  # a folder of Transformers < 4.34, whose map comes first
        settings |= _read(folder, "special_tokens_map.json")
    for key, value in (settings | settings.get("sp_model_kwargs", {})).items():
        if value != _SUPPORTED.get(key, value):
            raise UserError(f"{folder} has a tokenizer with {key} {value!r}, whose ids jaxlm cannot reproduce; choose "
                            "another model.")
    named, model_type = read_class(folder), _read(folder, "config.json").get("model_type", "").replace("-", "")
    is_albert = "do_lower_case" in settings and file_format == SENTENCEPIECE_MODEL and model_type not in _CLASSES
    implied = _PUBLISHED.get((file, *list(pieces)[:3]), "albert" if is_albert else "pretrained")
    if model_type in _CLASSES and file_format in (_CLASSES[model_type].format, JSON_FILE):
        implied = model_type
    # A tokenizer.json says everything, except what code in its folder does.
    is_whole = file_format == JSON_FILE and "AutoTokenizer" not in settings.get("auto_map", ()) and named not in _CODE
    fallback = TokenizerClass() if is_whole or not named else None
    kind = _CLASSES.get(named.removesuffix("Fast").removesuffix("Tokenizer").lower() or implied, fallback)
    if kind is None or (kind.format not in ("", file_format) and file_format != JSON_FILE):
        kind = fallback
    if kind is None:
        raise UserError(f"{folder} has a tokenizer of the class {named}, which jaxlm does not read from {file_format} "
                        "files; save it as a tokenizer.json, or choose another one.")
    settings = dict(kind.options) | settings
    roles = {role: _content(settings[f"{role}_token"]) for role in ROLES if settings.get(f"{role}_token")}
    extra = settings.get("extra_special_tokens", ())
    others = [*settings.get("additional_special_tokens", ()), *(extra.values() if isinstance(extra, dict) else extra)]
    special = [*roles.values(), *map(_content, others)]
    ids = _read(folder, "added_tokens.json", {"*": int})
    words = {i: {"content": name, "special": name in special} for name, i in ids.items()}
    roles |= {"bos": ""} if settings.get("bos_token", "") is None else {}
    tokens = [added_token(int(i), "") | {"special": False, "normalized": not token.get("special", False)} | token
              for i, token in settings.get("added_tokens_decoder", words).items()]
    return Folder(kind, settings, sorted(tokens, key=lambda token: token["id"]), roles, special)


def rebuilt(folder: epath.Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a `tokenizer.json` as `AutoTokenizer` reads it, in some classes with their own parts."""
    named = _own_class(folder, content)
    if named not in _REBUILT:
        return dict(content)
    parts, settings = _REBUILT[named], _read(folder, "tokenizer_config.json")
    if named == "llama":
        scheme = "always" if settings.get("legacy") else "first"
        scheme = scheme if settings.get("add_prefix_space", True) else "never"
        parts = parts | {"pre_tokenizer": parts["pre_tokenizer"] | {"prepend_scheme": scheme}}
    return {**content, **parts, "model": content["model"] | {"ignore_merges": False}}


def _own_class(folder: epath.Path, content: Mapping[str, Any]) -> str:
    """Return the name of the class that `AutoTokenizer` makes; "" for one that takes `tokenizer.json` as it is."""
    model_type = _read(folder, "config.json").get("model_type", "")
    named = read_class(folder).removesuffix("Fast").removesuffix("Tokenizer").lower()
    if model_type == "qwen2" or (model_type == "qwen3" and not named):
        return "qwen2"  # whatever the first names
    is_whole = model_type in ("mistral", "modernbert", "modernbert-decoder") or (
        named == "llama" and '"ByteLevel"' in json.dumps(content.get("pre_tokenizer")))
    return "" if is_whole else named


def read_class(folder: epath.Path) -> str:
    """Return the name of the tokenizer's class, or ""."""
    files = (_read(folder, "tokenizer_config.json"), _read(folder, "config.json"))
    return next((name for file in files if (name := file.get("tokenizer_class"))), "")


def read_length(folder: epath.Path) -> int | None:
    """Return the number of tokens at which Transformers cuts texts; None if the folder does not say."""
    longest = _read(folder, "tokenizer_config.json").get("model_max_length", 0)
    return int(longest) if 0 < longest < 1e9 else None  # Transformers writes 1e30 for no limit


def templates(folder: epath.Path) -> tuple[str, str] | None:
    """Return the ids around one text and two by a `tokenizer.json`, as a `Template` has them; None without it."""
    if not (folder / "tokenizer.json").exists():
        return None
    step = _read(folder, "tokenizer.json", dict).get("post_processor") or {}
    for each in step.get("processors", [step]):
        if "single" in each:
            return _template(each, each["single"]), _template(each, each["pair"])
        if "cls" in each:  # BertProcessing, RobertaProcessing
            cls, sep = (f"#{each[name][1]}" for name in ("cls", "sep"))
            pair = f"$B:1 {sep}:1" if each["type"] == "BertProcessing" else f"{sep} $B {sep}"
            return f"{cls} $A {sep}", f"{cls} $A {sep} {pair}"
    return "$A", "$A $B"


def _template(processor: Mapping[str, Any], sequence: Sequence[Mapping[str, Any]]) -> str:
    """Return a sequence of TemplateProcessing as a `Template` has it."""
    found = []
    for (kind, what), in (part.items() for part in sequence):
        ids = processor["special_tokens"][what["id"]]["ids"] if kind == "SpecialToken" else ()
        found += [f"#{i}:{what['type_id']}" for i in ids] or [f"${what['id']}:{what['type_id']}"]
    return " ".join(found)


def other_settings(folder: epath.Path) -> dict[str, Any]:
    """Return the settings of a folder's tokenizer that its ids do not depend on: `OTHERS`."""
    settings, file = _read(folder, "tokenizer_config.json"), folder / "chat_template.jinja"
    settings |= {"chat_template": file.read_text()} if file.exists() else {}
    is_padded_left = "padding_side" not in settings and read_class(folder).startswith(("Llama", "Gemma"))
    if is_padded_left and _own_class(folder, _read(folder, "tokenizer.json", dict)):
        settings["padding_side"] = "left"  # by default of the class
    return {name: settings[name] for name in OTHERS if name in settings}


def num_separators(post_processor: Mapping[str, Any]) -> int:
    """Return the number of separators that a post-processor of a `tokenizer.json` puts between two texts."""
    steps = post_processor.get("processors", [post_processor])
    pair = next((step["pair"] for step in steps if "pair" in step), ())
    texts = [i for i, part in enumerate(pair) if "Sequence" in part]
    known = {"BertProcessing": 1, "RobertaProcessing": 2}
    return texts[1] - texts[0] - 1 if len(texts) == 2 else max(
        (known.get(step.get("type"), 0) for step in steps), default=0)


def _content(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else token


def _read(folder: epath.Path, name: str, form: Any = _FORM) -> dict[str, Any]:
    """Read a JSON object without its null values but that of the begin symbol; an empty one if there is none."""
    found = read_json(folder / name, form) if (folder / name).exists() else {}
    return {key: value for key, value in found.items() if value is not None or key == "bos_token"}
