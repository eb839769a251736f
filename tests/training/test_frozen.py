"""An objective with a teacher: read by the loss, neither trained nor saved."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

from jaxlm import systems
from jaxlm.cli import main
from jaxlm.config.experiment import Experiment, OptimizerConfig, Resolved, TrainConfig
from jaxlm.config.presets import load_config
from jaxlm.errors import Stopped, UserError
from jaxlm.fields import field
from jaxlm.models.base import Inputs
from jaxlm.models.bert import Bert
from jaxlm.objectives.base import Objective, Term, total_loss
from jaxlm.parallel.mesh import MeshConfig, make_mesh
from jaxlm.runs.load import load_model, load_teacher
from jaxlm.runs.pretrain import pretrain
from jaxlm.training.checkpoints import Checkpoints
from jaxlm.training.program import Program, corruption_key
from jaxlm.types import TokenBatch
from tests.training.support import assert_same_arrays, metadata, metrics, saved_steps
from tests.training.test_run import files_of

LENGTH = 32


@dataclasses.dataclass(frozen=True)
class Readout(Objective):
    """Distils a teacher's hidden states into a linear readout of word embeddings: loss = mean squared error."""

    model: Bert = field(Bert(), weights=True)
    teacher: str = field("", resumable=True)

    primary_metric = "distance"

    def load_constants(self, vocabulary, load):
        return load(self.teacher).params

    def init(self, key):
        width = self.model.hidden_size
        table = jax.random.normal(key, (self.model.vocab_size, width))
        return {"word": {"embedding": table}, "readout": {"kernel": jnp.zeros((width, width))}}

    def merge_pretrained(self, params, source):
        return params | {"word": self.constants["embeddings"]["word"]}

    def corrupt(self, key, batch):
        return {"input_ids": batch.tokens, "attention_mask": batch.segment_ids}

    def loss(self, params, example, key, train):
        ids, mask = example["input_ids"], example["attention_mask"]
        theirs = self.model.hidden_states(self.constants, Inputs(ids, mask=mask))
        ours = params["word"]["embedding"][ids] @ params["readout"]["kernel"]
        distance = jnp.mean(jnp.square(ours - theirs), -1)
        return {"distance": Term.of(distance, mask.astype(jnp.float32), 1.0)}

    def flops(self, length):
        return float(2 * length * self.model.hidden_size**2)

    def constants_flops(self, length):
        return self.model.forward_flops(length)


@pytest.fixture
def experiment(finished, monkeypatch) -> Experiment:
    monkeypatch.setitem(systems._CLASSES, systems.type_name(Readout), Readout)
    teacher = load_config(finished / "config.json")
    return Experiment(
        Readout(model=teacher.objective.model, teacher=str(finished)),
        data=dataclasses.replace(teacher.data, tokenizer=str(finished / "tokenizer")),
        optimizer=OptimizerConfig(learning_rate=0.03, warmup_steps=2, schedule="constant"),
        train=TrainConfig(steps=12, batch_size=8, accumulate=2, log_every=3, eval_every=4, checkpoint_every=4,
                          keep_checkpoints=4, tracker="none"),
    )


def train(experiment: Experiment, run: Path, stop: int = -1) -> None:
    """With a SIGTERM that arrives during step `stop`."""
    import contextlib

    from jaxlm.training import loop

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Stopped):
        patch.setattr(loop, "_stop_signals", lambda after: contextlib.nullcontext(lambda now: 15 * (now == stop)))
        pretrain(Resolved(experiment), run, report=lambda line: None)


def test_a_student_learns_and_its_teacher_is_in_no_checkpoint(experiment, finished, tmp_path):
    before, run = files_of(finished), tmp_path / "student"
    train(experiment, run)
    assert files_of(finished) == before
    assert saved_steps(run) == [0, 4, 8, 12]
    student = {"word/embedding", "readout/kernel"}
    saved = metadata(run, 12)["checksums"]
    assert {path.removeprefix("params/") for path in saved if path.startswith("params/")} == student
    assert not [path for path in saved if "encoder" in path or "mlm_head" in path]
    losses = [line["eval_distance"] for line in metrics(run) if "eval_distance" in line]
    assert losses[-1] < 0.9 * losses[0]
    # It began with the teacher's embeddings.
    checkpoints = Checkpoints(run / "checkpoints", read_only=True)
    teacher = load_model(finished).params
    shapes = {"word": teacher["embeddings"]["word"], "readout": {"kernel": np.zeros((16, 16), np.float32)}}
    first, _ = checkpoints.restore_params(jax.eval_shape(lambda: shapes), step=0)
    last, step = checkpoints.restore_params(jax.eval_shape(lambda: shapes))
    checkpoints.close()
    assert_same_arrays(first["word"], teacher["embeddings"]["word"])
    assert step == 12 and np.abs(np.asarray(last["word"]["embedding"] - first["word"]["embedding"])).max() > 1e-3


@pytest.mark.slow
def test_stopping_a_student_changes_nothing(experiment, tmp_path):
    """Before its first checkpoint of training, between two, and not at all."""
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    train(experiment, whole)
    for stop in (2, 6, -1):
        train(experiment, pieces, stop)
    assert metadata(pieces, 12) == metadata(whole, 12) and metrics(pieces) == metrics(whole)


@pytest.mark.slow
@pytest.mark.parametrize("step", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_moved_teacher_goes_on_and_one_of_other_weights_is_refused(experiment, finished, tmp_path, monkeypatch, step):
    run, kept, moved = (tmp_path / name for name in ("student", "kept", "moved"))
    if step:
        train(experiment, run, step)
    else:  # it has its teacher's embeddings, and has done no step
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("jaxlm.runs.pretrain.train", interrupted)
            train(experiment, run)
    assert saved_steps(run)[-1] == step
    shutil.copytree(run, kept)
    finished.rename(moved)
    objective = dataclasses.replace(experiment.objective, teacher=str(moved))
    experiment = dataclasses.replace(experiment, objective=objective)
    train(experiment, run, 6)  # with the tokenizer in its folder
    assert saved_steps(run)[-1] == 6
    assert main(["pretrain", str(moved), "--train.steps", "13"]) == 0  # it learns on
    before = files_of(kept)
    with pytest.raises(UserError, match=r"objective\.teacher holds other weights than when this run began"):
        train(experiment, kept)
    assert files_of(kept) == before


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_a_teacher_has_only_what_its_folder_holds(finished, tmp_path):
    """A head that an import initializes afresh would teach noise."""
    folder = tmp_path / "transformers"
    assert main(["export", str(finished), str(folder)]) == 0
    tensors = load_file(folder / "model.safetensors")
    save_file({name: x for name, x in tensors.items() if "cls.predictions" not in name}, folder / "model.safetensors")
    assert "mlm_head" in load_model(folder).params
    assert main(["import", str(folder), str(tmp_path / "imported")]) == 0
    for path in (folder, tmp_path / "imported"):
        assert set(load_teacher(str(path)).params) >= {"embeddings", "encoder"}
        assert "mlm_head" not in load_teacher(str(path)).params
    assert "mlm_head" in load_teacher(str(finished)).params


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_teacher_gets_no_gradient_and_stays_as_it_is(experiment, finished, accumulate):
    train = dataclasses.replace(experiment.train, accumulate=accumulate)
    experiment = dataclasses.replace(experiment, train=train)
    objective = experiment.objective.bind(load_model(finished).tokenizer.vocabulary, LENGTH)
    constants = jax.tree.map(jnp.asarray, objective.load_constants(objective.vocabulary, load_teacher))
    kept = jax.device_get(constants)
    taught = objective.with_constants(constants)
    program = Program(taught, experiment.train, experiment.optimizer, make_mesh(MeshConfig(), jax.devices()[:1]))
    state = program.init_state(taught.merge_pretrained(program.init_params(0), None))
    assert program.num_params == 512 * 16 + 16 * 16
    tokens = np.random.default_rng(0).integers(110, 512, (8, LENGTH)).astype(np.int32)
    batch = TokenBatch(tokens, (np.arange(LENGTH) < np.arange(8)[:, None] * 4 + 4).astype(np.int32))
    example = jax.jit(objective.corrupt)(corruption_key(0, 0), batch)
    grads = jax.grad(lambda p: total_loss(taught.loss(p, example, jax.random.key(0), True)))(state.params)
    expected = float(optax.tree.norm(grads))
    for step in range(3):
        state, terms = program.train_step(state, batch, constants)
        if step == 0:
            assert float(terms["grad_norm"].total) == pytest.approx(expected, rel=1e-5)
    assert_same_arrays(constants, kept)
    # The loss does depend on it.
    other = jax.tree.map(lambda x: x + 0.1, constants)
    _, changed = program.train_step(state, batch, other)
    assert abs(float(changed["loss"].total) - float(terms["loss"].total)) > 1e-3


def test_flops_count_a_teacher_once(experiment):
    objective = experiment.objective
    expected = 8 * (3 * 2 * LENGTH * 16 * 16 + objective.model.forward_flops(LENGTH))
    assert objective.step_flops(LENGTH, 8) == expected
