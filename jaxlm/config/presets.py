"""Loading of an Experiment from a preset's Python file or from the config.json of a run folder."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import hashlib
import json
import os
import re
import sys
import types
from pathlib import Path

from etils import epath

from jaxlm import __version__
from jaxlm.config.experiment import Experiment
from jaxlm.config.json import from_json
from jaxlm.errors import UserError
from jaxlm.fields import check_types, settings
from jaxlm.paths import any_path, is_run_folder, reading, refuse_links
from jaxlm.systems import is_foreign, register

PRESETS = Path(__file__).parents[1] / "presets"
"""Folder of the presets that are installed with jaxlm; in a checkout it is a link to configs/."""


def preset_files() -> dict[str, str]:
    """Return the file of each installed preset by name, such as bert_base, or sst2 for a task."""
    return {file.stem: str(file) for folder in (PRESETS, PRESETS / "tasks") for file in sorted(folder.glob("*.py"))}


def load_preset(path: str) -> Experiment:
    """Return the Experiment of a run folder, or of a preset: a Python file that sets `experiment`.

    Raises:
        UserError: The path is neither, or the preset cannot be run.
    """
    if is_run_folder(path):
        return load_config(any_path(path) / "config.json")
    experiment = getattr(run_preset(path), "experiment", None)
    if not isinstance(experiment, Experiment):
        raise UserError(f"the preset {path} does not set `experiment` to a jaxlm Experiment.")
    check_types(experiment)
    return experiment


def run_preset(path: str) -> types.ModuleType:
    """Run a preset's file as a module, once for each content, and register the classes that it brings.

    These are the dataclasses that it defines or imports, and those of its `experiment`. Only a file whose name ends in
    .py is executed, or an installed preset by its name.
    """
    path = preset_files().get(path, path)
    if not (path.endswith(".py") and Path(path).is_file()):
        raise UserError(f"there is no preset or run folder {path}; {_hint(Path(path))}")
    # Annotations, flags and `type_name` find the module by its name, which is not one that Python could import.
    name, source = os.path.abspath(path), Path(path).read_bytes()
    if (module := sys.modules.get(name)) is not None and module.__source__ == source:
        return module
    sys.modules[name] = module = types.ModuleType(name)
    module.__file__, module.__source__ = name, source
    try:
        exec(compile(source, name, "exec"), vars(module))
        found = [value for value in vars(module).values() if isinstance(value, type)]
        if isinstance(experiment := getattr(module, "experiment", None), Experiment):
            found += [type(setting.value) for setting in settings(experiment)]
        register(*(cls for cls in found if dataclasses.is_dataclass(cls) and is_foreign(cls)))
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, UserError) or not isinstance(error, Exception):
            raise
        raise UserError(f"the preset {path} cannot be run: {type(error).__name__}: {error}") from error
    return module


def loaded_presets() -> dict[str, str]:
    """Return the name and a digest of every preset file that this process has run."""
    modules = [(name, module) for name, module in sys.modules.items() if os.path.isabs(name)]
    return {Path(name).name: hashlib.sha256(module.__source__).hexdigest()[:12] for name, module in modules}


def describe_preset(path: str) -> str:
    """Return the docstring of a preset's file, with names of presets in place of paths; "" for a run folder."""
    file = Path(preset_files().get(path, path))
    text = ast.get_docstring(ast.parse(file.read_text("utf-8"))) if file.suffix == ".py" and file.is_file() else None
    return re.sub(r"configs/(?:tasks/)?(\w+)\.py| \(configs/RESULTS\.md\)", r"\1", f"{text}\n" if text else "")


def _hint(path: Path) -> str:
    """Return a hint at the presets that exist."""
    names = {name: name for name in preset_files()} | {file.stem: str(file) for file in path.parent.glob("*.py")}
    close = [names[name] for name in difflib.get_close_matches(path.stem, names, n=3, cutoff=0.5)]
    return f"did you mean {' or '.join(close)}?" if close else f"the presets are the files in {PRESETS}."


def age(version: object) -> str:
    """Return the version of jaxlm that wrote a run, for a message; "" if it is this one or not known."""
    return f" (written by jaxlm {version}, this is {__version__})" if version not in (None, __version__) else ""


def _version(run: epath.Path) -> object:
    try:
        return json.loads((run / "data.json").read_bytes()).get("jaxlm")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None


def load_config(path: os.PathLike[str] | str) -> Experiment:
    """Return the Experiment of a run folder's config.json. Every command that reads a run folder calls this first.

    Raises:
        UserError: The file is no configuration of this version of jaxlm, or the run folder holds symbolic links.
    """
    with reading(path):
        file = any_path(path)
        if not file.is_file():
            raise UserError(f"{path} does not exist: {file.parent} is not a jaxlm run folder.")
        value = json.loads(file.read_bytes())
        value = value if isinstance(value, dict) else {}
        if value.get("type") != Experiment.__name__:
            hint = ", but of a Transformers folder; `jaxlm import` makes a run of it" if "model_type" in value else ""
            raise UserError(f"{path} is no configuration of a jaxlm run{hint}.")
        refuse_links(file.parent)
        experiment = from_json(value, f"{path}{age(_version(file.parent))}")
    check_types(experiment)
    return experiment
