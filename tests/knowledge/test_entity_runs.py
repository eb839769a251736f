"""Runs on text with mentions: stopped and resumed, shown, exported, begun from a BERT, and refused."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from jaxlm.cli import main
from jaxlm.knowledge.knowledge_graph import Vectors, write_vectors
from jaxlm.runs.load import load_model, load_run
from tests.training.support import assert_same_arrays, metadata, metrics, write_preset, write_text
from tests.training.test_run import refused, stopped_after

PRESET = """
from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.knowledge.linked_text import LinkedText
from jaxlm.knowledge.ernie import Ernie
from jaxlm.knowledge.entity_autoencoder import EntityAutoencoder

experiment = Experiment(
    objective=EntityAutoencoder(
        model=Ernie(
            hidden_size=16, num_layers=3, num_text_layers=1, num_heads=2, intermediate_size=32, max_positions=32,
            dropout=0.0, attention_dropout=0.0, entity_hidden_size=8, entity_num_heads=2,
        ),
        entities={graph!r},
    ),
    data=LinkedText(source={text!r}, length=32, vocab_size=512, held_out=0.1),
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2, schedule="constant"),
    train=TrainConfig(steps=6, batch_size=8, log_every=3, eval_every=0, eval_batches=2, checkpoint_every=3,
                      tracker="none"),
)
"""


@pytest.fixture(scope="module")
def linked(tmp_path_factory) -> Path:
    """A preset with its text, in which every fourth word is a mention of itself, and a graph that has most of them."""
    folder = tmp_path_factory.mktemp("linked")
    draw, names = random.Random(0), set()
    with (folder / "text.jsonl").open("w") as file:
        for text in write_text(folder / "text.txt").read_text().split("\n\n"):
            starts = [0, *(i + 1 for i, char in enumerate(text) if char == " ")]
            spans = [(start, start + len(text[start:].split()[0])) for start in draw.sample(starts, len(starts) // 4)]
            names |= {text[start:end] for start, end in spans}
            mentions = [{"start": start, "end": end, "id": text[start:end]} for start, end in spans]
            file.write(json.dumps({"text": text, "entities": mentions}) + "\n")
    (folder / "graph").mkdir()
    kept = tuple(sorted(names))[10:]
    vectors = np.random.default_rng(0).normal(size=(len(kept), 8)).astype(np.float32)
    write_vectors(folder / "graph", "entity", Vectors(kept, vectors))
    preset = folder / "ernie.py"
    preset.write_text(PRESET.format(graph=str(folder / "graph"), text=str(folder / "text.jsonl")))
    return preset


@pytest.mark.slow
def test_stopping_changes_nothing(linked, tmp_path):
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    assert main(["pretrain", str(linked), "--run-dir", str(whole)]) == 0
    for steps in (2, 6):
        code = stopped_after(steps, ["pretrain", str(linked), "--run-dir", str(pieces)])
        assert code == (0 if steps == 6 else 143)
    assert metadata(pieces, 6) == metadata(whole, 6) and metrics(pieces) == metrics(whole)
    assert_same_arrays(load_run(pieces).params, load_run(whole).params)


@pytest.mark.slow
def test_a_run_is_shown_and_exported_and_other_vectors_are_refused(linked, tmp_path, capsys):
    whole = tmp_path / "whole"
    assert main(["pretrain", str(linked), "--run-dir", str(whole)]) == 0
    said = capsys.readouterr().out
    assert "mentions of" in said and f"of them in {linked.parent / 'graph'}; 6 steps are" in said
    assert {"dea_loss", "dea_accuracy", "eval_dea_loss", "eval_nsp_loss", "eval_mlm_loss"} <= set(metrics(whole)[-1])

    # The same vectors under other names are other entities.
    names, vectors = (linked.parent / "graph" / name for name in ("entity2id.txt", "vectors.safetensors"))
    (tmp_path / "renamed").mkdir()
    first, *others = names.read_text().splitlines()
    swapped = [line.split("\t")[0] for line in (others[1], others[0], *others[2:])]
    renamed = "\n".join([first, *(f"{name}\t{i}" for i, name in enumerate(swapped))]) + "\n"
    (tmp_path / "renamed" / "entity2id.txt").write_text(renamed)
    (tmp_path / "renamed" / "vectors.safetensors").write_bytes(vectors.read_bytes())
    said = refused(
        capsys, "pretrain", linked, "--run-dir", whole, "--train.steps", "8", "--objective.entities",
        tmp_path / "renamed",
    )
    assert "objective.entities holds other weights than when this run began" in said

    assert main(["show", str(whole), "--examples", "2"]) == 0
    assert ", kept" in capsys.readouterr().out
    assert main(["export", str(whole), str(tmp_path / "out")]) == 0
    exported = load_model(tmp_path / "out")
    assert exported.objective.model == load_run(whole).objective.model
    assert_same_arrays(exported.params, load_run(whole).params)
    flags = ["--init-from", str(tmp_path / "out"), "--run-dir", str(tmp_path / "continued"), "--train.steps", "1"]
    assert main(["pretrain", str(linked), *flags]) == 0


@pytest.mark.slow  # test_entity_autoencoder.py has what it takes from it
def test_a_run_begins_with_a_bert(linked, tmp_path, capsys):
    bert, run = write_preset(tmp_path, linked.parent / "text.txt"), tmp_path / "run"
    text = bert.read_text().replace("num_layers=1", "num_layers=3").replace('"document"', '"next-sentence"')
    bert.write_text(text)
    assert main(["pretrain", str(bert), "--run-dir", str(tmp_path / "bert"), "--train.steps", "1"]) == 0
    flags = ["--run-dir", str(run), "--init-from", str(tmp_path / "bert"), "--train.steps", "1"]
    capsys.readouterr()
    assert main(["pretrain", str(linked), *flags]) == 0
    said = capsys.readouterr().out
    assert "randomly initialized: entity_encoder, entity_head\n" in said
    fill = ["fill-mask", str(run), "ba [MASK] ki"]
    assert main(fill) == 0
