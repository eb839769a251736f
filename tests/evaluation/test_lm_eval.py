"""lm_eval's tasks on models of jaxlm against `lm_eval --model hf` on the exported folder, with local files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxlm.evaluation.in_context import run
from tests.inference.test_score import side

TASKS = {
    "choices": dict(
        output_type="multiple_choice", doc_to_text="Say {{text}}:", doc_to_choice="pieces", doc_to_target="label",
        metric_list=[{"metric": "acc"}, {"metric": "acc_norm"}], num_fewshot=1,
    ),
    "words": dict(
        output_type="multiple_choice", doc_to_text="Say {{text}}:", doc_to_choice=["ab", "xyz cb"],
        doc_to_target="label",
        metric_list=[{"metric": name} for name in ("acc", "acc_norm", "acc_mutual_info")],
    ),
    "rolling": dict(
        output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{long}}",
        metric_list=[{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    ),
    "free": dict(
        output_type="generate_until", doc_to_text="Say {{text}}:", doc_to_target="{{pieces[0]}}",
        generation_kwargs={"until": ["b", "\n\n"], "max_new_tokens": 7, "do_sample": False},
        metric_list=[{"metric": "exact_match"}],
    ),
}
ASK = """
import json, sys
import jaxlm.evaluation.lm_eval, lm_eval.models
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

path, options, folder, *tasks = sys.argv[1:]
for model, facts in ("jaxlm", {"path": path}), ("hf", {"pretrained": path, "dtype": "float32"} | json.loads(options)):
    found = simple_evaluate(
        model=model, model_args=facts, device="cpu", batch_size=2, tasks=tasks, bootstrap_iters=0, log_samples=True,
        task_manager=TaskManager(include_path=folder, include_defaults=False),
    )
    print("RESULT" + json.dumps([found["results"], {
        name: [sample["filtered_resps"] for sample in samples] for name, samples in found["samples"].items()
    }]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder of task files with rows of JSON."""
    path = tmp_path_factory.mktemp("tasks")
    rows = [
        {
            "text": f"{a}bc {a}de", "label": i % 2, "pieces": [f"{a}bx", f"{a}by {a}b"],
            "long": f"{a}bc {a}b, ab{a}. " * (3 + 9 * i),
        }
        for i, a in enumerate("abcdef")
    ]
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, task in TASKS.items():
        facts = {
            "task": name, "dataset_path": "json", "test_split": "test", "fewshot_split": "test",
            "dataset_kwargs": {"data_files": {"test": str(path / "rows.jsonl")}}, **task,
        }
        (path / f"{name}.yaml").write_text(json.dumps(facts))  # JSON is YAML
    return path


def start(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Run Python without network."""
    environment = os.environ | {
        "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache"),
        "TOKENIZERS_PARALLELISM": "false", "JAX_PLATFORMS": "cpu",
    }
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=600
    )


def ask(model: Path, options: str, folder: Path, *tasks: str) -> list:
    """Return results and answers of our model and of Transformers' with these options, from one folder."""
    out = start(folder, "-c", ASK, str(model), options, str(folder), *tasks)
    lines = [line for line in out.stdout.splitlines() if line.startswith("RESULT")]
    assert len(lines) == 2, out.stderr[-3000:]
    return [json.loads(line.removeprefix("RESULT")) for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "tasks", "options"), [
    ("gpt2", ["choices", "words", "rolling", "free"], "{}"), ("t5", ["choices", "free"], '{"backend": "seq2seq"}'),
])
def test_figures_are_those_of_the_exported_folder(family, tasks, options, folder, tmp_path):
    side(family, tmp_path)
    (ours, own), (theirs, wanted) = ask(tmp_path / "hf", options, folder, *tasks)
    for task in tasks:
        keys = [key for key in theirs[task] if key.endswith(",none") and "stderr" not in key]
        assert keys and ours[task].keys() >= set(keys)
        for key in keys:
            assert ours[task][key] == pytest.approx(theirs[task][key], rel=1e-3), (task, key)
        if task == "free":
            answers = [answer for (answer,) in wanted[task]]
            if family == "t5":  # theirs counts the tokens of the prompt as well and writes more
                cut = [len(answer.rstrip("\N{REPLACEMENT CHARACTER}")) for (answer,) in own[task]]
                assert max(cut) > 3
                assert [a[:n] for a, n in zip(answers, cut, strict=True)] == [
                    a[:n] for (a,), n in zip(own[task], cut, strict=True)
                ]
            else:
                assert own[task] == wanted[task]
            assert len(set(answers)) > 2
            continue
        for mine, other in zip(own[task], wanted[task], strict=True):
            pairs = zip(mine, other, strict=True) if task in ("choices", "words") else [(mine, other)]
            for a, b in pairs:
                a, b = (a, b) if isinstance(a, list) else ([a], [b])
                assert float(a[0]) == pytest.approx(float(b[0]), abs=1e-3 * max(1, abs(float(b[0]))))
                assert a[1:] == b[1:]
    if "words" in tasks:
        check_prompt_file(folder, tmp_path, theirs["words"], wanted["words"])


def check_prompt_file(folder: Path, path: Path, figures: dict, samples: list) -> None:
    """`jaxlm evaluate --task` has lm_eval's figures; `samples` are its log-likelihoods, then the unconditional ones."""
    for metric, normalise in (("acc", "none"), ("acc_norm", "characters"), ("acc_mutual_info", "unconditional")):
        (path / "words.json").write_text(json.dumps({
            "kind": "choice", "data": str(folder / "rows.jsonl"), "prompt": "Say {text}:", "choices": ["ab", "xyz cb"],
            "answer": "label", "normalise": normalise,
        }))
        result = run(str(path / "hf"), str(path / "words.json"), str(path / f"{metric}.jsonl"))
        assert result["metrics"]["accuracy"] == pytest.approx(figures[f"{metric},none"], abs=1e-6), metric
    rows = [json.loads(line) for line in (path / "acc_mutual_info.jsonl").read_text().splitlines()]
    for row, sample in zip(rows, samples, strict=True):
        first, second, *unconditional = (float(value) for value, _ in sample)
        differences = [first - unconditional[0], second - unconditional[1]]
        assert list(row["scores"].values()) == pytest.approx(differences, abs=1e-3)


@pytest.mark.slow
def test_the_command_line(folder, tmp_path):
    side("gpt2", tmp_path)
    ours, nothing = (start(
        folder, "-m", "jaxlm.evaluation.lm_eval", "--model", "jaxlm", "--model_args", f"path={tmp_path / name}",
        "--tasks", "rolling", "--limit", "1", "--include_path", str(folder),
    ) for name in ("hf", "nothing"))
    assert ours.returncode == 0 and "word_perplexity" in ours.stdout, ours.stderr[-3000:]
    assert nothing.returncode == 1 and nothing.stderr.splitlines()[-1].startswith("jaxlm: ")
