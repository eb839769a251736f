"""Writes the files from which `transformers.AutoTokenizer` makes the same tokenizer."""

from __future__ import annotations

import json
import os
from typing import Any, Literal, get_args

from etils import epath

from jaxlm.errors import UserError
from jaxlm.tokenizers.files import ROLES
from jaxlm.tokenizers.tokenizer import Tokenizer, write_whole

Family = Literal["bert", "electra", "gpt2", "t5"]
_INPUTS = {
    "bert": ["input_ids", "token_type_ids", "attention_mask"],
    "electra": ["input_ids", "token_type_ids", "attention_mask"],
    "gpt2": ["input_ids", "attention_mask"],
    "t5": ["input_ids", "attention_mask"],
}
# What a family sets around a text and a pair of texts: roles, and A and B for the texts, each with its segment.
_TEMPLATES: dict[str, tuple[list[tuple[str, int]], list[tuple[str, int]]]] = {
    "bert": (
        [("cls", 0), ("A", 0), ("sep", 0)],
        [("cls", 0), ("A", 0), ("sep", 0), ("B", 1), ("sep", 1)],
    ),
    "t5": ([("A", 0), ("eos", 0)], [("A", 0), ("eos", 0), ("B", 0), ("eos", 0)]),
}
_TEMPLATES["electra"] = _TEMPLATES["bert"]
_NEEDED = {"bert": ("pad", "cls", "sep", "mask"), "electra": ("pad", "cls", "sep", "mask"), "gpt2": ("eos",),
           "t5": ("pad", "eos")}


def export(tokenizer: Tokenizer, folder: str | os.PathLike[str], family: Family, max_length: int) -> None:
    """Writes tokenizer.json, tokenizer_config.json and special_tokens_map.json into `folder`.

    `AutoTokenizer.from_pretrained(folder)` then gives the ids of `tokenizer.encode` without special symbols, and with
    them what the family's models expect: [CLS] A [SEP] B [SEP], nothing for GPT-2, A </s> for T5.
    family: whose models read the ids. max_length: the longest input, special symbols included.
    Files of the same names are overwritten. Raises UserError if the tokenizer lacks a symbol that the family needs.
    """
    if family not in get_args(Family):
        raise UserError(f"a tokenizer is exported for {', '.join(get_args(Family))}, not for {family!r}.")
    vocabulary = tokenizer.vocabulary
    vocabulary.require(*_NEEDED[family], purpose=f"an export for {family}")
    names = {role: tokenizer.piece(number) for role in ROLES if (number := getattr(vocabulary, role)) >= 0}
    facts = tokenizer.to_json()
    facts["post_processor"] = _post_processor(facts, family, tokenizer, names)
    roles = {f"{role}_token": piece for role, piece in names.items()}
    others = [token["content"] for token in facts["added_tokens"]
              if token["special"] and token["content"] not in names.values()]
    config: dict[str, Any] = {
        # The class that takes tokenizer.json as it stands: the families' own classes rebuild it by rules of theirs.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length, "padding_side": "right", "truncation_side": "right",
        "clean_up_tokenization_spaces": False, "model_input_names": _INPUTS[family], **roles,
        "added_tokens_decoder": {
            str(token["id"]): {key: value for key, value in token.items() if key != "id"}
            for token in facts["added_tokens"]
        },
    }
    if others:
        config["additional_special_tokens"] = others
    folder = epath.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    symbols = roles | ({"additional_special_tokens": others} if others else {})
    for name, value in (
        ("tokenizer.json", facts), ("tokenizer_config.json", config), ("special_tokens_map.json", symbols),
    ):
        write_whole(folder / name, json.dumps(value, ensure_ascii=False, indent=1).encode())


def _post_processor(
    facts: dict[str, Any], family: str, tokenizer: Tokenizer, names: dict[str, str]
) -> dict[str, Any] | None:
    if family not in _TEMPLATES:
        return {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True} if (
            tokenizer.is_byte_level
        ) else None
    single, pair = _TEMPLATES[family]

    def part(name: str, segment: int) -> dict[str, Any]:
        kind, content = ("Sequence", name) if name in "AB" else ("SpecialToken", names[name])
        return {kind: {"id": content, "type_id": segment}}

    used = {names[name]: getattr(tokenizer.vocabulary, name) for name, _ in pair if name not in "AB"}
    return {
        "type": "TemplateProcessing", "single": [part(*p) for p in single], "pair": [part(*p) for p in pair],
        "special_tokens": {piece: {"id": piece, "ids": [number], "tokens": [piece]} for piece, number in used.items()},
    }
