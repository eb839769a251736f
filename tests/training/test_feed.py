"""What each step reads: phase after phase, the same after any stop and on any number of hosts."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import itertools
import json
import math
import weakref
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from jaxlm.analysis.step import open_stand_in
from jaxlm.config.experiment import Experiment, PhaseConfig, TrainConfig, parse_phases
from jaxlm.config.flags import override
from jaxlm.config.json import from_json, to_json
from jaxlm.config.presets import load_preset
from jaxlm.data.base import RowFormat
from jaxlm.data.text import TextData
from jaxlm.errors import UserError
from jaxlm.models.bert import Bert
from jaxlm.models.gpt2 import Gpt2
from jaxlm.objectives.causal_lm import CausalLM
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.objectives.permutation_lm import PermutationLM
from jaxlm.parallel.mesh import MeshConfig, make_mesh
from jaxlm.runs.session import with_steps
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.training.feed import Feed, stage_after, stages_of
from jaxlm.training.program import Program, TrainState
from tests.data.stand_ins import store_of
from tests.training.support import assert_same_arrays

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    documents = ["".join(chr(97 + (7 * i + j) % 26) for j in range(20 + i)) for i in range(60)]
    return store_of(tmp_path_factory.mktemp("store") / "store", documents, held_out=0.2)


OBJECTIVE = CausalLM(model=Gpt2(hidden_size=16, num_layers=1, num_heads=2, max_positions=32))
BOUND = OBJECTIVE.bind(Vocabulary.stand_in(300), 32)
TWO = "3x8, 5"
THREE = "2x16x4, 3, 2x16x5 optimizer.learning_rate=3e-4, 2x16"
"""Of the rows of 16 + 1 tokens, the phases read 8, 10 and 16."""


def experiment_of(phases: str = TWO, steps: int = 9, **data: Any) -> Experiment:
    train = TrainConfig(steps=steps, batch_size=4, eval_batches=2, phases=phases, seed=3)
    return Experiment(BOUND, data=TextData(length=32, **data), train=train)


def feed_of(store, phases: str = TWO, steps: int = 9) -> Feed:
    return Feed(store, experiment_of(phases, steps), make_mesh(MeshConfig(), jax.devices()[:1]))


def tokens(feed: Feed, after: int, count: int) -> list[np.ndarray]:
    source = feed.after(after)
    found = [np.asarray(batch.tokens) for batch in itertools.islice(source, count)]
    source.close()
    return found


def test_short_rows_first_and_as_many_tokens(store):
    feed = feed_of(store)
    found = tokens(feed, 0, 6)
    assert [t.shape for t in found] == [(16, 9)] * 3 + [(4, 33)] * 3
    for split, first, length, rows in ((found[:3], 0, 9, 16), (found[3:], 0, 33, 4)):
        expected = store.batches("train", rows, RowFormat("packed-text", length), 3)
        for step, ours in enumerate(split, first):
            np.testing.assert_array_equal(ours, expected.batch(step).tokens)
    assert [np.asarray(b.tokens).shape for b in feed.held_out(BOUND)] == [(4, 33)] * 2
    assert feed.change_at(4) == "From step 4 on, batches are 4 x 32; so the loss may jump."
    assert not any(feed.change_at(step) for step in (1, 2, 3, 5))


@pytest.mark.parametrize(("phases", "done"), [
    (TWO, 1), (TWO, 2), (TWO, 3), (TWO, 4), (THREE, 2), (THREE, 5), (THREE, 6), (THREE, 7),
])
def test_the_same_after_any_stop(store, phases, done):
    feed = feed_of(store, phases)
    for ours, theirs in zip(tokens(feed, done, 9 - done), tokens(feed, 0, 9)[done:], strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_no_row_repeats_between_phases_of_one_length(store):
    """The rows of 16 + 1 tokens of the three phases are those of one shuffle, in its order."""
    found = tokens(feed_of(store, THREE), 0, 9)
    assert [t.shape for t in found] == [(4, 17)] * 2 + [(4, 33)] * 3 + [(5, 17)] * 2 + [(8, 17)] * 2
    one = store.batches("train", 1, RowFormat("packed-text", 17), 3)
    expected = [one.batch(number).tokens[0] for number in range(8 + 10 + 16)]
    np.testing.assert_array_equal(np.concatenate([t for t in found if t.shape[1] == 17]), expected)


@pytest.mark.parametrize("phases", [TWO, THREE])
def test_each_step_has_its_stage(store, phases):
    """As `jaxlm show` finds the batch of a step; two processes read its halves."""
    feed = feed_of(store, phases)
    for step, ours in enumerate(tokens(feed, 0, 9)):
        stage = stage_after(feed._stages, step)
        number, middle = step - stage.phase.after, len(ours) // 2
        np.testing.assert_array_equal(stage.batches.batch(number).tokens, ours)
        halves = [stage.batches.batch(number, part).tokens for part in (slice(middle), slice(middle, None))]
        np.testing.assert_array_equal(np.concatenate(halves), ours)


GOLDEN = {  # Batches of bert_mini's two stages at 8563d12, where they were `short_steps` 700 of `short_length` 16.
    0: "3c955cc636b65e80", 1: "635e3283f8548b3e", 699: "6b3e266b7abe5fc5", 700: "c5889c246566fd6b",
    701: "48294568e3f997e7", 1499: "64301e3999bfb4c9",
}


def test_batches_of_old_runs_stay(tmp_path):
    documents = ["".join(chr(97 + (7 * i + j) % 26) for j in range(20 + i)) for i in range(400)]
    experiment = load_preset(str(CONFIGS / "bert_mini.py"))
    stages = stages_of(store_of(tmp_path / "store", documents, held_out=0.2), experiment)
    for step, expected in GOLDEN.items():
        stage = stage_after(stages, step)
        found = np.ascontiguousarray(stage.batches.batch(step - stage.phase.after).tokens)
        assert hashlib.sha256(found.tobytes()).hexdigest()[:16] == expected
    assert experiment.describe_phases() == "256 x 16 for 700 steps, then 32 x 128"


def test_shapes_are_of_the_rows_that_are_read(store):
    feed = feed_of(store)
    assert feed.shape(1) == feed.shape(3) == (8, 16) and feed.shape(4) == (32, 4)


def test_passes_over_the_text(store):
    """3 steps of 16 rows of 9 tokens and 5 of 4 rows of 33; and where the run ends among the short rows."""
    short, full = (store.batches("train", 1, RowFormat("packed-text", length), 3).num_rows for length in (9, 33))
    for steps, passes in ((8, 48 / short + 20 / full), (2, 32 / short)):
        assert feed_of(store, steps=steps).passes == pytest.approx(passes)


def test_a_feed_that_nobody_holds_is_gone(store):
    """Or a sweep would keep the rows and the open files of each of its runs."""
    feed = weakref.ref(feed_of(store))
    gc.collect()
    assert feed() is None


def test_without_phases_all_rows_are_alike(store):
    assert [t.shape for t in tokens(feed_of(store, ""), 0, 2)] == [(4, 33)] * 2
    assert experiment_of("").describe_phases() == "4 x 32"


@pytest.mark.parametrize(("phases", "says"), [
    ("3x12, 5", "phase 1 of train.phases: rows of 12 tokens do not divide a batch of 4 x 32 tokens"),
    ("3, 5x1", r"phase 2 of train.phases: data.length is 1; it must be in \[8, inf\)"),
    ("3, 5x64", "phase 2 of train.phases: data.length 64 is more than the model's 32 positions"),
    ("3x16;5", "train.phases has '3x16;5'; a phase is STEPS, STEPSxLENGTH or STEPSxLENGTHxBATCH"),
    ("3x0", "train.phases has '3x0'"), ("3,", "train.phases has ''"), ("x16", "train.phases has 'x16'"),
    ("3 train.seed=1", "phase 1 of train.phases: train.seed is no field that a phase can set"),
    ("3 objective.model.vocab_size=9", "objective.model.vocab_size is no field"),
    ("3 optimizer.rate=1", "optimizer.rate is no field"), ("3 mesh.data=1", "mesh.data is no field"),
    ("3 optimizer.learning_rate=x", "optimizer.learning_rate is 'x'; it must be float"),
    ("3 optimizer.learning_rate=-1", r"optimizer.learning_rate is -1; it must be in \(0, inf\)"),
    ("3 train.accumulate=3", "train.batch_size 4 is not divisible by train.accumulate 3"),
    ("3 data.length=0", "data.length is 0"), ("3 data.length=x", "data.length is 'x'"),
])
def test_impossible_phases(phases, says):
    with pytest.raises(UserError, match=says):
        open_stand_in(experiment_of(phases))


def test_a_stream_has_one_shape(store):
    train = TrainConfig(steps=9, batch_size=4, phases="3x16, 6")
    with pytest.raises(UserError, match=r"phase 1 of train\.phases: PermutationLM reads a stream in rows of one"):
        open_stand_in(Experiment(PermutationLM(), data=TextData(length=32), train=train))
    store_batches = store.batches("train", 2, RowFormat("stream", 9, 8), 3)
    np.testing.assert_array_equal(store_batches.after(6, 2).batch(1).tokens, store_batches.batch(4).tokens)


def test_a_plan_is_of_one_phase():
    said = []
    session = open_stand_in(experiment_of("2x16, 3, 2x16x6 optimizer.weight_decay=0.2"), report=said.append)
    e = session.experiment
    assert (e.data.length, e.train.batch_size, e.train.steps, e.train.phases) == (16, 6, 4, ())
    assert e.optimizer.weight_decay == 0.2 and session.synthetic_batch().tokens.shape == (6, 17)
    assert said == ["Batches are 8 x 16 for 2 steps, then 4 x 32 for 3 steps, then 6 x 16 (optimizer.weight_decay 0.2)"
                    "; this is a step of phase 3 of 3."]
    e = open_stand_in(experiment_of("2x16, 3, 2x16x6"), phase=2).experiment
    assert (e.data.length, e.train.batch_size, e.train.steps, e.train.phases) == (32, 4, 3, ())
    with pytest.raises(UserError, match=r"--phase is 4; the last one is 3 \(train\.phases\)"):
        open_stand_in(experiment_of("2x16, 3, 2x16x6"), phase=4)


@pytest.mark.parametrize("text", [THREE, "3x16 objective.mask_rate=0.3, 5 train.batch_size=8 optimizer.name=adamw", "",
                                  "3x16 objective.model.rope_scaling=(32.0,1.0,4.0,8192.0), 5"])
def test_phases_of_a_flag_and_of_an_earlier_run(text):
    """As a text, and as the list in config.json; configurations of earlier versions have the text."""
    config = experiment_of(text)
    assert parse_phases(config.phases_text) == config.train.phases
    assert parse_phases("3 data.temperature=inf")[0].fields == (("data.temperature", math.inf),)
    stored = json.loads(json.dumps(to_json(config.train)))
    assert isinstance(stored["phases"], list)
    assert from_json(stored) == from_json(stored | {"phases": text}) == config.train
    changed = override(config, ["--train.phases", "5x8, 4"], "pretrain")
    assert changed.train.phases == (PhaseConfig(5, 8), PhaseConfig(4))
    with pytest.raises(UserError, match=r"train.phases: steps is 0; it must be in \[1, inf\)"):
        PhaseConfig(0)


def test_steps_are_the_sum_of_the_phases():
    assert with_steps(experiment_of("3x8, 4, 5", steps=None)).train.steps == 12
    longer = with_steps(experiment_of("3x8, 4, 5", steps=20))
    assert longer.describe_phases() == "16 x 8 for 3 steps, then 4 x 32 for 4 steps, then 4 x 32"
    assert longer.describe_phases(7) == "16 x 8 for 3 steps, then 4 x 32"


def test_a_phase_keeps_the_state_and_evaluates_as_the_run_does():
    """Its program is the run's where only shapes change; evaluation has the run's rates and the phase's model."""
    phases = "3x8, 3 objective.mask_rate=0.3, 3 objective.mask_rate=0.4 objective.model.activation=relu"
    bert = Bert(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=16, max_positions=32)
    bound = MaskedLM(model=bert).bind(Vocabulary.stand_in(300), 32)
    e = dataclasses.replace(experiment_of(phases), objective=bound)
    program = Program(bound, e.train, e.optimizer, make_mesh(MeshConfig(), jax.devices()[:1]), phases=e.phases)
    first, second, third = (program.at(step) for step in (3, 4, 7))
    assert first is program and program.at(6) is second is not third
    assert program.eval_step is second.eval_step is not third.eval_step
    assert [each.objective.mask_rate for each in (first, second, third)] == [0.15, 0.3, 0.4]
    assert [each.eval_objective.mask_rate for each in (first, second, third)] == [0.15] * 3
    assert [each.eval_objective.model.activation for each in (first, second, third)] == ["gelu", "gelu", "relu"]


@pytest.mark.slow
def test_a_run_that_is_resumed_twice_is_the_run_in_one_piece(store):
    """At a boundary and inside a phase, bit for bit; test_run.py has the whole command."""
    change = "optimizer.learning_rate=1e-3 optimizer.warmup_steps=1 optimizer.weight_decay=0.5"
    e = experiment_of(f"2x16, 3x32x5 {change}, 2x16x8 train.accumulate=2", steps=7)
    program = Program(BOUND, e.train, e.optimizer, make_mesh(MeshConfig(), jax.devices()[:1]), phases=e.phases)

    def run(state: TrainState | None, after: int, last: int) -> TrainState:
        feed = Feed(store, e, program.mesh)
        state = program.init_state(program.init_params(3)) if state is None else jax.device_put(state)
        with contextlib.closing(feed.after(after)) as batches:
            for step, batch in zip(range(after + 1, last + 1), batches, strict=False):
                state, _ = program.at(step).train_step(state, batch, ())
        return jax.device_get(state)

    second = run(None, 0, 2)
    third = run(second, 2, 3)
    # The warm-up of the second phase begins at 0, while Adam's count and moments go on.
    assert_same_arrays(third.params, second.params)
    counts = optax.tree.get_all_with_path(third.opt_state, "count")
    assert [int(count) for _, count in counts] == [3, 3]
    assert_same_arrays(run(run(third, 3, 5), 5, 7), run(None, 0, 7))


@pytest.mark.parametrize("change", ["objective.model.num_layers=2", "optimizer.name=lion", "optimizer.average=0.5"])
def test_what_changes_the_state_is_refused(change):
    e = experiment_of(f"3x8, 6 {change}")
    program = Program(BOUND, e.train, e.optimizer, make_mesh(MeshConfig(), jax.devices()[:1]), phases=e.phases)
    with pytest.raises(UserError, match=f"phase 2 of train.phases: {change.split('=')[0]} would change the parameters"):
        program.at(4)
