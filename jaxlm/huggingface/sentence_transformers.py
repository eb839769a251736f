"""Files of sentence-transformers beside a Transformers folder: pooling, normalization and length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxlm.errors import UserError
from jaxlm.inference.embed import resolve_pooling
from jaxlm.paths import read_json, reading
from jaxlm.tokenizers.classes import read_length
from jaxlm.types import Vectors

MODES = {"cls": "cls_token", "mean": "mean_tokens", "last": "lasttoken"}
"""Our pooling modes → their names in sentence-transformers."""
MODULES, POOLING, LENGTH = "modules.json", "1_Pooling/config.json", "sentence_bert_config.json"
CONFIG = "config_sentence_transformers.json"


def write(folder: Path, objective: Any, vectors: Vectors) -> None:
    """Write the files from which `SentenceTransformer(folder)` computes our vectors."""
    vectors = vectors._replace(pooling=resolve_pooling(objective, vectors.pooling))
    names = ["", "1_Pooling", *(["2_Normalize"] if vectors.normalize else [])]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{path[2:] or 'Transformer'}"}
        for i, path in enumerate(names)
    ]
    modes = {f"pooling_mode_{theirs}": ours == vectors.pooling for ours, theirs in MODES.items()}
    contents = {
        MODULES: modules, POOLING: {"word_embedding_dimension": objective.model.text_model.width, **modes},
        LENGTH: {"max_seq_length": vectors.length, "do_lower_case": False},
    }
    if vectors.similarity:
        contents[CONFIG] = {
            "prompts": dict(vectors.prompts), "default_prompt_name": None, "similarity_fn_name": vectors.similarity,
            "matryoshka_dims": [*vectors.widths, objective.model.width] if vectors.widths else None,
        }
    for name in names[1:]:
        (folder / name).mkdir()
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read(folder: Path) -> Vectors | None:
    """Read the embedding settings of a folder; None if it is not one of sentence-transformers.

    Since version 6, the longest text is that of the tokenizer.

    Raises:
        UserError: jaxlm does not support its modules or its pooling.
    """
    if not (folder / MODULES).is_file():
        return None
    with reading(folder):
        types = [module["type"].rpartition(".")[2] for module in read_json(folder / MODULES, [{"type": str}])]
        if types not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
            raise UserError(f"{folder} has the modules {', '.join(types)}; jaxlm supports only Pooling and Normalize.")
        files = [folder / name for name in (POOLING, LENGTH, CONFIG)]
        pooling, length, config = (read_json(file, dict) if file.is_file() else {} for file in files)
        modes = [name.removeprefix("pooling_mode_") for name, value in pooling.items() if value is True]
        chosen = pooling.get("pooling_mode") or [mode for mode in modes if mode != "include_prompt"]
        matches = [ours for ours, theirs in MODES.items() if chosen in (ours, theirs, [ours], [theirs])]
        if not matches:
            raise UserError(f"{folder / POOLING} asks for {chosen}; jaxlm supports {', '.join(MODES)}.")
        prompts = config.get("prompts") or {}
        prompt = prompts.get(config.get("default_prompt_name"), None if any(prompts.values()) else "")
        longest = length.get("max_seq_length") or read_length(folder)
        return Vectors(
            matches[0], longest, len(types) == 3, prompt, tuple(prompts.items()),
            bool(pooling.get("include_prompt", True)), config.get("similarity_fn_name") or "",
        )
