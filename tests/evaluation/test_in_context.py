"""Tasks in context: prompt files against scores from PyTorch's logits, and refusals."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from jaxlm.cli import main
from jaxlm.errors import UserError
from jaxlm.evaluation import in_context
from jaxlm.evaluation.in_context import evaluate, run
from jaxlm.evaluation.prompts import PromptTask, fill, read_examples, read_task
from jaxlm.inference import generate
from jaxlm.inference.score import Score
from jaxlm.inference.text import Completion
from jaxlm.runs.model import TrainedModel
from jaxlm.tasks.tables import TableRow
from jaxlm.tokenizers.training import train_tokenizer
from jaxlm.types import FolderSettings
from tests.inference.test_score import side

ROWS = [
    {"text": "abc ade", "label": "0", "pieces": ["abx", "aby ab"], "answers": ["aca", "acb ab"]},
    {"text": "bbc", "label": "1", "pieces": ["bbx", "bby ab", "bbk"], "answers": ["bca"]},
    {"text": "cbc cde cdf", "label": "1", "pieces": ["cbx", "cby"], "answers": ["cca"]},
]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2")
    return *side("gpt2", folder), str(folder / "hf")


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    folder = tmp_path_factory.mktemp("t5")
    return *side("t5", folder), str(folder / "hf")


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    return *side("bert", folder), str(folder / "hf")


@pytest.fixture()
def prompt_file(tmp_path: Path):
    """Return a function that writes a prompt file beside its data."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")

    def write(**fields) -> str:
        path = tmp_path / "trial.json"
        path.write_text(json.dumps({"data": "rows.jsonl"} | fields), encoding="utf-8")
        return str(path)

    return write


def log_likelihood(model, tokenizer, text: str, count: int) -> np.ndarray:
    """Return PyTorch's log-probabilities of the last `count` tokens of a text."""
    ids = tokenizer.encode(text)
    logits = torch.log_softmax(model(torch.tensor([ids[:-1]])).logits[0], -1)
    return logits[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].detach().numpy()[-count:]


def test_a_choice_is_the_likeliest_continuation(gpt2, prompt_file, tmp_path):
    model, ours, path = gpt2
    given = [row | {"pieces": [*row["pieces"], "abé 옛"]} for row in ROWS]  # 6 characters, 9 bytes
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    for normalise in ("none", "tokens", "characters", "bytes"):
        file = prompt_file(kind="choice", prompt="Say {text}:", choices="pieces", answer="label", normalise=normalise)
        result = run(path, file, str(tmp_path / "out.jsonl"))
        rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert result["task"] == "trial" and result["examples"] == 3
        for source, row in zip(given, rows, strict=True):
            wanted = []
            for choice in source["pieces"]:
                count = len(ours.tokenizer.encode(f" {choice}"))
                values = log_likelihood(model, ours.tokenizer, f"Say {source['text']}: {choice}", count)
                sizes = {"none": 1, "tokens": count, "characters": len(choice), "bytes": len(choice.encode())}
                wanted.append(values.sum() / sizes[normalise])
            np.testing.assert_allclose(list(row["scores"].values()), wanted, atol=1e-3)
            assert row["prediction"] == str(int(np.argmax(wanted))) and row["gold"] == source["label"]
        assert result["metrics"] == {"accuracy": np.mean([row["prediction"] == row["gold"] for row in rows])}


def test_an_empty_choice_is_none(t5, prompt_file, tmp_path):
    """A row of a table may have fewer choices than the others; an empty text would have the likelihood 1."""
    fields = dict(kind="choice", data="rows.csv", prompt="{text}", choices=["{a}", "{b}", "{c}"], answer="label")
    table = "text,a,b,c,label\nabc,abx,aby,abk,2\nbbc,bbx,,bby,{}\n"
    (tmp_path / "rows.csv").write_text(table.format(2))
    run(t5[2], prompt_file(**fields), str(tmp_path / "out.jsonl"))
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [[*row["scores"]] for row in rows] == [["0", "1", "2"], ["0", "2"]]
    assert rows[1]["prediction"] != "1" and rows[1]["gold"] == "2" and max(rows[1]["scores"].values()) < 0
    examples = read_examples(read_task(prompt_file(**fields, shots=1, delimiter=" = ", separator="#")))
    assert [e.prompt for e in examples] == ["bbc = bby#abc", "abc = abk#bbc"]
    for text in (table.format(1), table.replace("bby", "").format(0)):
        (tmp_path / "rows.csv").write_text(text)
        with pytest.raises(UserError, match="line 3: fewer than two choices have a text, or the right one has none"):
            read_examples(read_task(prompt_file(**fields)))


def test_an_answer_is_a_number_before_it_is_a_text(prompt_file, tmp_path):
    """As in MMLU, whose choices may be numbers too; labels say otherwise."""
    fields = dict(kind="choice", data="own.jsonl", prompt="{text}", choices="pieces", answer="label")
    pieces = {"7": ["7", "2", "1"], "0": ["0", "2", "1"], "2": ["4", "2", "1"]}
    lines = [json.dumps({"text": "abc", "pieces": texts, "label": label}) for label, texts in pieces.items()]
    (tmp_path / "own.jsonl").write_text("\n".join(lines))
    assert [example.gold for example in read_examples(read_task(prompt_file(**fields)))] == [0, 0, 2]
    templates = [f"{{pieces[{number}]}}" for number in range(3)]
    task = read_task(prompt_file(**fields | {"choices": templates, "labels": [*"abc"]}))
    assert [example.gold for example in read_examples(task)] == [0, 0, 1]


def test_shots_precede_the_prompt(prompt_file):
    fields = dict(
        kind="choice", prompt="Say {text}:", choices=[" no", " yes"], answer="label", delimiter="", separator="#"
    )
    plain = read_examples(read_task(prompt_file(**fields)))
    assert [example.prompt for example in plain] == [f"Say {row['text']}:" for row in ROWS]
    solved = [f"Say {row['text']}:{[' no', ' yes'][int(row['label'])]}" for row in ROWS]
    found = read_examples(read_task(prompt_file(**fields, shots=2)))
    for number, example in enumerate(found):
        *shots, own = example.prompt.split("#")
        assert own == plain[number].prompt
        assert sorted(shots) == sorted(solved[:number] + solved[number + 1 :])  # never the row itself
    # The draw is of the seed and the row, not of how many rows are asked for; seeds differ.
    assert read_examples(read_task(prompt_file(**fields, shots=2)), limit=2) == found[:2]
    drawn = [read_examples(read_task(prompt_file(**fields, shots=1, seed=seed))) for seed in range(6)]
    assert any(draw != drawn[0] for draw in drawn)
    # From a file of their own any row may come; that of the rows is none.
    same = read_examples(read_task(prompt_file(**fields, shots=2, shots_data="rows.jsonl")))
    assert same == found
    task = read_task(prompt_file(**fields, shots=3, shots_data="rows.jsonl"))
    shutil.copy(task.data, others := f"{task.data[:-6]}-others.jsonl")
    other = read_examples(dataclasses.replace(task, shots_data=others))
    assert sorted(other[0].prompt.split("#")[:-1]) == sorted(solved)


def test_free_answers(gpt2, t5, prompt_file, tmp_path):
    fields = dict(kind="generate", prompt="Say {text}:", answer="answers", max_new_tokens=6, stop=["zzz"], shots=1)
    for model, ours, path in (gpt2, t5):
        metrics = ["exact_match", "f1", "rouge", "bleu"]
        result = run(path, prompt_file(**fields, metrics=metrics), str(tmp_path / "out.jsonl"))
        assert set(result["metrics"]) == {"exact_match", "f1", "rouge1", "rouge2", "rougeL", "bleu"}
        rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        for example, row in zip(read_examples(read_task(prompt_file(**fields))), rows, strict=True):
            ids = ours.tokenizer.encode(example.prompt)[-35:] if model is gpt2[0] else [
                *ours.tokenizer.encode(example.prompt), 3
            ]
            eos = ours.tokenizer.vocabulary.eos
            out = model.generate(
                torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=6, do_sample=False,
                pad_token_id=0, eos_token_id=eos,
            )[0].tolist()
            new = [i for i in (out[len(ids) :] if model is gpt2[0] else out[1:]) if i not in (eos, 0)]
            assert row["prediction"] == ours.tokenizer.decode(new).strip()
            assert row["gold"] == list(example.answers)
    # What the model says is right where it is the answer.
    said = [dict(row, answers=[own["prediction"]]) for row, own in zip(ROWS, rows, strict=True)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in said))
    assert run(path, prompt_file(**fields | {"shots": 0}))["metrics"].keys() == {"exact_match"}


def test_a_free_answer_is_right_as_the_vocabulary_spells_it(tmp_path, monkeypatch):
    """NFKC takes Thai ำ apart, so that no model writes it."""
    tokenizer = train_tokenizer(["คำถาม คำตอบ"] * 9, tmp_path / "t", kind="bpe", vocab_size=500)
    said = Completion(tokenizer.decode(tokenizer.encode("คำถาม")), [], [])
    loaded = types.SimpleNamespace(tokenizer=tokenizer, objective=None, generate=lambda *_, **options: [said])
    monkeypatch.setattr(in_context, "prompt_of", lambda objective, ids: ids)
    monkeypatch.setattr(in_context, "fit_prompts", lambda loaded, prompts, new_tokens: prompts)
    task, example = PromptTask(data="x", kind="generate"), types.SimpleNamespace(prompt="x", answers=("คำถาม",))
    rows, found, _ = in_context._generate(loaded, task, [example], False)
    assert found == {"exact_match": 1.0} and rows[0]["gold"] == ["คำถาม"] != [rows[0]["prediction"]]
    # Sentinels that are words of text, as mT5's are, or bytes, as ByT5's: they end an answer and are no part of it.
    v, (first, *_), seen = tokenizer.vocabulary, tokenizer.encode("คำตอบ"), []
    v = dataclasses.replace(v, sentinel=first, sentinel_step=-1)
    said = Completion("", [first, *tokenizer.encode("คำถาม"), first - 1], [])
    loaded.generate = lambda *_, stop_ids, **options: seen.append(stop_ids) or [said]
    loaded.settings = FolderSettings()
    monkeypatch.setattr(tokenizer, "vocabulary", v)
    assert in_context._generate(loaded, task, [example], True)[:2] == (rows, found) and seen == [[v.eos, first - 1]]


@pytest.mark.slow
def test_a_t5_pretrained_on_spans_continues_a_sentinel(t5, prompt_file, monkeypatch):
    _, ours, path = t5
    v = ours.tokenizer.vocabulary
    plain, spans = (
        run(path, prompt_file(kind="choice", prompt="{text}", choices="pieces", answer="label", sentinel=sentinel))
        for sentinel in (False, True)
    )
    assert plain["examples"] == spans["examples"] == 3
    examples = read_examples(task := read_task(prompt_file(kind="generate", prompt="{text}", answer="label")))
    seen = []
    monkeypatch.setattr(
        generate, "prepare_prompts", lambda _, prompts, new: seen.extend(prompts) or [[*p, v.eos] for p in prompts]
    )
    for step in (5, 0):  # of a run, and of a Transformers folder or an import that is not trained
        seen.clear()
        evaluate(TrainedModel(**vars(ours) | {"step": step}), task, examples)
        assert {prompt[-1] == v.sentinel for prompt in seen} == {step > 0}


def test_the_last_word(gpt2, prompt_file, tmp_path, monkeypatch):
    model, ours, path = gpt2
    (tmp_path / "rows.jsonl").write_text('{"text": "abc abf"}\n{"text": "abc bcd xqz."}\n')
    result = run(path, prompt_file(kind="last-word"), str(tmp_path / "out.jsonl"))
    totals, lasts = [], []
    for text, word in (("abc abf", " abf"), ("abc bcd xqz.", " xqz.")):
        values = log_likelihood(model, ours.tokenizer, text, len(ours.tokenizer.encode(word)))
        totals.append(values.sum())
        lasts.append(values[-1])
    m = result["metrics"]
    assert m["word_perplexity"] == pytest.approx(np.exp(-np.mean(totals)), rel=1e-3)
    assert m["token_perplexity"] == pytest.approx(np.exp(-np.mean(lasts)), rel=1e-3)
    # All tokens of a word must be right, or the last one only.
    found = [Score(np.zeros(2, np.float32), np.array(right)) for right in ((True, True), (False, True))]
    monkeypatch.setattr("jaxlm.runs.model.score", lambda *_: found)
    m = run(path, prompt_file(kind="last-word"), str(tmp_path / "out.jsonl"))["metrics"]
    assert (m["word_accuracy"], m["token_accuracy"]) == (0.5, 1.0)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["gold"] for row in rows] == ["abf", "xqz."]


@pytest.mark.slow
def test_perplexity(gpt2, prompt_file, tmp_path):
    model, ours, path = gpt2
    texts = ["abc abd, abe. " * 12, "Short 옛날 text."]
    (tmp_path / "text.txt").write_text("\n\n".join(texts), encoding="utf-8")
    result = run(path, prompt_file(kind="perplexity", data="text.txt", stride=40))
    nats, tokens = 0.0, 0
    for text in [texts[0], texts[1]]:
        ids = [ours.tokenizer.vocabulary.bos, *ours.tokenizer.encode(text.rstrip("\n"))]
        tokens += len(ids) - 1
        nats -= _windowed(model, ids, 40)
    m = result["metrics"]
    assert m["perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-3)
    words, size = sum(len(text.split()) for text in texts), sum(len(text.encode()) for text in texts)
    assert m["word_perplexity"] == pytest.approx(math.exp(min(nats / words, 700)), rel=1e-2)
    assert m["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-2)
    assert len(m) == 3 and (result["length"], result["stride"]) == (40, 40)
    assert run(path, prompt_file(kind="perplexity", data="text.txt"))["stride"] == 20
    (tmp_path / "text.txt").write_text("abc abd. 我们学习语言模型。 ภาษาไทย", encoding="utf-8")  # words have no spaces
    m = run(path, prompt_file(kind="perplexity", data="text.txt"))["metrics"]
    assert list(m) == ["perplexity", "bits_per_byte"]


def _windowed(model, ids: list[int], length: int) -> float:
    """Return PyTorch's log-likelihood of ids[1:], `length` at a time; the last window has as much context as fits."""
    total = 0.0
    for start in range(1, len(ids), length):
        end = min(start + length, len(ids))
        row = ids[max(end - length - 1, 0) : end]
        logits = torch.log_softmax(model(torch.tensor([row[:-1]])).logits[0], -1)
        values = logits[torch.arange(len(row) - 1), torch.tensor(row[1:])]
        total += values[start - end :].sum().item()
    return total


@pytest.mark.slow
def test_masked_models(bert, prompt_file):
    _, _, path = bert
    result = run(path, prompt_file(kind="pseudo-likelihood"))
    assert result["metrics"]["pseudo_perplexity"] > 1 and result["metrics"]["pseudo_log_likelihood"] < 0
    assert run(path, prompt_file(kind="choice", prompt="{text}", choices="pieces", answer="label"))["examples"] == 3
    with pytest.raises(UserError, match="MaskedLM cannot do a task of the kind generate; use a causal"):
        run(path, prompt_file(kind="generate", answer="label"))


def test_templates():
    row = {"a": "x", "b": ["one", "two"], "c.d": 3, "1": "first"}
    assert fill("{a}-{b[1]}-{b}-{c.d}-{1} {{a}}", TableRow("f, line 1", row)) == "x-two-one two-3-first {a}"
    for template in ("{e}", "{b[7]}", "{a[k]}"):
        with pytest.raises(UserError, match=r"f, line 1: there is no \{"):
            fill(template, TableRow("f, line 1", row))
    with pytest.raises(UserError, match="f, line 1: the field 'c' is an object, not text"):
        fill("{c}", TableRow("f, line 1", {"c": {"d": 3}}))


def test_toml_and_tables(tmp_path):
    (tmp_path / "rows.tsv").write_text("good film\tpos\nbad film\tneg\n")
    (tmp_path / "films.toml").write_text(
        'kind = "choice"\ndata = "rows.tsv"\nprompt = "{1} ="\nchoices = ["bad", "good"]\nlabels = ["neg", "pos"]\n'
        'answer = "2"\n'
    )
    task = read_task(str(tmp_path / "films.toml"))
    assert task.task == "films" and task.choices == ("bad", "good")
    examples = read_examples(task)
    assert [(e.prompt, e.gold, e.choices, e.labels) for e in examples] == [
        ("good film =", 1, (" bad", " good"), ("neg", "pos")), ("bad film =", 0, (" bad", " good"), ("neg", "pos")),
    ]
    (tmp_path / "rows.tsv").rename(tmp_path / "rows.txt")
    as_text = read_examples(dataclasses.replace(task, data=str(tmp_path / "rows.txt")))
    assert [e.prompt for e in as_text] == ["good film =", "bad film ="]
    (tmp_path / "rows.tsv").write_text("good film\tpos\nbad film\tnagative\n")
    with pytest.raises(UserError, match="line 2: the answer 'nagative' is none of the labels neg, pos"):
        read_examples(task)
    with pytest.raises(UserError, match=r"no column '3'; it has '1', '2'. Choose columns in the prompt file"):
        read_examples(dataclasses.replace(task, answer="3"))


@pytest.mark.parametrize(("fields", "words"), [
    ({"kind": "choise"}, "kind is 'choise'; it must be .*'choice', 'generate'"),
    ({"kind": "generate", "promt": "x"}, "no field 'promt'; the fields of a prompt file are kind, data, prompt"),
    ({"kind": "generate"}, "kind generate needs the field answer"),
    ({"kind": "choice", "answer": "label"}, "kind choice needs the field choices"),
    ({"kind": "choice", "answer": "label", "choices": ["a", 3]}, r"choices is \('a', 3\); it must be tuple\[str"),
    ({"kind": "choice", "answer": "label", "choices": ["a", "b"], "labels": ["x"]}, "1 labels for 2 choices"),
    ({"kind": "generate", "answer": "label", "shots": "two"}, "shots is 'two'; it must be int"),
    ({"kind": "generate", "answer": "label", "shots": -1}, r"shots is -1; it must be in \[0, inf\)"),
    ({"kind": "generate", "answer": "label", "metrics": ["rouje"]}, r"metrics names \['rouje'\]; kind generate has"),
    ({"kind": "generate", "answer": "label", "prompt": "a {text"}, "the template 'a {text' cannot be read"),
    ({"kind": "perplexity", "shots": 2}, "kind perplexity has no shots"),
    ({"kind": "generate", "answer": "label", "data": 3}, "data is 3; it must be str"),
])
def test_a_wrong_field_is_one_sentence(fields, words, prompt_file):
    with pytest.raises(UserError, match=words) as error:
        read_task(path := prompt_file(**fields))
    assert str(error.value).startswith(path if "path" in locals() else "/") and "\n" not in str(error.value)


def test_wrong_flags(bert, prompt_file, capsys):
    file = prompt_file(kind="pseudo-likelihood")
    for flags, words in (
        (["--limit", "2"], "--limit is for prompts"),
        (["--length", "64"], "--length is for --vectors; leave it out; --data.length is that of a task"),
        (["--task", file, "--limit", "-1"], "argument --limit: -1 is below 0; see `jaxlm evaluate --help`."),
        (["--bootstrap", "-3"], "argument --bootstrap: -3 is below 0"),
    ):
        assert main(["evaluate", bert[2], *flags]) == 2
        assert words in capsys.readouterr().err


def test_wrong_files(tmp_path, prompt_file):
    for content in ("{", "[" * 100_000):
        (tmp_path / "broken.json").write_text(content)
        with pytest.raises(UserError, match="cannot be read"):
            read_task(str(tmp_path / "broken.json"))
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(UserError, match="it must be an object"):
        read_task(str(tmp_path / "list.json"))
    (tmp_path / "empty.json").write_text("{}")
    with pytest.raises(UserError, match="must be an object with the fields kind and data"):
        read_task(str(tmp_path / "empty.json"))
    with pytest.raises(UserError, match="no column 'nothing'"):
        read_examples(read_task(prompt_file(kind="generate", prompt="{nothing}", answer="label")))
    with pytest.raises(UserError, match="3 rows, too few for 3 shots"):
        read_examples(read_task(prompt_file(kind="generate", prompt="{text}", answer="label", shots=3)))
