"""Export of a tokenizer to the files of `transformers.AutoTokenizer`."""

from __future__ import annotations

import json
import os
from typing import Any

from etils import epath

from jaxlm.paths import write_whole
from jaxlm.tokenizers.classes import OTHERS, ROLES
from jaxlm.tokenizers.sentencepiece_json import probes
from jaxlm.tokenizers.template import Template, parts, symbol_id
from jaxlm.tokenizers.tokenizer import Tokenizer


def export(
    tokenizer: Tokenizer, folder: str | os.PathLike[str], template: Template, max_length: int, begin: int = -1
) -> None:
    """Write tokenizer.json, tokenizer_config.json and special_tokens_map.json into `folder`, over existing ones.

    `AutoTokenizer.from_pretrained(folder)` then gives the ids of `tokenizer.encode`, with the template around them, and
    `begin` as its begin token; by default that of the tokenizer.

    Raises:
        UserError: the tokenizer lacks a special token of the template, or the files would give other ids.
    """
    tokenizer.require_equal_ids(probes(tokenizer.vocabulary.pieces))
    vocabulary = tokenizer.vocabulary
    vocabulary.require(*template.needs, purpose="an export for this model")
    names = {role: tokenizer.piece(token_id) for role in ROLES if (token_id := getattr(vocabulary, role)) >= 0}
    names |= {"bos": tokenizer.piece(begin)} if begin >= 0 else {}
    if template.symbols:  # the published GPT-1 has no padding token
        names.setdefault("pad", template.symbols[0])
    tokenizer_json = tokenizer.to_json()
    tokenizer_json["post_processor"] = _post_processor(template, tokenizer, names)
    roles = {f"{role}_token": piece for role, piece in names.items()}
    others = [token["content"] for token in tokenizer_json["added_tokens"]
              if token["special"] and token["content"] not in names.values()]
    symbols: dict[str, Any] = roles | ({"additional_special_tokens": others} if others else {})
    config = {
        # This class takes tokenizer.json as it is; the classes of the families rebuild it by their own rules.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length, "padding_side": "right", "truncation_side": "right",
        "clean_up_tokenization_spaces": False, "model_input_names": list(template.inputs),
        "bos_token": None, **symbols,  # null, since without the key readers guess it from names
        **{name: value for name, value in tokenizer.settings.items() if name in OTHERS},
        # Models that read the last token need it.
        **({"padding_side": "left"} if template.padding_side == "left" else {}),
        "added_tokens_decoder": {
            str(token["id"]): {key: value for key, value in token.items() if key != "id"}
            for token in tokenizer_json["added_tokens"]
        },
    }
    folder = epath.Path(folder)
    for name, value in (
        ("tokenizer.json", tokenizer_json), ("tokenizer_config.json", config), ("special_tokens_map.json", symbols),
    ):
        write_whole(folder / name, json.dumps(value, ensure_ascii=False, indent=1).encode())


def _post_processor(template: Template, tokenizer: Tokenizer, names: dict[str, str]) -> dict[str, Any] | None:
    byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    if not template.pair:
        return byte_level if tokenizer.is_byte_level else None

    def pieces(sequence: str) -> list[dict[str, Any]]:
        return [
            {"Sequence": {"id": name[1:], "type_id": segment}} if name.startswith("$") else
            {"SpecialToken": {"id": names.get(name, name), "type_id": segment}} for name, segment in parts(sequence)
        ]

    used = sorted({name for name, _ in parts(template.pair) if not name.startswith("$")})
    names = names | {name: tokenizer.piece(int(name[1:])) for name in used if name.startswith("#")}
    special = {names.get(name, name): symbol_id(tokenizer.vocabulary, name) for name in used}
    step = {
        "type": "TemplateProcessing", "single": pieces(template.single or "$A"), "pair": pieces(template.pair),
        "special_tokens": {name: {"id": name, "ids": [i], "tokens": [name]} for name, i in special.items()},
    }
    if not (tokenizer.is_byte_level and " sep sep " in template.pair):
        return step
    # RoBERTa's RobertaProcessing: a token's offsets begin after its space.
    is_prefixed = '"add_prefix_space": true' in json.dumps(tokenizer.to_json()["pre_tokenizer"])
    byte_level |= {"add_prefix_space": is_prefixed, "trim_offsets": True}
    return {"type": "Sequence", "processors": [byte_level, step]}
