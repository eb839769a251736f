"""Files of knowledge graphs: triples, and vectors of entities and relations in the form of OpenKE.

A folder of vectors has `entity2id.txt` and `relation2id.txt` (the count, then a line `name<TAB>id` for each id from 0)
and the vectors in `vectors.safetensors` (arrays `entity` and `relation`) or as text in `entity2vec.vec` and
`relation2vec.vec` (one row a line, floats between tabs).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from jaxlm.data.readers import read_lines, read_names
from jaxlm.errors import UserError
from jaxlm.paths import reading

Kind = Literal["entity", "relation"]
VECTORS = "vectors.safetensors"


class Vectors(NamedTuple):
    """Vectors of the entities or of the relations of a knowledge graph."""

    names: tuple[str, ...]
    """Name of each id."""
    vectors: np.ndarray
    """float32 [n, width]."""


def read_vectors(folder: str | os.PathLike[str], kind: Kind = "entity") -> Vectors:
    """Read the vectors of entities or relations, from `vectors.safetensors` if it has them, else from text."""
    names = read_names(folder, kind)
    path = Path(folder) / VECTORS
    vectors = _read_array(path, kind) if path.is_file() else None
    if vectors is None:
        path = Path(folder) / f"{kind}2vec.vec"
        with reading(path), warnings.catch_warnings(action="ignore"):  # numpy warns of an empty file
            vectors = np.loadtxt(path, np.float32, ndmin=2, comments=None)
    if vectors.ndim != 2 or len(vectors) != len(names):
        raise UserError(
            f"{path} has an array {kind} of shape {list(vectors.shape)} for the {len(names):,} names of {kind}2id.txt; "
            "both must be of the same graph."
        )
    return Vectors(names, vectors)


def write_vectors(folder: str | os.PathLike[str], kind: Kind, vectors: Vectors) -> None:
    """Write `{kind}2id.txt`, `{kind}2vec.vec` and the array `kind` of `vectors.safetensors`.

    Arrays of the other kind in `vectors.safetensors` are kept. The text has nine digits, enough for the exact float32.
    """
    folder, rows = Path(folder), np.ascontiguousarray(vectors.vectors, np.float32)
    with (folder / f"{kind}2id.txt").open("w", encoding="utf-8", newline="\n") as file:
        file.write(f"{len(vectors.names)}\n")
        file.writelines(f"{name}\t{number}\n" for number, name in enumerate(vectors.names))
    with (folder / f"{kind}2vec.vec").open("w", encoding="utf-8", newline="\n") as file:
        line = "\t".join(["%.9g"] * rows.shape[1]) + "\n"
        file.writelines(line % tuple(row.tolist()) for row in rows)
    path, other = folder / VECTORS, "relation" if kind == "entity" else "entity"
    kept = _read_array(path, other) if path.is_file() else None
    save_file({kind: rows} | ({} if kept is None else {other: kept}), path)
    path.chmod((folder / f"{kind}2id.txt").stat().st_mode)  # safetensors creates files that only their owner can read


def read_triples(path: str | os.PathLike[str]) -> Iterator[tuple[str, str, str]]:
    """Yield (head, relation, tail) of the lines of a file with columns between tabs, also .gz, .xz or .zst."""
    for place, line in read_lines(str(path)):
        if not line.strip():
            continue
        columns = [column.strip() for column in line.split("\t")]
        if len(columns) != 3 or not all(columns):
            raise UserError(f"{place} is {line.strip()[:60]!r}; it must be head, relation and tail, with tabs between.")
        yield columns[0], columns[1], columns[2]


def _read_array(path: Path, name: str) -> np.ndarray | None:
    """Return an array of a safetensors file as float32; None if the file lacks it."""
    with reading(path), safe_open(path, framework="numpy") as arrays:
        return arrays.get_tensor(name).astype(np.float32, copy=False) if name in arrays.keys() else None  # noqa: SIM118
