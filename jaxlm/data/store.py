"""The token store: a text, tokenized once, as a manifest of shards and an index of the splits.

A store is a folder with `manifest.json` and, for each of the splits `train` and `held_out`, the arrays `offsets` (of
documents in the tokens of the split), `runs` (offsets of runs of tokens that follow each other in a shard), `places`
(where the runs begin in the tokens of all shards), and `counts` (int64, the count of each id). It is finished if and
only if it has a manifest. The tokens stay in the shards (`jaxlm.data.shards`), which several stores may share. A store
depends on no objective: it has no special tokens, windows or masks.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from jaxlm.data.arrays import FlatArray, Increasing, check_size, read_facts, write_facts
from jaxlm.data.base import RowFormat, Statistics, entropy
from jaxlm.data.batches import Batches
from jaxlm.data.readers import read_names
from jaxlm.data.shards import Shard, Shards
from jaxlm.data.splits import SplitText, tokens_of, write_index
from jaxlm.data.windows import DocumentWindows, PackedWindows, Split
from jaxlm.errors import UserError
from jaxlm.paths import at_once, in_bucket, new_folder
from jaxlm.tokenizers.unknown import NUM_WORDS, describe_unknown

FORMAT = 4
"""Version of the files; version 3 had copies of all tokens."""
MANIFEST = "manifest.json"


def write_store(folder: epath.Path, source: str, held_out: float, shards: Shards, text: SplitText) -> None:
    """Write the store of a text; `source` is its name for messages, and `held_out` the share that is held out."""
    tokenizer = shards.tokenizer
    if is_finished(folder):  # another process has written it, and may read it already
        return
    with new_folder(folder, MANIFEST) as new:
        parts, left_out = write_index(new, text)
        facts = {"format": FORMAT, "text": text.totals.digest, "tokenizer": tokenizer.fingerprint, "held_out": held_out,
                 "sentences": shards.sentences, "left_out": left_out}
        words = dict.fromkeys(word for shard in text.shards for word in shard.facts["unknown_words"])
        manifest = facts | {
            "fingerprint": hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest(),
            "held_out_tail": text.rule.tail < text.totals.bytes,
            "unit": "sentences" if shards.sentences else "documents",
            "source": source,
            "vocabulary": {name: getattr(tokenizer.vocabulary, name) for name in ("size", "pad", "eos", "unk")},
            "unknown_words": list(words)[:NUM_WORDS],
            "dtype": text.shards[0].facts["dtype"],
            "mentions": sum(shard.facts["mentions"] for shard in text.shards),
            "blank": sum(shard.facts["blank"] for shard in text.shards),
            # One that the held-out end divides counts as two in its shard.
            "documents": sum(shard.facts["documents"] for shard in text.shards) - (text.cut is not None),
            "duplicates": int(sum(removed.sum() for removed in text.removed)),
            "also_held_out": text.num_copies,
            "parts": parts,
            "cut": text.cut,
            "shards": [[shard.path.name, shard.facts["tokens"]] for shard in text.shards],
        }
        write_facts(new / MANIFEST, manifest)


class Store:
    """A finished token store, opened for reading."""

    def __init__(
        self, folder: str | os.PathLike[str], shards: str | os.PathLike[str], begin: Sequence[int] = ()
    ) -> None:
        """Open the store in `folder`, whose shards are in the folder `shards`.

        Args:
            folder: A finished store.
            shards: Its shards.
            begin: The special tokens that the tokenizer puts before a text; rows have one at most.

        Raises:
            UserError: the folder has no store, one of another version, a damaged one, or one of nothing but [UNK].
        """
        self.folder = os.fspath(folder)
        self.manifest: Mapping[str, Any] = read_facts(epath.Path(folder) / MANIFEST, FORMAT)
        self._shards = [f"{os.fspath(shards)}/{name}" for name, _ in self.manifest["shards"]]
        self.fingerprint: str = self.manifest["fingerprint"]
        vocabulary = self.manifest["vocabulary"]
        self.vocab_size: int = vocabulary["size"]
        self.pad: int = vocabulary["pad"]
        self.eos: int = vocabulary["eos"]
        self.begin: int | None = begin[0] if len(begin) == 1 else None
        self.has_entities: bool = self.manifest["mentions"] > 0
        self._entity_ids: dict[str, np.ndarray] = {}
        counts = self.counts("train") + self.counts("held_out")
        words, source = self.manifest["unknown_words"], self.manifest["source"]
        self.unknown = describe_unknown(counts, vocabulary["unk"], words, source)

    def check_shards(self) -> None:
        """Raise UserError if the tokens of a shard on a disk are missing or cut off; they are not read."""
        for path, (_, size) in zip(self._shards, self.manifest["shards"], strict=True):
            if not in_bucket(path):
                check_size(f"{path}/tokens", self.manifest["dtype"], size)

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
        return FlatArray(epath.Path(self.folder) / split / "counts", "int64", self.vocab_size).read(0, self.vocab_size)

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
        unit = self.manifest["unit"]
        of = f"{held_out.documents:,} of {train.documents + held_out.documents:,} {unit}"
        if self.manifest["held_out_tail"]:
            of = f"the last {held_out.text_bytes:,} bytes of the text, which has few documents"
        each, per = train.text_bytes / max(1, train.num_tokens), train.num_tokens / max(1, train.documents)
        tokens = (
            f"Token store: {train.num_tokens:,} tokens to train on ({each:.1f} bytes each, {per:,.0f} per {unit[:-1]}),"
            f" {held_out.num_tokens:,} held out ({of})"
        )
        return "; ".join(filter(None, [tokens, self.unknown, self.has_entities and self._entity_summary]))

    def remarks(self, source: str, kind: str) -> Iterator[str]:
        """Yield which documents are left out, and why; `kind` is that of the duplicates."""
        facts = self.manifest
        if facts["blank"]:
            yield f"Rows of {source} without text, which are left out: {facts['blank']:,}"
        if kind != "off":
            yield (f"Left out of {source} as {kind} duplicates: {facts['duplicates']:,} of {facts['documents']:,} "
                   "documents")
        if facts["also_held_out"]:
            yield f"Left out of the training text of {source}, as held out: {facts['also_held_out']:,} documents"

    def batches(self, split: str, batch_size: int, row_format: RowFormat, seed: int) -> Batches:
        """Return batches of windows; see `jaxlm.data.base.Source`.

        The values of `row_format.packing`:

        * "document": a row holds tokens of one document (see `windows.DocumentWindows`).
        * "packed": documents follow each other without padding.
        * "packed-room": the same, with room in a row for 2 symbols around each document (see `windows.PackedWindows`).
        * "packed-eos": as "packed", with an end-of-sequence token after each document.
        * "packed-text": as "packed-eos", and before each document the symbol that the tokenizer puts before a text.
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
            begin = self.begin if packing == "packed-text" else None
            stride = stride if is_stream else None
            windows = PackedWindows(part, length, pad, self.eos, stride, entity_ids, begin=begin)
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
            ids = {name: number for number, name in enumerate(read_names(graph, "entity"))}
            found = np.array([-1, *(ids.get(name, -1) for name in self._entity_names)], np.int32)
            if found.max() < 0:
                raise UserError(
                    f"{graph} has none of the {len(self._entity_names):,} entities that the text mentions, such as "
                    f"{self._entity_names[0]!r}; choose vectors of the same knowledge graph."
                )
            self._entity_ids[graph] = found
        return self._entity_ids[graph]

    @functools.cached_property
    def _names_by_shard(self) -> list[list[str]]:
        """Names of the entities of each shard."""
        return list(at_once(lambda path: Shard(epath.Path(path)).facts["names"], self._shards))

    @functools.cached_property
    def _entity_names(self) -> list[str]:
        """Names of the entities of all shards, one shard after the other."""
        return [name for names in self._names_by_shard for name in names]

    @property
    def _entity_summary(self) -> str:
        """Numbers of mentions and entities, and how many of these the knowledge graphs of the batches have."""
        names = self._entity_names
        said = f"{self.manifest['mentions']:,} mentions of {len(set(names)):,} entities"
        for graph, ids in self._entity_ids.items():
            known = {name for name, number in zip(names, ids[1:], strict=True) if number >= 0}
            said += f", {len(known):,} of them in {graph}"
        return said

    def _split(self, split: str) -> Split:
        facts, folder = self.manifest["parts"][split], epath.Path(self.folder) / split
        sizes = [size for _, size in self.manifest["shards"]]
        entities = None
        if self.has_entities:
            before = np.cumsum([0, *(len(names) for names in self._names_by_shard)])
            entities = tokens_of(folder, self._shards, sizes, "uint32", facts["runs"], "entities", before)
        return Split(
            documents=facts["documents"],
            num_tokens=facts["tokens"],
            text_bytes=facts["text_bytes"],
            tokens=tokens_of(folder, self._shards, sizes, self.manifest["dtype"], facts["runs"]),
            offsets=Increasing(folder / "offsets", facts["documents"]),
            entities=entities,
            folder=folder,
        )


def is_finished(folder: str | os.PathLike[str]) -> bool:
    """Return whether the folder holds a finished store."""
    return (epath.Path(folder) / MANIFEST).exists()
