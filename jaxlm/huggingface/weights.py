"""Weights of a Transformers folder: safetensors, in one file or in shards with an index; nothing else is opened."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy, which safetensors then gives out)
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from jaxlm.errors import UserError
from jaxlm.paths import reading

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
# What other frameworks leave behind: pickles and formats whose readers could run code or need the framework.
UNSAFE = ("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt*", "*.h5", "*.msgpack")
# Weights as they are stored; float32 holds each of them exactly, apart from F64.
FLOATS = ("F64", "F32", "F16", "BF16")


class Weights:
    """The tensors of a folder, read one at a time. UserError where files are missing or damaged.

    shapes: name -> shape of every tensor that the folder holds.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        self._stack = contextlib.ExitStack()
        self.shapes: dict[str, tuple[int, ...]] = {}
        try:
            self._find()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._open.clear()
        self._stack.close()

    def read(self, name: str) -> np.ndarray:
        """One tensor, as float32. UserError for a tensor that holds no floating-point numbers."""
        file = self._files[name]
        with reading(file):
            stored = self._open[file].get_slice(name).get_dtype()
            if stored not in FLOATS:
                raise UserError(f"{file}: {name} is stored as {stored}; only floating-point weights can be read.")
            array = self._open[file].get_tensor(name)
        return array.astype(np.float32, copy=False)

    def _find(self) -> None:
        if (self.folder / SINGLE).is_file():
            names = self._names_in(self.folder / SINGLE)
            self._files = dict.fromkeys(names, self.folder / SINGLE)
        elif (self.folder / INDEX).is_file():
            self._files = self._read_index()
        else:
            pickles = sorted(path.name for pattern in UNSAFE for path in self.folder.glob(pattern))
            if pickles:
                raise UserError(
                    f"{self.folder} has its weights in {pickles[0]} only, a format that is never opened here since it "
                    "can run code; save the model again with Transformers as safetensors (`model.save_pretrained`)."
                )
            raise UserError(f"{self.folder} has no {SINGLE} (or {INDEX}); is it a folder that Transformers saved?")
        for name, file in self._files.items():
            with reading(file):
                self.shapes[name] = tuple(self._open[file].get_slice(name).get_shape())

    def _names_in(self, file: Path) -> list[str]:
        if file not in self._open:
            with reading(file):
                self._open[file] = self._stack.enter_context(safe_open(file, framework="numpy"))
        return list(self._open[file].keys())

    def _read_index(self) -> dict[str, Path]:
        file = self.folder / INDEX
        with reading(file):
            mapping = json.loads(file.read_text(encoding="utf-8"))["weight_map"].items()
        files: dict[str, Path] = {}
        for name, shard in mapping:
            # An index from elsewhere must not lead to files outside its folder.
            if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
                raise UserError(f"{file} names the shard {shard!r}; a shard is a .safetensors file beside the index.")
            if not (self.folder / shard).is_file():
                raise UserError(f"{self.folder} lacks the shard {shard} that {INDEX} names; copy the folder again.")
            if name not in self._names_in(self.folder / shard):
                raise UserError(f"{self.folder / shard} lacks {name}, which {INDEX} places there; copy both again.")
            files[name] = self.folder / shard
        return files


def write_weights(folder: Path, tensors: Iterable[tuple[str, np.ndarray]], shard_bytes: int = SHARD_BYTES) -> None:
    """Writes float32 tensors as Transformers does: one file, or shards of at most `shard_bytes` with their index (a
    tensor that is larger alone has a shard of its own)."""
    shards: list[dict[str, np.ndarray]] = [{}]
    size = 0
    for name, array in tensors:
        nbytes = 4 * array.size
        if shards[-1] and size + nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = array
        size += nbytes
    if len(shards) == 1:
        files = [SINGLE]
    else:
        files = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    for file, shard in zip(files, shards, strict=True):
        # Made contiguous shard by shard: transposed views take no memory until then.
        ready = {name: np.ascontiguousarray(array, dtype=np.float32) for name, array in shard.items()}
        (folder / file).touch()
        mode = (folder / file).stat().st_mode
        save_file(ready, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(mode)  # safetensors makes files that only their owner can read
    if len(shards) > 1:
        parameters = sum(array.size for shard in shards for array in shard.values())
        index = {
            "metadata": {"total_parameters": parameters, "total_size": 4 * parameters},
            "weight_map": {name: file for file, shard in zip(files, shards, strict=True) for name in shard},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
