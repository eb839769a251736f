"""Models and tokenizers of the hub: a local server speaks its protocol, and `huggingface_hub` is the client."""

from __future__ import annotations

import argparse
import hashlib
import http.server
import json
import os
import re
import subprocess
import sys
import threading
import urllib.parse
from pathlib import Path

import huggingface_hub
import jax
import numpy as np
import pytest
from etils import epath

from jaxlm.cli import main
from jaxlm.commands.common import _pin_init_from
from jaxlm.config.presets import load_config
from jaxlm.hub import pin
from jaxlm.runs.folder import write_metadata
from jaxlm.runs.load import load_model
from jaxlm.tokenizers.tokenizer import Tokenizer
from tests.huggingface.support import save_torch, torch_bert
from tests.training.support import metadata, saved_steps, write_preset, write_text

STUDENT = """
from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.distilbert import Distilbert
from jaxlm.objectives.distillation import Distillation

experiment = Experiment(
    objective=Distillation(
        model=Distilbert(hidden_size=32, num_layers=1, num_heads=4, intermediate_size=64, max_positions=40)
    ),
    data=TextData(source={text!r}, length=32, held_out=0.0),
    optimizer=OptimizerConfig(warmup_steps=1, schedule="constant"),
    train=TrainConfig(steps=2, batch_size=4, tracker="none"),
)
"""


class Hub(http.server.ThreadingHTTPServer):
    """The endpoints that `snapshot_download` uses, for repositories that are folders.

    Attributes:
        commits: (repository, commit) → folder.
        refs: (repository, branch or tag) → commit.
        served: Path of every file that was sent.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.commits: dict[tuple[str, str], Path] = {}
        self.refs: dict[tuple[str, str], str] = {}
        self.served: list[str] = []

    def push(self, repository: str, folder: Path) -> str:
        """Make the folder the newest commit of `main`."""
        commit = hashlib.sha1(f"{repository} {folder}".encode()).hexdigest()
        self.commits[repository, commit], self.refs[repository, "main"] = folder, commit
        return commit


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path, hub = urllib.parse.unquote(urllib.parse.urlparse(self.path).path), self.server
        found = re.fullmatch(r"/api/models/(\w+/\w+)/(revision|tree)/(.+)", path) or re.fullmatch(
            r"/(\w+/\w+)/(resolve)/([^/]+)/(.+)", path)
        if not found or all(repository != found[1] for repository, _ in hub.commits):
            return self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        commit = hub.refs.get((found[1], found[3]), found[3])
        folder = hub.commits.get((found[1], commit))
        if folder is None:
            return self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        files = {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
        if found[2] == "revision":
            siblings = [{"rfilename": name} for name in files]
            return self.answer(200, json.dumps({"id": found[1], "sha": commit, "siblings": siblings}).encode())
        if found[2] == "tree":
            entries = [{"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                       for name, data in files.items()]
            return self.answer(200, json.dumps(entries).encode())
        if self.command == "GET":
            hub.served.append(f"{commit}/{found[4]}")
        data = files[found[4]]
        self.answer(200, data, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": commit})

    def answer(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (("Content-Length", str(len(data))), *(headers or {}).items()):
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


def use(monkeypatch: pytest.MonkeyPatch, endpoint: str, cache: Path, offline: bool = False) -> None:
    """Set what `huggingface_hub` has read from HF_ENDPOINT, HF_HUB_CACHE and HF_HUB_OFFLINE at its import."""
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    use(monkeypatch, f"http://127.0.0.1:{server.server_port}", tmp_path / "cache")
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def models(tmp_path_factory, vocab_file) -> tuple[Path, Path]:
    """Two BERTs of the same sizes; beside their safetensors lies a pickle."""
    folder = tmp_path_factory.mktemp("models")
    found = tuple(save_torch(torch_bert("gelu", seed=seed), folder / str(seed), vocab_file) for seed in (0, 1))
    for each in found:
        (each / "pytorch_model.bin").write_bytes(b"pickle")
        (each / "consolidated.safetensors").write_bytes(b"Mistral's second copy")
        (each / "onnx").mkdir()
        (each / "onnx" / "model.onnx").write_bytes(b"graph")
    return found


def assert_same(params, others) -> None:
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, params, others)))


@pytest.mark.slow
def test_a_run_keeps_the_commit_that_it_began_from(hub, models, tmp_path, capsys):
    first = hub.push("acme/tiny", models[0])
    preset, run = write_preset(tmp_path), tmp_path / "run"
    command = ["pretrain", str(preset), "--init-from", "hf:acme/tiny", "--run-dir", str(run), "--data.held-out", "0"]
    assert main([*command, "--train.steps", "1"]) == 0
    assert metadata(run, 1)["imported_from"] == f"hf:acme/tiny#{first}"
    assert json.loads((run / "data.json").read_text())["imported_from"] == f"hf:acme/tiny#{first}"
    assert f"{first}/model.safetensors" in hub.served
    assert not [name for name in hub.served if name.endswith((".bin", ".onnx"))]

    second = hub.push("acme/tiny", models[1])
    assert main([*command, "--train.steps", "2"]) == 0  # the files of the first commit are in the cache
    assert saved_steps(run)[-1] == 2 and metadata(run, 2)["imported_from"] == f"hf:acme/tiny#{first}"
    assert not [name for name in hub.served if name.startswith(second)]
    assert_same(load_model(f"hf:acme/tiny#{first}").params, load_model(models[0]).params)
    assert_same(load_model(f"hf:acme/tiny@{first}").params, load_model(models[0]).params)
    assert_same(load_model("hf:acme/tiny").params, load_model(models[1]).params)
    assert load_model("hf:acme/tiny@main").path == f"hf:acme/tiny@main#{second}"

    capsys.readouterr()
    assert main([*command[:3], "hf:acme/tiny@main", *command[4:], "--train.steps", "3"]) == 2
    assert f"began from hf:acme/tiny#{first}, not from hf:acme/tiny@main#{second}" in capsys.readouterr().err


@pytest.mark.slow
def test_tokenizer_and_teacher_keep_their_commits(hub, models, tmp_path):
    first = hub.push("acme/tiny", models[0])
    assert Tokenizer.load("hf:acme/tiny") == Tokenizer.load(models[0])
    assert hub.served and not [name for name in hub.served if name.endswith(".safetensors")]
    preset, run = tmp_path / "student.py", tmp_path / "run"
    preset.write_text(STUDENT.format(text=str(write_text(tmp_path / "text.txt"))))
    command = ["pretrain", str(preset), "--run-dir", str(run), "--objective.teacher", "hf:acme/tiny",
               "--data.tokenizer", "hf:acme/tiny"]
    assert main(command) == 0
    experiment = load_config(run / "config.json")
    assert experiment.objective.teacher == experiment.data.tokenizer == f"hf:acme/tiny#{first}"
    second = hub.push("acme/tiny", models[1])  # as a teacher it would be refused
    assert main([*command, "--train.steps", "4"]) == 0
    assert main(["pretrain", str(run), "--train.steps", "6"]) == 0
    assert saved_steps(run)[-1] == 6 and not [name for name in hub.served if name.startswith(second)]


def test_it_is_imported_and_embeds(hub, models, tmp_path, capsys):
    commit = hub.push("acme/tiny", models[0])
    assert main(["import", "hf:acme/tiny", str(tmp_path / "run")]) == 0
    assert metadata(tmp_path / "run", 0)["imported_from"] == f"hf:acme/tiny#{commit}"
    assert {name.split("/")[-1] for name in hub.served if name.endswith(".safetensors")} == {"model.safetensors"}
    capsys.readouterr()
    vectors = []
    for model in ("hf:acme/tiny", str(models[0])):
        assert not main(["embed", model, "the cat"])
        vectors.append(json.loads(capsys.readouterr().out)["vector"])
    assert vectors[0] == vectors[1] and len(vectors[0]) == 32


def test_mistakes_are_one_sentence(hub, models, tmp_path, capsys, monkeypatch):
    hub.push("acme/tiny", models[0])
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    for name in ("config.json", "vocab.txt", "pytorch_model.bin"):
        (pickled / name).write_bytes(b"{}")
    hub.push("acme/pickled", pickled)
    preset = str(write_preset(tmp_path))

    def says(name: str, words: str, flag: str = "--init-from") -> None:
        run = tmp_path / "run"
        assert main(["pretrain", preset, "--run-dir", str(run), flag, name]) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert said.startswith("jaxlm: ") and words in said and "Traceback" not in said and not run.exists()

    says("hf:acme/none", "the hub has no repository acme/none that you can read")
    says("hf:acme/none", "the hub has no repository acme/none that you can read", "--data.tokenizer")
    says("hf:acme/tiny@v9", "the repository acme/tiny has no revision v9")
    says("hf:acme/pickled", "hf:acme/pickled has no safetensors, and other weights (pytorch_model.bin) are never")
    says("hf:a/b/c", "hf:a/b/c is no name of the hub; write hf:ORG/NAME or hf:ORG/NAME@REVISION")
    assert not [name for name in hub.served if name.endswith(".bin")]
    use(monkeypatch, huggingface_hub.constants.ENDPOINT, tmp_path / "empty", offline=True)
    says("hf:acme/tiny", "hf:acme/tiny needs the network, or a whole copy in the cache (Cannot reach")
    use(monkeypatch, "http://127.0.0.1:9", tmp_path / "empty")  # nothing listens there
    says("hf:acme/tiny", "hf:acme/tiny needs the network, or a whole copy in the cache (")


@pytest.mark.slow
def test_the_cache_is_enough_offline(hub, models, tmp_path, capsys):
    commit = hub.push("acme/tiny", models[0])
    assert pin("hf:acme/tiny") == f"hf:acme/tiny#{commit}" and pin(str(models[0])) == str(models[0])
    env = os.environ | {"HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "jaxlm.cli", "fill-mask", "hf:acme/tiny", "the [MASK] sat"]
    said = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert main(["fill-mask", str(models[0]), "the [MASK] sat"]) == 0
    assert said.stdout == capsys.readouterr().out and "the [MASK] sat" in said.stdout


@pytest.mark.slow
def test_a_sweep_keeps_the_commit_of_its_first_run(hub, models, tmp_path):
    first = hub.push("acme/tiny", models[0])
    write_metadata(epath.Path(tmp_path) / "sweep" / "rate_1" / "seed_0", {"imported_from": f"hf:acme/tiny#{first}"})
    hub.push("acme/tiny", models[1])
    options = argparse.Namespace(init_from="hf:acme/tiny", run_dir=str(tmp_path / "sweep"), config="sst2")
    _pin_init_from(options)
    assert options.init_from == f"hf:acme/tiny#{first}"
