"""Weights of a Transformers folder: safetensors in one file, or in shards with an index. No other format is opened."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy, which safetensors then gives out)
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from jaxlm.errors import UserError
from jaxlm.paths import read_json, reading

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
# Stored types that can be read; float32 represents all but F64 exactly.
FLOATS = ("F64", "F32", "F16", "BF16")


class Weights:
    """Tensors of a folder, read one at a time. Missing or damaged files raise UserError.

    Attributes:
        folder: the folder.
        shapes: shape of every tensor in the folder, by name.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Path] = {}
        for file in self._shards():
            with reading(file), safe_open(file, framework="numpy") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - it is no dict
                    self._files[name], self.shapes[name] = file, tuple(tensors.get_slice(name).get_shape())

    def read(self, name: str) -> np.ndarray:
        """Return a tensor as float32; tensors of other than floating-point numbers raise UserError."""
        file = self._files[name]
        with reading(file), safe_open(file, framework="numpy") as tensors:
            stored = tensors.get_slice(name).get_dtype()
            if stored not in FLOATS:
                raise UserError(f"{file}: {name} is stored as {stored}; only floating-point weights can be read.")
            return tensors.get_tensor(name).astype(np.float32, copy=False)

    def _shards(self) -> list[Path]:
        """Return the single file, or all shards that the index names."""
        if (self.folder / SINGLE).is_file():
            return [self.folder / SINGLE]
        file = self.folder / INDEX
        if file.is_file():
            names = set(read_json(file, {"weight_map": {"*": str}})["weight_map"].values())
            # An untrusted index must not lead to files outside its folder.
            if any(Path(name).name != name or not name.endswith(".safetensors") for name in names):
                raise UserError(f"{file} names shards that are no .safetensors files beside it; copy it again.")
            return [self.folder / name for name in sorted(names)]
        raise UserError(
            f"{self.folder} has no {SINGLE} (or {INDEX}); other formats are never opened here since they can run code, "
            "so save the model again with Transformers as safetensors (`model.save_pretrained`)."
        )


def write_weights(folder: Path, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
    """Write float32 tensors as Transformers does: in one file, or in shards of at most `SHARD_BYTES` with an index.

    A tensor above that size gets its own shard.
    """
    shards: list[dict[str, np.ndarray]] = [{}]
    size = 0
    for name, array in tensors:
        nbytes = 4 * array.size
        if shards[-1] and size + nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = array
        size += nbytes
    files = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    files = files if len(shards) > 1 else [SINGLE]
    for file, shard in zip(files, shards, strict=True):
        # Copy shard by shard: transposed views take no memory until then.
        ready = {name: np.ascontiguousarray(array, dtype=np.float32) for name, array in shard.items()}
        (folder / file).touch()
        mode = (folder / file).stat().st_mode
        save_file(ready, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(mode)  # safetensors creates files that only their owner can read
    if len(shards) > 1:
        parameters = sum(array.size for shard in shards for array in shard.values())
        index = {
            "metadata": {"total_parameters": parameters, "total_size": 4 * parameters},
            "weight_map": {name: file for file, shard in zip(files, shards, strict=True) for name in shard},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
