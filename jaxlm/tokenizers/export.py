"""Writes the files from which `transformers.AutoTokenizer` makes the same tokenizer."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

from etils import epath

from jaxlm.tokenizers.files import ROLES
from jaxlm.tokenizers.tokenizer import Tokenizer, write_whole


@dataclasses.dataclass(frozen=True)
class Template:
    """What a model family expects around its texts.

    single, pair: parts separated by spaces, each a role of the vocabulary ("cls") or a text ($A, $B), with ":" and its
        segment id if that is not 0; pair is "cls $A sep $B:1 sep:1" for BERT. Empty: nothing stands around a text.
    inputs: names of the arrays that the model takes.
    needs: roles that the tokenizer must have.
    padding_side: "left" for a model whose [CLS] stands at the end.
    """

    single: str = ""
    pair: str = ""
    inputs: tuple[str, ...] = ("input_ids", "attention_mask")
    needs: tuple[str, ...] = ()
    padding_side: str = "right"


def export(tokenizer: Tokenizer, folder: str | os.PathLike[str], template: Template, max_length: int) -> None:
    """Writes tokenizer.json, tokenizer_config.json and special_tokens_map.json into `folder`.

    `AutoTokenizer.from_pretrained(folder)` then gives the ids of `tokenizer.encode` without special symbols, and with
    them what the template says. max_length: the longest input, special symbols included. Files of the same names are
    overwritten. Raises UserError if the tokenizer lacks a symbol that the template needs.
    """
    vocabulary = tokenizer.vocabulary
    vocabulary.require(*template.needs, purpose="an export for this model")
    names = {role: tokenizer.piece(number) for role in ROLES if (number := getattr(vocabulary, role)) >= 0}
    facts = tokenizer.to_json()
    facts["post_processor"] = _post_processor(template, tokenizer, names)
    roles = {f"{role}_token": piece for role, piece in names.items()}
    others = [token["content"] for token in facts["added_tokens"]
              if token["special"] and token["content"] not in names.values()]
    symbols: dict[str, Any] = roles | ({"additional_special_tokens": others} if others else {})
    config = {
        # The class that takes tokenizer.json as it stands; those of the families rebuild it by their own rules.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length, "padding_side": template.padding_side, "truncation_side": "right",
        "clean_up_tokenization_spaces": False, "model_input_names": list(template.inputs), **symbols,
        "added_tokens_decoder": {
            str(token["id"]): {key: value for key, value in token.items() if key != "id"}
            for token in facts["added_tokens"]
        },
    }
    folder = epath.Path(folder)
    for name, value in (
        ("tokenizer.json", facts), ("tokenizer_config.json", config), ("special_tokens_map.json", symbols),
    ):
        write_whole(folder / name, json.dumps(value, ensure_ascii=False, indent=1).encode())


def _post_processor(template: Template, tokenizer: Tokenizer, names: dict[str, str]) -> dict[str, Any] | None:
    if not template.single:
        byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
        return byte_level if tokenizer.is_byte_level else None

    def parts(sequence: str) -> list[dict[str, Any]]:
        found = []
        for part in sequence.split():
            name, _, segment = part.partition(":")
            kind, content = ("Sequence", name[1:]) if name.startswith("$") else ("SpecialToken", names[name])
            found.append({kind: {"id": content, "type_id": int(segment or 0)}})
        return found

    used = {part.partition(":")[0] for part in template.pair.split() if not part.startswith("$")}
    special = {names[role]: getattr(tokenizer.vocabulary, role) for role in sorted(used)}
    return {
        "type": "TemplateProcessing", "single": parts(template.single), "pair": parts(template.pair),
        "special_tokens": {name: {"id": name, "ids": [number], "tokens": [name]} for name, number in special.items()},
    }
