"""Lookup of families: by objective and model for an export, by model_type for an import."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxlm import systems
from jaxlm.errors import UserError
from jaxlm.huggingface.family import Family
from jaxlm.huggingface.tasks import export_family, import_family, pretraining_objective
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.parallel.hosts import log

LACKING = {
    "qwen2": "biases of queries, keys and values without one of the output",
    "new": "ntk's scaling of rotary positions (gte is the family in Transformers)",
    "ultrabert": "a masked-LM head of two layers",
    "umt5": "relative positions of its own in each layer",
    "t5gemma": "a cap of attention scores (attn_logit_softcapping)",
    "t5gemma2": "a vision tower, and attention over a decoder's and its encoder's tokens at once",
    "gemma3": "a vision tower (gemma3_text is the language model alone)",
}
"""Type of a model → what it has that no model here has."""


def family_of(objective: Any) -> Family:
    """Return the family that exports an objective."""
    if objective.command == "finetune" or objective.vector_settings(None):
        return export_family(family_of(pretraining_objective(objective)), objective)
    system = systems.system_of(objective)
    if system is None or not system.family:
        raise UserError(
            f"{type(objective).__name__} with the model {type(objective.model).__name__} has no class in Transformers, "
            "so it cannot be exported; jaxlm/YOUR_OWN.md says how a preset or a package names one."
        )
    if not (families := _families(system)):
        raise UserError(f"{system.family}, the module with the names of a {type(objective.model).__name__} in "
                        "Transformers, cannot be imported, as said above; mend it, or its name in the System.")
    return families[0]


def family_named(model_type: str, where: str, architecture: str = "") -> Family:
    """Return the family that imports a `model_type` of config.json.

    The `architecture` of a task selects the task's family. Messages name the folder `where`.
    """
    # Of two with one `model_type` the first is kept, so that no package changes what jaxlm's folders are.
    found = [family for system in systems.importable() for family in _families(system)]
    families = {family.model_type: family for family in reversed(found)}
    if model_type not in families:
        part = f", which needs {LACKING[model_type]}" if model_type in LACKING else ""
        raise UserError(
            f"{where} holds a model of the family {model_type!r}{part}; jaxlm imports these families: "
            f"{', '.join(dict.fromkeys(family.model_type for family in found))}."
        )
    return import_family(families[model_type], architecture)


def writer_of(objective: Any) -> Callable[..., None] | None:
    """Return the function (folder, objective, params, tokenizer) that writes an objective in its own format, if any."""
    system = systems.system_of(objective)
    return _module(system.writer).write if system and system.writer else None


def reader_of(folder: Path) -> Callable[[Path], PretrainedModel] | None:
    """Return the function that reads a folder in a system's own format, which it knows by a file in it, if any."""
    modules = [_module(system.writer) for system in systems.all_systems() if system.writer]
    return next((m.read for m in modules if hasattr(m, "MARKER") and (folder / m.MARKER).is_file()), None)


def _families(system: systems.System) -> tuple[Family, ...]:
    """Return the family of a system, which exports, and those that are only imported."""
    if isinstance(system.family, Family):
        return (system.family,)
    try:
        module = _module(system.family)
        family = module.FAMILY
    except Exception as error:  # of another's code
        if _path(system.family).startswith("jaxlm.huggingface."):
            raise
        log(f"The family {system.family} is left out, since it cannot be imported: {error}.")
        return ()
    if isinstance(family, Mapping):
        family = next(family[kind] for kind in (*system.model.__mro__, *family) if kind in family)
    return (family, *getattr(module, "IMPORT_ONLY", ()))


def _module(name: str) -> Any:
    """Import the module of a family or a writer; only those in use are imported."""
    return importlib.import_module(_path(name))


def _path(name: str) -> str:
    """Return the dotted name of a module of this package or, if it has none of this name, of another."""
    own = f"jaxlm.huggingface.{name}"
    return own if "." not in name and importlib.util.find_spec(own) else name
