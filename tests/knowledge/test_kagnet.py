"""KagNet from the command line: training, evaluation, predictions and pictures, with a small graph."""

from __future__ import annotations

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.cli import main
from jaxlm.errors import UserError
from jaxlm.huggingface import import_folder
from jaxlm.knowledge.kagnet import KagNet
from jaxlm.knowledge.kagnet_network import KagNetwork
from jaxlm.knowledge.knowledge_graph import Vectors, write_vectors
from jaxlm.runs.load import load_model, load_run
from jaxlm.runs.resolve import resolve
from jaxlm.runs.session import set_up
from jaxlm.training.checkpoints import Checkpoints

pytest.importorskip("simplemma")
PLACES = ["river", "house", "tree", "road", "shop", "bed"]
ANIMALS = ["cat", "dog", "duck", "horse", "cow", "sheep", "mouse", "bird", "fish", "ant"]
NETWORK = ("--objective.network.concept-size", "8", "--objective.network.graph-sizes", "6", "4",
           "--objective.network.path-size", "8", "--objective.network.pair-size", "8")
SIZES = ("--objective.sizes.nodes", "16", "--objective.sizes.edges", "16", "--objective.sizes.pairs", "4",
         "--objective.sizes.paths", "8")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A graph that says where each animal is, its vectors, and questions about it."""
    folder = tmp_path_factory.mktemp("kagnet")
    draw = np.random.default_rng(0)
    home = dict(zip(ANIMALS, draw.choice(PLACES, len(ANIMALS)), strict=True))
    triples = [f"{animal}\tAtLocation\t{place}\n" for animal, place in home.items()]
    (folder / "graph.tsv").write_text("".join(triples))
    for kind, names in (("entity", [*ANIMALS, *PLACES]), ("relation", ["AtLocation", "PartOf"])):
        write_vectors(folder, kind, Vectors(tuple(names), draw.normal(size=(len(names), 8)).astype(np.float32)))
    with (folder / "rows.jsonl").open("w") as out:
        for number in range(80):
            animal = ANIMALS[number % len(ANIMALS)]
            others = draw.choice([place for place in PLACES if place != home[animal]], 2, replace=False)
            places = draw.permutation([home[animal], *others]).tolist()
            choices = [{"label": label, "text": place} for label, place in zip("ABC", places, strict=True)]
            out.write(json.dumps({
                "id": f"q{number}", "answerKey": "ABC"[places.index(home[animal])],
                "question": {"stem": f"Number {number}: where is the {animal}?", "choices": choices},
            }) + "\n")
    return folder


def flags(files, model, *more):
    return ["--init-from", model, "--data.source", str(files / "rows.jsonl"), "--objective.graph",
            str(files / "graph.tsv"), "--data.length", "48", *NETWORK, *SIZES, "--train.steps", "2",
            "--train.epochs", "0", "--train.batch-size", "8", "--train.patience", "0", "--train.tracker", "none",
            *more]


def finetune(files, model, run, *more):
    return main(["finetune", "configs/tasks/kagnet.py", *flags(files, model, *more), "--run-dir", str(run), "--json"])


def predictions(run, path, *more):
    assert main(["evaluate", str(run), "--predictions", str(path), "--json", *more]) == 0, more
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_it_learns_what_only_the_graph_says_with_a_frozen_encoder(models, files, tmp_path, capsys, monkeypatch):
    """Every question is answered by a path of one hop. The encoder stays as it is, and the run can be read."""
    monkeypatch.setenv("JAXLM_CACHE", str(tmp_path / "cache"))
    model, run = models("bert"), tmp_path / "run"
    vectors = ("--objective.vectors", str(files), "--objective.sizes.threshold", "0")
    assert finetune(files, model, run, "--train.steps", "150", "--optimizer.learning-rate", "3e-3", *vectors) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["task"] == "kagnet" and result["metrics"]["accuracy"] == 1.0 and result["examples"] == 8
    trained, source = load_run(run), import_folder(model)
    for name, tree in trained.params.items():
        if name != "knowledge":
            jax.tree.map(np.testing.assert_array_equal, tree, source.params[name])
    # The tables begin with the vectors, and an inverse relation with a copy of the relation.
    shapes = jax.eval_shape(trained.objective.init, jax.random.key(0))
    begun, _ = Checkpoints(run / "checkpoints", read_only=True).restore_params(shapes, step=0)
    relations = np.asarray(begun["knowledge"]["relation"]["embedding"])
    count = trained.objective.network.num_relations
    assert not relations[0].any() and relations.shape == (2 * count + 1, 8)
    np.testing.assert_array_equal(relations[2], relations[2 + count])  # 1 is atlocation
    assert not np.array_equal(relations[1], relations[1 + count])  # antonym has no vector

    rows = predictions(run, tmp_path / "answers.jsonl")
    assert all(row["prediction"] == row["gold"] and len(row["paths"]) == 3 for row in rows)
    for row in rows:
        best = row["paths"]["ABC".index(row["gold"])][0]
        assert best["path"].count("--atlocation-->") == 1 and best["attention"] > 0.2
    # The run's own copy of the encoder gives the same scores, without the folder of the encoder.
    again = predictions(run, tmp_path / "again.jsonl", "--objective.encoder", "")
    np.testing.assert_allclose([row["scores"] for row in again], [row["scores"] for row in rows], atol=1e-4)
    capsys.readouterr()
    assert main(["show", str(run), "--examples", "1"]) == 0
    shown = capsys.readouterr().out
    assert "--atlocation--> " in shown and "right" in shown
    assert re.search(r"(\w+) \| (\w+)\s+[01]\.\d{3}  \1 --atlocation--> \2", shown)
    for flag, value, message in (("vectors", "", "has changed since the model was trained"),
                                 ("encoder", "nowhere", "nowhere is not a folder")):
        assert main(["evaluate", str(run), f"--objective.{flag}", value]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_encoder_can_be_trained_along_and_the_graph_left_out(models, files, tmp_path, capsys):
    more = ("--objective.train-encoder", "True", "--objective.criterion", "cross-entropy", "--objective.graph", "")
    assert finetune(files, models("bert"), tmp_path / "run", *more) == 0
    trained, source = load_run(tmp_path / "run"), import_folder(models("bert"))
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), trained.params["encoder"], source.params["encoder"])
    assert any(jax.tree.leaves(moved))
    rows = predictions(tmp_path / "run", tmp_path / "answers.jsonl")
    assert all(row["paths"] == [[], [], []] for row in rows)


def bound(files, model, *more):
    """The bound task, its first batch and fresh parameters."""
    session = set_up(resolve("configs/tasks/kagnet.py", flags(files, model, *more)[2:], model), load_model).open_data()
    task = session.objective
    return task, session.source.batches("train", 8, task.row_format(48), 0).batch(0), session.pretrained


@pytest.mark.slow
def test_losses_in_numpy(models, files):
    task, batch, _ = bound(files, models("bert"), "--objective.margin", "0.3")
    made = task.synthetic(8, batch["input_ids"].shape[-1])
    assert made.keys() == batch.keys()
    assert all(made[name].shape[2:] == batch[name].shape[2:] for name in made)  # with five choices
    params = jax.jit(task.init)(jax.random.key(0))
    batch["row"][5] = -1  # fills up the batch
    batch = jax.tree.map(jnp.asarray, batch)
    logits = np.asarray(jax.jit(task.predict)(params, batch)["logits"], np.float64)
    margin, entropy = [], []
    for row, label in zip(logits[batch["row"] >= 0], batch["label"][batch["row"] >= 0], strict=True):
        scores = 1 / (1 + np.exp(-row))
        margin.append(np.mean([max(0, 0.3 - scores[label] + scores[i]) for i in range(3) if i != label]))
        entropy.append(-np.log(np.exp(row[label]) / np.exp(row).sum()))
    for criterion, expected in (("margin", margin), ("cross-entropy", entropy)):
        loss = jax.jit(dataclasses.replace(task, criterion=criterion).loss, static_argnums=3)
        term = loss(params, batch, jax.random.key(1), True)["task_loss"]
        assert float(term.total / term.weight) == pytest.approx(np.mean(expected), abs=1e-5)
        assert float(term.weight) == 7 and term.coefficient == 1.0


@pytest.mark.slow
def test_a_run_is_resumed_bit_for_bit_and_goes_on_as_a_pretrained_model(models, files, tmp_path):
    """As a pretrained model, its network is taken over for the same graph only."""
    assert finetune(files, models("bert"), tmp_path / "run") == 0
    assert main(["finetune", str(tmp_path / "run"), "--train.steps", "4"]) == 0
    assert finetune(files, models("bert"), tmp_path / "straight", "--train.steps", "4") == 0
    both = [load_run(tmp_path / name).params for name in ("run", "straight")]
    jax.tree.map(np.testing.assert_array_equal, *both)
    run, _, pretrained = bound(files, str(tmp_path / "run"))
    assert "knowledge" in pretrained.params and run.network == load_run(tmp_path / "run").objective.network
    _, _, pretrained = bound(files, str(tmp_path / "run"), "--objective.graph", "")
    assert "knowledge" not in pretrained.params


@pytest.mark.parametrize(("more", "message"), [
    (["--objective.graph", "missing.tsv"], "missing.tsv does not exist"),
    (["--objective.vectors", "missing"], "does not exist"),
    (["--objective.sizes.paths", "0"], "objective.sizes.paths is 0"),
    (["--objective.network.concept-size", "12", "--objective.vectors", "FOLDER"], "network.concept-size 8"),
    (["--objective.lm-coefficient", "0.5"], "no language-model loss"),
])
def test_mistakes(models, files, tmp_path, capsys, more, message):
    more = [str(files) if flag == "FOLDER" else flag for flag in more]
    assert finetune(files, models("bert"), tmp_path / "run", *more) == 2
    assert message in capsys.readouterr().err


def test_it_writes_no_text():
    with pytest.raises(UserError, match="writes no text"):
        KagNet().as_text(None)


def test_flops_count_the_frozen_encoder_once():
    from jaxlm.models.bert import Bert

    model = Bert(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32)
    task = KagNet(model=model, graph="graph.tsv", network=KagNetwork(10, 3))
    network = dataclasses.replace(task, encoder="somewhere").flops(32)
    assert dataclasses.replace(task, train_encoder=True).flops(32) - network == 5 * model.forward_flops(32)
    assert 3 * (task.flops(32) - network) == pytest.approx(5 * model.forward_flops(32))
