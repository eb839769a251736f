"""TransE: loss and gradients in PyTorch, the law of corruption, filtered ranks, and runs from the command line."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.cli import main
from jaxlm.errors import UserError
from jaxlm.knowledge.graph_tokenizer import graph_names, graph_tokenizer
from jaxlm.knowledge.knowledge_graph import read_vectors
from jaxlm.knowledge.transe import TransE
from jaxlm.knowledge.triple_ranking import TripleRanking, ranks, replace_ends
from jaxlm.knowledge.triples import TripleStatistics
from jaxlm.objectives.base import total_loss
from jaxlm.runs.load import load_model
from jaxlm.training.metrics import read_metrics
from jaxlm.types import TripleBatch

ENTITIES, RELATIONS, WIDTH = 11, 3, 5
VOCABULARY = graph_tokenizer([f"e {i}" for i in range(ENTITIES)], [f"r{i}" for i in range(RELATIONS)]).vocabulary


def triples(rows: int, seed: int = 0) -> np.ndarray:
    high = [ENTITIES, RELATIONS, ENTITIES]
    return np.random.default_rng(seed).integers(0, high, (rows, 3)).astype(np.int32)


def random_params(seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)
    shapes = {"entity": (ENTITIES, WIDTH), "relation": (RELATIONS, WIDTH)}
    return {name: {"embedding": rng.normal(size=shape).astype(np.float32)} for name, shape in shapes.items()}


@pytest.mark.parametrize(("distance", "normalize"), [
    ("l2", "entities"), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in (
        ("l1", "entities"), ("l1", "all"), ("l2", "all"), ("l1", "none"), ("l2", "none")
    ))
])
def test_loss_and_gradients_are_those_of_plain_torch(distance, normalize):
    torch = pytest.importorskip("torch")
    objective = TripleRanking(TransE(hidden_size=WIDTH, distance=distance, normalize=normalize), 0.7, 4)
    objective = objective.bind(VOCABULARY, 3)
    batch, params = triples(13), random_params()
    batch[5] = -1  # a row that fills up the batch
    example = jax.jit(objective.corrupt)(jax.random.key(0), TripleBatch(batch))

    def loss(params):
        return total_loss(objective.loss(params, example, jax.random.key(0), True))

    value, found = jax.jit(jax.value_and_grad(loss))(params)

    tables = {name: torch.tensor(tree["embedding"], requires_grad=True) for name, tree in params.items()}
    entity, relation = tables["entity"], tables["relation"]
    if normalize != "none":
        entity = entity / entity.norm(dim=1, keepdim=True)
    if normalize == "all":
        relation = relation / relation.norm(dim=1, keepdim=True)

    def far(head: int, kind: int, tail: int):
        difference = entity[head] + relation[kind] - entity[tail]
        return difference.abs().sum() if distance == "l1" else (difference**2).sum().sqrt()

    losses = []
    for row in [row for row in range(13) if row != 5]:
        head, kind, tail = batch[row].tolist()
        for other, is_head in zip(example["entities"][row].tolist(), example["is_head"][row].tolist(), strict=True):
            corrupted = far(other, kind, tail) if is_head else far(head, kind, other)
            losses.append(torch.clamp(0.7 + far(head, kind, tail) - corrupted, min=0))
    assert 0 < sum(loss > 0 for loss in losses) < len(losses) == 48
    expected = torch.stack(losses).mean()
    expected.backward()
    assert float(value) == pytest.approx(expected.item(), abs=1e-6)
    for name, table in tables.items():
        np.testing.assert_allclose(found[name]["embedding"], table.grad.numpy(), atol=1e-6)


@pytest.mark.parametrize("corruption", ["uniform", "bern"])
def test_ends_are_replaced_by_the_law_of_the_paper(corruption):
    share = np.array([0.2, 0.5, 0.9], np.float32)
    statistics = TripleStatistics(np.zeros(0), 0.0, head_share=share)
    objective = TripleRanking(TransE(hidden_size=WIDTH), 1.0, 20_000, corruption).bind(VOCABULARY, 3, statistics)
    batch = np.array([[0, 0, 10], [4, 1, 4], [10, 2, 7]], np.int32)
    example = jax.device_get(jax.jit(objective.corrupt)(jax.random.key(1), TripleBatch(batch)))
    for row, (head, kind, tail) in enumerate(batch):
        expected = share[kind] if corruption == "bern" else 0.5
        is_head, entities = example["is_head"][row], example["entities"][row]
        assert is_head.mean() == pytest.approx(expected, abs=5 * np.sqrt(0.25 / 20_000))
        for old, drawn in ((head, entities[is_head]), (tail, entities[~is_head])):
            counts = np.bincount(drawn, minlength=ENTITIES)
            assert len(counts) == ENTITIES and counts[old] == 0
            others = np.delete(counts, old)
            chi_square = np.sum((others - others.mean()) ** 2) / others.mean()
            assert chi_square < 35  # 9 degrees of freedom: 1 in 10,000


def test_replacements_of_the_first_and_the_last_entity():
    ends = jnp.array([[0, 0, 1]] * 64, jnp.int32)
    found, is_head = jax.jit(replace_ends, static_argnums=(3, 4))(jax.random.key(0), ends, jnp.array([0.5]), 2, 3)
    np.testing.assert_array_equal(found, jnp.where(is_head, 1, 0))


def brute_rank(distances: np.ndarray, own: int, others: set[int]) -> float:
    left = [i for i in range(len(distances)) if i not in others or i == own]
    nearer = sum(distances[i] < distances[own] for i in left)
    ties = sum(distances[i] == distances[own] for i in left) - 1
    return 1 + nearer + ties / 2


@pytest.mark.parametrize("distance", ["l1", "l2"])
def test_ranks_are_filtered_and_equal_distances_share_their_mean_rank(distance):
    """Vectors of few integers, so that many distances are equal; more entities than a chunk."""
    rng, count, width = np.random.default_rng(0), 300, 2
    model = TransE(
        num_entities=count, num_relations=RELATIONS, hidden_size=width, distance=distance, normalize="none"
    )
    params = {"entity": {"embedding": rng.integers(-4, 5, (count, width)).astype(np.float32)},
              "relation": {"embedding": rng.integers(-2, 3, (RELATIONS, width)).astype(np.float32)}}
    rows = np.unique(rng.integers(0, [count, RELATIONS, count], (40, 3)), axis=0).astype(np.int32)
    known = np.full((len(rows), 2, 21), -1, np.int32)
    for row in range(len(rows)):
        for end, place in enumerate((0, 2)):
            others = np.setdiff1d(rng.integers(0, count, rng.integers(0, 20)), rows[row, place])
            known[row, end, : len(others) + 1] = [*others, rows[row, place]]
    found = np.asarray(jax.jit(ranks, static_argnums=0)(model, params, rows, known))
    entity, relation = params["entity"]["embedding"], params["relation"]["embedding"]
    for row, (head, kind, tail) in enumerate(rows):
        differences = entity + relation[kind] - entity[tail], entity[head] + relation[kind] - entity
        for end, (difference, own) in enumerate(zip(differences, (head, tail), strict=True)):
            far = np.abs(difference).sum(1) if distance == "l1" else (difference**2).sum(1)
            assert found[row, end] == brute_rank(far, own, set(known[row, end].tolist()))
    assert (found % 1 == 0.5).any() and found.min() < 8


def test_metrics_are_of_the_ends_that_are_ranked():
    objective = TripleRanking(TransE(hidden_size=WIDTH)).bind(VOCABULARY, 3)
    params, batch = jax.tree.map(jnp.asarray, random_params()), triples(4)
    known = np.full((4, 2, 3), -1, np.int32)
    known[:3, 0, 0], known[:2, 1, 0] = batch[:3, 0], batch[:2, 2]  # two ends have too many
    batch[3] = -1
    example = jax.jit(objective.corrupt)(jax.random.key(0), TripleBatch(batch, known))
    terms = jax.jit(lambda params: objective.loss(params, example, jax.random.key(0), False))(params)
    found = np.asarray(ranks(objective.model, params, jnp.asarray(batch), jnp.asarray(known)))
    found = np.array([*found[:3, 0], *found[:2, 1]])
    assert terms["ranking_loss"].weight == 3 and terms["mrr"].weight == 5
    expected = {"mrr": 1 / found, "mean_rank": found, "hits_at_1": found <= 1, "hits_at_3": found <= 3,
                "hits_at_10": found <= 10}
    for name, values in expected.items():
        assert float(terms[name].total) == pytest.approx(values.sum(), rel=1e-6)
    assert np.asarray(objective.real_tokens(example, TripleBatch(batch))).sum() == 9


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    """A folder with triples of a grid of 6 x 6 places: each is left of the next, and above the one below."""
    folder = tmp_path_factory.mktemp("graph")
    place = [[f"place {x} {y}" for x in range(6)] for y in range(6)]
    lines = [f"{place[y][x]}\tleft of\t{place[y][x + 1]}" for y in range(6) for x in range(5)]
    lines += [f"{place[y][x]}\tabove\t{place[y + 1][x]}" for y in range(5) for x in range(6)]
    (folder / "triples.tsv").write_text("\n".join(lines))
    (folder / "dev.tsv").write_text("\n".join(lines[::9]))
    return folder


def pretrain(graph, run, *flags: str) -> list[dict]:
    assert main([
        "pretrain", "configs/transe_tiny.py", "--run-dir", str(run), "--data.source", str(graph / "triples.tsv"),
        "--data.dev", str(graph / "dev.tsv"), "--data.cache-dir", str(graph / "cache"), "--train.tracker", "none",
        "--train.batch-size", "16", "--objective.model.hidden-size", "8", "--train.log-every", "40",
        "--optimizer.learning-rate", "0.05", "--optimizer.schedule", "constant", *flags,
    ]) == 0
    return read_metrics(run)


@pytest.fixture(scope="module")
def finished(graph):
    run = graph / "run"
    flags = ("--train.eval-every", "40", "--train.checkpoint-every", "40")
    pretrain(graph, run, "--train.steps", "80", *flags)
    return run, pretrain(graph, run, "--train.steps", "160", *flags)


@pytest.mark.slow
def test_a_run_learns_the_graph_and_goes_on_bit_for_bit(graph, finished):
    run, metrics = finished
    evaluations = [line["eval_mrr"] for line in metrics if "eval_mrr" in line]
    assert len(evaluations) == 4 and evaluations[-1] > max(0.75, evaluations[0])
    assert metrics[-1]["eval_hits_at_10"] >= metrics[-1]["eval_hits_at_3"] >= metrics[-1]["eval_hits_at_1"]
    pretrain(graph, graph / "whole", "--train.steps", "160", "--train.eval-every", "0", "--train.checkpoint-every", "0")
    for name, tree in load_model(run).params.items():
        np.testing.assert_array_equal(tree["embedding"], load_model(graph / "whole").params[name]["embedding"])


@pytest.mark.slow
def test_vectors_are_exported_and_begun_from(graph, finished, capsys):
    run, metrics = finished
    out = graph / "vectors"
    assert main(["export", str(run), str(out)]) == 0
    model = load_model(run)
    assert load_model(out).objective.model == model.objective.model
    for kind, names in zip(("entity", "relation"), graph_names(model.tokenizer.vocabulary), strict=True):
        vectors = read_vectors(out, kind)
        assert vectors.names == names
    np.testing.assert_allclose(np.linalg.norm(read_vectors(out).vectors, axis=1), 1, atol=1e-6)
    assert names == ("left of", "above")
    again = pretrain(
        graph, graph / "again", "--init-from", str(out), "--train.steps", "1", "--optimizer.learning-rate", "1e-12"
    )
    assert again[-1]["eval_mrr"] == pytest.approx(metrics[-1]["eval_mrr"], abs=1e-6)
    capsys.readouterr()
    assert main(["embed", str(out), "place 0 0", "no place"]) == 0
    first, unknown = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    np.testing.assert_allclose(first["vector"], read_vectors(out).vectors[0], atol=1e-6)
    assert not any(unknown["vector"])
    (graph / "other.tsv").write_text("place 0 0\tleft of\tnowhere\n")
    assert main([
        "pretrain", "configs/transe_tiny.py", "--run-dir", str(graph / "other"), "--init-from", str(out),
        "--data.source", str(graph / "other.tsv"), "--data.cache-dir", str(graph / "cache"),
    ]) == 2
    assert "other.tsv has the name 'nowhere', which is not in" in capsys.readouterr().err


@pytest.mark.slow
def test_show_names_the_ends_that_were_replaced(finished, capsys):
    run, _ = finished
    assert main(["show", str(run), "--objective.negatives", "2"]) == 0
    shown = capsys.readouterr().out
    assert "<left of>" in shown and "‹place " in shown and shown.count("   not  ") == 2 * shown.count("triple  ")


def test_values_out_of_range_are_refused():
    for name, value in (("margin", 0.0), ("negatives", 0)):
        with pytest.raises(UserError, match=f"{name} is"):
            dataclasses.replace(TripleRanking(), **{name: value})
