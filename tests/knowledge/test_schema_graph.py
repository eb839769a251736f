"""Paths against networkx, scores against the formula, and the arrays of schema graphs."""

import itertools

import networkx
import numpy as np
import pytest

from jaxlm.errors import UserError
from jaxlm.knowledge.concept_graph import ConceptGraph
from jaxlm.knowledge.grounding import Concepts
from jaxlm.knowledge.knowledge_graph import Vectors, write_vectors
from jaxlm.knowledge.schema_graph import (
    GraphSizes,
    Knowledge,
    build_graphs,
    describe_path,
    edge_scores,
    find_paths,
    schema_graph,
)
from jaxlm.types import SchemaGraph

RELATIONS = ("isa", "relatedto", "usedfor")


@pytest.fixture(scope="module")
def knowledge():
    """A random graph of 40 concepts, with vectors."""
    draw = np.random.default_rng(0)
    names = [f"c{i:02}" for i in range(40)]
    rows = zip(draw.choice(names, 150), draw.choice(RELATIONS, 150), draw.choice(names, 150), strict=True)
    graph = ConceptGraph.of([(str(h), str(r), str(t)) for h, r, t in rows if h != t])
    normal = draw.normal
    return Knowledge(graph, normal(size=(len(graph.concepts), 8)).astype(np.float32),
                     normal(size=(len(graph.relations), 8)).astype(np.float32))


def hop_scores(knowledge):
    """The highest (1 + cos(r, t - h)) / 2 among the triples between two concepts, by both orders of the two."""
    graph, scores = knowledge.graph, {}
    for a, name, b in graph.triples():
        head, tail = graph.ids[a], graph.ids[b]
        relation = knowledge.relations[graph.relations.index(name)].astype(float)
        shift = np.subtract(*(knowledge.concepts[i].astype(float) for i in (tail, head)))
        cosine = relation @ shift / np.linalg.norm(relation) / np.linalg.norm(shift)
        for hop in ((head, tail), (tail, head)):
            scores[hop] = max(scores.get(hop, 0), (1 + (abs(cosine) if name == "relatedto" else cosine)) / 2)
    return scores


def reference_paths(graph, head, tail):
    """The reference's search: paths of one to four hops in turn, until there are 100."""
    nodes = networkx.Graph(sorted(tuple(sorted((graph.ids[h], graph.ids[t]))) for h, _, t in graph.triples()))
    found = {}
    for hops in range(1, 5):
        for path in networkx.all_simple_paths(nodes, head, tail, cutoff=hops):
            if len(found) < 100:
                found.setdefault(tuple(path))
    return list(found)


def test_paths_are_those_of_the_reference(knowledge):
    graph = knowledge.graph
    scores, hops, counts = edge_scores(*knowledge), hop_scores(knowledge), set()
    for head, tail in itertools.product(range(5), range(20, 30, 3)):
        expected = {path: np.prod([hops[hop] for hop in itertools.pairwise(path)])
                    for path in reference_paths(graph, head, tail)}
        found = {path.concepts: path.score for path in find_paths(graph, scores, head, tail, 0.0)}
        assert found == pytest.approx(expected, abs=1e-5)
        kept = find_paths(graph, scores, head, tail, 0.3)
        assert {path.concepts for path in kept} == {path for path, score in expected.items() if score >= 0.3}
        assert [path.score for path in kept] == sorted((path.score for path in kept), reverse=True)
        counts |= {len(path) for path in found} | {len(found)}
    assert counts >= {2, 3, 4, 5, 100} and max(counts) == 100
    assert find_paths(graph, scores, 3, 3, 0.0) == []


def test_each_hop_has_its_lowest_relation(knowledge):
    graph = knowledge.graph
    count = len(graph.relations)
    between = {}
    for head, name, tail in graph.triples():
        a, r, b = graph.ids[head], graph.relations.index(name), graph.ids[tail]
        between.setdefault((a, b), set()).add(r)
        between.setdefault((b, a), set()).add(r + count)
    paths = [path for tail in range(20, 40) for path in find_paths(graph, edge_scores(*knowledge), 0, tail, 0.0)]
    assert len(paths) > 20
    for path in paths:
        assert path.relations == tuple(min(between[hop]) for hop in itertools.pairwise(path.concepts))


def check(graph, arrays, sizes):
    """Assert the rules of a schema graph's arrays, and return its paths as concepts."""
    assert {name: array.shape for name, array in arrays._asdict().items()} == sizes.shapes()
    concepts = arrays.concepts[arrays.concepts >= 0]
    assert len(set(concepts)) == len(concepts)
    edges = {tuple(edge) for edge in arrays.edges[arrays.edges[:, 0] >= 0]}
    assert len(edges) == (arrays.edges[:, 0] >= 0).sum() and all(a < b for a, b in edges)
    assert all(concepts[b] in graph.neighbors(concepts[a]) for a, b in edges)
    found = []
    for pair, nodes, relations in zip(arrays.path_pairs, arrays.path_nodes, arrays.path_relations, strict=True):
        nodes, relations = nodes[nodes >= 0], relations[relations >= 0]
        assert (pair < 0) == (len(nodes) == 0) and len(relations) == max(0, len(nodes) - 1)
        if pair >= 0:
            assert arrays.pairs[pair].tolist() == [nodes[0], nodes[-1]]
            assert all((min(hop), max(hop)) in edges for hop in itertools.pairwise(nodes))
            found.append(tuple(concepts[nodes].tolist()))
    pairs = arrays.pairs[arrays.pairs[:, 0] >= 0]
    assert len(pairs) == len(set(arrays.path_pairs[arrays.path_pairs >= 0]))
    return found


def test_arrays_of_a_schema_graph(knowledge):
    graph, scores = knowledge.graph, edge_scores(*knowledge)
    concepts = Concepts((0, 1, 2, 3, 4), (20, 21, 22))
    sizes = GraphSizes(threshold=0.4)
    paths = sorted((path for head, tail in itertools.product(*concepts)
                    for path in find_paths(graph, scores, head, tail, 0.4)), key=lambda path: -path.score)
    arrays = schema_graph(graph, scores, concepts, sizes)
    short = [path.concepts for path in paths if len(path.concepts) <= 3]
    assert check(graph, arrays, sizes) == short and 10 < len(short) < len(paths)
    # The edges of longer paths and those within the question's concepts are there, too.
    nodes = arrays.concepts.tolist()
    edges = {tuple(sorted(nodes[i] for i in edge)) for edge in arrays.edges[arrays.edges[:, 0] >= 0]}
    within = {tuple(sorted((head, int(tail)))) for side in concepts for head in side
              for tail in set(graph.neighbors(head)) & set(side)}
    hops = {tuple(sorted(hop)) for path in paths for hop in itertools.pairwise(path.concepts)}
    short_hops = {tuple(sorted(hop)) for path in short for hop in itertools.pairwise(path)}
    assert within - hops and edges == within | hops and len(short_hops | within) < len(edges)


@pytest.mark.parametrize("sizes", [
    GraphSizes(paths=5, threshold=0.0), GraphSizes(pairs=2, threshold=0.0), GraphSizes(nodes=6, threshold=0.0),
])
def test_the_best_paths_are_kept_where_there_is_no_room(knowledge, sizes):
    graph, scores = knowledge.graph, edge_scores(*knowledge)
    concepts = Concepts((0, 1, 2, 3, 4), (20, 21, 22))
    everything = check(graph, schema_graph(graph, scores, concepts, GraphSizes(threshold=0.0)), GraphSizes())
    kept = check(graph, schema_graph(graph, scores, concepts, sizes), sizes)
    assert 0 < len(kept) < len(everything) and kept[0] == everything[0]
    assert kept == [path for path in everything if path in kept]


def test_statements_without_paths_are_empty(knowledge):
    for concepts in (Concepts((), (1,)), Concepts((1,), ()), Concepts((2,), (2,))):
        arrays = schema_graph(knowledge.graph, edge_scores(*knowledge), concepts, GraphSizes())
        assert all((array == -1).all() for array in arrays)


def test_graphs_of_rows_are_built_once(tmp_path, monkeypatch):
    pytest.importorskip("simplemma")
    monkeypatch.setenv("JAXLM_CACHE", str(tmp_path / "cache"))
    graph = tmp_path / "graph.tsv"
    graph.write_text("cat\tHasA\ttail\ncat\tIsA\tanimal\ndog\tIsA\tanimal\nhouse\tUsedFor\tliving\n")
    draw = np.random.default_rng(0)
    for kind, names in (("entity", ("cat", "Dog", "Tail", "other")), ("relation", ("IsA", "PartOf"))):
        write_vectors(tmp_path, kind, Vectors(names, draw.normal(size=(len(names), 4)).astype(np.float32)))
    knowledge = Knowledge.open(str(graph), str(tmp_path))
    opened = knowledge.graph
    assert knowledge.concepts[opened.ids["dog"]].any() and not knowledge.concepts[opened.ids["animal"]].any()
    assert not knowledge.relations[opened.relations.index("usedfor")].any()
    rows, reports = [("What do cats have?", ["tails", "a dog"]), ("A house?", ["dogs", "cats"])], []
    sizes = GraphSizes(threshold=0.0)
    graphs = build_graphs(rows, knowledge, sizes, reports.append)
    texts = [[[describe_path(opened, one, k) for k in np.flatnonzero(one.path_pairs >= 0)]
              for one in (SchemaGraph(*(array[row, choice] for array in graphs)) for choice in range(2))]
             for row in range(2)]
    assert texts == [[["cat --partof*--> tail"], ["cat --isa--> animal --isa*--> dog"]], [[], []]]
    again = build_graphs(rows, knowledge, sizes, reports.append)
    assert len(reports) == 1 and all((a == b).all() for a, b in zip(graphs, again, strict=True))
    build_graphs(rows, knowledge, GraphSizes(paths=3), reports.append)  # other settings
    build_graphs(rows, Knowledge(opened, None, None), sizes, reports.append)  # no vectors
    assert len(reports) == 3
    write_vectors(tmp_path, "entity", Vectors(("x",), np.ones((1, 4), np.float32)))
    with pytest.raises(UserError, match="no vector of any entity"):
        Knowledge.open(str(graph), str(tmp_path))
