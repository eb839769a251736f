"""Files of sentence-transformers beside a Transformers folder: pooling, normalization, prompts and length."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxlm.errors import UserError
from jaxlm.huggingface.table import Table, dense
from jaxlm.huggingface.weights import write_weights
from jaxlm.inference.embed import resolve_pooling
from jaxlm.parallel.hosts import log
from jaxlm.paths import read_json, reading
from jaxlm.tokenizers.classes import read_length
from jaxlm.types import Params, Vectors

MODES = {"cls": "cls_token", "mean": "mean_tokens", "last": "lasttoken"}
"""Our pooling modes → their names in sentence-transformers."""
MODULES, POOLING, LENGTH = "modules.json", "1_Pooling/config.json", "sentence_bert_config.json"
CONFIG, RERANKER, MULTI_VECTOR = "config_sentence_transformers.json", "CrossEncoder", "MultiVectorEncoder"
IDENTITY, TOKENS = "torch.nn.modules.linear.Identity", {"module_input_name": "token_embeddings"}
DENSE, MASK, NORMALIZE = "1_Dense", "2_MultiVectorMask", "3_Normalize"
"""Modules of a multi-vector encoder after its Transformer."""
PROJECTION = Table(dense("token_projection", "linear", bias=False))


def write(folder: Path, objective: Any, vectors: Vectors, params: Params) -> None:
    """Write the files from which `SentenceTransformer(folder)` or `MultiVectorEncoder(folder)` computes our vectors."""
    if vectors.similarity == "maxsim":
        return _write_late(folder, objective, vectors, params)
    vectors = vectors._replace(pooling=resolve_pooling(objective, vectors.pooling))
    names, width = ["", "1_Pooling", *(["2_Normalize"] if vectors.normalize else [])], objective.model.text_model.width
    modes = {f"pooling_mode_{theirs}": ours == vectors.pooling for ours, theirs in MODES.items()}
    default = next((name for name, text in vectors.prompts if text and text == vectors.prompt), None)
    _write(folder, names, {
        POOLING: {"word_embedding_dimension": width, "include_prompt": vectors.pools_prompt, **modes},
        LENGTH: {"max_seq_length": vectors.length, "do_lower_case": False},
        CONFIG: {"prompts": dict(vectors.prompts), "default_prompt_name": default,
                 "similarity_fn_name": vectors.similarity or None,
                 "matryoshka_dims": [*vectors.widths, width] if vectors.widths else None},
    })


def _write_late(folder: Path, objective: Any, vectors: Vectors, params: Params) -> None:
    """Write the files of a multi-vector encoder, which sentence-transformers has since version 6."""
    longest, pieces = min(objective.query_length or vectors.length, vectors.length), objective.vocabulary.pieces
    expansion = {"strategy": "fixed", "attend": True, "length": longest} if objective.expand_queries else None
    sizes = {"in_features": objective.model.width, "out_features": objective.token_width}
    _write(folder, ["", DENSE, MASK, NORMALIZE], {
        LENGTH: {"max_seq_length": vectors.length, "query_length": longest, "query_expansion": expansion},
        CONFIG: {"model_type": MULTI_VECTOR, "prompts": dict(vectors.prompts), "similarity_fn_name": "maxsim"},
        f"{DENSE}/config.json": {**sizes, "bias": False, "activation_function": IDENTITY, **TOKENS},
        f"{MASK}/config.json": {"skiplist_words": [pieces[i] for i in objective.skipped_ids]},
        f"{NORMALIZE}/config.json": TOKENS,
    })
    write_weights(folder / DENSE, PROJECTION.to_transformers(params))


def write_reranker(folder: Path, prompt: str) -> None:
    """Write the files from which `CrossEncoder(folder)` reads a prompt before each query."""
    _write(folder, [""], {
        LENGTH: {"transformer_task": "sequence-classification"},
        CONFIG: {"model_type": RERANKER, "prompts": {"query": prompt}, "default_prompt_name": "query",
                 "activation_fn": IDENTITY},
    })


def _write(folder: Path, modules: Sequence[str], contents: dict[str, Any]) -> None:
    contents[MODULES] = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.{room}.{path[2:] or 'Transformer'}"}
        for i, path in enumerate(modules)
        for room in ["multi_vector_encoder.modules" if path == MASK else "models"]
    ]
    for name in modules:
        (folder / name).mkdir(exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read(folder: Path) -> Vectors | None:
    """Read the embedding settings of a folder; None if it is not one of sentence-transformers, or a reranker.

    Since version 6, the longest text is that of the tokenizer.
    """
    modules, config = _modules(folder), _read(folder / CONFIG)
    if not modules or config.get("model_type") == RERANKER:
        return None
    types = [kind for kind, _ in modules]
    if types not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UserError(f"{folder} has the modules {', '.join(types)}; jaxlm supports only Pooling and Normalize.")
    file, (inner, module) = modules[1][1] / "config.json", read_module(folder)
    with reading(folder):
        pooling = read_json(file, dict)
        modes = [name.removeprefix("pooling_mode_") for name, value in pooling.items() if value is True]
        chosen = pooling.get("pooling_mode") or [mode for mode in modes if mode != "include_prompt"] or "mean"
        matches = [ours for ours, theirs in MODES.items() if chosen in (ours, theirs, [ours], [theirs])]
        if not matches:
            raise UserError(f"{file} asks for {chosen}; jaxlm supports {', '.join(MODES)}.")
        prompts = {name: text or "" for name, text in (config.get("prompts") or {}).items()}
        if not prompts.get("document") and any(map(prompts.get, ("passage", "corpus"))):
            log(f"{folder} has a prompt for passages, but none named document, so that documents get none, as in "
                "sentence-transformers; --objective.passage-prompt and evaluate --document-prompt give them one.")
        limits = (read_length(inner), _read(inner / "config.json").get("max_position_embeddings"))
        longest = module.get("max_seq_length") or min((n for n in limits if n and n > 0), default=None)
        prompt = prompts.get(config.get("default_prompt_name"), None if any(prompts.values()) else "")
        widths = tuple((config.get("matryoshka_dims") or ())[:-1])
        return Vectors(matches[0], longest, len(types) == 3, prompt, tuple(prompts.items()),
                       bool(pooling.get("include_prompt", True)), config.get("similarity_fn_name") or "", widths)


def read_module(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return where a folder of sentence-transformers has its Transformers model, and that module's settings."""
    inner = next((path for kind, path in _modules(folder) if kind == "Transformer"), None)
    # Until version 2 the file was named after the family.
    files = [*inner.glob(LENGTH), *sorted(inner.glob("sentence_*_config.json"))] if inner else []
    return inner or folder, _read(files[0]) if files else {}


def reranker_prompt(folder: Path) -> str:
    """Return the text that `CrossEncoder(folder)` puts before each query."""
    config = _read(folder / CONFIG) if _modules(folder) else {}
    prompt = (config.get("prompts") or {}).get(config.get("default_prompt_name"))
    return prompt or "" if config.get("model_type") == RERANKER else ""


def _modules(folder: Path) -> list[tuple[str, Path]]:
    """Return the kind and the folder of each module; none for a folder that is not one of sentence-transformers."""
    found, file = [], folder / MODULES
    for number, module in enumerate(read_json(file, [{"type": str, "path?": str}]) if file.is_file() else ()):
        kind = module["type"].rpartition(".")[2]
        path = Path(module.get("path", f"{number}_{kind}" if number else ""))
        if path.is_absolute() or ".." in path.parts:
            raise UserError(f"{file} has a module at {path}, outside its folder; copy it again.")
        found.append((kind, folder / path))
    return found


def _read(file: Path) -> dict[str, Any]:
    return read_json(file, dict) if file.is_file() else {}
