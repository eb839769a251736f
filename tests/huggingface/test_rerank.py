"""Rerankers: losses, scores and metrics are those of a CrossEncoder of sentence-transformers that loads the export."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random

import jax
import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder
from sentence_transformers.cross_encoder.evaluation import CrossEncoderRerankingEvaluator
from sentence_transformers.cross_encoder.losses import ListNetLoss
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

import jaxlm
from jaxlm.cli import main
from jaxlm.data.labelled import LabelledSource
from jaxlm.errors import UserError
from jaxlm.huggingface import ModelCard, export_folder
from jaxlm.huggingface.sentence_transformers import write as write_vectors
from jaxlm.objectives.base import class_of, total_loss
from jaxlm.runs.load import load_model
from jaxlm.runs.model import load_trained
from jaxlm.tasks.base import Answer
from jaxlm.tasks.classification import Classification
from jaxlm.tasks.pooled import truncate_pair
from jaxlm.tasks.rerank import Rerank
from jaxlm.tasks.text_groups import TextGroups
from jaxlm.types import Vectors
from tests.huggingface.test_tasks import MODELS, Bert, Deberta, ElectraEncoder, Gpt2, ModernBert, Xlnet
from tests.huggingface.test_tasks import tokenizer as bpe  # noqa: F401 - a fixture
from tests.params import random_params
from tests.tasks.support import pretrained

LENGTH = 24
ROWS = [
    {"query": "the tree", "positive": "ak", "negatives": ["bks the tree", "cm", "ak"]},  # the positive is no negative
    {"query": "fp", "positive": "then a tree, or the gq or the hr " * 4, "negatives": ["lb as a tree then and then"]},
    {"query": "dn", "positive": "eo and the tree, fp", "negatives": []},
]
LISTS = [["ak", "bks the tree", "cm"], [ROWS[1]["positive"], ROWS[1]["negatives"][0]], [ROWS[2]["positive"]]]
PAIRS = [(row["query"], text) for row, texts in zip(ROWS, LISTS, strict=True) for text in texts]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def records(folder):
    return [*TextGroups().read(str(write(folder / "rows.jsonl", ROWS)))]


@pytest.mark.parametrize(("model", "architecture"), [
    (Bert, "BertForSequenceClassification"),
    *(pytest.param(model, f"{name}ForSequenceClassification", marks=pytest.mark.slow) for model, name in (
        (Xlnet, "XLNet"), (ModernBert, "ModernBert"), (ElectraEncoder, "Electra"), (Deberta, "DebertaV2"),
        (Gpt2, "GPT2"))),
])
def test_losses_and_scores_are_those_of_sentence_transformers(model, architecture, bpe, tmp_path):  # noqa: F811
    task = Rerank(model=MODELS[model]).bind(bpe.vocabulary, LENGTH)
    params = random_params(task, 0)
    out = export_folder(tmp_path / "out", task, params, bpe, ModelCard(), max_length=LENGTH)
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == [architecture] and len(config["id2label"]) == 1
    theirs = CrossEncoder(str(out), device="cpu").eval()
    scores = theirs.predict(PAIRS)
    assert theirs.num_labels == 1 and np.ptp(scores) > 0.05
    trained = load_trained(out)  # the folder is imported as a reranker, with its classifier
    assert class_of(trained.objective) is Rerank and not trained.fresh
    assert trained.path == str(out) and jax.tree.all(jax.tree.map(np.array_equal, trained.params, params))
    np.testing.assert_allclose(trained.score_pairs(PAIRS), scores, atol=1e-5)
    long = [("or the gq " * 9, "hr lb as fp " * size) for size in (9, 6)]  # the spare token of an odd length
    long += [(passage, query) for query, passage in long]
    np.testing.assert_allclose(trained.score_pairs(long), theirs.predict(long), atol=1e-5)
    with pytest.raises(UserError, match="is a reranker and has no vectors"):
        trained.encode(["the tree"])
    for wrong in (["the tree"], [("a", "b", "c")], [], [1, 2], [("a", None)]):
        with pytest.raises(UserError, match="give a list of pairs"):
            trained.score_pairs(wrong)
    assert "CrossEncoder('out').predict" in (out / "README.md").read_text()
    theirs.save_pretrained(str(tmp_path / "saved"))  # a folder of theirs has the activation in a file of its own
    del config["sentence_transformers"]
    (tmp_path / "saved" / "config.json").write_text(json.dumps(config))
    saved = load_trained(tmp_path / "saved")
    assert class_of(saved.objective) is Rerank and not saved.fresh
    (tmp_path / "saved" / "config_sentence_transformers.json").unlink()  # a folder of Transformers alone
    alone = load_trained(tmp_path / "saved")
    assert class_of(alone.objective) is Classification
    np.testing.assert_allclose(alone.score_pairs(PAIRS), scores, atol=1e-5)
    kept = Rerank().with_pretrained_model(alone).select_params(alone)  # it goes on with the same output
    assert np.array_equal(kept["classifier"]["kernel"], alone.params["classifier"]["kernel"])

    source = LabelledSource(bpe, {"held_out": records(tmp_path)}, False)
    (batch,) = source.batches("held_out", 4, task.row_format(LENGTH), 0).evaluation(4, 1)
    assert batch["row"].tolist() == [0, 1, 2, -1] and batch["input_ids"].shape == (4, 3, LENGTH)
    made = dataclasses.replace(task, negatives=2).synthetic(4, LENGTH)
    assert {name: (x.shape, x.dtype) for name, x in made.items()} == {n: (x.shape, x.dtype) for n, x in batch.items()}
    terms = jax.jit(lambda p, b: task.loss(p, b, jax.random.key(0), False))(params, batch)
    with torch.no_grad():
        labels = [torch.tensor([1e4] + [0.0] * (len(texts) - 1)) for texts in LISTS]  # softmax: 1 for the positive
        loss = ListNetLoss(theirs)([[row["query"] for row in ROWS], LISTS], labels).item()
    split = np.split(scores, np.cumsum([len(texts) for texts in LISTS])[:-1])
    right = np.mean([each[0] > max(each[1:]) for each in split if len(each) > 1])  # nothing is right without negatives
    assert split[-1].size == 1 and terms["accuracy"].weight == 2
    assert float(total_loss(terms)) == pytest.approx(loss, abs=1e-6)
    assert float(terms["accuracy"].total / terms["accuracy"].weight) == pytest.approx(right)


def test_metrics_are_those_of_sentence_transformers():
    draw = np.random.default_rng(0)
    scores = [draw.normal(size=size).tolist() for size in (1, 2, 5, 30, 30)]
    scores[-1][0] = -9.0  # a positive below the tenth place
    golds = [[1.0] + [0.0] * (len(row) - 1) for row in scores]
    answers = [Answer(row, {}) for row in scores]
    evaluator = CrossEncoderRerankingEvaluator([])
    theirs = np.mean([evaluator.compute_metrics(gold, row)[:2] for gold, row in
                      zip(golds[1:], scores[1:], strict=True)], axis=0)
    found = Rerank().score(golds, answers)
    assert found == {"ndcg_at_10": pytest.approx(theirs[1]), "mrr_at_10": pytest.approx(theirs[0])}
    assert 0.1 < found["mrr_at_10"] < 0.9 and Rerank().score(golds[:1], answers[:1]) == {}
    # A model that scores all passages alike finds nothing: trec_eval's order of equal scores, the last id first.
    assert Rerank().score([[1, 0]], [Answer([0.5, 0.5], {})])["mrr_at_10"] == 0.5


@pytest.mark.slow
def test_from_the_command_line(tmp_path, capsys):
    """A model learns which passages have the query's first word; every way out gives the same scores."""
    start, words = pretrained("bert", tmp_path / "model"), ("cat", "dog", "house", "tree", "runs")
    write_vectors(start, load_model(start).objective, Vectors("mean", 8, False), {})  # an embedding model's length
    draw, rows = random.Random(0), []
    for number in range(200):
        one, *others = draw.sample(words, 4)
        rows.append({"query": one, "positive": f"a {one}", "negatives": [f"a {word}" for word in others[: number % 4]]})
    train, dev = (write(tmp_path / f"{part}.jsonl", rows[160 * part : 160 + 40 * part]) for part in range(2))
    run = str(tmp_path / "run")
    flags = ["--data.length", "16", "--train.epochs", "24", "--optimizer.learning-rate", "3e-3", "--train.tracker",
             "none", "--objective.negatives", "2"]
    command = ["finetune", "rerank", "--init-from", str(start), "--data.source", str(train), "--data.dev", str(dev)]
    assert main([*command, *flags, "--run-dir", run, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    # By chance 0.6; the last percents depend on the masks of dropout.
    assert result["task"] == "rerank" and result["metrics"]["mrr_at_10"] > 0.85
    out = str(tmp_path / "out")
    assert main(["export", run, out]) == 0
    theirs = CrossEncoder(out, device="cpu")
    assert theirs.max_seq_length == 16 and not (tmp_path / "out" / "modules.json").exists()
    pairs = [("cat", "a cat"), ("cat", "the dog and the house " * 9)]
    ours = jaxlm.load(run).score_pairs(pairs, 16)
    np.testing.assert_allclose(theirs.predict(pairs), ours, atol=1e-5)
    assert ours[0] > ours[1] and ours.shape == (2,)
    capsys.readouterr()
    answers = tmp_path / "answers.jsonl"
    assert main(["evaluate", run, "--objective.negatives", "0", "--predictions", str(answers), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["metrics"]
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    assert {len(line["prediction"]) for line in lines} == {1, 2, 3, 4}
    samples = [{"query": row["query"], "positive": row["positive"], "negative": row["negatives"]} for row in rows[160:]]
    evaluator = CrossEncoderRerankingEvaluator([sample for sample in samples if sample["negative"]])
    wanted = evaluator(theirs)
    assert found == {"ndcg_at_10": pytest.approx(wanted["ndcg@10"], abs=1e-6),
                     "mrr_at_10": pytest.approx(wanted["mrr@10"], abs=1e-6)}
    with pytest.raises(UserError, match="is no reranker"):
        jaxlm.load(str(start)).score_pairs(pairs)


def test_a_pair_is_cut_as_by_the_library_tokenizers():
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    for first, second, room in itertools.product(range(9), range(9), range(1, 9)):
        tokenizer.enable_truncation(room, strategy="longest_first")
        kept = tokenizer.encode("a " * first, "b " * second).tokens
        ours = truncate_pair(np.zeros(first), np.zeros(second), room)
        assert [len(part) for part in ours] == [kept.count("a"), kept.count("b")], (first, second, room)


def test_padding_is_told(bpe, tmp_path):  # noqa: F811
    task = Rerank(model=MODELS[Bert]).bind(bpe.vocabulary, LENGTH)
    for sizes, told in (([1, 1, 1, 7], ["Rows have 3.5 passages on average and are padded to 8"]), ([1, 3], [])):
        rows = [{"query": "ak", "positive": "the", "negatives": ["bks", "cm", "dn", "eo", "fp", "gq", "hr"][:size]}
                for size in sizes]
        source = LabelledSource(bpe, {"train": [*TextGroups().read(str(write(tmp_path / "rows.jsonl", rows)))]}, False)
        assert [line.partition(";")[0] for line in task.remarks(source, LENGTH)] == told


def test_refusals(bpe, tmp_path):  # noqa: F811
    data = TextGroups(source=str(write(tmp_path / "rows.jsonl", ROWS[2:])), held_out=0.0)
    task = Rerank(model=MODELS[Bert]).bind(bpe.vocabulary, LENGTH)
    with pytest.raises(UserError, match=r"has no hard negatives; name their columns with --data.negative-fields"):
        task.with_labels_of(data.open(bpe), data)
    with pytest.raises(UserError, match="writes no text"):
        task.as_text(records(tmp_path)[0])
