"""The token store: a text, tokenized once, as flat arrays of ids and document offsets.

A store is a folder with `manifest.json` and, for each of the splits `train` and `held_out`, the arrays `tokens`
(uint16 or uint32), `offsets` (int64 [documents + 1]) and `counts` (int64, the count of each id). It is finished if and
only if it has a manifest. The splits are in the folder that the manifest names as `arrays`, a new one for each build.
A store depends on no objective: it has no special tokens, windows or masks.

A text with mentions of entities adds `entities.json`, a list of their names, and an array `entities` beside each
`tokens` (uint32): the place in that list, from 1, of the entity whose mention begins at the token; 0 for none.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Collection
from typing import Any

import fsspec
import numpy as np
from etils import epath

from jaxlm.data import arrays
from jaxlm.data.arrays import FlatArray, damaged
from jaxlm.data.base import RowFormat, Statistics, entropy
from jaxlm.data.batches import Batches
from jaxlm.data.fingerprint import Survey
from jaxlm.data.readers import read_names
from jaxlm.data.windows import DocumentWindows, PackedWindows, Split
from jaxlm.errors import UserError
from jaxlm.tokenizers.unknown import describe_unknown

FORMAT = 3
"""Version of the files; version 2 did not count [UNK]."""
MANIFEST = "manifest.json"
ENTITIES = "entities.json"
SPLITS = ("train", "held_out")


def store_fingerprint(
    text: Survey, tokenizer: str, held_out: float, sentences: bool = False, repeated: Collection[int] = ()
) -> str:
    """Return the SHA-256 (hex) of the fingerprints of text and tokenizer and of the settings.

    It excludes the FORMAT of the files, so that a run can continue with the same tokens in other files.
    """
    facts = {"format": 2, "text": text.fingerprint, "tokenizer": tokenizer, "held_out": held_out}
    facts |= {"sentences": True} if sentences else {}
    facts |= {"repeated": sorted(repeated)} if repeated else {}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


class Store:
    """A finished token store, opened for reading."""

    def __init__(self, folder: str) -> None:
        """Open the store in `folder`.

        Raises:
            UserError: the folder has no store, one of another version, a damaged one, or one of nothing but [UNK].
        """
        self.folder = str(folder)
        self.manifest = _read_manifest(self.folder)
        self.fingerprint: str = self.manifest["fingerprint"]
        vocabulary = self.manifest["vocabulary"]
        self.vocab_size: int = vocabulary["size"]
        self.pad: int = vocabulary["pad"]
        self.eos: int = vocabulary["eos"]
        self.has_entities: bool = "entities" in self.manifest
        self._context = arrays.context()
        self._entity_ids: dict[str, np.ndarray] = {}
        counts = self.counts("train") + self.counts("held_out")
        words, source = self.manifest["unknown_words"], self.manifest["source"]
        self.unknown = describe_unknown(counts, vocabulary["unk"], words, source)

    @functools.cached_property
    def train(self) -> Split:
        """The training split."""
        return self._split("train")

    @functools.cached_property
    def held_out(self) -> Split:
        """The held-out split."""
        return self._split("held_out")

    def counts(self, split: str) -> np.ndarray:
        """Return the count of each id in a split: int64 [vocab_size]."""
        return self._array(split, "counts", self.vocab_size).read(0, self.vocab_size)

    @functools.cached_property
    def statistics(self) -> Statistics:
        """Token statistics of both splits."""
        longest = self.manifest["parts"]["train"]["longest"] / max(1, self.train.num_tokens)
        held_out = self.counts("held_out")
        return Statistics(self.counts("train"), entropy(held_out), longest, held_out, self.held_out.text_bytes)

    @property
    def summary(self) -> str:
        """Sizes of both splits, in one line."""
        train, held_out = self.train, self.held_out
        unit = self.manifest.get("unit", "documents")
        of = f"{held_out.documents:,} of {train.documents + held_out.documents:,} {unit}"
        if self.manifest["held_out_tail"]:
            of = f"the last {held_out.text_bytes:,} bytes of the text, which has few documents"
        each, per = train.text_bytes / max(1, train.num_tokens), train.num_tokens / max(1, train.documents)
        tokens = (
            f"Token store: {train.num_tokens:,} tokens to train on ({each:.1f} bytes each, {per:,.0f} per {unit[:-1]}),"
            f" {held_out.num_tokens:,} held out ({of})"
        )
        return "; ".join(filter(None, [tokens, self.unknown, self.has_entities and self._entity_summary]))

    def batches(self, split: str, batch_size: int, row_format: RowFormat, seed: int) -> Batches:
        """Return batches of windows; see `jaxlm.data.base.Source`.

        The values of `row_format.packing`:

        * "document": a row holds tokens of one document (see `windows.DocumentWindows`).
        * "packed": documents follow each other without padding.
        * "packed-room": the same, with room in a row for 2 symbols around each document (see `windows.PackedWindows`).
        * "packed-eos": as "packed", with an end-of-sequence token after each document.
        * "stream": as "packed-eos", unshuffled; row r of a batch starts `stride` tokens after row r of the last one.
        * "stream-both-ways": as "stream", but odd rows move backward.

        Raises:
            UserError: also if the training text is too short for a single window, or the packing needs an
                end-of-sequence token, which the tokenizer lacks.
        """
        packing, length, stride, graph = row_format
        part, pad, entity_ids = getattr(self, split), max(self.pad, 0), self.entity_ids(graph) if graph else None
        is_stream = packing.startswith("stream")
        if packing == "document":
            windows = DocumentWindows(part, length, pad, entity_ids)
        elif packing in ("packed", "packed-room"):
            windows = PackedWindows(part, length, pad, None, None, entity_ids, 2 if packing == "packed-room" else 0)
        elif self.eos >= 0:
            windows = PackedWindows(part, length, pad, self.eos, stride if is_stream else None, entity_ids)
        else:
            raise UserError(
                "The tokenizer has no end-of-sequence symbol, which packing documents with one between them needs; "
                "choose a tokenizer that has it, or train one with `jaxlm tokenizer train`."
            )
        batches = Batches(windows, batch_size, seed, is_stream, packing == "stream-both-ways")
        if batches.num_rows == 0 and split == "train":
            source = self.manifest["source"]
            raise UserError(f"{source}: no document to train on has 2 tokens or more; give --data.source more text.")
        return batches

    def entity_ids(self, graph: str) -> np.ndarray:
        """Return the ids that a knowledge graph has for the entities of this store.

        Args:
            graph: folder of the graph, with the names of its entities in entity2id.txt.

        Returns:
            int32 [1 + entities]: -1 for no entity, then the id of each, -1 for one that the graph lacks.

        Raises:
            UserError: the store has no entities, or the graph has none of them.
        """
        if not self.has_entities:
            raise UserError(
                f"{self.manifest['source']} was read as text without entities; set the data of the preset to a "
                "jaxlm.knowledge.linked_text.LinkedText."
            )
        if graph not in self._entity_ids:
            names = json.loads((epath.Path(self.folder) / ENTITIES).read_text())
            ids = {name: number for number, name in enumerate(read_names(graph, "entity"))}
            found = np.array([-1, *(ids.get(name, -1) for name in names)], np.int32)
            if found.max() < 0:
                raise UserError(
                    f"{graph} has none of the {len(names):,} entities that the text mentions, such as {names[0]!r}; "
                    "choose vectors of the same knowledge graph."
                )
            self._entity_ids[graph] = found
        return self._entity_ids[graph]

    @property
    def _entity_summary(self) -> str:
        """Numbers of mentions and entities, and how many of these the knowledge graphs of the batches have."""
        mentions = sum(self.manifest["parts"][split]["mentions"] for split in SPLITS)
        known = [f", {(ids >= 0).sum():,} of them in {graph}" for graph, ids in self._entity_ids.items()]
        return f"{mentions:,} mentions of {self.manifest['entities']:,} entities{''.join(known)}"

    def _split(self, split: str) -> Split:
        facts = self.manifest["parts"][split]
        return Split(
            documents=facts["documents"],
            num_tokens=facts["tokens"],
            text_bytes=facts["text_bytes"],
            tokens=self._array(split, "tokens", facts["tokens"]),
            offsets=self._array(split, "offsets", facts["documents"] + 1),
            entities=self._array(split, "entities", facts["tokens"]) if self.has_entities else None,
        )

    def _array(self, split: str, name: str, size: int) -> FlatArray:
        return FlatArray(str(_split_folder(self.folder, self.manifest, split) / name), size, self._context)


def is_finished(folder: str) -> bool:
    """Return whether the folder holds a finished store."""
    return (epath.Path(folder) / MANIFEST).exists()


def _read_manifest(folder: str) -> dict[str, Any]:
    path = epath.Path(folder) / MANIFEST
    try:
        manifest = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise UserError(f"{folder} holds no finished token store.") from error
    except ValueError as error:
        raise damaged(folder, f"{MANIFEST} is not JSON") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise UserError(f"The token store {folder} is of another version of jaxlm; delete that folder to rebuild it.")
    for split in SPLITS:
        expected = manifest["parts"][split]["disk_bytes"]
        found = disk_bytes(str(_split_folder(folder, manifest, split)))
        if found != expected:
            raise damaged(folder, f"{split} takes {found:,} bytes on disk instead of {expected:,}")
    return manifest


def _split_folder(folder: str, manifest: dict[str, Any], split: str) -> epath.Path:
    """Return the folder of a split's arrays."""
    return epath.Path(folder) / manifest.get("arrays", "") / split


def disk_bytes(folder: str) -> int:
    """Return the total size of the files below a folder."""
    store, path = fsspec.core.url_to_fs(folder)
    return store.du(path)
