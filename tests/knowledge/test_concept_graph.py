"""Reading, merging and pruning of concept graphs, on small graphs written by hand."""

import json

import numpy as np
import pytest

from jaxlm.errors import UserError
from jaxlm.knowledge.concept_graph import CONCEPTNET, ConceptGraph, open_graph, read_concepts

TRIPLES = """
cat	IsA	Animal
Cat	IsA	animal
cat	HasA	long tail
cat	MotivatedByGoal	sleep well
tree	HasPrerequisite	water
oak	InstanceOf	tree
oak	HasContext	botany
oak	NotIsA	animal
oak	IsA	oak
person	AtLocation	house
what the cat does	RelatedTo	cat
r2d2	IsA	robot
""".strip()


def write(folder, text, name="graph.tsv"):
    (folder / name).write_text(text)
    return folder / name


def named(graph):
    return sorted(graph.triples())


def test_conceptnet_relations_are_merged_and_concepts_pruned(tmp_path):
    graph = open_graph(write(tmp_path, TRIPLES))
    assert graph.relations == CONCEPTNET
    assert named(graph) == [
        ("cat", "isa", "animal"),
        ("long_tail", "partof", "cat"),  # HasA with its ends exchanged
        ("oak", "isa", "tree"),
        ("sleep_well", "causes", "cat"),
        ("tree", "hassubevent", "water"),
    ]


def test_relations_of_other_graphs_stay(tmp_path):
    graph = open_graph(write(tmp_path, "Q1\tP31\tQ2\nQ2\tP5\tQ1\nQ3\tP31\tQ2\nQ3\tIsA\tQ1\n"))
    assert graph.relations == ("IsA", "P31", "P5")
    assert named(graph) == [("q1", "P31", "q2"), ("q2", "P5", "q1"), ("q3", "IsA", "q1"), ("q3", "P31", "q2")]


def test_conceptnet_assertions(tmp_path):
    rows = [("Synonym", "/c/en/cat/n", "/c/en/true_cat"), ("HasA", "/c/en/cat", "/c/en/tail/n/wn/animal"),
            ("IsA", "/c/fr/chat", "/c/en/animal"), ("IsA", "/c/en/cat", "/c/fr/animal"),
            ("ExternalURL", "/c/en/cat", "http://example.org"), ("dbpedia/genre", "/c/en/cat", "/c/en/animal")]
    lines = ("\t".join([f"/a/[/r/{r}/,{h}/,{t}/]", f"/r/{r}", h, t, json.dumps({"weight": 1.0})]) for r, h, t in rows)
    path = write(tmp_path, "\n".join(lines) + "\n", "assertions.csv")
    assert read_concepts(path) == [("cat", "relatedto", "true_cat"), ("tail", "partof", "cat")]


def test_edges_go_in_both_directions():
    graph = ConceptGraph.of([("a", "isa", "b"), ("b", "isa", "a"), ("a", "usedfor", "b"), ("c", "isa", "b")])
    a, b, c = (graph.ids[name] for name in "abc")
    assert [graph.neighbors(i).tolist() for i in (a, b, c)] == [[b], [a, c], [b]]
    np.testing.assert_array_equal(graph.edges(graph.heads, graph.tails), np.arange(len(graph.tails)))
    isa, inverse = CONCEPTNET.index("isa"), CONCEPTNET.index("isa") + len(CONCEPTNET)
    edge = int(graph.offsets[a])
    found = graph.edge_relations[graph.relation_offsets[edge] : graph.relation_offsets[edge + 1]]
    assert found.tolist() == [isa, CONCEPTNET.index("usedfor"), inverse]
    assert graph.first_relation(edge) == isa
    assert graph.first_relation(int(graph.offsets[b]) + 1) == inverse and graph.relation_name(inverse) == "isa*"


def test_the_written_graph_is_the_same_graph(tmp_path):
    graph = open_graph(write(tmp_path, TRIPLES))
    again = open_graph(write(tmp_path, "".join("\t".join(t) + "\n" for t in graph.triples()), "merged.tsv"))
    assert again.fingerprint == graph.fingerprint
    other = open_graph(write(tmp_path, "cat\tIsA\tanimal\n", "other.tsv"))
    assert other.fingerprint != graph.fingerprint


@pytest.mark.parametrize(("text", "message"), [
    ("the\tIsA\tword\n", "no triple between two concepts"), ("", "no triple"), ("cat\tIsA\n", "line 1"),
])
def test_files_without_a_graph_are_refused(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        open_graph(write(tmp_path, text))
    with pytest.raises(UserError, match="does not exist"):
        open_graph(tmp_path / "missing.tsv")
