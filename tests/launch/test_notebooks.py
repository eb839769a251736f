"""The notebooks in launch/, executed on small models."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from tests.launch.test_tpu_pod import LAUNCH
from tests.training.support import write_text

DATA = Path(os.environ.get("JAXLM_DATA", ""))
SMALL = "--data.length 32 --train.batch-size 8 --train.phases= --train.eval-every 2 --train.log-every 1"


@pytest.mark.parametrize("name", ["pretrain", "continue", "finetune"])
def test_a_notebook_has_no_outputs_and_asks_for_nothing_but_settings(name):
    cells = json.loads((LAUNCH / "notebooks" / f"{name}.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
    assert sum("def setting(" in "".join(cell["source"]) for cell in code) == 1
    assert cells[0]["cell_type"] == "markdown" and cells[0]["source"][0].startswith("# ")


def small_bert(folder: Path) -> Path:
    """A BERT of random weights with words of SST-2, as Transformers saves it."""
    transformers = pytest.importorskip("transformers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "the", "film", "is", "dull", "good", "as", "it", "."]
    letters = [chr(number) for number in range(97, 123)]
    folder.mkdir()
    vocabulary = dict.fromkeys([*words, *letters, *(f"##{letter}" for letter in letters)])
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    config = transformers.BertConfig(
        vocab_size=len(vocabulary), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    transformers.BertForPreTraining(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pretrain", "continue", "finetune"])
def test_a_notebook(name, tmp_path, monkeypatch):
    """Each cell runs, and the last one loads the export in Transformers."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    text = write_text(tmp_path / "text.txt", documents=400)
    settings = {
        "JAXLM_CONFIGS": LAUNCH.parent / "configs", "JAXLM_TEXT": text, "JAXLM_STEPS": 4, "JAXLM_RUN": tmp_path / "run",
        "JAXLM_CACHE": tmp_path / "cache", "IPYTHONDIR": tmp_path / "ipython", "HF_HUB_OFFLINE": 1,
        "PYTHONPATH": LAUNCH.parent, "JAX_PLATFORMS": "cpu", "JAXLM_FLAGS": SMALL,
    }
    if name == "pretrain":
        settings["JAXLM_PRESET"] = LAUNCH.parent / "configs" / "bert_tiny.py"
        settings["JAXLM_FLAGS"] += " --data.vocab-size 512"
    else:
        settings["JAXLM_MODEL"] = small_bert(tmp_path / "model")
    if name == "finetune":
        rows = tmp_path / "train.tsv"
        if (source := DATA / "glue" / "SST-2" / "train.tsv.gz").is_file():
            rows.write_text("\n".join(gzip.decompress(source.read_bytes()).decode().split("\n")[:200]))
        else:
            made = (f"a {('dull', 'good')[n % 2]} film {n}\t{n % 2}\n" for n in range(200))
            rows.write_text("sentence\tlabel\n" + "".join(made))
        settings |= {"JAXLM_TRAIN": rows, "JAXLM_FLAGS": "--train.epochs 1 --data.length 32 --train.batch-size 16"}
    for variable, value in settings.items():
        monkeypatch.setenv(variable, str(value))
    notebook = nbformat.read(LAUNCH / "notebooks" / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    cells = [json.dumps(cell.outputs) for cell in notebook.cells if cell.cell_type == "code"]
    assert any("image/png" in outputs for outputs in cells), "the curves"
    assert not any("jaxlm: " in outputs for outputs in cells), "no command has failed"
    wanted = {"pretrain": "BertForPreTraining", "continue": "0.", "finetune": "'score'"}
    assert wanted[name] in cells[-1]
    (tmp_path / "executed.ipynb").write_text(nbformat.writes(notebook))
