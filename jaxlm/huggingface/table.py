"""Tables of names: the tensor of each of our parameters in a Transformers checkpoint.

A table is read in both directions, so that export and import cannot disagree. All arrays are numpy's.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np

from jaxlm.errors import UserError
from jaxlm.trees import get, within
from jaxlm.types import Params

Shape = tuple[int, ...]
LAYER = "{layer}"
WRAPPERS = re.compile(r"^((module|_orig_mod)\.)+")
"""What DataParallel and torch.compile put before the names of a model's tensors."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One Transformers tensor and the parameters that it consists of.

    Attributes:
        ours: paths such as "encoder/layers/attention/query/kernel". Several are joined along their last axis (GPT-2's
            fused query-key-value matrix).
        theirs: name of the tensor. With `{layer}` the entry stands for one tensor per layer of a stacked parameter.
        transpose: whether their matrix is [out, in] (torch.nn.Linear) where ours is [in, out].
        shape: shape of their tensor if a reshape is needed, such as [hidden, heads, width] (XLNet).
        layer: index into the leading axis of ours, which is stacked by layer; None for a whole parameter.
        first_layer: their number of our first layer, for a parameter that the layers before it lack.
    """

    ours: tuple[str, ...]
    theirs: str
    transpose: bool = False
    shape: Shape | None = None
    layer: int | None = None
    first_layer: int = 0

    def layers(self, template: Params) -> list[Entry]:
        """Return one entry per layer of `template`, or the entry itself if its name has no `{layer}`."""
        if LAYER not in self.theirs:
            return [self]
        return [
            dataclasses.replace(self, theirs=self.theirs.replace(LAYER, str(self.first_layer + layer)), layer=layer)
            for layer in range(get(template, self.ours[0]).shape[0])
        ]

    def our_shapes(self, template: Params) -> list[Shape]:
        """Return the shapes of our parameters, without the leading axis of a stack."""
        shapes = [tuple(get(template, path).shape) for path in self.ours]
        return shapes if self.layer is None else [shape[1:] for shape in shapes]

    def their_shape(self, shapes: Sequence[Shape]) -> Shape:
        """Return the shape of their tensor, given `our_shapes`."""
        joined = _joined_shape(shapes)
        return self.shape or (joined[::-1] if self.transpose else joined)

    def to_theirs(self, leaves: Sequence[np.ndarray]) -> np.ndarray:
        """Return their tensor, a view into ours if possible."""
        array = leaves[0] if len(leaves) == 1 else np.concatenate(leaves, axis=-1)
        array = array.T if self.transpose else array
        return array if self.shape is None else array.reshape(self.shape)

    def to_ours(self, array: np.ndarray, shapes: Sequence[Shape]) -> list[np.ndarray]:
        """Return our parameters of the given shapes from their tensor."""
        joined = _joined_shape(shapes)
        if self.shape is not None:
            array = array.reshape(joined[::-1] if self.transpose else joined)
        cuts = np.cumsum([shape[-1] for shape in shapes])[:-1]
        parts = np.split(array.T if self.transpose else array, cuts, axis=-1)
        return [np.ascontiguousarray(part, np.float32) for part in parts]


def _joined_shape(shapes: Sequence[Shape]) -> Shape:
    """Return the shape of arrays joined along their last axis."""
    return (*shapes[0][:-1], sum(shape[-1] for shape in shapes))


def dense(ours: str, theirs: str, bias: bool = True) -> tuple[Entry, ...]:
    """Return the entries of a `flax.linen.Dense` and a `torch.nn.Linear`."""
    kernel = Entry((f"{ours}/kernel",), f"{theirs}.weight", transpose=True)
    return (kernel, Entry((f"{ours}/bias",), f"{theirs}.bias")) if bias else (kernel,)


def norm(ours: str, theirs: str, bias: bool = True) -> tuple[Entry, ...]:
    """Return the entries of a LayerNorm, or of an RMSNorm without bias."""
    scale = Entry((f"{ours}/scale",), f"{theirs}.weight")
    return (scale, Entry((f"{ours}/bias",), f"{theirs}.bias")) if bias else (scale,)


def embedding(ours: str, theirs: str) -> tuple[Entry, ...]:
    """Return the entry of an embedding, [rows, width] on both sides."""
    return (Entry((f"{ours}/embedding",), f"{theirs}.weight"),)


@dataclasses.dataclass(frozen=True)
class Table:
    """Correspondence between an objective's parameters and one Transformers class."""

    entries: tuple[Entry, ...]
    prefix: str = ""
    """`base_model_prefix` of the class ("bert."); a folder of the bare model has names without it."""
    ties: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Second name of a tensor → its first name.

    A file may hold either, or both with equal values; an export has the first.
    """
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Entry → another entry of the same parameter.

    An export has both. A file may lack either; of a file with both the first is read.
    """
    ignored: tuple[str, ...] = ()
    """Names of buffers and untrained tensors."""
    old_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Patterns in names of older files → what stands there now (r"LayerNorm\\.gamma$" → "LayerNorm.weight")."""
    optional: tuple[str, ...] = ()
    """Our subtrees that a file may lack as a whole, such as "mlm_head"; they are then initialized."""

    def tensors(self, template: Params) -> list[Entry]:
        """Return one entry per tensor of a model with the parameters of `template` (anything with `.shape`)."""
        return [tensor for entry in self.entries for tensor in entry.layers(template)]

    def tensor_shapes(self, template: Params) -> dict[str, Shape]:
        """Return the shape of every tensor by its Transformers name."""
        return {e.theirs: e.their_shape(e.our_shapes(template)) for e in self.tensors(template)}

    def to_transformers(self, params: Params) -> Iterator[tuple[str, np.ndarray]]:
        """Yield name and array in the order of the table; arrays are views into `params` if possible."""
        for entry in self.tensors(params):
            leaves = [np.asarray(get(params, path)) for path in entry.ours]
            yield entry.theirs, entry.to_theirs([leaf if entry.layer is None else leaf[entry.layer] for leaf in leaves])

    def from_transformers(
        self, stored: Mapping[str, Shape], read: Callable[[str], np.ndarray], template: Params, where: str
    ) -> dict[str, np.ndarray]:
        """Return the float32 parameters of a file by path, without the optional subtrees that it lacks.

        `stored` has the shape of every tensor in the file; `template` is anything with the shapes of our parameters.

        Raises:
            UserError: tensors are missing, unknown, of another shape, or untied.
        """
        found = self._find(stored, template, where)
        params: dict[str, np.ndarray] = {}
        for entry in self.tensors(template):
            if entry.theirs not in found:
                continue
            first, *others = found[entry.theirs]
            array = read(first)
            for other in others:
                if not np.array_equal(array, read(other), equal_nan=True):
                    raise UserError(
                        f"{where} has {other} that differs from {first}; this model ties them, so a checkpoint with "
                        "separate weights cannot be imported."
                    )
            for path, leaf in zip(entry.ours, entry.to_ours(array, entry.our_shapes(template)), strict=True):
                if entry.layer is None:
                    params[path] = leaf
                    continue
                if path not in params:
                    params[path] = np.empty(get(template, path).shape, np.float32)
                params[path][entry.layer] = leaf
        return params

    def _find(self, stored: Mapping[str, Shape], template: Params, where: str) -> dict[str, list[str]]:
        """Return the stored names of each tensor in the file, of which a tied tensor may have several."""
        wanted = self.tensor_shapes(template)
        known = {*wanted, *self.ties, *self.ignored}
        found: dict[str, list[str]] = {}
        for original in stored:
            name = self._current_name(original, known)
            if name not in self.ignored:
                found.setdefault(self.ties.get(name, name), []).append(original)
        for first, second in self.copies.items():
            if held := found.get(first, found.get(second)):
                found |= {first: held, second: held}
        if unknown := [original for name in found.keys() - wanted.keys() for original in found[name]]:
            raise UserError(
                f"{where} has {listed(sorted(unknown))}, which this model lacks; remove tensors that are not part of "
                "the pretraining model (such as the head of a task) or choose a folder without them."
            )
        wrong = [f"{original} {list(stored[original])} instead of {list(wanted[name])}"
                 for name, originals in found.items() for original in originals
                 if tuple(stored[original]) != wanted[name]]
        if wrong:
            raise UserError(f"{where} does not fit its config.json: it has {listed(wrong)}.")
        # An optional subtree that lacks only some of its tensors is damaged.
        subtree = {entry.theirs: next((root for root in self.optional if within(entry.ours[0], root)), None)
                   for entry in self.tensors(template)}
        present = {None, *(subtree[name] for name in found)}
        if damaged := [name for name in wanted if name not in found and subtree[name] in present]:
            raise UserError(f"{where} lacks {listed(damaged)}; it is damaged, or its config.json is of another model.")
        return found

    def _current_name(self, name: str, known: Collection[str]) -> str:
        """Return the table's name of a stored tensor: old names replaced, a missing prefix added, no wrappers."""
        name = WRAPPERS.sub("", name)
        for old, new in self.old_names.items():
            name = re.sub(old, new, name)
        return self.prefix + name if name not in known and self.prefix + name in known else name


def listed(names: list[str], max_names: int = 4) -> str:
    """Join names by commas; replace the tail of a long list by its length."""
    shown = ", ".join(names[:max_names])
    return shown if len(names) <= max_names else f"{shown} and {len(names) - max_names} more"
