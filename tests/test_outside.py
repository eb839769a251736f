"""Objectives, models and tasks from outside jaxlm: of a preset, and of the installed package tests/outside."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import transformers

import jaxlm
from jaxlm import systems
from jaxlm.cli import main
from jaxlm.config.experiment import OptimizerConfig, TrainConfig
from jaxlm.config.json import flatten, from_json, to_json
from jaxlm.config.presets import load_preset
from jaxlm.errors import UserError
from jaxlm.fields import field
from jaxlm.huggingface import ModelCard, export_folder, import_folder
from jaxlm.huggingface.card import render
from jaxlm.huggingface.families import family_of
from jaxlm.models.bert import Bert
from jaxlm.models.roberta import Roberta
from jaxlm.objectives.base import Objective, class_of
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.parallel.mesh import MeshConfig, make_mesh
from jaxlm.runs import pretrain as pretraining
from jaxlm.runs.load import load_run
from jaxlm.runs.resolve import resolve
from jaxlm.tasks.classification import Classification, TextRows
from jaxlm.tasks.tagging import Tagging
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.training.program import Program
from jaxlm.types import TokenBatch
from tests.params import random_params
from tests.tasks.support import tokenizer_of
from tests.training.support import saved_steps, write_text

OUTSIDE = Path(__file__).parent / "outside"
PAGE = (Path(jaxlm.__file__).parent / "YOUR_OWN.md").read_text("utf-8")
OWN = """
import dataclasses
from jaxlm.config.experiment import Experiment
from jaxlm.objectives.masked_lm import MaskedLM

source = "a name that a preset may use"

@dataclasses.dataclass(frozen=True)
class Mine(MaskedLM):
    power: float = 1.0

experiment = Experiment(objective=Mine(power=2.0))
"""


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    """Nothing that a test registers or imports is left behind."""
    systems.all_systems()  # those of jaxlm stay
    for name in ("_SYSTEMS", "_TASKS", "_CLASSES"):
        monkeypatch.setattr(systems, name, dict(getattr(systems, name)))
    before = set(sys.modules)
    yield
    for name in [name for name in sys.modules.keys() - before if name.endswith(".py") or name.startswith("tinylab")]:
        del sys.modules[name]
    systems._load_packages.cache_clear()


def written(path: Path, text: str = OWN) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return str(path)


def test_a_preset_brings_its_classes(tmp_path):
    experiment = load_preset(written(tmp_path / "mine.py"))
    value = to_json(experiment)
    assert value["objective"]["type"] == "mine.py:Mine" and value["objective"]["model"]["type"] == "Bert"
    assert from_json(value) == experiment
    assert load_preset(str(tmp_path / "mine.py")) is experiment, "the file is run once"
    base = systems.system_of(MaskedLM(model=Roberta()))
    assert systems.system_of(experiment.objective, Roberta()) == base
    assert systems.system_of(with_other_model(experiment.objective)) is None, "of a model of its own"
    edited = load_preset(written(tmp_path / "mine.py", OWN.replace("2.0", "3.0")))
    assert edited.objective.power == 3.0 and to_json(edited)["objective"]["power"] == 3.0


def with_other_model(objective):
    class Other(Bert):
        pass

    return type(objective)(model=Other())


def test_a_run_needs_the_file_of_its_preset(tmp_path, monkeypatch):
    value = to_json(load_preset(written(tmp_path / "mine.py")))
    monkeypatch.setattr(systems, "_CLASSES", {n: c for n, c in systems._CLASSES.items() if ":" not in n})
    with pytest.raises(UserError, match=re.escape("run names the class Mine of the preset mine.py; give that file as")):
        from_json(value, "run")
    renamed = load_preset(written(tmp_path / "renamed.py"))
    assert type(from_json(value).objective) is type(renamed.objective)
    assert flatten(renamed)["objective"] == "preset:Mine" != flatten(load_preset("bert_tiny"))["objective"]
    load_preset(written(tmp_path / "third.py"))
    with pytest.raises(UserError, match=r"names the class Mine of the preset mine\.py"):  # one of two that it may be
        from_json(value)


def test_mistakes_in_a_class_are_found(tmp_path):
    plain = OWN.replace("@dataclasses.dataclass(frozen=True)", "").replace("power=2.0", "")
    with pytest.raises(UserError, match=r"Mine has fields and is no dataclass; put @dataclasses\.dataclass"):
        load_preset(written(tmp_path / "mine.py", plain))
    sizes = OWN.replace("power: float = 1.0", "sizes: object = None").replace("power=2.0", "sizes=[1]")
    with pytest.raises(UserError, match=r"\[1\] is a list, which config\.json cannot keep"):
        to_json(load_preset(written(tmp_path / "mine.py", sizes)))

    for wrong, said in (
        ("type: float = 1.0", "Mine has a field 'type', a name that jaxlm uses itself"),
        ("constants: float = 1.0", "Mine has a field 'constants', a name"),
        ("power: float = 1.0\n    mask_rate = 0.3", "Mine.mask_rate has no type, so that the field keeps the default"),
    ):
        mistaken = OWN.replace("power: float = 1.0", wrong).replace("power=2.0", "")
        with pytest.raises(UserError, match=re.escape(said)):
            load_preset(written(tmp_path / "mine.py", mistaken))
    kinds = OWN.replace("import dataclasses", "import dataclasses, enum\nKind = enum.StrEnum('Kind', 'a b')")
    kinds = kinds.replace("power: float = 1.0", "kind: Kind = Kind.a").replace("power=2.0", "")
    with pytest.raises(UserError, match=r"a is a Kind, which config\.json cannot keep"):
        to_json(load_preset(written(tmp_path / "mine.py", kinds)))

    class Odd(Classification):
        gold_value = "odd"  # of rows without it nothing would say that they have no answer

    with pytest.raises(UserError, match=r"Odd\.gold_value is 'odd'; choose one of label, labels, "):
        Odd()


def test_a_model_of_ones_own_begins_from_the_weights_of_its_base(tmp_path, finished):
    """What it adds begins fresh; a term with the name of the sum is refused."""
    text = """
import dataclasses
import jax.numpy as jnp
from jaxlm.config.experiment import Experiment
from jaxlm.models.bert import Bert
from jaxlm.objectives.base import Term
from jaxlm.objectives.masked_lm import MaskedLM

@dataclasses.dataclass(frozen=True)
class Scaled(Bert):
    def init(self, key):
        return super().init(key) | {"scale": jnp.ones(3)}

@dataclasses.dataclass(frozen=True)
class Mine(MaskedLM):
    def loss(self, *arguments):
        return super().loss(*arguments) | {"loss": Term.of(1.0, 1.0, 1.0)}

experiment = Experiment(objective=Mine(model=Scaled(), input_format="document"))
"""
    source = load_run(finished)
    resolved = resolve(written(tmp_path / "mine.py", text), [], init_from=str(finished))
    objective, base = resolved.experiment.objective, source.objective.model
    assert type(objective.model).__name__ == "Scaled" and objective.model.hidden_size == base.hidden_size
    other = text.replace("jaxlm.models.bert import Bert", "jaxlm.models.roberta import Roberta as Bert")
    with pytest.raises(UserError, match=r"is a Bert, and objective\.model, a Scaled, extends another class"):
        resolve(written(tmp_path / "other.py", other), [], init_from=str(finished))
    bound = objective.bind(source.objective.vocabulary, 32)
    fresh = jax.eval_shape(bound.init, jax.random.key(0))
    merged = bound.merge_pretrained(jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), fresh), source)
    assert merged["scale"].shape == (3,)
    np.testing.assert_array_equal(merged["embeddings"]["norm"]["bias"], source.params["embeddings"]["norm"]["bias"])
    t = TrainConfig(steps=2, batch_size=8)
    program = Program(bound, t, OptimizerConfig(warmup_steps=0), make_mesh(MeshConfig(), jax.devices()[:1]))
    batch = TokenBatch(*[jax.ShapeDtypeStruct((8, 32), np.int32)] * 2)
    with pytest.raises(UserError, match="Mine has a term 'loss', which training has of its own"):
        program.lower(batch)


def test_parameters_may_depend_on_the_vocabulary(tmp_path, monkeypatch):
    """Also where a run is checked before its text is read."""
    text = OWN.replace("    power: float = 1.0\n", """    power: float = 1.0

    def init(self, key):
        return super().init(key) | {"prior": jnp.zeros(len(self.vocabulary.special))}
""")
    write_text(tmp_path / "text.txt")
    flags = ["--data.source", str(tmp_path / "text.txt"), "--data.length", "32", "--data.vocab-size", "512"]
    resolved = resolve(written(tmp_path / "mine.py", "import jax.numpy as jnp\n" + text), flags)
    shapes = []
    monkeypatch.setattr(pretraining, "_train", lambda session, mesh, *_: shapes.append(session.program(mesh).shapes))
    pretraining.pretrain(resolved, tmp_path / "run")
    assert shapes[0].params["prior"].shape == (512,)


def test_two_classes_of_one_name_are_refused(tmp_path):
    load_preset(written(tmp_path / "a" / "mine.py"))
    with pytest.raises(UserError, match=r"Mine is a class of \S*/a/mine.py and of \S*/b/mine.py; rename one of them"):
        load_preset(written(tmp_path / "b" / "mine.py"))
    shadow = load_preset(written(tmp_path / "shadow.py", OWN.replace("class Mine(", "class MaskedLM(").replace(
        "Mine(power", "MaskedLM(power")))
    assert type(from_json(to_json(shadow)).objective) is type(shadow.objective) is not MaskedLM


@pytest.mark.parametrize("name", ["os:system", "os.py:system", "subprocess", "mylab:Mine", "tests.outside.evil:Evil"])
def test_nothing_is_imported_because_a_folder_says_so(tmp_path, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "mylab.py", "raise SystemExit('imported')")
    written(tmp_path / "os.py", "raise SystemExit('imported')")
    before = set(sys.modules)
    with pytest.raises(UserError, match=r"here names (the class|a type)"):
        from_json({"type": name, "command": "true"}, "here")
    assert not sys.modules.keys() - before


def test_a_class_that_nothing_registers_is_not_saved():
    class Mine(MaskedLM):
        pass

    with pytest.raises(UserError, match=r"tests:Mine is not registered.*jaxlm.systems.register"):
        to_json(Mine())


def test_a_package_that_cannot_be_imported_is_named(tmp_path, monkeypatch, capsys):
    """And everything else works."""
    info = tmp_path / "broken-1.dist-info"
    written(info / "METADATA", "Name: broken\nVersion: 1\n")
    written(info / "entry_points.txt", "[jaxlm.systems]\nbroken = no_such_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    systems._load_packages.cache_clear()
    assert systems.system_of(MaskedLM()).family == "bert"
    said = capsys.readouterr()
    assert "The classes of broken are not registered, since no_such_module cannot be imported" in said.err + said.out


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The folder in which pip has installed the package."""
    folder = tmp_path_factory.mktemp("site")
    source = shutil.copytree(OUTSIDE, folder / "source")
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--quiet", "--target", str(folder / "packages")]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], check=True, timeout=600)
    return folder / "packages"


def test_an_installed_package_is_found_by_its_entry_point(site, monkeypatch):
    monkeypatch.syspath_prepend(site)
    systems._load_packages.cache_clear()
    assert "tinylab" not in sys.modules
    value = {"type": "tinylab:Shuffled", "model": {"type": "tinylab:GatedBert"}, "input_format": "document"}
    objective = from_json(value).bind_unchecked(Vocabulary.stand_in(99))
    assert to_json(objective)["model"]["type"] == "tinylab:GatedBert"
    from jaxlm.huggingface.families import family_named, family_of

    assert family_of(objective).models(objective)[0].architecture == "GatedBertForMaskedLM"
    assert family_named("gated-bert", "here").model_type == "gated-bert"
    task = from_json({"type": "tinylab:Smoothed", "labels": ["a", "b"], "model": value["model"]})
    task = task.bind_unchecked(objective.vocabulary)
    models = family_of(task).models(task)
    assert models[0].architecture == "GatedBertForSequenceClassification"
    assert "```python\nimport tinylab.modeling\nfrom transformers" in render(ModelCard(), task, models, 1, "out")
    assert systems.task_of(task).rows.text_field == "review"
    assert systems.task_of(Classification()).rows is TextRows


@pytest.fixture
def package(monkeypatch) -> None:
    """tests/outside, not installed; its entry point's module is imported."""
    monkeypatch.syspath_prepend(OUTSIDE)
    importlib.import_module("tinylab.systems")


SIZES = dict(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32, max_positions=32)


@pytest.mark.usefixtures("package")
def test_a_task_from_scratch_is_scored_exported_and_imported(tmp_path):
    """With the logits of the PyTorch class, of which it has one a token."""
    from tinylab.odd import OddWord, WordRows

    rows = [{"words": ["red", "dog", "old", "river"][: 2 + n % 3], "odd": n % 2} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = tokenizer_of(tmp_path / "tokenizer")
    tokenizer.save(tmp_path / "saved")
    data = WordRows(dev=str(tmp_path / "rows.jsonl"), length=32, tokenizer=str(tmp_path / "saved"))
    source = data.open(tokenizer)
    task = OddWord(model=Bert(**SIZES)).bind(tokenizer.vocabulary, 32)
    params = random_params(task, 0)
    (batch,) = source.batches("held_out", 8, task.row_format(32), 0).evaluation(8, 1)
    out = export_folder(tmp_path / "out", task, params, tokenizer, ModelCard())
    model = transformers.AutoModelForTokenClassification.from_pretrained(out).eval()
    with torch.no_grad():
        names = ("input_ids", "token_type_ids", "attention_mask")
        theirs = model(**{name: torch.tensor(batch[name]).long() for name in names}).logits[..., 0].numpy()
    words = [logits[word >= 0] for logits, word in zip(theirs, batch["word"], strict=True)]
    assert [len(words[list(batch["row"]).index(n)]) for n in range(8)] == [len(row["words"]) for row in rows]
    answers, odds = task.answers(params, source, 32, 8), [rows[number]["odd"] for number in batch["row"]]
    for number, logits in zip(batch["row"], words, strict=True):
        np.testing.assert_allclose(answers[number].scores["scores"], logits, atol=1e-4)
    right = [np.argmax(logits) == odd for logits, odd in zip(words, odds, strict=True)]
    assert task.score_rows(params, source, 32, 8) == {"accuracy": np.mean(right)}
    losses = [np.logaddexp.reduce(logits) - logits[odd] for logits, odd in zip(words, odds, strict=True)]
    loss = jax.jit(lambda params, batch: task.loss(params, batch, None, False)["task_loss"])(params, batch)
    np.testing.assert_allclose(loss.total / loss.weight, np.mean(losses), rtol=1e-4)
    again = import_folder(out)
    assert class_of(again.objective) is Tagging, "the first task with this head"
    jax.tree.map(np.testing.assert_array_equal, again.params, params)


def test_the_page_on_tasks_shows_a_part_of_the_task():
    page = (Path(jaxlm.__file__).parent / "tasks" / "README.md").read_text("utf-8")
    shown = re.search(r"^```python\n(.*?)^```", page, re.M | re.S)[1].splitlines()
    lines = iter((OUTSIDE / "tinylab" / "odd.py").read_text("utf-8").splitlines())
    assert len(shown) > 30 and [line for line in shown if line and line not in lines] == []


@pytest.mark.usefixtures("package")
def test_what_an_export_lacks_is_said(tmp_path, monkeypatch, capsys):
    from tinylab.gated import GatedBert

    objective = MaskedLM(model=GatedBert(**SIZES), input_format="document").bind(Vocabulary.stand_in(99), 16)
    module = "the module with the names of a GatedBert in Transformers, cannot be imported, as said above"
    for family, message in (
        ("bert", r"BertForMaskedLM of Transformers has no encoder/layers/mlp/wi_0/bias, .*: name heads .*; and it "
                 r"has no encoder/layers/mlp/wi/bias, encoder/layers/mlp/wi/kernel, which the table of BertForMasked"),
        ("tinylab.tabel", f"tinylab.tabel, {module}"),
        ("tinylab.odd", rf"tinylab\.odd, {module}"), ("tinylab_names", f"tinylab_names, {module}"),
    ):
        systems.register(systems.System(MaskedLM, GatedBert, family))
        with pytest.raises(UserError, match=message):
            export_folder(tmp_path / "out", objective, {}, None, ModelCard())
    said = "".join(capsys.readouterr())
    assert "tinylab_names is left out, since it cannot be imported: No module named 'tinylab_names'" in said
    written(tmp_path / "tinylab_names.py", "from tinylab.table import FAMILY")
    monkeypatch.syspath_prepend(tmp_path)  # a module beside a preset has a name without dots
    assert family_of(objective).model_type == "gated-bert"


@pytest.mark.slow  # test_a_preset_brings_its_classes has a class of one's own
def test_the_page(tmp_path, monkeypatch, capsys):
    """Its preset and its commands, on a little text."""
    monkeypatch.chdir(tmp_path)
    (_, code), (_, commands), _, (_, look), *_ = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.M | re.S)
    commands = commands.splitlines()
    small = 'Bert(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32, dropout=0.0, attention_dropout=0.0)'
    for old, new in (('Bert.published("tiny")', small), ("steps=200", 'steps=2, tracker="none"'), ("1024", "512")):
        assert old in code
        code = code.replace(old, new)
    written(tmp_path / "mine_tiny.py", code)
    write_text(Path(written(tmp_path / "texts" / "some.txt", "")))
    assert len(commands) == 5
    for command in commands:
        _, *arguments = shlex.split(command.replace("300", "3"), comments=True)
        assert main(arguments) in (0, None), command
    said = capsys.readouterr().out
    assert "predict" in said and "step 3" in said
    assert saved_steps(tmp_path / "runs/mine")[-1] == 3
    assert json.loads((tmp_path / "runs/mine/config.json").read_text())["objective"]["type"] == "mine_tiny.py:Mine"
    assert jaxlm.load("runs/mine", preset="mine_tiny.py").objective.power == 2.0
    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert config["architectures"] == ["BertForMaskedLM"]
    exec(look, names := {})
    ids = names["example"]["input_ids"]
    assert ids.shape == (8, 64) and (ids == names["mine"].vocabulary.mask).any()


@dataclasses.dataclass(frozen=True)
class Extended(Objective):
    """Extends no objective of jaxlm."""

    model: Bert = field(Bert(), weights=True)


def test_an_objective_that_extends_no_other_is_exported_as_its_preset_says():
    with pytest.raises(UserError, match="how a preset or a package names one"):
        family_of(Extended())
    systems.register(systems.System(Extended, Bert, "bert", export_only=True))
    objective = Extended().bind(Vocabulary.stand_in(Bert().vocab_size), 8)
    assert family_of(objective).models(objective)[0].architecture == "BertForMaskedLM"


@pytest.mark.slow
def test_the_package_in_every_command(site, tmp_path):
    """Pretrain, kill, resume, show, plan, export, finetune, evaluate, in processes that find it by its entry point."""
    for name in ("shuffled_tiny.py", "smoothed.py"):
        shutil.copy(OUTSIDE / name, tmp_path / name)
    write_text(tmp_path / "text.txt")
    rows = [{"review": f"{word} {word} bo ka", "label": label} for word, label in [("ti", "a"), ("mu", "b")] * 20]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    root = str(Path(jaxlm.__file__).parents[1])
    installed = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{site}"}

    def start(*arguments: str, env=installed) -> subprocess.Popen:
        return subprocess.Popen([sys.executable, "-m", "jaxlm.cli", *arguments], cwd=tmp_path, env=env, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def run(*arguments: str, code: int = 0, env=installed) -> str:
        process = start(*arguments, env=env)
        said = process.communicate(timeout=600)[0]
        assert process.returncode == code, said
        return said

    killed = start("pretrain", "shuffled_tiny.py", "--run-dir", "run", "--train.steps", "4000")
    deadline = time.monotonic() + 600
    while not saved_steps(tmp_path / "run"):
        assert killed.poll() is None and time.monotonic() < deadline, killed.communicate()[0]
        time.sleep(0.2)
    killed.kill()
    killed.communicate()
    steps = saved_steps(tmp_path / "run")[-1] + 4
    assert "resumed at step" in run("pretrain", "run", "--train.steps", str(steps))
    assert saved_steps(tmp_path / "run")[-1] == steps
    assert "Shuffled, batch of step 1" in run("show", "run")
    assert "tinylab:Shuffled" in (tmp_path / "run/config.json").read_text()
    assert "batch 8 x 32" in run("plan", "run")
    run("export", "run", "out")
    code = re.search(r"```python\n(.*?)```", (tmp_path / "out/README.md").read_text(), re.S)[1] + """
import jax, numpy as np, torch, jaxlm
from jaxlm.models.base import Inputs
theirs = model.eval()
ours, ids = jaxlm.load("run"), np.arange(24).reshape(2, 12) % 30 + 5
model = ours.objective.model
hidden = model.hidden_states(ours.params, Inputs(jax.numpy.asarray(ids)))
matrix, bias = model.output_matrix(ours.params)
logits = model.token_features(ours.params, hidden) @ matrix.T + bias
np.testing.assert_allclose(logits, theirs(torch.tensor(ids)).logits.detach(), atol=1e-4)
again = jaxlm.load("out")
assert type(again.objective.model).__name__ == "GatedBert"
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=installed, check=True, timeout=600)
    assert "smoothed" in run("finetune", "smoothed.py", "--init-from", "run", "--run-dir", "tuned")
    run("export", "tuned", "tuned_out")
    config = json.loads((tmp_path / "tuned_out/config.json").read_text())
    assert (config["model_type"], config["id2label"]) == ("gated-bert", {"0": "a", "1": "b"})
    assert "smoothed" in run("evaluate", "tuned", "--data.source", "rows.jsonl")
    run("embed", "run", "ti mu")
    said = run("show", "run", code=2, env=os.environ | {"PYTHONPATH": root})
    assert "config.json names the class Shuffled of the package tinylab, which registers none here" in said
