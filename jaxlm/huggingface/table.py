"""One table of names per family: where each of our parameters stands in a Transformers checkpoint.

A table is read in both directions, so that an export and an import cannot disagree. Everything here is numpy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np

from jaxlm.errors import UserError

Params = dict[str, Any]
LAYER = "{layer}"


@dataclasses.dataclass(frozen=True)
class Entry:
    """One Transformers tensor (or one per layer, where `theirs` holds `{layer}`) and the parameters it consists of.

    ours: paths such as "encoder/layers/attention/query/kernel". With several, their tensor is ours joined along the
    last axis of our orientation (GPT-2's fused query-key-value matrix).
    theirs: the name of the tensor; with `{layer}` our arrays carry the layers as their first dimension.
    transpose: whether their matrix is [out, in] (torch.nn.Linear) where ours is [in, out].
    """

    ours: tuple[str, ...]
    theirs: str
    transpose: bool = False

    @property
    def stacked(self) -> bool:
        return LAYER in self.theirs

    def their_shape(self, shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
        """Shape of their tensor, given the shapes of ours."""
        parts = [shape[1:] if self.stacked else shape for shape in shapes]
        joined = (*parts[0][:-1], sum(part[-1] for part in parts))
        return joined[::-1] if self.transpose else joined


def dense(ours: str, theirs: str, bias: bool = True) -> tuple[Entry, ...]:
    """A `flax.linen.Dense` and the `torch.nn.Linear` of the same function."""
    kernel = Entry((f"{ours}/kernel",), f"{theirs}.weight", transpose=True)
    return (kernel, Entry((f"{ours}/bias",), f"{theirs}.bias")) if bias else (kernel,)


def norm(ours: str, theirs: str, bias: bool = True) -> tuple[Entry, ...]:
    """A LayerNorm, or an RMSNorm when it has no bias."""
    scale = Entry((f"{ours}/scale",), f"{theirs}.weight")
    return (scale, Entry((f"{ours}/bias",), f"{theirs}.bias")) if bias else (scale,)


def embedding(ours: str, theirs: str) -> tuple[Entry, ...]:
    """A table of vectors, [rows, width] on both sides."""
    return (Entry((f"{ours}/embedding",), f"{theirs}.weight"),)


@dataclasses.dataclass(frozen=True)
class Table:
    """All the names of one Transformers class."""

    entries: tuple[Entry, ...]
    prefix: str = ""
    """What heads put before the names of the bare model ("bert."): files of the bare model lack it."""
    ties: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Second name of a tensor -> its first name. A file may hold either or, equal to the last bit, both; we write
    the first."""
    ignored: tuple[str, ...] = ()
    """Names of buffers that carry nothing trained."""
    old_endings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Endings that older files use -> today's ("LayerNorm.gamma" -> "LayerNorm.weight")."""
    heads: tuple[str, ...] = ()
    """Our subtrees that a file may lack altogether, such as "mlm_head"; they are then initialised freshly."""

    def their_names(self, template: Params) -> dict[str, tuple[int, ...]]:
        """Their name -> shape, for parameters with the shapes of `template` (anything with `.shape`)."""
        names = {}
        for entry in self.entries:
            shapes = [tuple(get(template, path).shape) for path in entry.ours]
            for layer in range(shapes[0][0]) if entry.stacked else [0]:
                names[entry.theirs.replace(LAYER, str(layer))] = entry.their_shape(shapes)
        return names

    def to_transformers(self, params: Params) -> Iterator[tuple[str, np.ndarray]]:
        """(name, array) in the order of the table; arrays are views into `params` where they can be."""
        for entry in self.entries:
            leaves = [np.asarray(get(params, path)) for path in entry.ours]
            for layer in range(leaves[0].shape[0]) if entry.stacked else [None]:
                parts = leaves if layer is None else [leaf[layer] for leaf in leaves]
                array = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
                yield entry.theirs.replace(LAYER, str(layer)), array.T if entry.transpose else array

    def from_transformers(
        self,
        stored: Mapping[str, tuple[int, ...]],
        read: Callable[[str], np.ndarray],
        template: Params,
        where: str,
    ) -> tuple[Params, list[str]]:
        """(parameters as float32, paths that the file lacks and that may be initialised freshly).

        stored: name -> shape of what the file holds; `read` gives one of them. template: our parameters, or anything
        with their shapes. UserError names tensors that are missing, not known, of another shape, or untied.
        """
        wanted = self.their_names(template)
        found = self._names(stored, wanted, where)
        self._check_shapes(found, stored, wanted, where)
        fresh = self._missing(found, template, where)
        params: Params = {}
        for entry in self.entries:
            if fresh.issuperset(entry.ours):
                continue
            leaves = [np.empty(get(template, path).shape, np.float32) for path in entry.ours]
            cuts = np.cumsum([leaf.shape[-1] for leaf in leaves])[:-1]
            for layer in range(leaves[0].shape[0]) if entry.stacked else [None]:
                name = entry.theirs.replace(LAYER, str(layer))
                array = self._read_tied(name, found, read, where)
                parts = np.split(array.T if entry.transpose else array, cuts, axis=-1)
                for leaf, part in zip(leaves, parts, strict=True):
                    leaf[... if layer is None else layer] = part
            for path, leaf in zip(entry.ours, leaves, strict=True):
                put(params, path, leaf)
        return params, [path for entry in self.entries for path in entry.ours if path in fresh]

    def today(self, name: str, known: Collection[str]) -> str:
        """The name by which this table knows a stored tensor: old endings replaced, the prefix added where it lacks."""
        for old, new in self.old_endings.items():
            if name.endswith(old):
                name = name.removesuffix(old) + new
        return self.prefix + name if name not in known and self.prefix + name in known else name

    def _names(self, stored: Collection[str], wanted: Collection[str], where: str) -> dict[str, str]:
        """Our name of a stored tensor (its first name, or the second of a tie) -> its name in the file."""
        known = {*wanted, *self.ties, *self.ignored}
        found: dict[str, str] = {}
        for original in stored:
            name = self.today(original, known)
            if name in found:
                raise UserError(f"{where} holds {name} twice, as {found[name]} and as {original}; remove one of them.")
            found[name] = original
        return {name: original for name, original in found.items() if name not in self.ignored}

    def _check_shapes(
        self, found: Mapping[str, str], stored: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]],
        where: str,
    ) -> None:
        firsts = {name: self.ties.get(name, name) for name in found}
        unknown = [found[name] for name, first in firsts.items() if first not in wanted]
        if unknown:
            raise UserError(
                f"{where} holds {listed(unknown)}, which this model does not have; remove what is not part of the "
                "pretraining model (the head of a fine-tuned task, say) or choose a folder without it."
            )
        wrong = [
            f"{found[name]} {list(stored[found[name]])} instead of {list(wanted[first])}"
            for name, first in firsts.items() if tuple(stored[found[name]]) != wanted[first]
        ]
        if wrong:
            raise UserError(f"{where} does not fit its config.json: it has {listed(wrong)}.")

    def _missing(self, found: Mapping[str, str], template: Params, where: str) -> set[str]:
        """Paths to initialise freshly; a head of which only a part is missing is damage, not a choice."""
        seconds: dict[str, list[str]] = {}
        for second, first in self.ties.items():
            seconds.setdefault(first, []).append(second)
        missing: dict[str, list[str]] = {}  # subtree of ours -> their names
        present: set[str] = set()
        for entry in self.entries:
            groups = {next((h for h in self.heads if within(path, h)), "") for path in entry.ours}
            layers = get(template, entry.ours[0]).shape[0] if entry.stacked else 1
            for layer in range(layers):
                name = entry.theirs.replace(LAYER, str(layer))
                here = any(n in found for n in (name, *seconds.get(name, ())))
                present |= groups if here else set()
                for group in groups if not here else ():
                    missing.setdefault(group, []).append(name)
        lacking = [name for group, names in missing.items() if group == "" or group in present for name in names]
        if lacking:
            raise UserError(
                f"{where} lacks {listed(lacking)}; it is damaged, or of another kind than its config.json says."
            )
        return {path for entry in self.entries for path in entry.ours if any(within(path, group) for group in missing)}

    def _read_tied(
        self, name: str, found: Mapping[str, str], read: Callable[[str], np.ndarray], where: str
    ) -> np.ndarray:
        names = [name, *(second for second, first in self.ties.items() if first == name)]
        originals = [found[n] for n in names if n in found]
        array = read(originals[0])
        for other in originals[1:]:
            if not np.array_equal(array, read(other), equal_nan=True):
                raise UserError(
                    f"{where} has {other} that differs from {originals[0]}; this model shares them, so a checkpoint "
                    "with separate weights cannot be imported."
                )
        return array


def get(tree: Params, path: str) -> Any:
    """The leaf at "a/b/c"."""
    for name in path.split("/"):
        tree = tree[name]
    return tree


def put(tree: Params, path: str, leaf: Any) -> None:
    """Sets the leaf at "a/b/c", making the dicts on the way."""
    *parents, last = path.split("/")
    for name in parents:
        tree = tree.setdefault(name, {})
    tree[last] = leaf


def paths(tree: Params, prefix: str = "") -> Iterator[str]:
    """All paths of a nested dict, "a/b/c"."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from paths(value, f"{prefix}{name}/")
        else:
            yield prefix + name


def within(path: str, subtree: str) -> bool:
    return path == subtree or path.startswith(subtree + "/")


def listed(names: list[str], most: int = 4) -> str:
    """The names joined by commas, the tail of a long list counted only."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
