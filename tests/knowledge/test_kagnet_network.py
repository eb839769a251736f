"""KagNet's network against plain PyTorch, one statement and one path at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxlm.knowledge.kagnet_network import KagNetwork
from jaxlm.types import Params, SchemaGraph
from tests.params import first_fast

CONCEPTS, RELATIONS, WIDTH, ROWS = 30, 4, 9, 5
NETWORK = KagNetwork(CONCEPTS, RELATIONS, concept_size=6, graph_sizes=(5, 4), path_size=7, pair_size=8)


def random_graphs(seed: int, nodes: int = 12, edges: int = 30, pairs: int = 6, paths: int = 20) -> SchemaGraph:
    """Graphs of 3 to 9 nodes; the second one has no pairs."""
    draw = np.random.default_rng(seed)
    shapes = {"concepts": (nodes,), "edges": (edges, 2), "pairs": (pairs, 2), "path_pairs": (paths,),
              "path_nodes": (paths, 3), "path_relations": (paths, 3)}
    graphs = SchemaGraph(**{name: np.full((ROWS, *shape), -1) for name, shape in shapes.items()})
    for row in range(ROWS):
        count = int(draw.integers(3, 10))
        graphs.concepts[row, :count] = draw.choice(CONCEPTS, count, replace=False)
        ends = np.argwhere(np.triu(draw.random((count, count)) < 0.5, 1))
        graphs.edges[row, : len(ends)] = ends
        number = 0
        for pair in range(0 if row == 1 else int(draw.integers(1, 4))):
            head, tail = graphs.pairs[row, pair] = draw.choice(count, 2, replace=False)
            for _ in range(int(draw.integers(1, 5))):
                middle = draw.choice([i for i in range(count) if i not in (head, tail)], int(draw.integers(0, 2)))
                path = [head, *middle, tail]
                graphs.path_pairs[row, number] = pair
                graphs.path_nodes[row, number, : len(path)] = path
                graphs.path_relations[row, number, : len(path) - 1] = draw.integers(0, 2 * RELATIONS, len(path) - 1)
                number += 1
    return graphs


def random_params() -> Params:
    """Parameters with trained rows for "none"."""
    params = NETWORK.init(jax.random.key(0), WIDTH)
    return {name: {"embedding": leaf["embedding"] + 0.5} if name in ("concept", "relation") else leaf
            for name, leaf in params.items()}


def statements() -> jax.Array:
    return jnp.asarray(np.random.default_rng(7).normal(size=(ROWS, WIDTH)), jnp.float32)


def slow_scores(params: Params, graph: SchemaGraph, statement: jax.Array, published_padding: bool):
    """Score, attention on paths and attention on pairs of one statement, as lists."""
    p = jax.tree.map(lambda leaf: torch.tensor(np.asarray(leaf)), params)
    s = torch.tensor(np.asarray(statement))

    def dense(name, x):
        return x @ p[name]["kernel"] + p[name]["bias"]

    # A node's vectors are the sums of its neighbours', through a layer.
    nodes = [int(concept) for concept in graph.concepts if concept >= 0]
    table = [p["concept"]["embedding"][concept + 1] for concept in nodes]
    vectors = table
    for name in ("graph_0", "graph_1"):
        summed = [torch.zeros_like(vectors[0]) for _ in nodes]
        for a, b in (edge for edge in graph.edges.tolist() if edge[0] >= 0):
            summed[a], summed[b] = summed[a] + vectors[b], summed[b] + vectors[a]
        vectors = [torch.relu(dense(name, x)) for x in summed]
    features = [torch.cat(both) for both in zip(table, vectors, strict=True)]

    lstm = torch.nn.LSTM(6 + 4 + 6, 7)
    lstm.load_state_dict({
        "weight_ih_l0": p["lstm"]["input"]["kernel"].T, "bias_ih_l0": p["lstm"]["input"]["bias"],
        "weight_hh_l0": p["lstm"]["recurrent"]["kernel"].T, "bias_hh_l0": p["lstm"]["recurrent"]["bias"],
    })
    none = torch.cat([p["concept"]["embedding"][0], torch.zeros(4)])
    ends = [[features[i] for i in pair] for pair in graph.pairs.tolist() if pair[0] >= 0]
    pairs, alphas = [], []
    for number, (head, tail) in enumerate(ends or [[torch.zeros(10), torch.zeros(10)]]):
        x = torch.cat([head, tail, s])
        for name in ("pair_0", "pair_1"):
            x = torch.nn.functional.leaky_relu(dense(name, x))
        outputs = []
        for path in np.flatnonzero(graph.path_pairs == number):
            steps = [torch.cat([features[node] if node >= 0 else none, p["relation"]["embedding"][relation + 1]])
                     for node, relation in zip(graph.path_nodes[path], graph.path_relations[path], strict=True)
                     if node >= 0 or published_padding]
            outputs.append(lstm(torch.stack(steps)[:, None])[0][-1, 0])
        related = torch.zeros(7)
        if outputs:
            alpha = torch.softmax(torch.stack(outputs) @ dense("path_query", x), 0)
            related = alpha @ torch.stack(outputs)
            alphas += alpha.tolist()
        pairs.append(torch.cat([x, related]))
    stacked = torch.stack(pairs)
    beta = torch.softmax(stacked[:, :8] @ dense("pair_query", s), 0)
    return dense("score", torch.cat([beta @ stacked, s])).item(), alphas, beta.tolist()


@pytest.mark.parametrize("published_padding", first_fast([False, True]))
def test_scores_and_attention(published_padding):
    network = KagNetwork(**(vars(NETWORK) | {"published_padding": published_padding}))
    params, graphs, s = random_params(), random_graphs(0), statements()
    scores = jax.device_get(jax.jit(network.__call__)(params, graphs, s))
    for row in range(ROWS):
        graph = SchemaGraph(*(array[row] for array in graphs))
        logit, alphas, betas = slow_scores(params, graph, s[row], published_padding)
        assert scores.logit[row] == pytest.approx(logit, abs=1e-5)
        # Paths of a pair follow each other.
        np.testing.assert_allclose(scores.path_attention[row][: len(alphas)], alphas, atol=1e-5)
        np.testing.assert_allclose(scores.pair_attention[row][: len(betas)], betas, atol=1e-5)
        assert not scores.path_attention[row][len(alphas) :].any()
        assert not scores.pair_attention[row][len(betas) :].any()
    assert np.std(scores.logit) > 0.1


@pytest.mark.slow
def test_order_and_padding_do_not_matter():
    params, graphs, s = random_params(), random_graphs(1), statements()
    score = jax.jit(NETWORK.__call__)
    expected = score(params, graphs, s)
    draw = np.random.default_rng(0)
    order = {name: draw.permutation(array.shape[1]) for name, array in graphs._asdict().items()}
    shuffled = SchemaGraph(**{
        name: array[:, order["path_pairs"] if name.startswith("path") else order[name]]
        for name, array in graphs._asdict().items()
    })

    def renumbered(array, order):
        return np.where(array >= 0, np.argsort(order)[array], -1)

    shuffled = shuffled._replace(
        path_pairs=renumbered(shuffled.path_pairs, order["pairs"]),
        **{name: renumbered(getattr(shuffled, name), order["concepts"]) for name in ("edges", "pairs", "path_nodes")},
    )
    found = score(params, shuffled, s)
    np.testing.assert_allclose(found.logit, expected.logit, atol=1e-5)
    np.testing.assert_allclose(found.path_attention, expected.path_attention[:, order["path_pairs"]], atol=1e-5)
    larger = random_graphs(1, nodes=17, edges=41, pairs=9, paths=33)
    found = score(params, larger, s)
    np.testing.assert_allclose(found.logit, expected.logit, atol=1e-5)
    np.testing.assert_allclose(found.pair_attention[:, :6], expected.pair_attention, atol=1e-5)


def test_one_pair_with_one_path_has_all_attention():
    graph = SchemaGraph(*(np.full((1, *shape), -1) for shape in ((5,), (4, 2), (3, 2), (6,), (6, 3), (6, 3))))
    graph.concepts[0, :3] = 4, 5, 6
    graph.edges[0, :2] = [[0, 1], [1, 2]]
    graph.pairs[0, 0], graph.path_pairs[0, 0] = (0, 2), 0
    graph.path_nodes[0, 0], graph.path_relations[0, 0, :2] = (0, 1, 2), (1, 5)
    scores = jax.jit(NETWORK.__call__)(random_params(), graph, statements()[:1])
    assert scores.path_attention[0].tolist() == [1.0, *[0.0] * 5] and scores.pair_attention[0].tolist() == [1.0, 0, 0]


@pytest.mark.slow
def test_a_statement_without_pairs_reads_no_graph():
    params, s = random_params(), statements()
    empty = SchemaGraph(*(np.full_like(array, -1) for array in random_graphs(0)))
    concepts = empty._replace(concepts=random_graphs(0).concepts, edges=random_graphs(0).edges)

    @jax.jit
    @jax.value_and_grad
    def total(params, graph):
        return jnp.sum(NETWORK(params, graph, s).logit)

    value, grads = total(params, empty)
    assert float(total(params, concepts)[0]) == pytest.approx(float(value), abs=1e-5)
    for name in ("concept", "relation", "graph_0", "lstm", "path_query"):
        assert all(not leaf.any() for leaf in jax.tree.leaves(grads[name]))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads)) and grads["pair_0"]["kernel"].any()


@pytest.mark.slow
def test_number_of_parameters_and_their_start():
    """696,374 besides the tables, with the sizes of the published model."""
    params = KagNetwork(100, 17).init(jax.random.key(0), 1024)
    count = sum(leaf.size for name, tree in params.items() if name not in ("concept", "relation")
                for leaf in jax.tree.leaves(tree))
    assert count == 696_374
    assert params["concept"]["embedding"].shape == (101, 100) and params["relation"]["embedding"].shape == (35, 100)
    assert not params["concept"]["embedding"][0].any() and not params["relation"]["embedding"][0].any()
    assert float(jnp.std(params["pair_0"]["kernel"])) == pytest.approx((2 / (1274 + 256)) ** 0.5, rel=0.02)
    assert float(jnp.std(params["pair_0"]["bias"])) == pytest.approx(1.0, rel=0.2)
    kernel = params["lstm"]["recurrent"]["kernel"]
    np.testing.assert_allclose(kernel @ kernel.T, np.eye(128), atol=1e-5)
    assert float(jnp.max(jnp.abs(params["graph_0"]["kernel"]))) == pytest.approx(0.1, rel=0.02)
