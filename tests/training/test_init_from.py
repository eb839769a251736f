"""Runs that begin from another model: `--init-from` a run or a Transformers folder."""

from __future__ import annotations

import json
import shutil
import weakref
from pathlib import Path

import jax
import pytest

import jaxlm
from jaxlm.cli import main
from jaxlm.config.presets import load_config
from jaxlm.runs.load import load_run
from jaxlm.tokenizers import tokenizer
from jaxlm.tokenizers.files import MARKER
from jaxlm.training.checkpoints import Checkpoints
from jaxlm.training.program import Program
from tests.training.support import assert_same_arrays, metadata, metrics, saved_steps, write_preset, write_text
from tests.training.test_run import refused

GPT2 = """
from jaxlm.models.gpt2 import Gpt2
from jaxlm.objectives.causal_lm import CausalLM

experiment = Experiment(CausalLM(Gpt2(num_layers=1)), experiment.data, experiment.optimizer, experiment.train)
"""

STUDENT = """
from jaxlm.models.distilbert import Distilbert
from jaxlm.objectives.distillation import Distillation

student = Distilbert(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32, max_positions=32)
experiment = Experiment(Distillation(student), experiment.data, experiment.optimizer, experiment.train)
"""


LLAMA = """
from jaxlm.models.llama import EuroBert, Llama
from jaxlm.objectives.causal_lm import CausalLM

model = Llama(hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=32,
              max_positions=32, tied_head={tied})
objective = {objective}
experiment = Experiment(objective, experiment.data, experiment.optimizer, experiment.train)
"""


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    """A preset of another size and another recipe, over another text."""
    folder = tmp_path_factory.mktemp("other")
    preset = write_preset(folder, write_text(folder / "text.txt", seed=7))
    text = preset.read_text()
    for old, new in (("hidden_size=16", "hidden_size=24, dropout=0.0, init_std=0.5"),
                     ("vocab_size=512", "vocab_size=600"), ("learning_rate=1e-2", "learning_rate=3e-3")):
        assert old in text
        text = text.replace(old, new)
    preset.write_text(text)
    return preset


@pytest.fixture(params=["run", pytest.param("transformers", marks=pytest.mark.slow)])
def source(request, finished, tmp_path) -> Path:
    if request.param == "run":
        return finished
    assert main(["export", str(finished), str(tmp_path / "transformers")]) == 0
    return tmp_path / "transformers"


def begin(preset: Path, run: Path, source: Path, *flags: str) -> int:
    return main(["pretrain", str(preset), "--run-dir", str(run), "--init-from", str(source), *flags])


def first_params(run: Path) -> dict:
    """The parameters of the checkpoint of step 0."""
    checkpoints = Checkpoints(run / "checkpoints", read_only=True)
    params, step = checkpoints.restore_params(jax.eval_shape(load_run(run).objective.init, jax.random.key(0)), step=0)
    checkpoints.close()
    assert step == 0
    return params


def test_it_begins_with_the_sources_weights_tokenizer_and_sizes(other, source, finished, tmp_path):
    run = tmp_path / "new"
    assert begin(other, run, source, "--train.keep-checkpoints", "4", "--data.length", "16") == 0
    theirs = load_run(finished)
    assert_same_arrays(first_params(run), theirs.params)
    ours = load_run(run)
    ids = [list(tokenizer.encode("kedu balo nimo")) for tokenizer in (ours.tokenizer, theirs.tokenizer)]
    assert ids[0] == ids[1] and ours.tokenizer.vocabulary.size == theirs.tokenizer.vocabulary.size == 512
    assert ours.length == theirs.length == 32, "it still reads longer texts"
    config, model_of_source = load_config(run / "config.json"), load_config(finished / "config.json").objective.model
    model = config.objective.model
    assert (model.hidden_size, model.vocab_size) == (16, 512), "what the weights are is the source's"
    assert model.dropout == 0.0 and model_of_source.dropout == 0.1, "the recipe is the preset's"
    assert config.optimizer.learning_rate == 3e-3 and config.data.source.endswith("other0/text.txt")
    lines = metrics(run)
    assert lines[-1]["step"] == 12 and lines[-1]["loss"] < lines[0]["loss"]
    assert metadata(run, 12)["imported_from"] == str(source)
    assert json.loads((run / "data.json").read_text())["imported_from"] == str(source)
    assert main(["pretrain", str(run), "--train.steps", "14"]) == 0 and saved_steps(run)[-1] == 14


def test_a_run_whose_source_is_gone_is_told_how_it_resumes(other, finished, tmp_path, capsys):
    run, source = tmp_path / "new", f"{finished}@4"
    assert begin(other, run, source, "--train.steps", "2") == 0
    shutil.rmtree(finished / "checkpoints" / "4")
    arguments = "pretrain", other, "--run-dir", run, "--init-from", source, "--train.steps", "3"
    said = refused(capsys, *arguments)
    own = f"; {run} has parameters of its own: resume it with `jaxlm pretrain {run}`."
    assert "has no checkpoint of step 4" in said and said.endswith(f"{own}\n")
    assert own not in refused(capsys, *arguments[:3], tmp_path / "another", *arguments[4:])
    assert main(["pretrain", str(run), "--train.steps", "3"]) == 0 and saved_steps(run)[-1] == 3


@pytest.mark.slow
def test_killed_early_it_begins_again_from_the_source(other, finished, tmp_path, monkeypatch):
    """Before the first step or the first checkpoint; bit for bit as the run that was left alone, with the same command
    or as its own preset."""
    alone, run, resumed = (tmp_path / name for name in ("alone", "new", "resumed"))
    assert begin(other, alone, finished) == 0
    for where, when in ("jaxlm.runs.pretrain.train", "before the first step"), (
        "jaxlm.training.checkpoints.Checkpoints.save", "before the first checkpoint"
    ):
        with monkeypatch.context() as patch:
            patch.setattr(where, killed)
            with pytest.raises(Killed):
                begin(other, run, finished)
        assert saved_steps(run) == [0], when
        if not resumed.exists():
            shutil.copytree(run, resumed)
    assert begin(other, run, finished) == 0
    assert main(["pretrain", str(resumed)]) == 0
    for folder in (run, resumed):
        assert metadata(folder, 12) == metadata(alone, 12) and metrics(folder) == metrics(alone)


class Killed(Exception):
    pass


def killed(*_, **__):
    raise Killed


def test_fresh_parameters_are_gone_when_the_state_is_made(other, finished, tmp_path, monkeypatch):
    """Beside the source's weights and the optimizer's state they might not fit."""
    init, left = Program.init_params, []

    def init_params(program, seed):
        params = init(program, seed)
        left.extend(map(weakref.ref, jax.tree.leaves(params)))
        return params

    def init_state(program, params):
        left[:] = [array() is not None for array in left]
        raise Killed

    monkeypatch.setattr(Program, "init_params", init_params)
    monkeypatch.setattr(Program, "init_state", init_state)
    with pytest.raises(Killed):
        begin(other, tmp_path / "new", finished)
    assert left and not any(left)


@pytest.mark.slow
def test_killed_before_it_has_the_sources_weights_it_never_begins_from_random_ones(
    other, finished, tmp_path, monkeypatch, capsys
):
    run = tmp_path / "new"
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save_params", killed)
        with pytest.raises(Killed):
            begin(other, run, finished)
    assert saved_steps(run) == []
    said = refused(capsys, "pretrain", run)
    assert f"--init-from {finished}" in said and saved_steps(run) == []
    assert begin(other, run, finished, "--train.steps", "1") == 0
    assert_same_arrays(first_params(run), load_run(finished).params)


@pytest.mark.slow
def test_a_student_killed_before_its_first_step_keeps_the_sizes_of_its_weights(
    preset, finished, tmp_path, monkeypatch, capsys
):
    """Layers of the teacher are its checkpoint of step 0. What does not depend on them may still change."""
    student, run = tmp_path / "student.py", tmp_path / "student"
    student.write_text(preset.read_text() + STUDENT)
    arguments = ["pretrain", str(student), "--run-dir", str(run), "--objective.teacher", str(finished)]
    arguments += ["--data.tokenizer", str(finished)]
    with monkeypatch.context() as patch:
        patch.setattr("jaxlm.runs.pretrain.train", killed)
        with pytest.raises(Killed):
            main(arguments)
    assert saved_steps(run) == [0]
    said = refused(capsys, *arguments, "--objective.model.max-positions", "40")
    assert "objective.model.max_positions: 32 -> 40" in said
    assert main([*arguments, "--optimizer.learning-rate", "5e-3", "--train.steps", "1"]) == 0


@pytest.mark.slow
def test_killed_while_its_tokenizer_is_saved_it_saves_it_again(other, finished, tmp_path, monkeypatch):
    run, write = tmp_path / "new", tokenizer.write_whole

    def killed_before_the_marker(path, data):
        killed() if path.name == MARKER else write(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "write_whole", killed_before_the_marker)
        with pytest.raises(Killed):
            begin(other, run, finished)
    assert [path.name for path in (run / "tokenizer").iterdir()] == ["spiece.model"]
    assert begin(other, run, finished, "--train.steps", "1") == 0
    assert (run / "tokenizer" / MARKER).read_bytes() == (finished / "tokenizer" / MARKER).read_bytes()


@pytest.mark.slow  # huggingface/test_llama.py has it of folders
def test_a_decoder_becomes_an_encoder_and_one_again(preset, finished, tmp_path, capsys):
    """With its parameters; the exported folder is EuroBERT's. Then the other way."""
    decoder, encoder, back = (tmp_path / name for name in ("decoder", "encoder", "back"))
    causal, masked = tmp_path / "causal.py", tmp_path / "masked.py"
    causal.write_text(preset.read_text() + LLAMA.format(objective="CausalLM(model)", tied=True))
    masked.write_text(preset.read_text() + LLAMA.format(
        objective='MaskedLM(model.as_type(EuroBert), input_format="document", predicts_next=True)', tied=False))
    flags = "--train.steps", "2", "--data.tokenizer", str(finished)
    assert main(["pretrain", str(causal), "--run-dir", str(decoder), *flags]) == 0
    assert begin(masked, encoder, decoder, "--train.steps", "2") == 0
    assert f"The Llama of {decoder} goes on as a EuroBert that attends to all tokens." in capsys.readouterr().err
    assert_same_arrays(first_params(encoder), load_run(decoder).params)
    model, own = (load_config(run / "config.json").objective.model for run in (encoder, decoder))
    assert model.tied_head and own.in_direction(False) == model
    assert main(["fill-mask", str(encoder), "kedu [MASK] nimo", "--top-k", "2"]) == 0
    assert main(["export", str(encoder), str(tmp_path / "hf")]) == 0
    assert begin(causal, back, tmp_path / "hf", "--train.steps", "1") == 0
    assert_same_arrays(first_params(back), load_run(encoder).params)
    assert load_config(back / "config.json").objective.model == own
    assert main(["generate", str(back), "kedu", "--max-new-tokens", "2"]) == 0
    flags = "--run-dir", tmp_path / "new", "--objective.model.is-causal", "False"
    assert "objective.model.is_causal is False; CausalLM needs True" in refused(capsys, "pretrain", causal, *flags)


def test_a_model_of_another_kind_is_refused(other, source, tmp_path, capsys):
    preset = tmp_path / "gpt2.py"
    preset.write_text(other.read_text() + GPT2)
    said = refused(capsys, "pretrain", preset, "--run-dir", tmp_path / "new", "--init-from", source)
    assert "holds a Bert" in said and "trains a Gpt2" in said and not (tmp_path / "new").exists()


def test_a_flag_for_what_the_weights_decide_is_refused(other, finished, tmp_path, capsys):
    flags = "--objective.model.hidden-size", "24"
    said = refused(capsys, "pretrain", other, "--run-dir", tmp_path / "new", "--init-from", finished, *flags)
    assert f"the weights of {finished} were trained with --objective.model.hidden-size 16" in said


@pytest.mark.slow
def test_a_run_that_has_parameters_of_its_own_takes_no_others(preset, finished, tmp_path, capsys):
    run = tmp_path / "copy"
    shutil.copytree(finished, run)
    said = refused(capsys, "pretrain", preset, "--run-dir", run, "--init-from", finished, "--train.steps", "14")
    assert f"{run} began from fresh parameters" in said and saved_steps(run) == [4, 8, 12]
    second = tmp_path / "second"
    capsys.readouterr()
    assert begin(preset, second, finished, "--train.steps", "1") == 0
    assert f"read from the beginning, in the order of {finished}; --train.seed 1" in capsys.readouterr().out
    assert begin(preset, tmp_path / "third", finished, "--train.steps", "1", "--data.held-out", "0.3") == 0
    assert f"{finished} held out less of this text" in capsys.readouterr().out
    said = refused(capsys, "pretrain", preset, "--run-dir", second, "--init-from", run, "--train.steps", "2")
    assert f"{second} began from {finished}" in said
    assert begin(preset, second, finished / ".." / finished.name, "--train.steps", "2") == 0
    assert "read from the beginning" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_head_that_the_source_lacks_is_initialized(preset, tmp_path, capsys):
    """Masked LM alone first, then with next-sentence prediction: what both have is the source's. And the other way
    round: what only the source has is left out. One line says so."""
    plain, run = tmp_path / "plain", tmp_path / "run"
    flags = ["--train.steps", "2", "--objective.input-format"]
    assert main(["pretrain", str(preset), "--run-dir", str(plain), *flags, "document"]) == 0
    assert begin(preset, run, plain, "--train.steps", "1", "--objective.input-format", "next-sentence") == 0
    theirs, ours = jaxlm.load(str(plain)).params, first_params(run)
    assert set(ours) - set(theirs) == {"pooler", "nsp_head"}
    assert_same_arrays({name: ours[name] for name in theirs}, theirs)
    said = capsys.readouterr().out
    assert f"tokenizer of {plain}; randomly initialized: nsp_head, pooler\n" in said
    back = tmp_path / "back"
    assert begin(preset, back, run, *flags, "document") == 0
    assert set(first_params(back)) == set(theirs)
    said = capsys.readouterr().out
    assert f"tokenizer of {run}; unused weights: nsp_head, pooler\n" in said
