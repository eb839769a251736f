"""The rules of the design that a reader of one file would not see broken."""

from __future__ import annotations

import ast
import configparser
import functools
import importlib.metadata
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import numpy as np

import jaxlm

ROOT = Path(jaxlm.__file__).parent
MAX_LINES = 60
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@functools.cache
def modules() -> dict[str, ast.Module]:
    """Module name → syntax tree."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text("utf-8"))
    return found


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """(qualified name, function) of every function, methods and nested ones too."""
    for node in ast.iter_child_nodes(tree):
        name = f"{prefix}.{node.name}" if hasattr(node, "name") else prefix
        if isinstance(node, FUNCTIONS):
            yield name, node
        yield from functions(node, name)


def words(tree: ast.AST, ignored: ast.AST | None = None) -> set[str]:
    """The names and attributes that code uses; texts do not count. ignored: a function that is left out."""
    if tree is ignored:
        return set()
    own = {getattr(tree, field) for field in ("id", "attr", "name") if isinstance(getattr(tree, field, None), str)}
    return own.union(*(words(child, ignored) for child in ast.iter_child_nodes(tree)))


def test_the_platform_is_asked_for_in_one_place_only():
    """One program runs on every device."""
    allowed = {"jaxlm.models.layers.kernel_choice.choose_kernel"}
    askers = set()
    for name, tree in modules().items():
        if name.split(".")[1:2] not in (["models"], ["objectives"], ["corruption"], ["knowledge"], ["training"]):
            continue
        remaining = ast.Module([node for node in tree.body if not isinstance(node, (ast.Import, ast.ImportFrom))], [])
        asking = {
            f"{name}{function}" for function, node in functions(remaining)
            if any("platform" in word or word == "default_backend" for word in words(node))
        }
        askers |= asking
        for function, node in functions(remaining):
            if f"{name}{function}" in allowed:
                remaining.body = [child for child in remaining.body if child is not node]
        outside = {word for word in words(remaining) if "platform" in word or word == "default_backend"}
        assert not outside, f"{name} asks for the platform: {outside}"
    assert askers == allowed


def test_jaxtyping_reads_every_shape():
    """Annotations are not evaluated at import, and the type checker skips those that it cannot evaluate."""
    shapes = [
        (name, node) for name, tree in modules().items() for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) in ("Bool", "Float", "Int")
    ]
    assert len(shapes) > 300
    for name, node in shapes:
        _, shape = node.slice.elts
        assert isinstance(shape, ast.Constant), f"{name}:{node.lineno}"
        getattr(jaxtyping, node.value.id)[np.ndarray, shape.value]


def num_lines(function: ast.FunctionDef) -> int:
    """Return the length of a function with its decorators and without its docstring."""
    first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
    doc = function.body[0] if ast.get_docstring(function) else None
    return function.end_lineno - first + 1 - (doc.end_lineno - doc.lineno + 1 if doc else 0)


def test_no_function_is_long():
    lengths = {
        f"{name}{function}": num_lines(node) for name, tree in modules().items() for function, node in functions(tree)
    }
    assert len(lengths) > 300
    assert not {name: lines for name, lines in lengths.items() if lines > MAX_LINES}


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield the jaxlm modules that a module imports at its own import, with the packages that it takes them from.

    Imports for type checkers do not count.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, FUNCTIONS):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            yield from imports(node)
            continue
        for name in names:
            while name.startswith("jaxlm") and name not in modules():
                name = name.rpartition(".")[0]
            if name.startswith("jaxlm"):
                yield name


def circle_among(graph: dict[str, set[str]]) -> list[str]:
    """A circle of nodes, or none: what is left when nodes without successors are taken away again and again."""
    graph = dict(graph)
    while leaves := [name for name, others in graph.items() if not others & graph.keys()]:
        for name in leaves:
            del graph[name]
    return sorted(graph)


def test_imports_go_in_no_circle():
    graph = {name: set(imports(tree)) - {name, "jaxlm"} for name, tree in modules().items()}
    assert graph["jaxlm.training.program"] >= {"jaxlm.objectives.base", "jaxlm.parallel.mesh"}
    assert circle_among({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == ["a", "b", "c", "d"]
    assert not circle_among(graph)


def floors() -> dict[str, int]:
    """Room → number of its row in the table of jaxlm/README.md."""
    page = (ROOT / "README.md").read_text("utf-8")
    table = page.partition("| room | contents |\n|---|---|\n")[2].partition("\n\n")[0]
    rows = [re.findall(r"`(\w+)", line.split(" | ")[0]) for line in table.splitlines()]
    return {room: floor for floor, row in enumerate(rows) for room in row}


def test_rooms_import_only_rooms_above_them():
    """The page lists the rooms; imports inside functions count, too."""
    floor = floors()
    rooms = {name: name.split(".")[1] for name in modules() if name != "jaxlm"}
    assert set(rooms.values()) == set(floor)
    pairs = {
        (name, other) for name in rooms for _, node in [("", modules()[name]), *functions(modules()[name])]
        for other in imports(node) if other != "jaxlm"
    }
    assert ("jaxlm.training.program", "jaxlm.objectives.base") in pairs
    assert not [f"{name} imports {other}" for name, other in pairs if floor[rooms[other]] > floor[rooms[name]]]
    # The first tenant: it registers itself, and jaxlm would be whole without it.
    assert {rooms[name] for name, other in pairs if rooms[other] == "knowledge"} == {"knowledge"}


def test_only_commands_open_models_by_the_front_door():
    """`import jaxlm` names no room, so that the rule above does not see it; a room calls `load_trained`."""
    users = {
        name for name, tree in modules().items() for node in ast.walk(tree)
        if isinstance(node, ast.Import) and any(alias.name == "jaxlm" for alias in node.names)
    }
    assert users and {".".join(name.split(".")[:2]) for name in users} == {"jaxlm.commands"}


def test_the_costs_of_compiled_steps_stand_below_what_is_measured():
    """The two groups of jaxlm/analysis, by the table of its page; curves and show need nothing of the costs."""
    page = (ROOT / "analysis" / "README.md").read_text("utf-8")
    costs, measured = (
        {f"jaxlm.analysis.{file}" for file in re.findall(r"`(\w+)`", line)}
        for line in re.findall(r"^\| (?:costs of compiled steps|measurements and runs) \|(.+)\|$", page, re.M)
    )
    own = {name for name in modules() if name.startswith("jaxlm.analysis.")}
    assert costs | measured == own and not costs & measured
    assert not [f"{name} imports {other}" for name in costs for other in imports(modules()[name]) if other in measured]
    for name in ("jaxlm.analysis.curves", "jaxlm.analysis.show"):
        assert not own & set(imports(modules()[name]))


def test_tasks_import_nothing_of_ours_inside_functions():
    """What they need of higher rooms, such as how a model is opened, is handed in."""
    found = [
        f"{name}{function}" for name, tree in modules().items()
        if name.startswith(("jaxlm.tasks.", "jaxlm.inference.", "jaxlm.knowledge."))
        for function, node in functions(tree) if list(imports(node))
    ]
    assert not found


def test_every_key_has_a_purpose():
    """`jax.random.key` is called in jaxlm.keys, and elsewhere only for shapes."""
    for name, tree in modules().items():
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        shapes = {id(x) for node in calls if ast.unparse(node.func) == "jax.eval_shape" for x in ast.walk(node)}
        own = [node for node in calls if ast.unparse(node.func) in ("jax.random.key", "jax.random.PRNGKey")]
        assert name == "jaxlm.keys" or not [node.lineno for node in own if id(node) not in shapes], name


def test_every_import_is_declared():
    """What a module imports at its import is required; what a function imports may be in an extra."""
    setup = configparser.ConfigParser()
    setup.read(ROOT.parent / "setup.cfg")

    def distributions(text: str) -> set[str]:
        found = (re.match(r"[\w.-]+", line.strip()) for line in text.splitlines())
        return {re.sub(r"[-_.]+", "-", match[0]).lower() for match in found if match}

    required = distributions(setup["options"]["install_requires"])
    extras = distributions("\n".join(setup["options.extras_require"].values()))
    installed, missing = importlib.metadata.packages_distributions(), set()
    for name, tree in modules().items():
        inner = {id(x) for _, function in functions(tree) for x in ast.walk(function)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                packages = [node.module]
            else:
                packages = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for package in {package.split(".")[0] for package in packages} - sys.stdlib_module_names - {"jaxlm"}:
                is_optional = id(node) in inner or name == "jaxlm.evaluation.lm_eval"  # imported by its command alone
                allowed = required | extras if is_optional else required
                if not distributions("\n".join([package, *installed.get(package, [])])) & allowed:
                    missing.add(f"{package} ({name})")
    assert not missing


def test_public_methods_are_documented():
    """`inspect.getdoc` finds the docstring that an override inherits, unlike ruff."""
    undocumented = []
    for name in modules():
        for cls in vars(importlib.import_module(name)).values():
            if inspect.isclass(cls) and cls.__module__ == name and not cls.__name__.startswith("_"):
                undocumented += [
                    f"{name}.{cls.__name__}.{key}" for key, member in vars(cls).items()
                    if not key.startswith("_")
                    and (inspect.isfunction(member) or isinstance(member, property))
                    and not inspect.getdoc(getattr(cls, key))
                ]
    assert not undocumented
