"""DeBERTa: published sizes, buckets, attention at some positions, the mask decoder, shared embeddings."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position

from jaxlm.errors import UserError
from jaxlm.models.base import Inputs
from jaxlm.models.deberta import Deberta, DebertaV3
from jaxlm.models.layers.disentangled import RelativeTable, distance_buckets
from tests.params import first_fast, random_params

SMALL = Deberta(
    vocab_size=90, hidden_size=16, num_layers=2, num_heads=2, intermediate_size=32, max_positions=24,
    position_buckets=8, init_std=0.3,
)


def shapes(model):
    return jax.eval_shape(model.init, jax.random.key(0))


def count(tree) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    ("size", "body", "body_without_words", "with_head", "pair"),
    first_fast([
        ("xsmall", 70_682_112, 21_491_712, 70_958_820, 131_339_749),
        ("small", 141_304_320, 42_923_520, 142_024_548, 263_051_365),
        ("base", 183_831_552, 85_450_752, 184_551_780, 326_842_213),
        ("large", 434_012_160, 302_837_760, 435_191_908, 719_626_341),
    ]),
)
def test_published_parameter_counts(size, body, body_without_words, with_head, pair):
    found = shapes(Deberta.published(size))
    assert count(found) == with_head and count(found) - count(found["mlm_head"]) == body
    assert body - count(found["embeddings"]["word"]) == body_without_words
    model = DebertaV3.published(size)
    found = shapes(model)
    h = model.hidden_size
    head = h * h + h + 2 * h + h + 1
    generator = Deberta.published(size, num_layers=model.num_layers // 2)
    assert count(found) == pair == body + head + count(shapes(generator)) + 512 * h


# Distance → bucket of the official code, with 256 buckets and 512 positions.
GOLDEN = {
    1: 1, 127: 127, 128: 128, 129: 129, 131: 131, 132: 131, 133: 132, 134: 133, 140: 137, 150: 143, 200: 169, 255: 192,
    300: 207, 400: 233, 511: 255,
}


def test_buckets():
    far, near = np.array([*GOLDEN]), np.array([*GOLDEN.values()])
    assert (distance_buckets(far, 256, 512) == near).all() and (distance_buckets(-far, 256, 512) == -near).all()
    for buckets, longest in ((256, 512), (8, 24), (32, 128)):
        states, positions = torch.zeros(longest, 1), np.arange(longest)
        theirs = build_relative_position(states, states, buckets, longest)[0].numpy()
        assert (distance_buckets(positions[:, None] - positions[None, :], buckets, longest) == theirs).all()


@pytest.mark.slow
def test_rows_of_the_table():
    """More buckets than positions are single distances; no two tokens have the distance `length`."""
    distances = np.arange(-20, 21)
    assert (distance_buckets(distances, 256, 21) == distances).all()
    table = RelativeTable(SMALL.stack, 30, 24)
    params = table.init(jax.random.key(0), 1)
    found = table.apply(params, 24)
    assert found.shape == (49, 16)
    np.testing.assert_array_equal(found[2:-2], table.apply(params, 23)[1:-1])


def run(model: Deberta, params, ids, mask=None, at=None):
    hidden = jax.jit(lambda params, ids, mask, at: model.hidden_states(params, Inputs(ids, mask=mask), at=at))
    return np.asarray(hidden(params, ids, mask, at))


@pytest.mark.parametrize("changes", first_fast([{"mask_decoder": True}, {}, {"mask_decoder": True, "num_layers": 1}]))
def test_some_positions_and_padding(changes):
    model = dataclasses.replace(SMALL, **changes)
    params, ids = random_params(model), jax.random.randint(jax.random.key(1), (3, 20), 0, 90)
    at = jnp.array([[0, 7, 19, 3, 3], [1, 2, 3, 4, 5], [12, 9, 0, 18, 11]])
    whole = run(model, params, ids)
    np.testing.assert_allclose(run(model, params, ids, at=at), np.take_along_axis(whole, at[..., None], 1), atol=1e-5)
    mask = (jnp.arange(20) < 13)[None].repeat(3, 0)
    np.testing.assert_allclose(run(model, params, ids, mask)[:, :13], run(model, params, ids[:, :13]), atol=1e-5)
    assert np.abs(whole[:, :13] - run(model, params, ids[:, :13])).max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["full", "cheap"])
def test_rematerialization_and_loops_change_nothing(remat):
    model = dataclasses.replace(SMALL, mask_decoder=True, num_layers=3)
    params, ids = random_params(model), jax.random.randint(jax.random.key(1), (2, 12), 0, 90)

    def gradients(model: Deberta):
        loss = lambda params: jnp.sum(jnp.sin(model.hidden_states(params, Inputs(ids), key=jax.random.key(2))))  # noqa: E731
        return jax.jit(jax.grad(loss))(params)

    other = gradients(dataclasses.replace(model, remat=remat, loop_layers=True))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), gradients(model), other)


def test_a_task_reads_the_states_below_the_mask_decoder():
    """As DebertaV2's classes do: a generator is fine-tuned without the positions of its decoder."""
    model, ids = dataclasses.replace(SMALL, mask_decoder=True), jnp.arange(12)[None] % 90
    params = model.init_task(jax.random.key(0))
    assert "position" not in params
    plain = jax.jit(SMALL.hidden_states)(params, Inputs(ids))
    np.testing.assert_array_equal(jax.jit(model.hidden_states)(params, Inputs(ids)), plain)


def test_the_pair_shares_the_word_embedding():
    names = [f.name for f in dataclasses.fields(DebertaV3) if hasattr(SMALL, f.name)]
    pair = DebertaV3(**{name: getattr(SMALL, name) for name in names}, generator_num_layers=1)
    params = jax.jit(pair.init)(jax.random.key(0))
    change = params["discriminator"]["embeddings"]["word"]["embedding"]
    assert not change.any() and pair.generator.mask_decoder and not pair.discriminator.mask_decoder
    base = params["generator"]["embeddings"]["word"]["embedding"]
    own = pair.text_params(params)
    np.testing.assert_array_equal(own["embeddings"]["word"]["embedding"], base)
    assert own["embeddings"]["norm"] is params["discriminator"]["embeddings"]["norm"]
    assert own["encoder"] is params["discriminator"]["encoder"]


@pytest.mark.parametrize(("n", "buckets"), [(20, 8), (6, 6)])
def test_flops(n, buckets):
    """Of one layer: four projections, the feed-forward layers, two products of attention, and two with the buckets."""
    h, f = 16, 32
    layer = 2 * n * (4 * h * h + 2 * h * f) + 4 * n * n * h + 2 * (2 * n * 2 * buckets * h)
    assert SMALL.forward_flops(n, 3) == 2 * layer + 3 * (2 * h * h + 2 * h * 90)


@pytest.mark.parametrize(
    ("changes", "message"), [({"position_buckets": 1}, "position_buckets is 1"), ({"num_heads": 3}, "not divisible")]
)
def test_invalid_configurations(changes, message):
    with pytest.raises(UserError, match=message):
        DebertaV3(**({"hidden_size": 16} | changes))
