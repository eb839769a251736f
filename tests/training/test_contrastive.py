"""Runs of contrastive learning from the command line: an encoder goes on with pairs, and with single sentences."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from jaxlm.cli import main
from tests.training.support import metadata, metrics, stopped_after

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(scope="module")
def encoder(_finished) -> Path:
    """Folder of a run of masked language modelling, and of its text."""
    return _finished.parent


@pytest.fixture(scope="module")
def pairs(encoder) -> Path:
    """Beginning and end of each document; the text has few words, so that both have some in common."""
    draw, path = random.Random(0), encoder / "pairs.jsonl"
    words = sorted(set((encoder / "text.txt").read_text().split()))
    rows = []
    for _ in range(400):
        topic = draw.sample(words, 3)
        query, positive = (" ".join(draw.sample(topic, 3) + draw.sample(words, 3)) for _ in range(2))
        rows.append({"query": query, "positive": positive, "negatives": [" ".join(draw.sample(words, 6))]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


FLAGS = ["--data.length", "24", "--train.steps", "40", "--train.batch-size", "32", "--train.eval-every", "20",
         "--train.checkpoint-every", "20", "--optimizer.learning-rate", "0.01", "--optimizer.schedule", "constant",
         "--train.tracker", "none", "--optimizer.warmup-steps", "2"]


def command(encoder: Path, pairs: Path, run: Path, *more: str) -> list[str]:
    return ["pretrain", str(CONFIGS / "contrastive_tiny.py"), "--init-from", str(encoder / "run"), "--run-dir",
            str(run), "--data.source", str(pairs), *FLAGS, *more]


@pytest.fixture(scope="module")
def run(encoder, pairs) -> Path:
    options = ["--objective.widths", "4", "--objective.query-prompt", "ba de ",
               "--objective.negatives", "1", "--train.steps", "None", "--train.epochs", "3.5"]
    assert main(command(encoder, pairs, encoder / "vectors", *options)) == 0
    return encoder / "vectors"


@pytest.mark.slow  # objectives/test_contrastive.py has its losses
def test_in_batch_accuracy_rises(run):
    held_out = [line["eval_accuracy"] for line in metrics(run) if "eval_accuracy" in line]
    first = metrics(run)[0]
    assert first["step"] == 1 and first["accuracy"] < 0.3 and held_out[-1] > 0.5
    last = metrics(run)[-1]
    assert last["step"] == 40  # 3.5 passes over 360 rows in batches of 32
    assert last["eval_positive_cosine"] > last["eval_negative_cosine"] + 0.3


@pytest.mark.slow
def test_a_stop_changes_nothing_and_chunks_may_change(run, encoder, pairs, tmp_path):
    plain = command(encoder, pairs, tmp_path / "one")
    assert main(plain) == 0
    again = command(encoder, pairs, tmp_path / "other")
    assert stopped_after(25, again) == 143
    assert main(again) == 0
    assert metadata(tmp_path / "other", 40)["checksums"] == metadata(tmp_path / "one", 40)["checksums"]
    assert main([*again, "--train.steps", "41", "--objective.chunks", "4"]) == 0


@pytest.mark.slow
def test_its_vectors_by_every_way_out(run, tmp_path, capsys):
    from sentence_transformers import SentenceTransformer

    def printed(*arguments: str) -> str:
        assert main([*arguments]) == 0
        return capsys.readouterr().out

    assert main(["embed", str(run), "ba de"]) == 2
    assert "has the prompts {'query': 'ba de ', 'document': ''}; give the text of one" in capsys.readouterr().err
    vector = np.array(json.loads(printed("embed", str(run), "bo", "--prompt", "ba de "))["vector"])
    assert np.linalg.norm(vector) == pytest.approx(1.0, abs=1e-5)
    printed("export", str(run), str(tmp_path / "out"))
    theirs = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    np.testing.assert_allclose(theirs.encode_query("bo"), vector, atol=1e-5)
    again = json.loads(printed("embed", str(tmp_path / "out"), "bo", "--prompt", "ba de "))["vector"]
    np.testing.assert_allclose(again, vector, atol=1e-5)
    # Texts are cut to the length of the training everywhere.
    text = "bo de ka " * 40
    ours = json.loads(printed("embed", str(run), text, "--prompt", ""))["vector"]
    assert main(["embed", str(run), text, "--prompt", "", "--length", "4096"]) == 0
    assert "tokens of a text; --length 4096 changes nothing beyond" in capsys.readouterr().err
    np.testing.assert_allclose(theirs.encode_document(text), ours, atol=1e-5)
    shown = printed("show", str(run), "--examples", "1")
    assert "query  [CLS] " in shown.replace("▁", "") and "negative" in shown
    # Queries and documents have their prompts, and scores are the product where the folder says so.
    rows = [{"query": "bo", "positive": "de ka"}, {"query": "ka", "positive": "ba"}, {"query": "de", "positive": "bo"}]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for folder in (run, tmp_path / "out"):
        if folder != run:
            for name, change in (("modules.json", lambda modules: modules[:2]),
                                 ("config_sentence_transformers.json", lambda x: x | {"similarity_fn_name": "dot"})):
                (folder / name).write_text(json.dumps(change(json.loads((folder / name).read_text()))))
        printed("evaluate", str(folder), "--vectors", str(tmp_path / "q.jsonl"), "--predictions",
                str(tmp_path / "found.jsonl"), "--overwrite")
        peer = theirs if folder == run else SentenceTransformer(str(folder), device="cpu")
        wanted = peer.similarity(peer.encode_query([row["query"] for row in rows]),
                                 peer.encode_document([row["positive"] for row in rows])).numpy()
        found = [json.loads(line)["scores"] for line in (tmp_path / "found.jsonl").read_text().splitlines()]
        np.testing.assert_allclose(found, -np.sort(-wanted, axis=1), atol=1e-4)
        assert np.abs(wanted).max() > 1.5 or folder == run


@pytest.mark.slow  # huggingface/test_late_interaction.py has its vectors
def test_late_interaction_from_pairs_to_a_multi_vector_encoder(encoder, pairs, tmp_path, capsys):
    from sentence_transformers import MultiVectorEncoder

    flags = ["--objective.interaction", "late", "--objective.query-length", "12", "--objective.expand-queries", "True",
             "--objective.token-width", "16"]
    assert main(command(encoder, pairs, tmp_path / "late", *flags)) == 0
    assert [line["eval_accuracy"] for line in metrics(tmp_path / "late") if "eval_accuracy" in line][-1] > 0.5
    assert main(["export", str(tmp_path / "late"), str(tmp_path / "out")]) == 0
    rows = [json.loads(line) for line in pairs.read_text().splitlines()[:50]]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "late"), "--vectors", str(tmp_path / "q.jsonl"), "--json", "--predictions",
                 str(tmp_path / "found.jsonl")]) == 0
    result = json.loads(capsys.readouterr().out)
    theirs = MultiVectorEncoder(str(tmp_path / "out"), device="cpu")
    wanted = theirs.similarity(theirs.encode_query([row["query"] for row in rows]),
                               theirs.encode_document([row["positive"] for row in rows])).numpy()
    found = [json.loads(line)["scores"] for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    np.testing.assert_allclose(found, -np.sort(-wanted, axis=1)[:, :10], atol=1e-4)
    ranks = 1 + np.sum(wanted > np.diagonal(wanted)[:, None], axis=1)
    assert result["metrics"]["recall_at_10"] == pytest.approx(np.mean(ranks <= 10), abs=0.021)  # ties
    assert result["metrics"]["mrr_at_10"] > 0.3
    # It is a vector per token everywhere, and the settings go on.
    assert main(["embed", str(tmp_path / "late"), "bo de"]) == 0
    assert np.shape(json.loads(capsys.readouterr().out)["vector"])[1] == 16
    assert main(["embed", str(tmp_path / "late"), "bo de", "--out", str(tmp_path / "x.npy")]) == 2
    assert "has a vector per token, of which no array can be written" in capsys.readouterr().err
    again = command(tmp_path, pairs, tmp_path / "again", "--train.steps", "2")
    again[again.index(str(tmp_path / "run"))] = str(tmp_path / "late")
    assert main(again) == 0
    assert json.loads((tmp_path / "again/config.json").read_text())["objective"]["expand_queries"] is True


def test_refusals(encoder, pairs, tmp_path, capsys):
    assert main(command(encoder, pairs, tmp_path / "x", "--train.accumulate", "2")) == 2
    assert "train.accumulate 2 would compare only the rows of a microbatch" in capsys.readouterr().err
    text = (CONFIGS / "contrastive_tiny.py").read_text().replace("dropout=0.0", "dropout=0.1")
    own = "jaxlm.objectives.self_contrastive import SelfContrastive as Contrastive"
    (tmp_path / "text.py").write_text(text.replace("jaxlm.tasks.contrastive import Contrastive", own))
    flags = ["--init-from", str(encoder / "run"), "--data.source", str(pairs), "--run-dir", str(tmp_path / "y")]
    assert main(["pretrain", str(tmp_path / "text.py"), *flags, "--data.length", "32"]) == 2
    assert "reads text without labels; rows of texts are for contrastive_tiny" in capsys.readouterr().err
    assert main(["pretrain", str(CONFIGS / "contrastive_tiny.py"), "--data.source", str(pairs)]) == 2
    assert "--init-from RUN_OR_HF_DIR" in capsys.readouterr().err
    assert main(["plan", str(CONFIGS / "contrastive_tiny.py"), "--train.accumulate", "4"]) == 2
    assert "objective.chunks to 4" in capsys.readouterr().err


@pytest.mark.slow
def test_sentences_find_themselves(encoder, tmp_path, capsys):
    arguments = ["pretrain", str(CONFIGS / "simcse_tiny.py"), "--init-from", str(encoder / "run"), "--data.source",
                 str(encoder / "text.txt"), *FLAGS, "--run-dir", str(tmp_path / "run"), "--data.sentences", "False"]
    assert main(arguments) == 0
    lines = [line for line in metrics(tmp_path / "run") if "eval_negative_cosine" in line]
    # Texts move apart, which is what there is to learn without labels.
    first = metrics(tmp_path / "run")[0]
    assert lines[-1]["eval_negative_cosine"] < first["negative_cosine"] - 0.1
    assert lines[-1]["eval_positive_cosine"] == pytest.approx(1.0, abs=1e-5)
    capsys.readouterr()
    still = ["--objective.model.dropout", "0", "--objective.model.attention-dropout", "0"]
    assert main([*arguments, "--run-dir", str(tmp_path / "still"), *still]) == 2
    assert "draws dropout twice, and the model has none" in capsys.readouterr().err
