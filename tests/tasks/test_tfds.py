"""Rows of prepared datasets: the builder of GLUE, with its names and features, over a few sentences."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from jaxlm.cli import main
from jaxlm.config.flags import override
from jaxlm.config.presets import load_preset
from jaxlm.errors import UserError
from jaxlm.tasks.classification import TextRows
from jaxlm.tasks.text_to_text import PairRows
from tests.tasks.support import FAST, sentences

LABELS = {
    "cola": ("unacceptable", "acceptable"), "sst2": ("negative", "positive"), "mrpc": ("not_equivalent", "equivalent"),
    "qnli": ("entailment", "not_entailment"), "rte": ("entailment", "not_entailment"), "stsb": (),
}


@pytest.fixture(scope="module", autouse=True)
def glue(tmp_path_factory):
    """Prepare GLUE's configurations as array_record; labels alternate between 0 and 1, and are -1 in the test split."""
    import tensorflow_datasets as tfds
    from tensorflow_datasets.text.glue import Glue

    def examples(features, split, count):
        for number, text in enumerate(sentences(count)):
            row = {name: f"{number} {name} {text} é" for name, feature in features.items()
                   if isinstance(feature, tfds.features.Text)}
            label = 3.8 if features["label"].np_dtype == np.float32 else number % 2
            yield number, row | {"idx": number, "label": -1 if split == "test" else label}

    def splits(builder, manager):
        counts = {"train": 12, "validation": 4, "test": 3}
        return {split: examples(builder.info.features, split, count) for split, count in counts.items()}

    folder = tmp_path_factory.mktemp("tfds")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TFDS_DATA_DIR", str(folder))
        patch.setattr(Glue, "_split_generators", splits)
        for name in LABELS:
            Glue(config=name, data_dir=str(folder), file_format="array_record").download_and_prepare()
        yield


def opened(name):
    """Return the experiment of a preset with the TFDS flags of its docstring."""
    path = f"configs/tasks/{name}.py"
    said = re.search(r"or (--data\.source tfds:.*?)\n *(\(|Recipe)", Path(path).read_text(), re.S)[1]
    return override(load_preset(path), said.replace("\\", "").split(), path)


@pytest.mark.parametrize("name", LABELS)
def test_glue_by_the_flags_of_a_presets_docstring(name):
    """Each row has its texts and the name of its label, which is None in the test split."""
    experiment = opened(name)
    data, task = experiment.data, experiment.objective
    assert (data.source, data.dev) == (f"tfds:glue/{name}", f"tfds:glue/{name}:validation")
    rows = sorted(data.read(data.source), key=lambda row: int(row.values["text"].split()[0]))
    assert len(rows) == 12 and len(list(data.read(data.dev))) == 4
    pairs = {"cola": ("sentence",), "sst2": ("sentence",), "qnli": ("question", "sentence")}
    for number, (row, text) in enumerate(zip(rows, sentences(12), strict=True)):
        wanted = [f"{number} {column} {text} é" for column in pairs.get(name, ("sentence1", "sentence2"))]
        assert [row.values[part] for part in ("text", "text_pair") if part in row.values] == wanted
        assert task.gold(row) == (LABELS[name][number % 2] if LABELS[name] else pytest.approx(3.8))
    # The classes are in TFDS's order, also where another would be the alphabet's: F1 is of the second.
    assert task.with_labels(rows, data.class_names()).labels == LABELS[name]
    golds = [task.gold(row) for row in data.read(f"tfds:glue/{name}:test")]
    assert golds == [None if LABELS[name] else -1.0] * 3


@pytest.mark.slow
def test_from_training_to_predictions(models, tmp_path, capsys):
    source, run, out = "tfds:glue/cola", str(tmp_path / "run"), tmp_path / "answers.jsonl"
    columns = ("--data.text-field", "sentence", "--data.label-field", "label")
    command = ["finetune", "configs/tasks/cola.py", "--init-from", models("bert"), *FAST, *columns, "--json"]
    assert main([*command, "--data.source", source, "--data.dev", f"{source}:validation", "--run-dir", run]) == 0
    assert json.loads(capsys.readouterr().out)["examples"] == 4
    assert main(["evaluate", run, "--data.source", f"{source}:test", "--predictions", str(out)]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == 3 and all(line["gold"] is None for line in lines)
    assert all(tuple(line["scores"]) == LABELS["cola"] for line in lines)
    assert main([*command, "--data.source", f"{source}:test", "--run-dir", str(tmp_path / "bad")]) == 2
    assert "cola:test, record 0 has no label; fill it in" in capsys.readouterr().err


def test_pairs_of_texts_with_and_without_targets():
    data = PairRows(source_field="sentence", target_field="label")
    targets = {row.values["targets"][0] for row in data.read("tfds:glue/sst2")}
    assert targets == set(LABELS["sst2"])
    assert [row.values["targets"] for row in data.read("tfds:glue/sst2:test")] == [None] * 3


def test_numbers():
    """The scores of STS-B are float32 in TFDS; 3.8 is written so, and not as 3.799999952316284."""
    data = PairRows(source_field="sentence1", target_field="label")
    assert {row.values["targets"][0] for row in data.read("tfds:glue/stsb")} == {"3.8"}


@pytest.mark.parametrize(("source", "message"), [
    ("tfds:glue/sst2:nowhere", "sst2:nowhere cannot be read .*nowhere"),
    ("tfds:no_such_rows", "tfds:no_such_rows cannot be read"),
    ("tfds:glue/mrpc", "tfds:glue/mrpc: there is no column 'text'; it has .*'sentence1', 'sentence2'"),
])
def test_a_mistake_gets_one_sentence(source, message):
    with pytest.raises(UserError, match=message):
        list(TextRows().read(source))
