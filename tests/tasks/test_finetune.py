"""`jaxlm finetune` and `evaluate` on small models: every kind of task, every family, and mistakes of users."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxlm.cli import main
from jaxlm.data.labelled import LabelledSource, Record
from jaxlm.data.text import TextData
from jaxlm.errors import UserError
from jaxlm.huggingface import ModelCard, export_folder, import_folder
from jaxlm.inference.generate import Settings, continuations
from jaxlm.knowledge.triples import TripleData
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.runs.load import load_model, load_run
from jaxlm.runs.resolve import folder_experiment, resolve
from jaxlm.runs.session import set_up
from jaxlm.tasks.classification import Classification, TextRows
from jaxlm.tasks.text_to_text import TextToText
from jaxlm.training.checkpoints import Checkpoints
from tests.params import random_params
from tests.tasks.support import FAST, finetune, result, sentences
from tests.training.support import metadata, metrics, saved_steps, stopped_after

KINDS = {
    "classify": {"accuracy", "f1", "matthews"},
    "pair": {"pearson", "spearman"},
    "choose": {"accuracy"},
    "tag": {"accuracy", "precision", "recall", "f1", "conlleval_f1"},
    "squad": {"exact_match", "f1"},
}


NO_LABELS = {
    "classify": ["--data.label-field", ""], "pair": ["--data.label-field", ""], "choose": ["--data.label-field", ""],
    "tag": ["--data.tag-column", "0"],
}


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "family"), [
    ("classify", "bert"), ("squad", "bert"), ("pair", "bert"), ("choose", "bert"), ("tag", "bert"), ("classify", "t5"),
    ("squad", "t5"), ("choose", "gpt1"), ("tag", "gpt2"), ("pair", "t5"), ("tag", "t5"), ("choose", "t5"),
    ("squad", "xlnet"),
])
def test_every_kind_of_task(preset, family, models, rows, tmp_path, capsys):
    """Training and evaluation work, and `evaluate` on the run gives the same metrics and predictions."""
    flags = {"pair": ["--objective.target", "number"], "squad": ["--objective.window-stride", "16"]}.get(preset, [])
    if family == "t5":  # its objective is text to text
        flags = [flag.replace("--objective.", "--objective.kind.") for flag in flags] if preset == "pair" else []
    assert finetune(preset, rows[preset], models(family), tmp_path / "run", *flags) == 0
    first = result(capsys)
    details = {"classes", "confusion"} if preset == "classify" else set()
    assert set(first) == {"task", "metrics", "examples"} | details and set(first["metrics"]) == KINDS[preset]
    assert first["examples"] == 4
    out = tmp_path / "answers.jsonl"
    assert main(["evaluate", str(tmp_path / "run"), "--data.source", str(rows[preset]), "--predictions", str(out)]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == 40 and all({"id", "prediction", "gold"} <= line.keys() for line in lines)
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "run"), "--json"]) == 0
    assert result(capsys) == first
    # Rows without labels are answered just as well.
    flags, source = NO_LABELS.get(preset, []), rows[preset]
    if preset == "squad":
        source = tmp_path / "bare.json"
        source.write_text(re.sub(r'"answers": \[[^]]*\]', '"is_impossible": false', rows[preset].read_text()))
    assert main(["evaluate", str(tmp_path / "run"), "--data.source", str(source), "--predictions", str(out), "--json",
                 "--overwrite", *flags]) == 0
    assert result(capsys)["metrics"] == {}
    bare = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["prediction"] for line in bare] == [line["prediction"] for line in lines]
    assert {line["gold"] for line in bare} == {None}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["xlnet", "gpt2", "albert", "electra"])
def test_the_other_families(family, models, rows, tmp_path, capsys):
    assert finetune("classify", rows["classify"], models(family), tmp_path / "run") == 0
    assert result(capsys)["task"] == "classification"


@pytest.mark.slow
def test_text_to_text(models, rows, tmp_path, capsys):
    flags = ["--objective.max-target", "8"]
    assert finetune("text_to_text", rows["text_to_text"], models("t5"), tmp_path / "t5", *flags) == 0
    assert set(result(capsys)["metrics"]) == {"exact_match", "f1"}
    # Flags belong to the text-to-text objective; those of the task are fields of `kind`.
    flags = ["--as-text", "--objective.max-target", "16", "--objective.kind.metric", "entities"]
    assert finetune("tag", rows["tag"], models("gpt2"), tmp_path / "written", *flags) == 0
    found = result(capsys)
    assert found["task"] == "text_to_text" and "precision" in found["metrics"]


def test_classification_learns(models, rows, tmp_path, capsys, curves):
    flags = ["--data.dev", str(rows["same"]), "--train.steps", "240", "--optimizer.learning-rate", "3e-3",
             "--train.batch-size", "16"]
    assert finetune("classify", rows["classify"], models("bert"), tmp_path / "run", *flags) == 0
    assert result(capsys)["metrics"] == {"accuracy": 1.0, "f1": 1.0, "matthews": 1.0}
    assert (tmp_path / "run" / "curves.png").stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "electra"])
def test_the_encoder_starts_from_the_pretrained_one(family, models, rows, tmp_path, capsys):
    """At step 0 all parameters but the heads are those of the folder (of ELECTRA's discriminator); training options
    are those of the flags."""
    flags = ["--train.keep-checkpoints", "5", "--objective.model.dropout", "0.05"]
    assert finetune("classify", rows["classify"], models(family), tmp_path / "run", *flags) == 0
    run = load_run(tmp_path / "run")
    source = import_folder(models(family))
    shapes = jax.eval_shape(run.objective.init, jax.random.key(0))
    begun, _ = Checkpoints(tmp_path / "run" / "checkpoints", read_only=True).restore_params(shapes, step=0)
    own = source.params["discriminator"] if family == "electra" else source.params
    for ours, theirs in zip(jax.tree.leaves(begun["encoder"]), jax.tree.leaves(own["encoder"]), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert "mlm_head" not in begun and set(begun) >= {"classifier", "pooler", "embeddings"}
    attention_dropout = 0.1 if family == "electra" else 0.0
    assert (run.objective.model.dropout, run.objective.model.attention_dropout) == (0.05, attention_dropout)
    # The same command with more steps goes on, with the warm-up that it began with.
    flags += ["--train.steps", "12"]
    assert finetune("classify", rows["classify"], models(family), tmp_path / "run", *flags) == 0
    assert load_run(tmp_path / "run").step == 12
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "run"), "--data.length", "100"]) == 2
    assert "more than the model's 64 positions" in capsys.readouterr().err


@pytest.mark.slow
def test_new_symbols_get_rows_of_their_own(models, rows, tmp_path, capsys):
    """GPT-1's start, delimiter and end tokens are appended to the embedding."""
    assert finetune("classify", rows["classify"], models("gpt1"), tmp_path / "run", "--train.steps", "1",
                    "--optimizer.learning-rate", "1e-12") == 0
    run = load_run(tmp_path / "run")
    params, source = run.params, import_folder(models("gpt1"))
    theirs = source.params["embeddings"]["word"]["embedding"]
    ours = params["embeddings"]["word"]["embedding"]
    assert len(ours) == len(theirs) + 3 == run.tokenizer.vocabulary.size
    np.testing.assert_allclose(ours[: len(theirs)], theirs, atol=1e-6)
    v = run.tokenizer.vocabulary
    assert [v.id(name) for name in ("[START]", "[DELIMITER]", "[EXTRACT]")] == [len(theirs) + i for i in range(3)]
    capsys.readouterr()


@pytest.mark.slow
def test_both_orders_and_the_language_model_loss(models, rows, tmp_path, capsys):
    """GPT-1 reads a pair in both orders, adds their vectors, and also predicts the text."""
    flags = ["--objective.target", "number", "--objective.both-orders", "True", "--objective.lm-coefficient", "0.5"]
    assert finetune("pair", rows["pair"], models("gpt1"), tmp_path / "run", *flags) == 0
    assert "lm_loss" in (tmp_path / "run" / "metrics.jsonl").read_text()
    assert set(result(capsys)["metrics"]) == KINDS["pair"]


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["classify", "tag"])
def test_elmo_from_a_run(preset, rows, tmp_path, capsys):
    """ELMo mixes its layers and averages the vectors of a text's words."""
    others = [f"{text} word{i} word{i}" for i, text in enumerate(sentences(450))]
    (tmp_path / "text.txt").write_text("\n\n".join(others))
    sizes = dict(hidden_size=8, cell_size=16, character_size=4, filter_widths=2, num_highways=0)
    flags = [f"--objective.model.{name.replace('_', '-')}={value}" for name, value in sizes.items()]
    flags += ["--objective.noise-words", "0", "--data.length", "16", "--data.vocab-size", "512"]
    assert main(["pretrain", "configs/elmo_tiny.py", "--data.source", str(tmp_path / "text.txt"), "--run-dir",
                 str(tmp_path / "elmo"), "--train.steps", "1", "--train.batch-size", "4", *flags]) == 0
    capsys.readouterr()
    assert finetune(preset, rows[preset], str(tmp_path / "elmo"), tmp_path / preset) == 0
    assert "accuracy" in result(capsys)["metrics"]
    params = load_run(tmp_path / preset).params
    assert set(params["mix"]) == {"weights", "scale"} and "softmax" not in params


@pytest.mark.slow
def test_early_stopping_keeps_the_best(models, rows, tmp_path, capsys):
    """At a high learning rate the loss soon rises: the run ends, and later commands read the best checkpoint."""
    flags = ["--train.steps", "60", "--train.eval-every", "2", "--train.patience", "2",
             "--optimizer.learning-rate", "1", "--optimizer.warmup-share", "0", "--optimizer.warmup-steps", "0",
             "--optimizer.schedule", "constant"]
    assert finetune("classify", rows["classify"], models("bert"), tmp_path / "run", *flags) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}
    best = min(losses, key=losses.get)
    assert max(losses) == best + 4 < 60
    assert load_run(tmp_path / "run").step == best
    assert f"Finished {best + 4} of 60 steps" in capsys.readouterr().err
    assert main(["finetune", str(tmp_path / "run")]) == 0
    assert "raise --train.patience to train longer" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_that_is_ended_early_is_evaluated(models, rows, tmp_path, capsys):
    arguments = ["finetune", "configs/tasks/classify.py", "--init-from", models("bert"), "--data.source",
                 str(rows["classify"]), "--run-dir", str(tmp_path / "run"), "--json", *FAST]
    assert stopped_after(1, arguments) == 143
    capsys.readouterr()
    assert main([*arguments, "--train.steps", "1"]) == 0
    found = result(capsys)
    assert found["examples"] == 4 and set(found["metrics"]) == KINDS["classify"]


@pytest.mark.slow
def test_the_best_checkpoint_by_a_metric_of_the_task(models, rows, tmp_path, capsys):
    """It is chosen by the figures that `evaluate` gives, the same for a run that was resumed."""
    flags = ["--train.eval-every", "15", "--train.best-by", "matthews", "--train.keep-checkpoints", "1",
             "--objective.model.dropout", "0.1", "--objective.model.attention-dropout", "0.1",
             "--optimizer.learning-rate", "0.01", "--optimizer.warmup-share", "0", "--optimizer.warmup-steps", "0",
             "--optimizer.schedule", "constant", "--train.batch-size", "16", "--data.dev", str(rows["same"])]
    found = {}
    for name, lengths in (("whole", (60,)), ("resumed", (15, 60))):
        for steps in lengths:
            assert finetune("classify", rows["classify"], models("bert"), tmp_path / name, *flags,
                            "--train.steps", str(steps)) == 0
        said = capsys.readouterr()
        lines = [line for line in metrics(tmp_path / name) if "eval_matthews" in line]
        figures = {line["step"]: line["eval_matthews"] for line in lines}
        best = max(figures, key=figures.get)
        final = json.loads(said.out.splitlines()[-1])["metrics"]["matthews"]
        assert final == pytest.approx(figures[best], abs=1e-6) and figures[best] > min(figures.values())
        assert load_run(tmp_path / name).step == best < 60 and saved_steps(tmp_path / name) == [best, 60]
        assert f"(best: {figures[best]:.4f} at step {best})" in said.err
        assert f"Best: step {best}, matthews {figures[best]:.4f}" in said.err
        found[name] = lines, metadata(tmp_path / name, best)["checksums"]
    assert found["whole"] == found["resumed"]
    # A finished run is evaluated as it was trained, whatever a later command says.
    assert finetune("classify", rows["classify"], models("bert"), tmp_path / "whole", *flags, "--train.steps", "60",
                    "--train.best-by", "") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["metrics"]["matthews"] == final
    assert finetune("classify", rows["classify"], models("bert"), tmp_path / "no", "--train.best-by", "bleu") == 2
    assert "train.best_by is 'bleu'; the figures of this run are loss, accuracy" in capsys.readouterr().err


@pytest.mark.slow
def test_chosen_parameters_are_frozen(models, rows, tmp_path, capsys):
    """A linear probe: the encoder's weights stay as they are, and the optimizer has no state for them."""
    flags = ["--train.accumulate", "2", "--optimizer.learning-rate", "0.1", "--optimizer.warmup-share", "0",
             "--optimizer.warmup-steps", "0", "--optimizer.freeze", "*", "!pooler/*", "!classifier"]
    assert finetune("classify", rows["classify"], models("bert"), tmp_path / "run", *flags) == 0
    assert re.search(r"parameters \([\d,]+ of them frozen\)", capsys.readouterr().err)
    begun, trained = import_folder(models("bert")).params, load_run(tmp_path / "run").params
    for name in ("embeddings", "encoder"):
        jax.tree.map(np.testing.assert_array_equal, begun[name], jax.device_get(trained[name]))
    assert not np.array_equal(begun["pooler"]["kernel"], trained["pooler"]["kernel"])
    for pattern, message in (("bilm*", "the pattern 'bilm*' matches no parameter; those of this run begin with "),
                             ("*", "optimizer.freeze leaves no parameter to train")):
        flags = ["--optimizer.freeze", pattern]
        assert finetune("classify", rows["classify"], models("bert"), tmp_path / "no", *flags) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow  # tests/huggingface/test_beams.py has beams
def test_answers_by_beam_search(models):
    source = import_folder(models("t5"))
    task = TextToText(max_target=6, beams=3, length_penalty=0.6).with_pretrained_model(source)
    task = task.bind(source.tokenizer.vocabulary, 64)
    texts = ["the red house", "a cat", "the old dog runs"]
    records = [Record(text, "", {"source": text, "targets": None}, (text,)) for text in texts]
    answers = task.answers(source.params, LabelledSource(source.tokenizer, {"held_out": records}, True), 64, 2)
    prompts = [source.tokenizer.encode(text) for text in texts]
    found = continuations(task, source.params, prompts, Settings(max_new_tokens=6, beams=3, length_penalty=0.6))
    assert [answer.prediction for answer in answers] == [source.tokenizer.decode(each.ids).strip() for each in found]


def test_steps_follow_from_epochs_unless_they_are_given(models, rows, tmp_path):
    def numbers(*flags, preset="configs/tasks/classify.py"):
        flags = ["--data.source", str(rows["classify"]), "--data.length", "64", *flags]
        experiment = set_up(resolve(str(preset), flags, models("bert")), load_model).open_data().experiment
        return experiment.train.steps, experiment.optimizer.warmup_steps

    assert numbers("--train.batch-size", "4") == (27, 3), "3 epochs of 36 rows, a tenth of them warm-up"
    assert numbers("--train.batch-size", "4", "--train.epochs", "2", "--optimizer.warmup-share", "0.5") == (18, 9)
    assert numbers("--train.steps=90") == (90, 9)
    assert numbers("--train.steps=90", "--optimizer.warmup-steps", "5") == (90, 5)
    with pytest.raises(UserError, match=r"train.epochs 2.0 and train.steps 90 are both given; set train.steps to"):
        numbers("--train.steps", "90", "--train.epochs", "2")
    preset = tmp_path / "preset.py"
    preset.write_text(Path("configs/tasks/classify.py").read_text().replace("warmup_steps=None, ", ""))
    with pytest.raises(UserError, match=r"warmup_share 0.1 and optimizer.warmup_steps 10000 are both given"):
        numbers(preset=preset)


def test_how_the_rows_of_a_transformers_folder_are_read(models, tmp_path):
    """In small batches, up to the length of its tokenizer, and with the columns that an export has stored."""
    source, rows = import_folder(models("bert")), {"text_pair_field": "other", "source": "train.tsv"}
    task = Classification(labels=("a", "b")).with_pretrained_model(source).bind(source.tokenizer.vocabulary, 64)
    export_folder(tmp_path / "out", task, random_params(task), source.tokenizer, ModelCard(), settings={"rows": rows})
    found = import_folder(tmp_path / "out")
    experiment = folder_experiment(found)
    assert experiment.train.batch_size == 32 and experiment.data == TextRows(length=64, text_pair_field="other")
    model = dataclasses.replace(task.model, max_positions=4096)
    for length, wanted in ((2048, 2048), (8192, 4096), (None, 512)):
        longer = dataclasses.replace(found, objective=dataclasses.replace(task, model=model), length=length)
        assert folder_experiment(longer).data.length == wanted
    file = tmp_path / "out" / "config.json"
    file.write_text(file.read_text().replace('"other"', "3"))
    with pytest.raises(UserError, match=r"out: in config.json, jaxlm.rows.text_pair_field is 3; it must be str"):
        folder_experiment(import_folder(tmp_path / "out"))


def test_show_draws_examples(models, rows, capsys):
    assert main(["show", "configs/tasks/squad.py", "--init-from", models("bert"), "--data.source", str(rows["squad"]),
                 "--data.length", "64", "--examples", "8"]) == 0
    shown = capsys.readouterr().out
    assert "[CLS]" in shown and "answer" in shown
    assert main(["show", "configs/tasks/squad.py", "--init-from", models("gpt2"), "--as-text", "--data.source",
                 str(rows["squad"]), "--data.length", "64", "--objective.max-target", "8"]) == 0
    shown = capsys.readouterr().out
    assert "  text  " in shown and "answer  *" in shown


def test_refusals_before_rows_are_read(models, tmp_path, capsys, monkeypatch):
    """The files of rows and of text do not exist."""
    for preset, flag in (("classify", "--train.best-by=f1"), ("tag", "--train.patience=2")):
        assert finetune(preset, "missing", models("bert"), tmp_path / "run", flag, "--data.held-out", "0") == 2
        assert "train.best_by and train.patience need held-out data" in capsys.readouterr().err
    flags = ["--train.patience", "2", "--data.held-out", "0", "--data.source", "missing"]
    assert main(["pretrain", "configs/bert_tiny.py", "--run-dir", str(tmp_path / "run"), *flags]) == 2
    assert "train.best_by and train.patience need held-out data" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    for data in (TextRows(dev="a", held_out=0.0), TripleData(dev="a", held_out=0.0), TextData()):
        assert data.has_held_out
    monkeypatch.delattr(MaskedLM, "describe")
    assert main(["show", "configs/bert_tiny.py", "--data.source", "missing"]) == 2
    assert "MaskedLM has no `describe` method" in capsys.readouterr().err


MISTAKES = {
    "label": ("classify", "text\tlabel\na\tx\nb\ty\nc\tx\nd\ty\n", "text\tlabel\nred\tz\n",
              r"dev.tsv, line 2: the label 'z' is not one of the training rows' \(x, y\); .*--objective\.labels"),
    "column": ("classify", "words\tlabel\na\tx\n", None, "line 1: there is no column 'text'; it has 'words', 'label'"),
    "short row": ("classify", "text\tlabel\na\tx\nb\n", None, "line 3 has 1 column instead of 2"),
    "number": ("pair", "text\ttext_pair\tlabel\na\tb\t1.5\nc\td\tmany\n" * 4, None, "the label 'many' is no number"),
    "span": ("squad", json.dumps({"data": [{"paragraphs": [{"context": "red house", "qas": [
        {"id": "q7", "question": "?", "answers": [{"text": "blue", "answer_start": 0}]}]}]}]}), None,
        "question q7: the answer 'blue' does not stand at character 0"),
    "form": ("squad", "{}", None, r"train.json cannot be read \(it lacks 'data'\); is it whole"),
    "choices": ("choose", '{"text": "a", "choices": ["b", "c"], "label": 0}\n{"text": "a", "choices": ["b", "c", "d"],'
                ' "label": 0}\n', None, "line 2 has 3 choices, the rows before 2"),
    "choice": ("choose", '{"text": "a", "choices": ["b", "c"], "label": 5}\n', None,
               "line 1: the label '5' is none of"),
    "tags": ("tag", "red X\n", None, "the word stands in 1"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_a_file_gets_one_sentence(name, models, tmp_path, capsys):
    preset, train, dev, message = MISTAKES[name]
    suffix = {"choose": "jsonl", "squad": "json", "tag": "conll"}.get(preset, "tsv")
    (tmp_path / f"train.{suffix}").write_text(train)
    flags = ["--objective.target", "number"] if preset == "pair" else []
    if preset == "tag":
        flags = ["--data.tag-column", "3"]
    if dev:
        (tmp_path / f"dev.{suffix}").write_text(dev)
        flags += ["--data.dev", str(tmp_path / f"dev.{suffix}")]
    source = tmp_path / f"train.{suffix}"
    assert finetune(preset, source, models("bert"), tmp_path / "run", *flags) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "run" / "config.json").exists()


def test_other_mistakes(models, rows, tmp_path, capsys):
    def refused(status, text):
        assert status == 2
        assert text in capsys.readouterr().err

    refused(finetune("text_to_text", rows["text_to_text"], models("bert"), tmp_path / "a"), "writes no text")
    refused(finetune("classify", rows["classify"], models("bert"), tmp_path / "b", "--data.length", "100"),
            "more than the model's 64 positions")
    for flag, text in (("--objective.model.num-layers=3", "were trained with --objective.model.num-layers 1"),
                       ("--objective.model.dropuot=0.3", "did you mean --objective.model.dropout?")):
        refused(finetune("classify", rows["classify"], models("bert"), tmp_path / "b", flag), text)
    refused(main(["evaluate", models("bert")]), "not fine-tuned for a task")
    answers = str(rows["classify"])
    for path, text in ((answers, "would replace the file that is read"), (str(tmp_path / "no" / "x"), "no folder")):
        refused(finetune("classify", answers, models("bert"), tmp_path / "b", "--predictions", path), text)
    (tmp_path / "bare.tsv").write_text("text\tlabel\na\tx\nb\t\nc\ty\nd\ty\n")
    refused(finetune("classify", tmp_path / "bare.tsv", models("bert"), tmp_path / "b"), "line 3 has no label")
    (tmp_path / "wrong.tsv").write_text("text\tlabel\n" + "".join(f"a\ttext {i}\n" for i in range(200)))
    refused(finetune("classify", tmp_path / "wrong.tsv", models("bert"), tmp_path / "b"),
            "200 different labels, such as 'text 0'; name the column that has them, as by --data.label-field, or "
            "if these are the classes, give --objective.labels")
    refused(main(["pretrain", "configs/tasks/classify.py", "--init-from", models("bert")]), "use `jaxlm finetune`")
    refused(main(["finetune", "configs/bert_tiny.py", "--init-from", models("bert")]), "use `jaxlm pretrain`")
    refused(main(["finetune", "configs/tasks/classify.py", "--data.source", str(rows["classify"]), "--run-dir",
                  str(tmp_path / "c")]), "--init-from")
    refused(finetune("classify", rows["classify"], models("bert"), tmp_path / "d", "--objective.lm-coefficient", "0.5"),
            "for decoders")

