"""The command line: what it says to mistakes. Exit code 2, one line on standard error, nothing written."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from jaxlm.cli import COMMANDS, main
from jaxlm.config.json import to_json
from jaxlm.config.presets import load_preset
from jaxlm.fields import with_value
from jaxlm.models.bert import Bert
from jaxlm.paths import check_output
from tests.training.support import write_preset


@pytest.fixture(scope="module")
def preset(tmp_path_factory):
    return write_preset(tmp_path_factory.mktemp("preset"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--train.stepz", "3"], "there is no field --train.stepz; did you mean --train.steps?"),
        (["--steps", "3"], "did you mean --train.steps?"),
        (["--objective.model.zebra", "3"], "there is no field --objective.model.zebra; --help lists"),
        (["--lr", "3"], "did you mean --optimizer.learning-rate?"),
        (["--objective.vocabulary", "3"], "there is no field --objective.vocabulary"),
        (["--objective.hidden-size", "3"], "did you mean --objective.model.hidden-size?"),
        (["more"], "more belongs to no field"),
        (["--train.steps", "0"], "train.steps is 0; it must be in [1, inf)"),
        (["--train.seed", "-1"], "train.seed is -1"),
        (["--train.log-every", "0"], "train.log_every is 0"),
        (["--optimizer.learning-rate", "0"], "optimizer.learning_rate is 0.0; it must be in (0, inf)"),
        (["--optimizer.learning-rate", "nan"], "optimizer.learning_rate is nan"),
        (["--optimizer.clip-norm", "nan"], "optimizer.clip_norm is nan"),
        (["--optimizer.b2", "1"], "optimizer.b2 is 1.0; it must be in [0, 1)"),
        (["--optimizer.eps", "0"], "optimizer.eps is 0.0; it must be in (0, inf)"),
        (["--optimizer.warmup-steps", "-1"], "optimizer.warmup_steps is -1"),
        (["--objective.mask-rate", "1.5"], "objective.mask_rate is 1.5"),
        (["--objective.model.num-heads", "3"], "num_heads"),
        (["--objective.model.num-layers", "3000000000"], "num_layers is 3000000000; it must be in [1, 1000]"),
        (["--data.length", "4"], r"data.length is 4; it must be in [8, inf)"),
        (["--data.length", "64"], "more than the model's 32 positions"),
        (["--data.source", "no/such/file.txt"], "no/such/file.txt"),
        (["--train.accumulate", "3"], "train.batch_size 8 is not divisible by train.accumulate 3"),
        (["--mesh.data", "3"], "the mesh data=3, fsdp=1, tensor=1 does not fit 1 device"),
        (["--mesh.data", "0"], "the mesh data=0, fsdp=1, tensor=1 does not fit 1 device"),
        (["--mesh.fsdp", "-1"], "set one of them to -1 to take what is left"),
    ],
)
def test_mistakes_in_fields(preset, tmp_path, capsys, monkeypatch, arguments, words):
    run = tmp_path / "run"
    monkeypatch.setenv("COLUMNS", "60")  # however narrow the terminal is
    assert main(["pretrain", str(preset), "--run-dir", str(run), *arguments]) == 2
    said = capsys.readouterr()
    assert words in said.err
    assert said.err.startswith("jaxlm: ") and said.err.count("\n") == 1 and "Traceback" not in said.err
    assert not run.exists()


@pytest.mark.parametrize("arguments", [
    ["--train.steps", "many"], ["--optimizer.learning-rate", "x"], ["--optimizer.name", "sgd"],
    ["--train.tracker", "maybe"], ["--train.steps"], ["--train.seed=many", "--train.steps", "1"],
])
def test_values_of_another_type_are_refused_by_tyro(preset, tmp_path, capsys, arguments):
    with pytest.raises(SystemExit) as stopped:
        main(["pretrain", str(preset), "--run-dir", str(tmp_path / "run"), *arguments])
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and arguments[0].partition("=")[0] in said and "Traceback" not in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", [
    ["evaluate", "RUN", "--predictions"], ["embed", "RUN", "A text.", "--out"],
    ["plan", "configs/bert_tiny.py", "--topology", "v5e:1x1", "--hlo"],
    ["finetune", "configs/tasks/classify.py", "--predictions"],
])
def test_outputs_replace_nothing(command, tmp_path, capsys):
    """A file elsewhere is replaced where --overwrite says so, a file of a run never."""
    run, mine = tmp_path / "run", tmp_path / "mine.npy"
    (run / "checkpoints" / "4").mkdir(parents=True)
    files = run / "config.json", run / "checkpoints" / "4" / "vectors.npy", mine
    for file in files:
        file.write_text("{}")
    whose = f"would replace a file of the run {run}; choose another"
    first = files[1] if command[0] == "embed" else files[0]  # embed writes .npy only
    for arguments, words in (([first], whose), ([files[1], "--overwrite"], whose), ([mine], "pass --overwrite")):
        assert main([str(run) if part == "RUN" else part for part in command] + [str(part) for part in arguments]) == 2
        assert words in capsys.readouterr().err
    assert {file.read_text() for file in files} == {"{}"}
    check_output(mine, command[-1], overwrite=True)
    check_output(tmp_path / "new", command[-1], overwrite=False)


def test_mistakes_in_names(preset, tmp_path, capsys):
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    broken, empty = tmp_path / "broken.py", tmp_path / "empty.py"
    broken.write_text("import no_such_module\n")
    empty.write_text("experiment = 3\n")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    run, task = tmp_path / "run", tmp_path / "task"
    classify = with_value(with_value(load_preset("classify"), "train.epochs", 0), "train.steps", 4)
    for folder, experiment in ((run, load_preset(str(preset))), (
        task, dataclasses.replace(classify, objective=dataclasses.replace(classify.objective, model=Bert()))
    )):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(to_json(experiment)))
    for arguments, words in (
        (["pretrain", preset.parent / "tinny.py"], "did you mean"),
        (["pretrain", broken], "cannot be run: ModuleNotFoundError"),
        (["pretrain", empty], "does not set `experiment`"),
        (["pretrain", preset, "--run-dir", other], "holds other files (notes.txt"),
        (["pretrain", preset, "--run-dir", other / "notes.txt"], "is a file"),
        (["pretrain", preset, "--run-dir", "/proc/run"], "cannot make the run folder /proc/run"),
        (["pretrain", preset, "--run-dir", tmp_path / "a[1]"], "a[1] has one of the characters *, ? and [ in it"),
        (["pretrain", preset, "--run-dir", "s3://bucket/run"], "s3://bucket/run cannot hold a run: Orbax keeps"),
        (["import", other, "s3://bucket/run"], "s3://bucket/run cannot hold a run: Orbax keeps"),
        (["export", "s3://bucket/run", other], "s3://bucket/run cannot hold a run: Orbax keeps"),
        (["tokenizer", "train", "out"], "arguments are required: --data.source"),
        (["tokenizer", "extend", other, "out", "--data.source", other, "--words", "0"], "--words 0 adds no word"),
        (["tokenizer", "train", "gs://bucket/vocabulary", "--data.source", other], "a local folder; tokenizers are"),
        (["pretrain", preset, "--run-dir", tmp_path / "\udcff"], "is not UTF-8, which runs need; choose another"),
        (["show", preset, "--data.tokenizer", fifo], "fifo is neither a file nor a folder"),
        (["show", preset, "--data.tokenizer", "http://host/vocab.txt"], "host/vocab.txt is a web address; download"),
        (["import", "b" * 300, other / "new"], "cannot be read or written (File name too long)."),
        (["pretrian", preset], "there is no command 'pretrian'; the commands are pretrain, show"),
        (["export", tmp_path / "nothing", tmp_path / "out"], "nothing is not a jaxlm run folder"),
        (["show", preset, "--step", "-1"], "--step is -1; it must be at least 0"),
        (["show", preset, "--step", 2**31], "--step is 2147483648; it must be at least 0, and below 2,147,483,648"),
        (["show", preset, "--examples", "0"], "--examples is 0; it must be at least 1"),
        (["bench", preset, "--steps", "3", "--generate", "2"], "--steps are those of training; leave it out beside"),
        (["pretrain", run, "--run-dir", other], "would begin from fresh parameters; pass --init-from"),
        (["finetune", task, "--run-dir", other, "--seeds", "2"], "would begin from fresh parameters; pass --init-from"),
        (["tokenizer", "train", broken / "x", "--data.source", other], "broken.py is not a folder"),
    ):
        assert main([str(argument) for argument in arguments]) == 2, arguments
        said = capsys.readouterr().err
        assert words in said and said.count("\n") == 1 and "Traceback" not in said
    assert [p.name for p in other.iterdir()] == ["notes.txt"]


def test_a_preset_of_another_name_is_suggested(preset, capsys, monkeypatch):
    monkeypatch.chdir(preset.parent)
    assert main(["pretrain", "tiny.yp"]) == 2
    assert "tiny.py" in capsys.readouterr().err


def test_help_of_the_fields(preset, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")  # as wide as the terminal
    for command in ("plan", "pretrain"):
        with pytest.raises(SystemExit) as stop:
            main([command, str(preset), "--help"])
        assert stop.value.code == 0
        said = capsys.readouterr().out
        assert ("--topology" in said) == (command == "plan")
    for words in ("--objective.mask-rate", "--objective.model.hidden-size", "--train.checkpoint-every", "--mesh.fsdp",
                  "--data.source", "Share of tokens that"):
        assert words in said
    assert "--objective.vocabulary" not in said
    with pytest.raises(SystemExit):
        main(["show", "tag", "--help"])
    assert "\nTagging of words, on your own data.\n\nCommand:     jaxlm finetune tag --init" in capsys.readouterr().out
    assert "Configuration of a run." in said and "Optimizer and learning-rate schedule." in said
    own, fields = said.split("usage: ")[1:]
    assert "--run-dir RUN_DIR" in own and "--init-from RUN_OR_HF_DIR" in own
    _, _, description, *boxes = fields.splitlines()
    assert description.startswith("Configuration of a run") and max(map(len, boxes)) <= 60


def test_help_imports_nothing_heavy():
    heavy = ("jax", "numpy", "flax", "tyro", "rich", "orbax", "tensorstore")
    code = (
        "import sys; from jaxlm.cli import main; assert main(['--help']) == 0; "
        f"print([name for name in {heavy!r} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    assert all(name in done.stdout for name in COMMANDS)


def test_the_module_is_the_command():
    done = subprocess.run([sys.executable, "-m", "jaxlm.cli", "nonsense"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not done.stdout


def test_a_file_name_that_is_no_utf8_is_printed(preset, tmp_path, capsys):
    text = shutil.copy(preset.parent / "text.txt", tmp_path / "text-\udcff.txt")
    flags = ["--data.source", str(text), "--data.tokenizer-kind", "byte-bpe", "--data.vocab-size", "512"]
    for order in ([str(tmp_path / "one"), *flags], [*flags, str(tmp_path / "two")]):
        assert main(["tokenizer", "train", *order]) == 0
    assert "text-\\udcff.txt" in capsys.readouterr().out
    assert len({(tmp_path / name / "tokenizer.json").read_text() for name in ("one", "two")}) == 1


@pytest.mark.parametrize("error", [
    MemoryError("no room"), RuntimeError("RESOURCE_EXHAUSTED: no room"), RuntimeError(),
    RuntimeError("INTERNAL: Error dispatching computation: Out of memory allocating 9 bytes: no room"),
])
def test_memory_that_does_not_suffice_is_one_sentence(error, preset, capsys, monkeypatch):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("jaxlm.analysis.show.show", fail)
    if not str(error):  # any other is a mistake of ours
        with pytest.raises(RuntimeError):
            main(["show", str(preset)])
        return
    assert main(["show", str(preset)]) == 2
    said = capsys.readouterr().err
    assert "out of memory" in said and "no room" in said and said.count("\n") == 1


def test_ctrl_c_ends_at_once_and_leaves_what_was_printed():
    """Python's shutdown would run what is registered with atexit."""
    code = (
        "import atexit, sys, types, jaxlm.cli as cli\n"
        "def interrupted(_): print('said before'); raise KeyboardInterrupt\n"
        "sys.modules['slow'] = types.SimpleNamespace(main=interrupted)\n"
        "cli.COMMANDS['slow'] = ('slow', '')\n"
        "atexit.register(print, 'shut down')\n"
        "sys.exit(cli.main(['slow']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "said before\n", "jaxlm: interrupted.\n")


@pytest.mark.parametrize(("command", "config", "where"), [
    ("pretrain", "configs/bert_tiny.py", "jaxlm.runs.pretrain.pretrain"),
    ("finetune", "configs/tasks/classify.py", "jaxlm.runs.sweep.finetune"),
])
def test_a_run_that_a_signal_has_stopped_has_an_exit_code_of_its_own(tmp_path, monkeypatch, command, config, where):
    from jaxlm.errors import Stopped

    def stopped(*arguments, **options):
        raise Stopped(signal.SIGHUP)

    monkeypatch.setattr(where, stopped)
    assert main([command, config, "--run-dir", str(tmp_path / "run")]) == 129
