"""Files of sentence-transformers beside a Transformers folder: pooling, normalization, prompts and length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxlm.errors import UserError
from jaxlm.inference.embed import resolve_pooling
from jaxlm.parallel.hosts import log
from jaxlm.paths import read_json, reading
from jaxlm.tokenizers.classes import read_length
from jaxlm.types import Vectors

MODES = {"cls": "cls_token", "mean": "mean_tokens", "last": "lasttoken"}
"""Our pooling modes → their names in sentence-transformers."""
MODULES, POOLING, LENGTH = "modules.json", "1_Pooling/config.json", "sentence_bert_config.json"
CONFIG = "config_sentence_transformers.json"
TRANSFORMER = "Transformer"
RERANKER = "CrossEncoder"
"""`model_type` in `CONFIG` of a reranker."""


def write(folder: Path, objective: Any, vectors: Vectors) -> None:
    """Write the files from which `SentenceTransformer(folder)` computes our vectors."""
    vectors = vectors._replace(pooling=resolve_pooling(objective, vectors.pooling))
    names = ["", "1_Pooling", *(["2_Normalize"] if vectors.normalize else [])]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{path[2:] or TRANSFORMER}"}
        for i, path in enumerate(names)
    ]
    modes = {f"pooling_mode_{theirs}": ours == vectors.pooling for ours, theirs in MODES.items()}
    size = {"word_embedding_dimension": objective.model.text_model.width, "include_prompt": vectors.pools_prompt}
    contents = {
        MODULES: modules, POOLING: size | modes, LENGTH: {"max_seq_length": vectors.length, "do_lower_case": False},
    }
    if vectors.similarity or vectors.prompts:
        contents[CONFIG] = {
            "prompts": dict(vectors.prompts), "default_prompt_name": vectors.default_name,
            "similarity_fn_name": vectors.similarity or None,
            "matryoshka_dims": [*vectors.widths, objective.model.text_model.width] if vectors.widths else None,
        }
    _write(folder, contents)


def write_reranker(folder: Path, prompt: str) -> None:
    """Write the files from which `CrossEncoder(folder)` reads a prompt before each query, if there is one."""
    if prompt:
        task = {"transformer_task": "sequence-classification", "module_output_name": "scores",
                "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}}}
        module = {"idx": 0, "name": "0", "path": "", "type": f"sentence_transformers.models.{TRANSFORMER}"}
        _write(folder, {MODULES: [module], LENGTH: task, CONFIG: {
            "model_type": RERANKER, "prompts": {"query": prompt}, "default_prompt_name": "query",
            "activation_fn": "torch.nn.modules.linear.Identity"}})


def _write(folder: Path, contents: dict[str, Any]) -> None:
    for module in contents[MODULES]:
        (folder / module["path"]).mkdir(exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read(folder: Path) -> Vectors | None:
    """Read the embedding settings of a folder; None if it is not one of sentence-transformers, or a reranker.

    Since version 6, the longest text is that of the tokenizer.

    Raises:
        UserError: jaxlm does not support its modules or its pooling.
    """
    modules, config = _modules(folder), _read(folder / CONFIG)
    if not modules or config.get("model_type") == RERANKER:
        return None
    types = [kind for kind, _ in modules]
    if types not in ([TRANSFORMER, "Pooling"], [TRANSFORMER, "Pooling", "Normalize"]):
        raise UserError(f"{folder} has the modules {', '.join(types)}; jaxlm supports only Pooling and Normalize.")
    file, inner = modules[1][1] / "config.json", modules[0][1]
    with reading(folder):
        pooling = read_json(file, dict)
        modes = [name.removeprefix("pooling_mode_") for name, value in pooling.items() if value is True]
        chosen = pooling.get("pooling_mode") or [mode for mode in modes if mode != "include_prompt"] or "mean"
        matches = [ours for ours, theirs in MODES.items() if chosen in (ours, theirs, [ours], [theirs])]
        if not matches:
            raise UserError(f"{file} asks for {chosen}; jaxlm supports {', '.join(MODES)}.")
        prompts = {name: text or "" for name, text in (config.get("prompts") or {}).items()}
        others = [name for name in ("passage", "corpus") if prompts.get(name)]
        if others and not prompts.get("document"):
            log(f"{folder} has a prompt {others[0]!r} and none for 'document', so documents get none, as in "
                "sentence-transformers; --objective.passage-prompt and evaluate --document-prompt give them one.")
        positions = _read(inner / "config.json").get("max_position_embeddings", -1)
        longest = [length for length in (read_length(inner), positions) if length and length > 0]
        return Vectors(
            matches[0], _module_config(inner).get("max_seq_length") or min(longest, default=None), len(types) == 3,
            prompts.get(config.get("default_prompt_name"), None if any(prompts.values()) else ""),
            tuple(prompts.items()), bool(pooling.get("include_prompt", True)), config.get("similarity_fn_name") or "",
            tuple((config.get("matryoshka_dims") or ())[:-1]),
        )


def model_folder(folder: Path) -> Path:
    """Return where a folder of sentence-transformers has its Transformers model; other folders as they are."""
    return next((path for kind, path in _modules(folder) if kind == TRANSFORMER), folder)


def lowers_case(folder: Path) -> bool:
    """Return whether a folder of sentence-transformers makes texts lower-case before their tokenizer reads them."""
    return bool(_modules(folder)) and bool(_module_config(model_folder(folder)).get("do_lower_case"))


def reranker_prompt(folder: Path) -> str:
    """Return the text that `CrossEncoder(folder)` puts before each query."""
    config = _read(folder / CONFIG) if _modules(folder) else {}
    is_reranker = config.get("model_type") == RERANKER
    return (config.get("prompts") or {}).get(config.get("default_prompt_name")) or "" if is_reranker else ""


def _modules(folder: Path) -> list[tuple[str, Path]]:
    """Return the kind and the folder of each module; none for a folder that is not one of sentence-transformers."""
    file = folder / MODULES
    if not file.is_file():
        return []
    found = []
    for number, module in enumerate(read_json(file, [{"type": str, "path?": str}])):
        kind = module["type"].rpartition(".")[2]
        path = Path(module.get("path", f"{number}_{kind}" if number else ""))
        if path.is_absolute() or ".." in path.parts:
            raise UserError(f"{file} has a module at {path}, outside its folder; copy it again.")
        found.append((kind, folder / path))
    return found


def _module_config(folder: Path) -> dict[str, Any]:
    """Return the settings of a Transformer module, whose file was named after its family until version 2."""
    return _read(next(iter([*folder.glob(LENGTH), *sorted(folder.glob("sentence_*_config.json"))]), folder / LENGTH))


def _read(file: Path) -> dict[str, Any]:
    return read_json(file, dict) if file.is_file() else {}
