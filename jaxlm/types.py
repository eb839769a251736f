"""Types that several packages share. The module does not import jax, so that readers start fast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Self

Params = dict[str, Any]
"""Parameters: a nested dict of arrays."""
Report = Callable[[str], None]
"""Receiver of progress messages."""
Pooling = Literal["cls", "mean", "last"]
"""How a text becomes one vector: its summary token (the last one of XLNet and decoders), all tokens, or the last."""

Role = Literal["", "query", "document"]
"""What a text is: a query, a document that answers it, or neither."""


class Vectors(NamedTuple):
    """Settings of text vectors, see `jaxlm.inference.embed.embed`."""

    pooling: Pooling
    length: int | None
    normalize: bool
    prompt: str | None = ""
    """What comes before a text that is neither query nor document; None where one of `prompts` has to be chosen."""
    prompts: tuple[tuple[str, str], ...] = ()
    """Names and texts of the prompts to choose from."""
    pools_prompt: bool = True
    """Whether the tokens of the prompt count in the pooling."""
    similarity: str = ""
    """"cosine" or "dot", the score of two vectors that the model was trained for, or "maxsim" if a text has a vector
    per token; "" if it was for none."""
    widths: tuple[int, ...] = ()
    """Numbers of leading components that were trained to serve as vectors of their own (Matryoshka)."""

    def prompt_of(self, role: Role) -> str | None:
        """Return the prompt of a text; queries and documents have none unless a prompt has their name."""
        return dict(self.prompts).get(role, "") if role else self.prompt


class FolderSettings(NamedTuple):
    """Settings of a model beside configuration, weights and tokenizer: those of its folder, in all runs from it."""

    vectors: Vectors | None = None
    """Those of a folder of sentence-transformers, or of training."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end a generated text; empty for the end token of the vocabulary."""
    length: int | None = None
    """Tokens of the longest texts that the folder's model reads, where they are known."""
    rows: tuple[tuple[str, Any], ...] = ()
    """Fields of the format of rows, such as the names of columns, of a folder; a run has a configuration."""
    sampling: tuple[tuple[str, Any], ...] = ()
    """Fields of generation_config.json that say how Transformers generates; jaxlm asks for them at each call."""

    def to_json(self) -> dict[str, Any]:
        """Return the settings of a run as JSON values."""
        vectors = self.vectors and self.vectors._asdict()
        return {"vectors": vectors, "stop_ids": self.stop_ids, "length": self.length, "sampling": self.sampling}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Self:
        """Return the settings of `to_json`; of {} the defaults."""
        if vectors := found.get("vectors"):
            pairs = {"prompts": tuple(map(tuple, vectors["prompts"])), "widths": tuple(vectors["widths"])}
            vectors = Vectors(**vectors | pairs)
        sampling = tuple(map(tuple, found.get("sampling", ())))
        return cls(vectors, tuple(found.get("stop_ids", ())), found.get("length"), sampling=sampling)

    def after_training(self, trained: Vectors | None, eos: int) -> Self:
        """Return the settings after a run that trained vectors, or None, and ended its texts with a token."""
        old, added = self.vectors, {eos} - {-1, *self.stop_ids} if self.stop_ids else ()
        if old and old.similarity == "maxsim" and not trained:
            old = None  # another objective has not kept the projection
        if trained and old:
            prompts = dict(old.prompts) | dict(trained.prompts)
            # A cosine does not tell whether the vectors have unit length.
            normalize = (old if trained.similarity == (old.similarity or "cosine") == "cosine" else trained).normalize
            prompt = old.prompt or (None if any(prompts.values()) else "")
            trained = trained._replace(normalize=normalize, prompt=prompt, prompts=tuple(prompts.items()),
                                       pools_prompt=bool(trained.prompts) or old.pools_prompt)
        return self._replace(vectors=trained or old, stop_ids=(*self.stop_ids, *added))


class TokenBatch(NamedTuple):
    """Uncorrupted rows of text.

    tokens: int32 [batch, length], padded with the vocabulary's `pad`.
    segment_ids: int32 [batch, length]; 0 is padding. Where documents are packed, 1, 2, ... number those inside a row;
        else they are the number of the row's document in its split, from 1.
    entities: entity of the mention that begins at each token, int32 [batch, length]; -1 for none. None for text without
        entities.
    Padding stands only at the end of a row.
    """

    tokens: Any
    segment_ids: Any
    entities: Any = None


class TripleBatch(NamedTuple):
    """Triples of a knowledge graph.

    triples: int32 [batch, 3], the ids of head, relation and tail; -1 in rows that fill up a batch.
    known: int32 [batch, 2, known], for held-out triples only: the entities that form a triple of the graph in the place
        of the head, and in that of the tail, padded with -1. An end without any is not ranked.
    """

    triples: Any
    known: Any = None


class SchemaGraph(NamedTuple):
    """Graph of the paths between the concepts of a question and of a choice (KagNet), with batch dimensions in front.

    -1 stands for none, in all arrays.
    """

    concepts: Any
    """int32 [nodes]: number of each concept in the knowledge graph."""
    edges: Any
    """int16 [edges, 2]: nodes of each undirected edge."""
    pairs: Any
    """int16 [pairs, 2]: nodes of the question's concept and of the choice's."""
    path_pairs: Any
    """int16 [paths]: pair of each path."""
    path_nodes: Any
    """int16 [paths, 3]: nodes of each path, in order."""
    path_relations: Any
    """int16 [paths, 3]: relation from each node of a path to the next; its last node has none."""
