"""What each step reads: short rows first, the same after any stop."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from jaxlm.analysis.step import open_stand_in
from jaxlm.config.experiment import Experiment, TrainConfig
from jaxlm.data.base import RowFormat
from jaxlm.data.text import TextData
from jaxlm.errors import UserError
from jaxlm.models.gpt2 import Gpt2
from jaxlm.objectives.causal_lm import CausalLM
from jaxlm.parallel.mesh import MeshConfig, make_mesh
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.training.feed import Feed, stage_after
from tests.data.stand_ins import store_of


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    documents = ["".join(chr(97 + (7 * i + j) % 26) for j in range(20 + i)) for i in range(60)]
    return store_of(tmp_path_factory.mktemp("store") / "store", documents, held_out=0.2)


OBJECTIVE = CausalLM(model=Gpt2(hidden_size=16, num_layers=1, num_heads=2, max_positions=32))


def experiment_of(short_steps: int = 3, short_length: int = 8) -> Experiment:
    return Experiment(
        OBJECTIVE, data=TextData(length=32),
        train=TrainConfig(batch_size=4, eval_batches=2, short_steps=short_steps, short_length=short_length, seed=3),
    )


def feed_of(store, short_steps: int = 3) -> Feed:
    experiment = experiment_of(short_steps)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    return Feed(store, OBJECTIVE.bind(Vocabulary.stand_in(300), 32), experiment.train, 32, mesh)


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
        expected = store.batches("train", rows, RowFormat("packed-eos", length), 3)
        for step, ours in enumerate(split, first):
            np.testing.assert_array_equal(ours, expected.batch(step).tokens)
    assert [np.asarray(b.tokens).shape for b in feed.held_out()] == [(4, 33)] * 2
    assert str(feed) == "16 x 8 for 3 steps, then 4 x 32"


@pytest.mark.parametrize("done", [1, 2, 3, 4])
def test_the_same_after_any_stop(store, done):
    feed = feed_of(store)
    for ours, theirs in zip(tokens(feed, done, 6 - done), tokens(feed, 0, 6)[done:], strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_each_step_has_its_stage(store):
    """As `jaxlm show` finds the batch of a step."""
    feed = feed_of(store)
    for step, ours in enumerate(tokens(feed, 0, 6)):
        stage = stage_after(feed._stages, step)
        np.testing.assert_array_equal(stage.batches.batch(step - stage.after).tokens, ours)


def test_shapes_are_of_the_rows_that_are_read(store):
    feed = feed_of(store)
    assert feed.shape(1) == feed.shape(3) == (8, 16) and feed.shape(4) == (32, 4)


def test_passes_over_the_text(store):
    """3 steps of 16 rows of 9 tokens and 5 of 4 rows of 33; and where the run ends among the short rows."""
    feed = feed_of(store)
    short, full = (store.batches("train", 1, RowFormat("packed-eos", length), 3).num_rows for length in (9, 33))
    assert feed._train.steps > 8
    for steps, passes in ((8, 48 / short + 20 / full), (2, 32 / short)):
        feed._train = dataclasses.replace(feed._train, steps=steps)
        assert feed.passes == pytest.approx(passes)


def test_without_short_steps_all_rows_are_alike(store):
    feed = feed_of(store, short_steps=0)
    assert [t.shape for t in tokens(feed, 0, 2)] == [(4, 33)] * 2 and str(feed) == "4 x 32"


@pytest.mark.parametrize(("length", "says"), [(12, "12 does not divide data.length 32"), (1, "is not possible")])
def test_impossible_lengths(length, says):
    with pytest.raises(UserError, match=f"train.short_length {says}"):
        open_stand_in(experiment_of(short_length=length))
