"""Nested dicts of parameters: leaves by path, and merging."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.errors import UserError
from jaxlm.types import Params

VOCABULARY_AXES: Mapping[str, int] = {
    **{f"{name}/embedding": 0 for name in ("word", "shared", "softmax", "output", "entity")},
    **{f"{name}/bias": 0 for name in ("mlm_head", "sbo_head", "lm_head", "softmax", "")},
    "lm_head/kernel": 1,
}
"""Last two names of a parameter's path → its vocabulary axis. The bias without a parent is XLNet's."""


def leaves(tree: Params) -> dict[str, Any]:
    """Return {path "a/b/c": leaf} of a nested dict."""
    return {path_string(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def nest(found: Mapping[str, Any]) -> Params:
    """Return the nested dict with these `leaves`."""
    tree: dict[str, Any] = {}
    for path, leaf in found.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree


def get(tree: Params, path: str) -> Any:
    """Return the leaf or subtree at "a/b/c"."""
    for name in path.split("/"):
        tree = tree[name]
    return tree


def path_string(path: tuple[Any, ...]) -> str:
    """Return a path of jax.tree_util as "a/b/c"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def within(path: str, subtree: str) -> bool:
    """Return whether a path is the root of a subtree or lies in it."""
    return path == subtree or path.startswith(subtree + "/")


def matches_patterns(path: str, patterns: Iterable[str]) -> bool:
    """Return whether shell patterns select a path.

    Each is matched against the path and its parents, and "*" also matches "/". The last match decides; a leading "!"
    deselects.
    """
    parents = [path[: i] for i, char in enumerate(path) if char == "/"]
    chosen = False
    for pattern in patterns:
        if any(fnmatch.fnmatchcase(name, pattern.removeprefix("!")) for name in (path, *parents)):
            chosen = not pattern.startswith("!")
    return chosen


def subtrees(chosen: Collection[str], every: Iterable[str]) -> list[str]:
    """Return the sorted roots of the largest subtrees that contain chosen leaves only."""
    others = [path for path in every if path not in chosen]
    roots = set()
    for path in chosen:
        names = path.split("/")
        prefixes = ("/".join(names[:count]) for count in range(1, len(names) + 1))
        roots.add(next(prefix for prefix in prefixes if not any(within(other, prefix) for other in others)))
    return sorted(roots)


def merge_params(params: Params, source: Params) -> Params:
    """Return `params` with the leaves that `source` has too replaced by those."""
    found = leaves(source)

    def merge(path: tuple[Any, ...], leaf: Any) -> Any:
        other = found.get(path_string(path), leaf)
        if np.shape(other) != np.shape(leaf):
            raise UserError(
                f"{path_string(path)} has the shape {list(np.shape(other))} in the model to begin from and "
                f"{list(np.shape(leaf))} here; give the model the same sizes and the same vocabulary."
            )
        return other

    return jax.tree_util.tree_map_with_path(merge, params)


def extend_vocabulary(source: Params, params: Params) -> Params:
    """Return `source` with what only `params` has along vocabulary axes appended."""
    found = leaves(params)

    def extend(path: tuple[Any, ...], leaf: Any) -> Any:
        other = found.get(path_string(path))
        axis = VOCABULARY_AXES.get("/".join(f"/{path_string(path)}".split("/")[-2:]))
        if axis is None or other is None or other.shape[axis] <= leaf.shape[axis]:
            return leaf
        return jnp.concatenate([leaf, jax.lax.slice_in_dim(other, leaf.shape[axis], None, axis=axis)], axis)

    return jax.tree_util.tree_map_with_path(extend, source)


def with_mean_rows(params: Params, rows: int, start: int, groups: Sequence[Sequence[int]]) -> Params:
    """Return `params` with the rows from `start` on along vocabulary axes replaced by means of rows.

    Vocabulary axes have the length `rows`; other tables, such as of entities, stay. Each of `groups` has the rows whose
    mean a new row is.
    """

    def extend(path: tuple[Any, ...], leaf: Any) -> Any:
        axis = VOCABULARY_AXES.get("/".join(f"/{path_string(path)}".split("/")[-2:]))
        if axis is None or leaf.shape[axis] != rows:
            return leaf
        table = np.moveaxis(np.asarray(leaf), axis, 0)
        means = {group: table[list(group)].mean(0, dtype=np.float64) for group in set(map(tuple, groups))}
        new = np.stack([means[tuple(group)] for group in groups]).astype(table.dtype)
        return np.moveaxis(np.concatenate([table[:start], new]), 0, axis)

    return jax.tree_util.tree_map_with_path(extend, params)
