"""Evaluation of vectors against counts written from the formulas, scipy and scikit-learn."""

from __future__ import annotations

import gzip
import itertools
import json
import math

import numpy as np
import pytest
import scipy.stats

from jaxlm.cli import main
from jaxlm.errors import UserError
from jaxlm.evaluation import vectors
from jaxlm.runs.model import load_trained
from tests.huggingface.support import minilm


def write_rows(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_folder(folder, queries, documents, qrels):
    write_rows(folder / "queries.jsonl", [{"_id": name, "text": text} for name, text in queries.items()])
    write_rows(folder / "corpus.jsonl", [{"_id": name, "text": text, "title": ""} for name, text in documents.items()])
    (folder / "qrels").mkdir()
    rows = [f"{query}\t{document}\t{gain}\n" for (query, document), gain in qrels.items()]
    (folder / "qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(rows))


def encode(texts, role):
    """Vectors that are written in the texts."""
    return np.array([[float(number) for number in text.split()] for text in texts], np.float32)


def counted(ranked, gains):
    """The metrics of one query, from the formulas; `ranked` are ids, best first."""
    dcg = sum(gains.get(name, 0) / math.log2(rank + 1) for rank, name in enumerate(ranked[:10], 1))
    best = sum(gain / math.log2(rank + 1) for rank, gain in enumerate(sorted(gains.values(), reverse=True)[:10], 1))
    found = [rank for rank, name in enumerate(ranked, 1) if name in gains]
    return {
        "ndcg_at_10": dcg / best, "mrr_at_10": 1 / found[0] if found and found[0] <= 10 else 0.0,
        "recall_at_10": sum(rank <= 10 for rank in found) / len(gains),
        "recall_at_100": sum(rank <= 100 for rank in found) / len(gains),
    }


def test_retrieval_with_ties_in_blocks(tmp_path, monkeypatch):
    """Cosines of vectors on two axes take three values, so that most are ties."""
    monkeypatch.setattr(vectors, "QUERIES", 4)
    monkeypatch.setattr(vectors, "DOCUMENTS", 7)
    draws, axes = np.random.default_rng(0), ["1 0", "0 1", "-1 0", "0 -1"]
    queries = {f"q{i}": axes[draws.integers(4)] for i in range(10)}
    documents = {f"d{i}": axes[draws.integers(4)] for i in range(150)}
    qrels = {(query, f"d{draws.integers(150)}"): int(draws.integers(4)) for query in queries for _ in range(15)}
    qrels |= {pair: 0 for pair in qrels if pair[0] == "q3"}  # no relevant document
    documents["q1"], qrels["q1", "q1"] = queries["q1"], 3  # left out of its own ranking, as in BEIR's code
    write_folder(tmp_path / "beir", queries, documents, qrels)
    found = vectors.evaluate(encode, str(tmp_path / "beir"), predictions=str(tmp_path / "out.jsonl"), resamples=50)
    assert (found["task"], found["examples"], found["documents"]) == ("retrieval", 9, 151)

    wanted = {}
    for query in queries:
        gains = {document: gain for (name, document), gain in qrels.items() if name == query and gain}
        products = {name: float(np.dot(*encode([queries[query], text], False))) for name, text in documents.items()}
        ranked = sorted({*documents} - {query}, key=lambda name: (products[name], name), reverse=True)
        if gains:
            wanted[query] = counted(ranked, gains) | {"prediction": ranked[:10]}
    rows = {row["id"]: row for row in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
    assert rows.keys() == wanted.keys()
    for query, metrics in wanted.items():
        assert rows[query]["prediction"] == metrics.pop("prediction")
        assert {name: rows[query][name] for name in metrics} == pytest.approx(metrics, abs=1e-6)
    for name, value in found["metrics"].items():
        assert value == pytest.approx(np.mean([metrics[name] for metrics in wanted.values()]), abs=1e-6)
        low, high = found["intervals"][name]
        assert low <= value <= high
    assert 0.0 < found["metrics"]["ndcg_at_10"] < 0.9
    assert found["groups"] == 2  # texts are compared without punctuation, so without the sign


def test_retrieval_by_late_interaction_in_blocks(tmp_path, monkeypatch):
    """A vector per word on one of three axes: the score is the sum over the query's words of the best product."""
    monkeypatch.setattr(vectors, "QUERIES", 9)
    monkeypatch.setattr(vectors, "DOCUMENTS", 20)
    draws = np.random.default_rng(0)
    words = {"a": [1, 0, 0], "b": [0, -1, 0], "c": [-0.6, 0.8, 0], "d": [0, 0, 1]}

    def drawn(count: int, most: int) -> list[str]:
        return [" ".join(draws.choice(list(words), draws.integers(1, most))) for _ in range(count)]

    def encode(texts, role):
        return [np.array([words[word] for word in text.split()], np.float32) for text in texts]

    queries, documents = dict.fromkeys(drawn(10, 5)), list(dict.fromkeys(drawn(40, 7)))
    rows = [{"query": query, "positive": documents[i :: len(queries)]} for i, query in enumerate(queries)]
    write_rows(tmp_path / "a.jsonl", rows)
    vectors.evaluate(encode, str(tmp_path / "a.jsonl"), predictions=str(tmp_path / "out.jsonl"), is_cosine=False)
    for query, line in zip(queries, (tmp_path / "out.jsonl").read_text().splitlines(), strict=True):
        scores = [sum(max(np.dot(words[q], words[d]) for d in text.split()) for q in query.split())
                  for text in documents]
        np.testing.assert_allclose(json.loads(line)["scores"], sorted(scores, reverse=True)[:10], atol=1e-6)
    write_rows(tmp_path / "b.jsonl", [{"sentence1": "a", "sentence2": "b c", "score": score} for score in (1, 2)])
    with pytest.raises(UserError, match="rank documents for queries; give a file of these, not of pairs"):
        vectors.evaluate(encode, str(tmp_path / "b.jsonl"), is_cosine=False)


def test_the_search_keeps_the_best_of_all_blocks(monkeypatch):
    monkeypatch.setattr(vectors, "QUERIES", 5)
    monkeypatch.setattr(vectors, "DOCUMENTS", 16)
    draws = np.random.default_rng(1)
    queries, documents = (draws.integers(-2, 3, (n, 3)).astype(np.float32) for n in (12, 100))
    products = queries @ documents.T  # of whole numbers, so exact
    for depth in (1, 20, 100):
        found, scores = vectors.search(queries, documents, depth)
        wanted = np.argsort(-products, axis=1, kind="stable")[:, :depth]
        np.testing.assert_array_equal(found, wanted)
        np.testing.assert_array_equal(scores, np.take_along_axis(products, wanted, axis=1))


def test_queries_of_one_file(tmp_path):
    """A document of two rows is one of the corpus; it comes after the one with a larger number for an id."""
    rows = [{"query": "1 0", "positive": ["1 0", "0 1"]}, {"query": "0 1", "positive": "0 1"},
            {"query": "1 1", "positive": "-1 0"}]
    write_rows(tmp_path / "a.jsonl", rows)
    found = vectors.evaluate(encode, str(tmp_path / "a.jsonl"), predictions=str(tmp_path / "out.jsonl"))
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["prediction"] for line in lines] == [["0", "1", "2"], ["1", "2", "0"], ["1", "0", "2"]]
    assert [line["gold"] for line in lines] == [["0", "1"], ["1"], ["2"]] and found["documents"] == 3
    assert found["metrics"]["mrr_at_10"] == pytest.approx((1 + 1 + 1 / 3) / 3, abs=1e-6)
    assert vectors.evaluate(encode, str(tmp_path / "a.jsonl"), limit=2)["metrics"]["ndcg_at_10"] == 1.0
    write_rows(tmp_path / "b.jsonl", [{"a": "1 0", "b": "1 0"}])
    assert vectors.evaluate(encode, str(tmp_path / "b.jsonl"), ["a", "b"])["examples"] == 1


def test_similarity_beside_word_overlap(tmp_path, monkeypatch):
    draws = np.random.default_rng(2)
    texts = [tuple(" ".join(map(str, row)) for row in draws.integers(-3, 4, (2, 3)) + 0.5) for _ in range(60)]
    golds = draws.integers(0, 6, 60)  # ties
    rows = [f"{one}\t{other}\t{gold}\n" for (one, other), gold in zip(texts, golds, strict=True)]
    (tmp_path / "a.tsv").write_text("sentence1\tsentence2\tscore\n" + "".join(rows) + "1 1 1\t1 1 1\t\n")
    found = vectors.evaluate(encode, str(tmp_path / "a.tsv"), resamples=20)
    assert (found["task"], found["examples"], found["unlabelled"]) == ("similarity", 60, 1)
    pairs = [encode(pair, "") for pair in texts]
    cosines = [one @ other / np.linalg.norm(one) / np.linalg.norm(other) for one, other in pairs]
    words = [[set(text.split()) for text in pair] for pair in texts]
    overlaps = [sum(word in other for word in one) / len({*one, *other}) for one, other in words]
    assert found["metrics"] == pytest.approx({
        "spearman": scipy.stats.spearmanr(cosines, golds)[0], "pearson": scipy.stats.pearsonr(cosines, golds)[0],
        "word_overlap_spearman": scipy.stats.spearmanr(overlaps, golds)[0],
        "word_overlap_pearson": scipy.stats.pearsonr(overlaps, golds)[0],
    }, abs=2e-6)
    assert found["intervals"].keys() == found["metrics"].keys()
    monkeypatch.setattr(vectors, "text_groups", None)  # slow for many rows, and for a bootstrap only
    found = vectors.evaluate(encode, str(tmp_path / "a.tsv"), is_cosine=False)
    products = [one @ other for one, other in pairs]
    assert found["metrics"]["pearson"] == pytest.approx(scipy.stats.pearsonr(products, golds)[0], abs=2e-6)


def test_classification_of_pairs_with_ties():
    sklearn = pytest.importorskip("sklearn.metrics")
    draws = np.random.default_rng(3)
    for size in (2, 5, 40):
        labels = np.append(draws.integers(0, 2, size - 1), 1).astype(float)
        scores = draws.integers(0, 8, size) / 8
        found = vectors.label_metrics(scores, labels)
        predictions = [scores >= threshold for threshold in [*np.unique(scores), 9.0]]
        precisions, hits = [], []
        for predicted in predictions[-2::-1]:  # from the highest threshold
            hits.append(labels[predicted].sum())
            precisions.append(hits[-1] / predicted.sum())
        steps = np.diff([0.0, *hits]) / labels.sum()
        assert found == pytest.approx({
            "average_precision": float(steps @ precisions),
            "best_accuracy": max(np.mean(predicted == labels) for predicted in predictions),
            "best_f1": max(sklearn.f1_score(labels, predicted, zero_division=0) for predicted in predictions),
        })
        assert found["average_precision"] == pytest.approx(sklearn.average_precision_score(labels, scores))
    assert vectors.label_metrics(np.zeros(3), np.zeros(3)) == {}
    # One positive among equal scores counts the same in any order.
    orders = [vectors.label_metrics(np.zeros(3), np.array(row)) for row in itertools.permutations([1.0, 0.0, 0.0])]
    assert all(found["average_precision"] == pytest.approx(1 / 3) for found in orders)


def test_mistakes(tmp_path):
    def refuses(match, path, **options):
        with pytest.raises(UserError, match=match):
            vectors.evaluate(encode, str(path), **options)

    table = tmp_path / "a.csv"
    table.write_text("a,b,c\n1 0,1 0,x\n")
    refuses("neither the columns sentence1, sentence2 and score or label nor query and positive.*--columns", table)
    refuses("line 2: the field 'c' is 'x', no number", table, columns=["a", "b", "c"])
    refuses("--columns takes two texts and a score", table, columns=["a"])
    refuses("there is no column 'd'", table, columns=["a", "d"])
    table.write_text("sentence1,sentence2,label\n1 0,1 0,1\n1 0,0 1,1\n")
    refuses("all values of label are equal", table)
    table.write_text("sentence1,sentence2,label\n1 0,1 0,\n")
    refuses("no row has a label", table)
    write_folder(tmp_path / "beir", {"q": "1 0"}, {"d": "1 0"}, {("q", "e"): 1})
    refuses("--columns is for a file", tmp_path / "beir", columns=["a", "b"])
    refuses("line 2: corpus.jsonl has no _id 'e'", tmp_path / "beir")
    (tmp_path / "beir/qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\nq\td\t0\n")
    refuses("no query has a relevant document", tmp_path / "beir")
    (tmp_path / "beir/qrels/test.tsv").unlink()
    refuses("neither qrels.tsv nor", tmp_path / "beir")


def test_the_command(tmp_path, capsys):
    write_rows(tmp_path / "a.jsonl", [
        {"query": "Who eats?", "positive": "A man is eating food."},
        {"query": "Is the infant carried?", "positive": "The girl carries a baby."},
    ])
    command = ["evaluate", str(minilm()), "--vectors", str(tmp_path / "a.jsonl")]
    assert main([*command, "--document-prompt", "text: ", "--bootstrap", "10", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["metrics"]["ndcg_at_10"] == 1.0 and found["groups"] == 2
    assert main(command) == 0
    assert "retrieval, 2 examples, 2 documents to find: ndcg_at_10 1.0000" in capsys.readouterr().out
    for flag in (["--against", "x"], ["--task", "x"], ["--data.length", "9"]):
        assert main([*command, *flag]) == 2
        assert f"{flag[0]} cannot be combined with --vectors" in capsys.readouterr().err


@pytest.mark.slow
def test_minilm_on_sts_b(real_data, tmp_path):
    """The last tenth of the training file: sentence-transformers gives 80.8 with mean pooling, 76.1 with [CLS]."""
    with gzip.open(real_data / "glue/STS-B/train.tsv.gz", "rt", encoding="utf-8") as file:
        head, *rows = file.read().splitlines(keepends=True)
    (tmp_path / "a.tsv").write_text(head + "".join(rows[-575:]), encoding="utf-8")
    model = load_trained(minilm())
    for pooling, spearman in (("mean", 0.808), ("cls", 0.761)):
        found = vectors.evaluate(
            lambda texts, _, pooling=pooling: model.encode(texts, pooling), str(tmp_path / "a.tsv"))
        assert found["metrics"]["spearman"] == pytest.approx(spearman, abs=0.001)
    assert 0.6 < found["metrics"]["word_overlap_spearman"] < 0.75
