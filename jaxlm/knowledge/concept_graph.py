"""A graph of concepts, such as ConceptNet, as KagNet (Lin et al. 2019) searches it.

python -m jaxlm.knowledge.concept_graph conceptnet-assertions-5.6.0.csv.gz conceptnet.tsv

writes the merged and pruned triples, which TransE trains on and KagNet reads in seconds instead of minutes.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.data.readers import read_lines
from jaxlm.errors import UserError
from jaxlm.knowledge.knowledge_graph import read_triples
from jaxlm.paths import file_state

Triple = tuple[str, str, str]
"""Head, relation, tail."""

_STOP_WORDS = (
    # pronouns and determiners
    "i me my mine myself we us our ours ourselves you your yours yourself yourselves he him his himself she her hers "
    "herself it its itself they them their theirs themselves what which who whom whose this that these those a an the "
    "all any both each few more most other some such no nor not only own same "
    # auxiliary verbs
    "am is are was were be been being have has had having do does did doing can could will would shall should might "
    "must may ought "
    # conjunctions, prepositions and adverbs
    "and but if or because as until while of at by for with about against between into through during before after "
    "above below to from up down in out on off over under again further then once here there when where why how so "
    "than too very just now "
    # ends of contractions
    "s t d ll m o re ve y don ain aren couldn didn doesn hadn hasn haven isn ma mightn mustn needn shan shouldn wasn "
    "weren won wouldn "
    # what the reference adds
    "like gone going get wanter"
)
STOP_WORDS = frozenset(_STOP_WORDS.split())
"""English words without content: our list in the place of NLTK's, which the reference downloads."""

_PRUNED_CONCEPTS = frozenset(("uk", "us", "take", "make", "object", "person", "people"))
_PRUNED_RELATION = "hascontext"
SYMMETRIC = ("relatedto", "antonym")
"""Relations of ConceptNet that hold in both directions."""
CONCEPTNET = (
    "antonym", "atlocation", "capableof", "causes", "createdby", "isa", "desires", "hassubevent", "partof",
    "hascontext", "hasproperty", "madeof", "notcapableof", "notdesires", "receivesaction", "relatedto", "usedfor",
)
"""The 17 relations that ConceptNet's are merged into, in the order of their ids."""
_MERGED = {name: name for name in CONCEPTNET} | {
    "locatednear": "atlocation", "causesdesire": "causes", "distinctfrom": "antonym", "hasfirstsubevent": "hassubevent",
    "haslastsubevent": "hassubevent", "hasprerequisite": "hassubevent", "entails": "hassubevent",
    "mannerof": "hassubevent", "instanceof": "isa", "definedas": "isa", "similarto": "relatedto",
    "synonym": "relatedto",
}
_SWAPPED = {"motivatedbygoal": "causes", "hasa": "partof"}
"""Relations that are merged with head and tail exchanged."""


@dataclasses.dataclass(frozen=True, eq=False)
class ConceptGraph:
    """Concepts and the relations between them, searchable in both directions.

    The inverse of relation r is r + number of relations. Edges are sorted by head, then by tail, one for each pair of
    concepts with a relation in either direction.
    """

    concepts: tuple[str, ...]
    """Name of each concept: lower case, "_" between words."""
    relations: tuple[str, ...]
    """Name of each relation, without inverses."""
    offsets: np.ndarray
    """int64 [concepts + 1]: first edge of each concept."""
    tails: np.ndarray
    """int32 [edges]: the concept at the other end of each edge."""
    relation_offsets: np.ndarray
    """int64 [edges + 1]: first relation of each edge."""
    edge_relations: np.ndarray
    """int32 [relations of all edges], ascending within an edge."""

    @classmethod
    def of(cls, triples: Iterable[Triple]) -> ConceptGraph:
        """Return the graph of triples that `read_concepts` has normalised."""
        triples = list(triples)
        concepts = sorted({name for head, _, tail in triples for name in (head, tail)})
        names = {name for _, name, _ in triples}
        relations = CONCEPTNET if names <= set(CONCEPTNET) else tuple(sorted(names))
        ids, numbers = ({name: i for i, name in enumerate(of)} for of in (concepts, relations))
        numbered = [(ids[head], numbers[name], ids[tail]) for head, name, tail in triples]
        head, relation, tail = np.array(numbered, np.int64).reshape(-1, 3).T
        rows = np.stack([
            np.concatenate([head, tail]), np.concatenate([tail, head]),
            np.concatenate([relation, relation + len(relations)]),
        ], axis=1)
        rows = np.unique(rows, axis=0)
        pairs, first = np.unique(rows[:, :2], axis=0, return_index=True)
        return cls(
            tuple(concepts), relations,
            offsets=np.searchsorted(pairs[:, 0], np.arange(len(concepts) + 1)),
            tails=pairs[:, 1].astype(np.int32),
            relation_offsets=np.append(first, len(rows)),
            edge_relations=rows[:, 2].astype(np.int32),
        )

    @functools.cached_property
    def ids(self) -> dict[str, int]:
        """Number of each concept."""
        return {name: number for number, name in enumerate(self.concepts)}

    @functools.cached_property
    def heads(self) -> np.ndarray:
        """int32 [edges]: the concept that each edge belongs to."""
        return np.repeat(np.arange(len(self.concepts), dtype=np.int32), np.diff(self.offsets))

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of names and edges."""
        facts = hashlib.sha256("\n".join([*self.concepts, "", *self.relations]).encode())
        for array in (self.offsets, self.tails, self.relation_offsets, self.edge_relations):
            facts.update(array.tobytes())
        return facts.hexdigest()

    def neighbors(self, concept: int) -> np.ndarray:
        """Return the concepts with an edge to `concept`, ascending."""
        return self.tails[self.offsets[concept] : self.offsets[concept + 1]]

    def edges(self, heads: np.ndarray, tails: np.ndarray) -> np.ndarray:
        """Return the numbers of the edges from `heads` to `tails`, which exist."""
        return np.searchsorted(self._keys, heads * np.int64(len(self.concepts)) + tails)

    @functools.cached_property
    def _keys(self) -> np.ndarray:
        return self.heads * np.int64(len(self.concepts)) + self.tails

    def first_relation(self, edge: Any) -> Any:
        """Return the lowest relation id of an edge or of several, so forward relations before inverse ones.

        The reference takes the first of a Python set of ids, in an order that has no meaning, after it has removed
        inverses of relations in the set.
        """
        return self.edge_relations[self.relation_offsets[edge]]

    def relation_name(self, relation: int) -> str:
        """Return the name of a relation, with an asterisk if it is an inverse."""
        count = len(self.relations)
        return self.relations[relation % count] + "*" * (relation >= count)

    def triples(self) -> Iterator[Triple]:
        """Yield the triples of the graph, each once."""
        edge = np.repeat(np.arange(len(self.tails)), np.diff(self.relation_offsets))
        for number in np.flatnonzero(self.edge_relations < len(self.relations)):
            head, tail = self.heads[edge[number]], self.tails[edge[number]]
            yield self.concepts[head], self.relations[self.edge_relations[number]], self.concepts[tail]


def open_graph(path: str | os.PathLike[str]) -> ConceptGraph:
    """Read the graph of a file of triples (.tsv) or of ConceptNet's assertions (.csv), also .gz, .xz or .zst."""
    return _open_graph(path, tuple(file_state(path)) if os.path.exists(path) else ())


@functools.lru_cache(maxsize=1)
def _open_graph(path: str | os.PathLike[str], state: tuple[int | str, ...]) -> ConceptGraph:
    graph = ConceptGraph.of(read_concepts(path))
    if not graph.concepts:
        raise UserError(f"{path} has no triple between two concepts that name something; give another graph.")
    return graph


def read_concepts(path: str | os.PathLike[str]) -> list[Triple]:
    """Read triples, normalise their names, merge ConceptNet's relations and prune.

    ConceptNet's relations are merged into the 17 of `CONCEPTNET`, and triples with another relation or with a name of
    other signs than letters are dropped. Relations of other graphs stay as they are. From every graph, triples are
    dropped that have equal ends, the relation hascontext, or an end that contains a stop word or is one of seven very
    general concepts.
    """
    triples, is_conceptnet = _read(path)
    kept = {
        (head, relation, tail): None for head, relation, tail in (map(_merge, triples) if is_conceptnet else triples)
        if relation not in ("", _PRUNED_RELATION) and head != tail and not _is_pruned(head) and not _is_pruned(tail)
    }
    return list(kept)


def normalize(name: str) -> str:
    """Return the name of a concept as graphs have it: lower case, "_" between words."""
    return "_".join(name.lower().replace("_", " ").split())


def _read(path: str | os.PathLike[str]) -> tuple[list[Triple], bool]:
    """Return the triples of a file with normalised names, and whether most relations are ConceptNet's."""
    _, first = next(read_lines(str(path)), ("", ""))
    if len(columns := first.split("\t")) == 5 and columns[1].startswith("/r/"):
        return list(_read_assertions(path)), True
    triples = [(normalize(head), relation, normalize(tail)) for head, relation, tail in read_triples(path)]
    counts = Counter(relation.lower() for _, relation, _ in triples)
    known = sum(count for name, count in counts.items() if name in _MERGED or name in _SWAPPED)
    return triples, 2 * known > len(triples)


def _read_assertions(path: str | os.PathLike[str]) -> Iterator[Triple]:
    """Yield the triples of ConceptNet's assertions whose ends are both English, without parts of speech."""
    for _, line in read_lines(str(path)):
        columns = line.split("\t")
        if len(columns) >= 4 and columns[2].startswith("/c/en/") and columns[3].startswith("/c/en/"):
            head, tail = (normalize(column.split("/")[3]) for column in columns[2:4])
            yield head, columns[1].rpartition("/")[2], tail


def _merge(triple: Triple) -> Triple:
    """Return a triple of ConceptNet with its merged relation, which is "" if the triple is to be dropped."""
    head, relation, tail = triple
    if not all(name.replace("_", "").replace("-", "").isalpha() for name in (head, tail)):
        return head, "", tail
    relation = relation.lower()
    if relation in _SWAPPED:
        return tail, _SWAPPED[relation], head
    return head, _MERGED.get(relation, ""), tail


def _is_pruned(concept: str) -> bool:
    return concept in _PRUNED_CONCEPTS or not STOP_WORDS.isdisjoint(concept.split("_"))


if __name__ == "__main__":
    source, target = sys.argv[1:]
    graph = open_graph(source)  # before the target is emptied, which may be the same file
    with Path(target).open("w", encoding="utf-8") as out:
        out.writelines("\t".join(triple) + "\n" for triple in graph.triples())
