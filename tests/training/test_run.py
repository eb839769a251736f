"""Runs as a user makes them: begun, resumed, extended, finished, and refused."""

from __future__ import annotations

import errno
import json
import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from etils import epath

import jaxlm
from jaxlm.cli import main
from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.config.json import flatten
from jaxlm.config.presets import load_config
from jaxlm.data.text import TextData
from jaxlm.errors import UserError
from jaxlm.fields import Setting
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.parallel.mesh import MeshConfig, make_mesh
from jaxlm.runs import folder as run_folder
from jaxlm.runs.folder import RunFolder, write_metadata
from jaxlm.runs.load import load_model, load_run
from jaxlm.runs.resolve import resolve
from jaxlm.runs.resume import schedule_remarks
from jaxlm.runs.session import set_up
from jaxlm.training.checkpoints import Checkpoints
from tests.training.support import (
    assert_same_arrays,
    metadata,
    metrics,
    saved_steps,
    stopped_after,
    write_preset,
    write_text,
)


def test_what_a_run_leaves_behind(finished):
    assert saved_steps(finished) == [4, 8, 12]
    assert (finished / "curves.png").stat().st_size > 1000
    names = {p.name for p in finished.iterdir()}
    assert {"config.json", "data.json", "tokenizer", "checkpoints", "metrics.jsonl"} <= names
    config = json.loads((finished / "config.json").read_text())
    assert config["objective"]["model"]["vocab_size"] == config["data"]["vocab_size"] == 512
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    # Every 3 steps, the first, and with every evaluation: one object a step, each with the figures that are promised.
    assert [line["step"] for line in lines] == [1, 3, 4, 6, 8, 9, 12]
    assert all({"loss", "learning_rate", "grad_norm", "mlm_loss"} <= set(line) for line in lines)
    assert ["tokens_per_second" in line for line in lines] == [False] + [True] * 6  # the first step compiles
    assert [line["step"] for line in lines if "eval_loss" in line] == [4, 8, 12]
    assert all("eval_mlm_loss" in line and "eval_mlm_accuracy" in line for line in lines if "eval_loss" in line)
    assert lines[-1]["eval_loss"] < lines[2]["eval_loss"]


def test_samples_change_nothing(finished, preset, tmp_path, capsys):
    run = tmp_path / "sampled"
    flags = ["--train.eval-every", "4", "--train.sample-every", "6", "--train.tracker", "tensorboard"]
    assert main(["pretrain", str(preset), "--run-dir", str(run), *flags]) == 0
    said = re.findall(r"step (\d+)  sample: (.*)", capsys.readouterr().out)
    assert [step for step, _ in said] == ["6"] * 3 + ["12"] * 3
    # The fifth token is masked first; what stood there is told.
    assert all(re.search(r"\[\S+ \d+%\].*  \(masked: \S+", line) for _, line in said)
    assert metrics(run) == metrics(finished)
    assert_same_arrays(load_run(run).params, load_run(finished).params)
    events = b"".join(file.read_bytes() for file in run.glob("events*"))
    assert events.count(b"samples/text_summary") == 2 and said[-1][1].encode() in events


def test_stopping_anywhere_changes_nothing(finished, preset, tmp_path):
    """A run in three pieces, which do not end where metrics are logged, is the run in one piece."""
    run = tmp_path / "pieces"
    for steps in (5, 7, 12):
        code = stopped_after(steps, ["pretrain", str(preset), "--run-dir", str(run), "--train.eval-every", "4"])
        assert code == (0 if steps == 12 else 143)
    assert metadata(run, 12) == metadata(finished, 12)
    assert metrics(run) == metrics(finished)
    assert_same_arrays(load_run(run).params, load_run(finished).params)


def test_a_text_of_one_document_is_told_before_training(tmp_path, capsys, monkeypatch):
    """Its next-sentence labels would be constant; sentence order and one segment need no other document."""
    preset = write_preset(tmp_path)
    (tmp_path / "text.txt").write_text((tmp_path / "text.txt").read_text().replace("\n\n", "\n"))
    monkeypatch.setattr("jaxlm.runs.pretrain.train", lambda *a, **k: 1 / 0)
    remark = "One document has 100.0% of the tokens, so at most 0.0% of the rows can get a random second segment"
    for input_format in ("next-sentence", "sentence-order", "document"):
        with pytest.raises(ZeroDivisionError):
            main(["pretrain", str(preset), "--run-dir", str(tmp_path / input_format),
                  "--objective.input-format", input_format])
        assert (remark in capsys.readouterr().out) == (input_format == "next-sentence")


@pytest.mark.slow  # test_step.py compares three whole steps
def test_microbatches_log_the_first_step_of_the_whole_batch(preset, tmp_path):
    """The loss of the same weights, and the norm of their gradients, in one part and in four."""
    logged = []
    for parts in ("1", "4"):
        run = tmp_path / parts
        flags = ["--train.accumulate", parts, "--objective.model.dropout", "0", "--train.steps", "1"]
        assert main(["pretrain", str(preset), "--run-dir", str(run), *flags]) == 0
        logged.append(metrics(run)[0])
    for name in ("loss", "grad_norm"):
        assert logged[1][name] == pytest.approx(logged[0][name], rel=1e-5)


def test_a_finished_run_says_so(finished, preset, capsys):
    before = {p: p.stat().st_mtime_ns for p in (finished / "checkpoints").rglob("*") if p.is_file()}
    for arguments in ([str(preset), "--run-dir", str(finished), "--train.eval-every", "4"], [str(finished)]):
        assert main(["pretrain", *arguments]) == 0
        said = capsys.readouterr()
        assert "Finished: 12 steps are done" in said.out and str(finished) in said.out and not said.err
    assert {p: p.stat().st_mtime_ns for p in (finished / "checkpoints").rglob("*") if p.is_file()} == before


def test_a_run_folder_goes_on_as_its_own_preset(finished, capsys):
    assert main(["pretrain", str(finished), "--train.steps", "14"]) == 0
    assert "resumed at step 12" in capsys.readouterr().out
    assert [line["step"] for line in metrics(finished)] == [1, 3, 4, 6, 8, 9, 12, 14]
    assert load_config(finished / "config.json").train.steps == 14


def test_a_damaged_checkpoint_is_passed_over(finished, capsys):
    before = metadata(finished, 12), metrics(finished)
    for file in (finished / "checkpoints" / "12" / "state").rglob("*"):
        if file.is_file() and file.stat().st_size > 100:
            file.write_bytes(file.read_bytes()[:50])
    assert main(["pretrain", str(finished)]) == 0
    said = capsys.readouterr().out
    assert "checkpoint of step 12 cannot be read" in said and "resumed at step 8" in said
    assert (metadata(finished, 12), metrics(finished)) == before


def test_a_run_without_its_checkpoints_is_not_begun_again(finished, preset, capsys):
    for path in (finished / "checkpoints").iterdir():
        shutil.rmtree(path)
    before = (finished / "metrics.jsonl").read_bytes()
    for arguments in ([finished], [preset, "--run-dir", finished, "--train.eval-every", "4"]):
        said = refused(capsys, "pretrain", *arguments)
        assert f"{finished} has done 12 steps and holds no checkpoint of them; bring checkpoints/ back" in said
    assert (finished / "metrics.jsonl").read_bytes() == before and not saved_steps(finished)


def refused(capsys, *arguments: object) -> str:
    """The one line that the command leaves on standard error, with exit code 2."""
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("jaxlm: ") and said.count("\n") == 1 and "Traceback" not in said
    return said


def files_of(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_another_configuration_is_refused(finished, preset, capsys):
    before = files_of(finished)
    said = refused(capsys, "pretrain", preset, "--run-dir", finished, "--train.seed", "1", "--data.length", "16")
    assert "train.seed: 0 -> 1" in said and "data.length: 32 -> 16" in said
    more = "--objective.model.vocab-size", "600", "--train.steps", "13"  # up to 127 rows of padding are kept
    said = refused(capsys, "pretrain", preset, "--run-dir", finished, "--train.eval-every", "4", *more)
    assert "objective.model.vocab_size: 512 -> 600" in said
    assert files_of(finished) == before


def test_fields_of_phases_may_change_from_here_on(finished, preset, capsys):
    """The refusal names the command, which keeps what the run has learnt."""
    arguments = ["pretrain", preset, "--run-dir", finished, "--train.eval-every", "4", "--train.steps", "14"]
    said = refused(capsys, *arguments, "--optimizer.learning-rate", "5e-3", "--optimizer.weight-decay", "0")
    command = f"jaxlm pretrain {finished} --train.steps 14 --train.phases '12, 2 optimizer.learning_rate=0.005 "
    assert f"or change them from here on with `{command}optimizer.weight_decay=0.0'`" in said
    for flags in (("--train.seed", "1"), ("--optimizer.name", "lion"), ("--objective.model.num-layers", "2"),
                  ("--optimizer.final-share", "0.1")):
        assert "from here on" not in refused(capsys, *arguments, *flags)
    assert main(shlex.split(said.split("`")[1])[1:]) == 0
    assert "resumed at step 12" in capsys.readouterr().out
    assert [line["learning_rate"] for line in metrics(finished)[-2:]] == pytest.approx([1e-2, 5e-3])


def test_changed_text_is_refused_with_both_fingerprints(tmp_path, capsys):
    preset, run = write_preset(tmp_path), tmp_path / "run"
    assert main(["pretrain", str(preset), "--run-dir", str(run), "--train.steps", "2"]) == 0
    old = json.loads((run / "data.json").read_text())["data"]
    write_text(tmp_path / "text.txt", seed=1)
    before = files_of(run)
    said = refused(capsys, "pretrain", preset, "--run-dir", run, "--train.steps", "4")
    assert "text has changed" in said and old[:12] in said and said.count("text.txt") == 2
    assert files_of(run) == before


def test_a_mistake_leaves_the_folder_free(preset, tmp_path, capsys):
    """What was refused may be tried again with other values, in the same folder."""
    run = tmp_path / "runs" / "run"
    refused(capsys, "pretrain", preset, "--run-dir", run, "--data.length", "64")  # more than the model's positions
    assert not list(tmp_path.glob("runs*"))
    assert main(["pretrain", str(preset), "--run-dir", str(run), "--train.steps", "1"]) == 0


def test_half_a_configuration_is_no_other_file(tmp_path, monkeypatch):
    """A disk that is full leaves nothing behind; a process that was killed leaves what the next start overlooks."""
    run = tmp_path / "run"
    run_folder.create(run)
    replace = Path.replace
    monkeypatch.setattr(Path, "replace", lambda *names: raise_error(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(UserError, match=r"config\.json cannot be written \(No space left"):
        run_folder.write_json(run / "config.json", {})
    assert not list(run.iterdir())
    monkeypatch.setattr(Path, "replace", replace)
    (run / ".config.json.0123456789abcdef.partial").write_text("{")
    run_folder.create(run)
    run_folder.write_json(run / "config.json", {})
    # What the killed process has left stays: each write has a name of its own, also those of two machines.
    assert sorted(path.suffix for path in run.iterdir()) == [".json", ".partial"]


def raise_error(error: BaseException) -> None:
    raise error


@pytest.mark.slow
def test_a_run_that_did_no_step_may_change_its_mind(preset, tmp_path, capsys):
    run = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxlm.runs.pretrain.train", lambda *a, **k: 1 / 0)  # as when memory does not suffice
        with pytest.raises(ZeroDivisionError):
            main(["pretrain", str(preset), "--run-dir", str(run)])
    assert (run / "config.json").exists()
    arguments = ["--data.vocab-size", "520", "--train.steps", "1"]
    assert main(["pretrain", str(preset), "--run-dir", str(run), *arguments]) == 0
    assert load_run(run).tokenizer.vocabulary.size == 520
    config = (run / "config.json").read_text()
    (run / "config.json").write_text(config.replace('"attention": "auto"', '"attention": "xla"'))
    assert load_run(run).objective.model.attention == "auto", "the kernel is a matter of training"


def test_a_loss_that_is_not_finite_stops_the_run(preset, tmp_path, capsys):
    run = tmp_path / "run"
    said = refused(
        capsys, "pretrain", preset, "--run-dir", run, "--optimizer.learning-rate", "1e38",
        "--optimizer.warmup-steps", "0", "--train.checkpoint-every", "1",
    )
    assert "is not finite" in said and "step" in said and "learning_rate" in said
    shapes = jax.eval_shape(load_run(run).objective.init, jax.random.key(0))
    checkpoints = Checkpoints(run / "checkpoints", read_only=True)
    assert checkpoints.steps()
    for step in checkpoints.steps():  # none of what was saved is anything but a number
        params, _ = checkpoints.restore_params(shapes, step=step)
        assert all(bool(jax.numpy.all(jax.numpy.isfinite(leaf))) for leaf in jax.tree.leaves(params)), step
    checkpoints.close()


def test_the_last_good_checkpoint_is_named(preset, tmp_path, capsys, monkeypatch):
    from jaxlm.training import program

    make = program.make_train_step

    def breaking(*arguments, **options):
        step = make(*arguments, **options)

        def broken(state, batch, frozen):
            number = int(state.step) + 1
            state, terms = step(state, batch, frozen)
            if number == 7:
                terms["grad_norm"] = terms["grad_norm"]._replace(total=jax.numpy.inf)
            return state, terms

        broken.trace = step.trace
        return broken

    monkeypatch.setattr(program, "make_train_step", breaking)
    said = refused(capsys, "pretrain", preset, "--run-dir", tmp_path / "run")
    assert "gradient of step 7 is not finite" in said and "of step 4" in said
    assert saved_steps(tmp_path / "run") == [4]
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 3, 6]
    assert "Go on with --train.skip-nonfinite 5, or lower optimizer.learning_rate: in a phase after the" in said
    assert main(["pretrain", str(tmp_path / "run"), "--train.skip-nonfinite", "5"]) == 0
    assert saved_steps(tmp_path / "run") == [4, 8, 12]


def test_show_of_a_run_tokenizes_as_the_run_does(finished, capsys, monkeypatch):
    """Though the text has changed since, and with it the tokenizer that would be trained on it."""
    text = write_text(finished.parent / "other.txt", seed=1)
    monkeypatch.setattr("jaxlm.data.text.train_tokenizer", lambda *a, **k: pytest.fail("trained another tokenizer"))
    assert main(["show", str(finished), "--data.source", str(text), "--examples", "1"]) == 0
    assert "MaskedLM, batch of step 1" in capsys.readouterr().out


def test_an_export_names_the_step_of_its_evaluation(finished, tmp_path, capsys):
    """Where a run was stopped, the newest figures are from before the newest checkpoint."""
    assert main(["export", str(finished), str(tmp_path / "same")]) == 0
    assert "at step" not in capsys.readouterr().out
    assert main(["export", f"{finished}@last3", str(tmp_path / "mean")]) == 0
    assert "Wrote the mean of steps 4, 8, 12 to" in capsys.readouterr().out
    assert "Held-out evaluation |" not in (tmp_path / "same" / "README.md").read_text()
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    lines[-1] = {name: value for name, value in lines[-1].items() if not name.startswith("eval_")}
    (finished / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    loss = next(line["eval_mlm_loss"] for line in lines if line["step"] == 8)
    assert main(["export", str(finished), str(tmp_path / "earlier")]) == 0
    assert f"Wrote step 12, held-out mlm_loss {loss:.4f} at step 8 to" in capsys.readouterr().out
    assert "| Sequence length | 32 |" in (tmp_path / "earlier" / "README.md").read_text()
    assert "| Held-out evaluation | of step 8 |" in (tmp_path / "earlier" / "README.md").read_text()


def test_epochs_of_text_are_passes_over_its_rows(preset, capsys):
    """A flag for them takes the place of the preset's steps."""
    session = set_up(resolve(str(preset), ["--train.epochs", "2.5"]), load_model).open_data()
    feed, steps = session.feed(make_mesh(MeshConfig(), jax.devices()[:1])), session.experiment.train.steps
    (batches, rows), = feed.draws
    assert rows == 8 * steps and 2.5 <= feed.passes < 2.5 + 8 / batches.num_rows
    said = refused(capsys, "pretrain", preset, "--run-dir", "run", "--train.epochs", "3", "--train.phases", "4x16, 8")
    assert "set --train.phases= or --train.epochs 0" in said


def test_a_run_without_its_tokenizer_says_so(finished, capsys):
    shutil.rmtree(finished / "tokenizer")
    assert f"{finished / 'tokenizer'} is missing; copy it" in refused(capsys, "fill-mask", finished, "a [MASK]")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "remark"),
    [
        (["linear"], "The learning rate now follows a schedule of 3 steps instead of 2"),
        (["wsd", "--optimizer.decay-share", "0.5"], "now decays from step 1 to 3 instead of 1 to 2; 2 are done"),
    ],
)
def test_a_schedule_with_another_end_is_reported(preset, tmp_path, capsys, flags, remark):
    run = tmp_path / "run"
    arguments = ["pretrain", str(preset), "--run-dir", str(run), "--optimizer.schedule", *flags]
    arguments += ["--optimizer.warmup-steps", "1"]
    assert main([*arguments, "--train.steps", "2"]) == 0
    assert "The learning rate" not in capsys.readouterr().out
    assert main([*arguments, "--train.steps", "3"]) == 0
    assert remark in capsys.readouterr().out


@pytest.mark.parametrize(
    ("done", "steps", "share", "remark"),
    [
        (90, 100, 0.1, None), (90, 1000, 0.1, None), (90, 90 + 20, 20 / 110, None),  # up to the end of the stable phase
        (91, 100, 0.1, None), (91, 200, 0.1, "from step 180 to 200 instead of 90 to 100; 91 are done"),
        (60, 100, 0.5, "from step 50 to 100 instead of 90 to 100; 60 are done"),
    ],
)
def test_the_decay_of_wsd_may_move_while_the_rate_is_stable(done, steps, share, remark):
    def wsd(steps, **fields):
        return Experiment(MaskedLM(), TextData(), OptimizerConfig(schedule="wsd", **fields), TrainConfig(steps=steps))

    before, now = wsd(100), wsd(steps, decay_share=share)
    remarks = schedule_remarks(SimpleNamespace(newest_step=done, experiment=before), now)
    assert len(remarks) == (remark is not None) and all(remark in line for line in remarks)
    fixed = [flatten(each, Setting.decides_result) for each in (before, now, wsd(100, decay_shape="cosine"))]
    assert fixed[0] == fixed[1] != fixed[2]


def test_fewer_steps_than_are_done_change_nothing(finished, capsys):
    before = files_of(finished)
    assert main(["pretrain", str(finished), "--train.steps", "5"]) == 0
    assert "Finished: 12 steps are done; raise --train.steps to train longer" in capsys.readouterr().out
    assert files_of(finished) == before


def test_another_tokenizer_is_refused(finished, capsys):
    before = files_of(finished)
    said = refused(capsys, "pretrain", finished, "--data.tokenizer", finished / "tokenizer")
    assert "data.tokenizer: auto -> " in said
    assert files_of(finished) == before


def test_an_edited_configuration_is_refused(finished, capsys):
    """Metadata say so at the start: those of data.json and, where that is edited too, those of the checkpoint."""
    before = {path: file for path, file in files_of(finished).items() if path.suffix != ".json"}
    config = finished / "config.json"
    config.write_text(config.read_text().replace('"learning_rate": 0.01', '"learning_rate": 0.02'))
    said = refused(capsys, "pretrain", finished, "--train.steps", "14")
    assert "optimizer.learning_rate: 0.01 -> 0.02" in said and str(finished) in said
    data = finished / "data.json"
    data.write_text(data.read_text().replace('"optimizer.learning_rate": 0.01', '"optimizer.learning_rate": 0.02'))
    assert main(["pretrain", str(finished), "--train.steps", "14"]) == 2
    said = capsys.readouterr().err
    assert f"{data} is damaged" in said and "optimizer.learning_rate: 0.01 -> 0.02" in said
    assert {path: file for path, file in files_of(finished).items() if path.suffix != ".json"} == before


def test_a_run_as_configuration_of_another_run(finished, tmp_path, capsys, monkeypatch):
    other = tmp_path / "other"
    said = refused(capsys, "pretrain", finished, "--run-dir", other)
    assert f"--init-from {finished}" in said and not other.exists()
    asked = []
    monkeypatch.setattr("jaxlm.runs.pretrain.pretrain", lambda resolved, run_dir: asked.append(
        (str(run_dir), resolved.pretrained and resolved.pretrained.path)
    ))
    assert main(["pretrain", str(finished), "--run-dir", str(other), "--init-from", str(finished)]) == 0
    assert main(["pretrain", str(finished), "--run-dir", f"{finished}/../{finished.name}"]) == 0
    assert asked == [(str(other), str(finished)), (f"{finished}/../{finished.name}", None)]


@pytest.mark.parametrize("content", [
    *(pytest.param(text, marks=pytest.mark.slow) for text in (b'{"data": "\xff"', b"[1]", b"{" * 100_000, None)),
    "a wrong digit",
])
def test_damaged_metadata_is_taken_from_a_checkpoint(content, finished, capsys):
    data = finished / "data.json"
    good = data.read_bytes()
    if content is None:
        data.unlink()
    elif content == "a wrong digit":
        fingerprint = json.loads(good)["data"].encode()
        data.write_bytes(good.replace(fingerprint, bytes([fingerprint[0] ^ 1]) + fingerprint[1:]))
    else:
        data.write_bytes(content)
    assert main(["export", str(finished), str(finished.parent / "out")]) == 0
    assert (f"{data} is damaged" in capsys.readouterr().err) == (content is not None)
    assert main(["pretrain", str(finished), "--train.steps", "13"]) == 0
    assert json.loads(data.read_bytes()) == json.loads(good)


@pytest.mark.parametrize(
    "name", [".lock", ".config.json.tmp", "curves.png", "checkpoints", "checkpoints/14", "tokenizer/spiece.model"]
)
def test_links_out_of_a_run_folder_are_not_followed(name, finished, tmp_path, capsys, curves):
    target = tmp_path / "mine"
    target.write_text("mine")
    path = finished / name
    shutil.rmtree(path, ignore_errors=True)
    path.unlink(missing_ok=True)
    path.symlink_to(target)
    assert f"{path} is a symbolic link" in refused(capsys, "pretrain", finished, "--train.steps", "14")
    assert target.read_text() == "mine"


@pytest.mark.parametrize("name", ["config.json", "data.json", "tokenizer", "tokenizer/spiece.model", "checkpoints/12"])
def test_commands_that_read_a_run_folder_refuse_links(name, finished, preset, tmp_path, capsys):
    path, target = finished / name, tmp_path / "elsewhere"
    path.rename(target)
    path.symlink_to(target)
    for command in (
        ["export", finished, tmp_path / "out"], ["fill-mask", finished, "[MASK]"], ["generate", finished, "a"],
        ["embed", finished, "a"], ["evaluate", finished], ["show", finished, "--examples", "1"],
        ["pretrain", preset, "--run-dir", tmp_path / "new", "--init-from", finished],
    ):
        assert f"{path} is a symbolic link" in refused(capsys, *command), command[0]
    assert not (tmp_path / "out").exists() and not (tmp_path / "new").exists()


def test_transformers_folders_of_links_are_read(finished, tmp_path, capsys):
    """The snapshots of Hugging Face's cache link to blobs."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1"
    assert main(["export", str(finished), str(blobs)]) == 0
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    assert main(["fill-mask", str(snapshot), "[MASK]"]) == 0
    assert "jaxlm import" in refused(capsys, "pretrain", snapshot)


def test_foreign_checkpoints_are_refused_in_one_sentence(finished, capsys):
    for step in saved_steps(finished):
        (finished / "checkpoints" / str(step) / "metadata" / "metadata").write_text('{"framework": "another"}')
    said = refused(capsys, "pretrain", finished, "--train.steps", "14")
    assert "no checkpoint of step 12, 8, 4 in" in said and "its metadata does not match its digest" in said


@pytest.mark.slow
def test_a_run_names_the_version_that_wrote_it(finished, preset, tmp_path, capsys, monkeypatch):
    assert metadata(finished, 12)["jaxlm"] == RunFolder.read(finished).metadata["jaxlm"] == jaxlm.__version__
    assert main(["--version"]) == 0 and capsys.readouterr().out == f"jaxlm {jaxlm.__version__}\n"
    changed = ("pretrain", preset, "--run-dir", finished, "--train.batch-size", "4")
    assert f"{finished} holds a run of another configuration" in refused(capsys, *changed)
    old = RunFolder.read(finished).metadata
    monkeypatch.setattr("jaxlm.runs.folder.__version__", "0.0.9")
    write_metadata(epath.Path(finished), old)
    monkeypatch.undo()
    written = f"(written by jaxlm 0.0.9, this is {jaxlm.__version__})"
    assert f"{finished} {written} holds a run of another configuration" in refused(capsys, *changed)
    assert f"the text has changed since this run {written} began" in refused(
        capsys, "pretrain", finished, "--data.source", write_text(tmp_path / "other.txt", seed=1))
    assert main(["pretrain", str(finished), "--train.steps", "13"]) == 0
    assert RunFolder.read(finished).metadata["jaxlm"] == jaxlm.__version__  # it has gone on with this version
    config = json.loads((finished / "config.json").read_text())
    (finished / "config.json").write_text(json.dumps(config | {"new": 1}))
    (finished / "data.json").write_text(json.dumps(old | {"jaxlm": "0.2"}))
    assert f"config.json (written by jaxlm 0.2, this is {jaxlm.__version__}) has a field 'new'" in refused(
        capsys, "pretrain", finished)
