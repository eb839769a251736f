"""Fine-tuned runs beside PyTorch: the losses of the same steps, and the predictions of `pipeline` on an export."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from jaxlm.cli import main
from jaxlm.config.presets import load_config
from jaxlm.huggingface import ModelCard, export_folder
from jaxlm.objectives.causal_lm import CausalLM
from jaxlm.runs.load import load_run
from tests.huggingface.support import minilm, save_torch, torch_bert
from tests.huggingface.test_tasks import MODELS, Gpt2
from tests.huggingface.test_tasks import tokenizer as bpe  # noqa: F401 - a fixture
from tests.params import random_params

NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
WORDS = ("the", "cat", "dog", "sat", "ran", "on", "under", "mat", "tree", "and")


def sentences(count: int) -> list[tuple[str, str]]:
    """Return texts of 2 to 12 words, with a label that depends on them."""
    rng = np.random.default_rng(0)
    found = [" ".join(rng.choice(WORDS, rng.integers(2, 13))) for _ in range(count)]
    return [(text, str(int("cat" in text.split()))) for text in found]


def write_rows(path: Path, rows, column: str = "text") -> Path:
    path.write_text("\n".join("\t".join(row) for row in [(column, "label"), *rows]) + "\n", encoding="utf-8")
    return path


def fine_tune(start: Path, rows: Path, run: Path, steps: int, *flags: str, preset: str = "classify") -> Path:
    common = {"train.steps": steps, "train.epochs": 0, "train.log-every": 1, "objective.classifier-dropout": 0}
    arguments = [text for name, value in common.items() for text in (f"--{name}", str(value))]
    assert main(["finetune", f"configs/tasks/{preset}.py", "--init-from", str(start), "--data.source", str(rows),
                 "--run-dir", str(run), *arguments, *flags]) == 0
    return run


def logged_losses(run: Path) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def their_losses(start: Path, run: Path) -> list[float]:
    """Return the losses of PyTorch's AdamW for the same weights, rows, order, rates, decay and clipping."""
    opened, experiment = load_run(run), load_config(run / "config.json")
    train, optimizer, data = experiment.train, experiment.optimizer, experiment.data
    batches = data.open(opened.tokenizer).batches(
        "train", train.batch_size, opened.objective.row_format(data.length), train.seed)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(start)
    decayed = {name for name, p in model.named_parameters() if p.ndim == 2}
    groups = [
        {"params": [p for name, p in model.named_parameters() if (name in decayed) is decay],
         "weight_decay": optimizer.weight_decay if decay else 0.0}
        for decay in (True, False)
    ]
    adam = torch.optim.AdamW(groups, lr=optimizer.learning_rate, betas=(optimizer.b1, optimizer.b2), eps=optimizer.eps)
    schedule = transformers.get_linear_schedule_with_warmup(adam, optimizer.warmup_steps, train.steps)
    losses = []
    for step in range(train.steps):
        batch = {name: torch.tensor(array).long() for name, array in batches.batch(step).items()}
        loss = model(labels=batch.pop("label"), **{name: batch[name] for name in batch if name != "row"}).loss
        losses.append(loss.item())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optimizer.clip_norm)
        adam.step()
        schedule.step()
        adam.zero_grad()
    return losses


@pytest.fixture(scope="module")
def bert_run(tmp_path_factory, vocab_file) -> tuple[Path, Path]:
    """Return the pretrained folder and the run of twenty steps."""
    folder = tmp_path_factory.mktemp("bert")
    labels = dict(id2label={0: "0", 1: "1"}, label2id={"0": 0, "1": 1})
    start = save_torch(torch_bert("gelu", "BertForSequenceClassification", **NO_DROPOUT, **labels), folder / "hf",
                       vocab_file)
    rows = write_rows(folder / "rows.tsv", sentences(60), "review")
    flags = ("--data.text-field", "review", "--data.length", "16", "--train.batch-size", "6",
             "--optimizer.learning-rate", "3e-3")
    return start, fine_tune(start, rows, folder / "run", 20, *flags)


@pytest.mark.slow  # test_step.py has twenty of pretraining
def test_twenty_steps_have_the_losses_of_pytorch(bert_run):
    start, run = bert_run
    ours, theirs = logged_losses(run), their_losses(start, run)
    assert len(ours) == 20 and np.ptp(ours) > 0.1
    np.testing.assert_allclose(ours, theirs, atol=1e-3)


def predictions(model: Path, rows: Path, out: Path, *flags: str) -> list:
    assert main(["evaluate", str(model), "--data.source", str(rows), "--predictions", str(out), *flags]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.slow  # test_tasks.py has the logits
def test_the_pipeline_gives_our_predictions(bert_run, tmp_path):
    _, run = bert_run
    texts = sentences(12)
    rows = write_rows(tmp_path / "rows.tsv", texts, "review")
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    ours = predictions(run, rows, tmp_path / "ours.jsonl")
    # The export, imported again, reads rows and predicts as the run does.
    again = predictions(tmp_path / "out", rows, tmp_path / "again.jsonl")
    assert [row["prediction"] for row in again] == [row["prediction"] for row in ours]
    pipe = transformers.pipeline("text-classification", str(tmp_path / "out"), device="cpu")
    for mine, theirs in zip(ours, pipe([text for text, _ in texts], batch_size=5), strict=True):
        assert theirs["label"] == f"LABEL_{mine['prediction']}"
        assert abs(theirs["score"] - mine["scores"][mine["prediction"]]) < 1e-4
    card = (tmp_path / "out" / "README.md").read_text()
    assert "AutoModelForSequenceClassification" in card and "| Labels | LABEL_0, LABEL_1 |" in card


@pytest.mark.slow
def test_the_pipeline_gives_a_decoders_predictions(bpe, tmp_path):  # noqa: F811
    objective = CausalLM(model=MODELS[Gpt2].for_vocabulary(bpe.vocabulary)).bind_unchecked(bpe.vocabulary)
    start = export_folder(tmp_path / "hf", objective, random_params(objective, 0), bpe, ModelCard())
    texts = [(f"{a}{b}s the tree, " * count + "then", "yes" if count > 1 else "no")
             for count, (a, b) in enumerate(["ak", "bl", "cm", "dn"])]
    rows = write_rows(tmp_path / "rows.tsv", texts)
    run = fine_tune(start, rows, tmp_path / "run", 2, "--data.length", "37", "--train.batch-size", "2")
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    pipe = transformers.pipeline("text-classification", str(tmp_path / "out"), device="cpu")
    ours = predictions(run, rows, tmp_path / "ours.jsonl")
    for mine, theirs in zip(ours, pipe([text for text, _ in texts], batch_size=4), strict=True):
        assert theirs["label"] == mine["prediction"]
        assert abs(theirs["score"] - mine["scores"][mine["prediction"]]) < 1e-4


@pytest.mark.slow
def test_the_pipeline_tags_words_as_we_do(vocab_file, tmp_path):
    start = save_torch(torch_bert("gelu", **NO_DROPOUT), tmp_path / "hf", vocab_file)
    words = [text.replace("cat", "cats").replace("dog", "dogged").split() for text, _ in sentences(12)]
    lines = "\n".join(
        "".join(f"{word}\t{'THING' if word[0] in 'cdtm' else 'OTHER'}\n" for word in own) for own in words)
    rows = tmp_path / "rows.conll"
    rows.write_text(lines + "\n")
    run = fine_tune(start, rows, tmp_path / "run", 25, "--data.length", "40", "--train.batch-size", "6",
                    "--optimizer.learning-rate", "3e-3", preset="tag")
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    ours = predictions(run, rows, tmp_path / "ours.jsonl")
    pipe = transformers.pipeline(
        "token-classification", str(tmp_path / "out"), aggregation_strategy="first", device="cpu")
    assert {tag for row in ours for tag in row["prediction"]} == {"OTHER", "THING"}
    for own, row in zip(words, ours, strict=True):
        places = np.cumsum([0, *(len(word) + 1 for word in own[:-1])])
        groups = pipe(" ".join(own))
        tags = [next(g["entity_group"] for g in groups if g["start"] <= place < g["end"]) for place in places]
        assert tags == row["prediction"]


@pytest.mark.slow
def test_minilm_on_sst2_has_the_losses_of_pytorch(tmp_path, real_data):
    """Trained weights on real rows, at BERT's learning rate."""
    labels = dict(id2label={0: "0", 1: "1"}, label2id={"0": 0, "1": 1})
    model = transformers.AutoModelForSequenceClassification.from_pretrained(minilm(), **labels, **NO_DROPOUT)
    model.save_pretrained(tmp_path / "hf")
    transformers.AutoTokenizer.from_pretrained(minilm()).save_pretrained(tmp_path / "hf")
    with gzip.open(real_data / "glue/SST-2/train.tsv.gz", "rt", encoding="utf-8") as file:
        (tmp_path / "rows.tsv").write_text("".join(itertools.islice(file, 400)), encoding="utf-8")
    flags = ("--train.batch-size", "16")
    run = fine_tune(tmp_path / "hf", tmp_path / "rows.tsv", tmp_path / "run", 20, *flags, preset="sst2")
    ours, theirs = logged_losses(run), their_losses(tmp_path / "hf", run)
    assert len(ours) == 20
    np.testing.assert_allclose(ours, theirs, atol=1e-3)
