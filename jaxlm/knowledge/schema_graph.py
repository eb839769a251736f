"""Schema graphs of KagNet (Lin et al. 2019): the paths between the concepts of a question and of a choice, as arrays.

The graphs of a file of rows are built once and kept in the cache folder, in a file that is loaded in one read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxlm.data.cache import cached_arrays
from jaxlm.errors import UserError
from jaxlm.fields import check_ranges, field
from jaxlm.knowledge.concept_graph import SYMMETRIC, ConceptGraph, normalize, open_graph
from jaxlm.knowledge.grounding import Concepts, Grounder
from jaxlm.knowledge.knowledge_graph import read_vectors
from jaxlm.types import Report, SchemaGraph

FORMAT = 2
"""Version of the cached files."""
STEPS = 3
"""Concepts at most of a path that the path encoder reads: two hops. Longer ones only give edges."""
_HOPS = 4
_PER_PAIR = 100
_CHUNK = 1 << 16  # edges that are scored together


@dataclasses.dataclass(frozen=True)
class GraphSizes:
    """Sizes of the arrays of a schema graph, and the lowest score of its paths.

    Where a graph is larger, the paths of one and two hops with the highest scores are kept with their pairs and
    concepts, then edges among the concepts of the question and among those of the choice, then edges of other paths.
    """

    nodes: int = field(256, range="[2, 32767]")
    """Concepts."""
    edges: int = field(512, range="[1, 32767]")
    """Undirected edges."""
    pairs: int = field(16, range="[1, 32767]")
    """Pairs of a concept of the question and one of the choice with a path between them."""
    paths: int = field(64, range="[1, 32767]")
    """Paths of all pairs."""
    threshold: float = field(0.15, range="[0, 1]")
    """Score below which a path is left out; see `edge_scores`."""

    def __post_init__(self) -> None:
        check_ranges(self, "objective.sizes.")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each array of `SchemaGraph`."""
        return {
            "concepts": (self.nodes,), "edges": (self.edges, 2), "pairs": (self.pairs, 2),
            "path_pairs": (self.paths,), "path_nodes": (self.paths, STEPS), "path_relations": (self.paths, STEPS),
        }


class Path(NamedTuple):
    """A path from a concept of the question to one of the choice, by numbers of the graph."""

    concepts: tuple[int, ...]
    relations: tuple[int, ...]
    score: float


def edge_scores(
    graph: ConceptGraph, concepts: np.ndarray | None = None, relations: np.ndarray | None = None
) -> np.ndarray:
    """Return the score of each edge by the vectors of TransE: float32 [edges], 1 without vectors.

    It is the highest (1 + cos(r, t - h)) / 2 over the relations of the edge. The inverse of a relation exchanges h and
    t; "relatedto" and "antonym" count in both directions. A zero vector has cosine 0 with any other.

    `concepts` and `relations` are float32 [names, width].
    """
    if concepts is None or relations is None:
        return np.ones(len(graph.tails), np.float32)
    count = len(graph.relations)
    is_symmetric = np.array([name in SYMMETRIC for name in graph.relations])
    edge = np.repeat(np.arange(len(graph.tails)), np.diff(graph.relation_offsets))
    scores = np.empty(len(edge), np.float32)
    for start in range(0, len(edge), _CHUNK):
        chosen = slice(start, start + _CHUNK)
        number = graph.edge_relations[chosen] % count
        sign = np.where(graph.edge_relations[chosen] < count, 1.0, -1.0)
        shift = concepts[graph.tails[edge[chosen]]] - concepts[graph.heads[edge[chosen]]]
        product = np.einsum("ed,ed->e", shift, relations[number])
        norms = np.linalg.norm(shift, axis=1) * np.linalg.norm(relations, axis=1)[number]
        cosine = np.divide(product, norms, out=np.zeros_like(product), where=norms > 0)
        scores[chosen] = (1 + np.where(is_symmetric[number], np.abs(cosine), sign * cosine)) / 2
    return np.maximum.reduceat(scores, graph.relation_offsets[:-1])


def walks_to(graph: ConceptGraph, tail: int) -> list[np.ndarray]:
    """Return for each number of hops below `STEPS` the concepts with a walk of so many to the tail: bool [concepts]."""
    near = [np.zeros(len(graph.concepts), bool) for _ in range(STEPS)]
    near[0][tail] = True
    for closer, farther in itertools.pairwise(near):
        for concept in np.flatnonzero(closer):
            farther[graph.neighbors(concept)] = True
    return near


def find_paths(
    graph: ConceptGraph, scores: np.ndarray, head: int, tail: int, threshold: float,
    near: Sequence[np.ndarray] = (),
) -> list[Path]:
    """Return the simple paths of up to four hops between two concepts, from high to low scores.

    As in the reference, the search stops at 100 paths, shorter ones first, and in the order of their concepts among
    those of the same length. The score of a path is the product of its edges'; paths below the threshold are left out.
    `near` is `walks_to` the tail, if that is known.
    """
    near = near or walks_to(graph, tail)

    def continued(path: tuple[int, ...], hops: int) -> Iterator[tuple[int, ...]]:
        """Yield the simple paths that go on from `path` for a number of hops, in the order of their concepts."""
        following = graph.neighbors(path[-1])
        following = following[near[hops - 1][following]] if hops <= STEPS else following
        for longer in ((*path, concept) for concept in following.tolist() if concept not in path):
            yield from (longer,) if hops == 1 else continued(longer, hops - 1)

    paths: list[Path] = []
    for hops in range(1, _HOPS + 1) if head != tail else ():
        walks = list(itertools.islice(continued((head,), hops), _PER_PAIR - len(paths)))
        concepts = np.array(walks, np.int64).reshape(-1, hops + 1)
        edges = graph.edges(concepts[:, :-1], concepts[:, 1:])
        relations, score = graph.first_relation(edges), np.prod(scores[edges], axis=1)
        paths += map(Path, walks, map(tuple, relations.tolist()), score.tolist())
    return sorted((path for path in paths if path.score >= threshold), key=lambda path: (-path.score, path.concepts))


def schema_graph(graph: ConceptGraph, scores: np.ndarray, concepts: Concepts, sizes: GraphSizes) -> SchemaGraph:
    """Return the schema graph of a statement.

    It has the paths of one and two hops, the edges of all paths, and the graph's edges among the concepts of the
    question and among those of the choice. Where the reference has no path, it links each concept of the question to
    each of the choice; nothing reads a graph without paths of one or two hops, so ours is empty.
    """
    paths = [path for tail in concepts.answer for near in [walks_to(graph, tail)] for head in concepts.question
             for path in find_paths(graph, scores, head, tail, sizes.threshold, near)]
    paths.sort(key=lambda path: (-path.score, path.concepts))
    nodes: dict[int, int] = {}
    pairs: dict[tuple[int, int], int] = {}
    edges: dict[tuple[int, int], None] = {}
    rows: list[tuple[int, list[int], tuple[int, ...]]] = []

    def add_edge(head: int, tail: int) -> None:
        new = {head, tail} - nodes.keys()
        if len(nodes) + len(new) <= sizes.nodes and len(edges) < sizes.edges:
            ends = sorted(nodes.setdefault(concept, len(nodes)) for concept in (head, tail))
            edges[ends[0], ends[1]] = None

    for path in (path for path in paths if len(path.concepts) <= STEPS):
        pair, new = (path.concepts[0], path.concepts[-1]), set(path.concepts) - nodes.keys()
        is_room = len(pairs) < sizes.pairs or pair in pairs
        if len(rows) == sizes.paths or not is_room or len(nodes) + len(new) > sizes.nodes:
            continue
        row = [nodes.setdefault(concept, len(nodes)) for concept in path.concepts]
        rows.append((pairs.setdefault(pair, len(pairs)), row, path.relations))
        for head, tail in itertools.pairwise(path.concepts):
            add_edge(head, tail)
    within = ((head, int(tail)) for side in concepts for head in side
              for tail in np.intersect1d(graph.neighbors(head), side))
    along = (hop for path in paths for hop in itertools.pairwise(path.concepts))
    for head, tail in itertools.chain(within, along) if rows else ():
        add_edge(head, tail)
    result = empty(sizes)
    result.concepts[: len(nodes)] = list(nodes)
    result.edges[: len(edges)] = np.reshape(list(edges), (-1, 2))
    result.pairs[: len(pairs)] = np.reshape([[nodes[head], nodes[tail]] for head, tail in pairs], (-1, 2))
    for number, (pair, row, relations) in enumerate(rows):
        result.path_pairs[number] = pair
        result.path_nodes[number, : len(row)] = row
        result.path_relations[number, : len(relations)] = relations
    return result


def empty(sizes: GraphSizes, *batch: int) -> SchemaGraph:
    """Return graphs without nodes, with batch dimensions in front."""
    return SchemaGraph(**{
        name: np.full((*batch, *shape), -1, np.int32 if name == "concepts" else np.int16)
        for name, shape in sizes.shapes().items()
    })


class Knowledge(NamedTuple):
    """A graph with the vectors of its concepts and relations; None without vectors."""

    graph: ConceptGraph
    concepts: np.ndarray | None
    """float32 [concepts, width]; zero where a concept has no vector."""
    relations: np.ndarray | None
    """float32 [relations, width]."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the graph and the vectors."""
        facts = hashlib.sha256(self.graph.fingerprint.encode())
        for array in (self.concepts, self.relations):
            facts.update(b"" if array is None else array.tobytes())
        return facts.hexdigest()

    @classmethod
    def open(cls, graph: str, vectors: str = "") -> Knowledge:
        """Read a graph, and the vectors in the folder `vectors` if it is given; names are matched as normalised."""
        opened = open_graph(graph)
        if not vectors:
            return cls(opened, None, None)
        concepts = _rows_of(vectors, "entity", opened.concepts)
        relations = _rows_of(vectors, "relation", [normalize(name) for name in opened.relations])
        return cls(opened, concepts, relations)


def build_graphs(
    rows: Sequence[tuple[str, Sequence[str]]], knowledge: Knowledge, sizes: GraphSizes, report: Report = print
) -> SchemaGraph:
    """Return the schema graphs of questions and their choices, [rows, choices, …], from the cache if it has them."""
    def build() -> dict[str, np.ndarray]:
        report(f"Finding the paths of {len(rows):,} questions among {len(knowledge.graph.concepts):,} concepts")
        grounder, scores = Grounder(knowledge.graph), edge_scores(*knowledge)
        graphs = empty(sizes, len(rows), len(rows[0][1]) if rows else 0)
        for number, (question, choices) in enumerate(rows):
            for choice, concepts in enumerate(grounder.ground(question, choices)):
                made = schema_graph(knowledge.graph, scores, concepts, sizes)
                for array, values in zip(graphs, made, strict=True):
                    array[number, choice] = values
        return graphs._asdict()

    facts = [FORMAT, knowledge.fingerprint, dataclasses.astuple(sizes), [list(row) for row in rows]]
    return SchemaGraph(**cached_arrays("graphs", facts, build))


def describe_path(graph: ConceptGraph, arrays: SchemaGraph, path: int) -> str:
    """Return a path of a statement as text: "cat --partof*--> eye"."""
    nodes, relations = arrays.path_nodes[path], arrays.path_relations[path]
    text = graph.concepts[arrays.concepts[nodes[0]]]
    for node, relation in zip(nodes[1:], relations, strict=False):
        if node >= 0:
            text += f" --{graph.relation_name(int(relation))}--> {graph.concepts[arrays.concepts[node]]}"
    return text


def _rows_of(folder: str, kind: str, names: Sequence[str]) -> np.ndarray:
    """Return the vectors of names, zero for a name that the folder lacks."""
    found = read_vectors(folder, kind)
    ids = {normalize(name): number for number, name in reversed(list(enumerate(found.names)))}  # the first of equals
    place = np.array([ids.get(name, -1) for name in names])
    if (place < 0).all():
        raise UserError(f"{folder} has no vector of any {kind} of the graph; give vectors that were trained on it.")
    return np.where((place >= 0)[:, None], found.vectors[place], 0).astype(np.float32)
