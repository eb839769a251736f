"""Text installed with every Python: the language reference of `help()` and the docstrings of the standard library."""

from __future__ import annotations

import ast
import functools
import inspect
import os
import sysconfig
import warnings
from collections.abc import Iterator

_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib-dynload"}


@functools.lru_cache(maxsize=1)
def documents() -> tuple[str, ...]:
    """Return one document per topic, then one per module, both sorted by name: about 2 MB.

    Only the table of topics is imported.
    """
    return (*_topics(), *_modules(sysconfig.get_path("stdlib")))


def _topics() -> Iterator[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions omit it
        return
    for _, text in sorted(topics.items()):
        yield text.strip()


def _modules(library: str) -> Iterator[str]:
    for folder, folders, files in os.walk(library):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED and not name.startswith("config-"))
        for name in sorted(files):
            path = os.path.join(folder, name)
            if name.endswith(".py") and path != os.path.join(library, "pydoc_data", "topics.py"):
                text = "\n\n".join(_docstrings(path))
                if text:
                    yield text


def _docstrings(path: str) -> Iterator[str]:
    """Yield the docstrings of a module, its classes and its functions, in source order."""
    try:
        with open(path, "rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):  # templates that are not Python
        return
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node, clean=False)
            if text and text.strip():
                yield inspect.cleandoc(text)
        children = [child for child in ast.iter_child_nodes(node) if isinstance(child, (ast.stmt, ast.excepthandler))]
        pending.extend(reversed(children))
