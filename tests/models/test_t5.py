"""T5's own parts: relative position buckets and bias, sizes, initialization, dropout, cached decoding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.errors import UserError
from jaxlm.models import t5
from jaxlm.models.base import Inputs
from jaxlm.models.layers.stack import unstack
from jaxlm.models.t5 import T5
from tests.params import first_fast

SMALL = dict(vocab_size=50, hidden_size=24, num_layers=2, num_heads=3, head_dim=5, intermediate_size=40)


def fresh(model: T5, seed: int = 0):
    return jax.jit(model.init)(jax.random.key(seed))


def spread(runs: dict[int, tuple[int, int]], last: int) -> list[int]:
    """Return {bucket: (first distance, last distance)} as a list by distance."""
    table = [0] * (last + 1)
    for bucket, (start, end) in runs.items():
        for n in range(start, min(end, last) + 1):
            table[n] = bucket
    return table


BIDIRECTIONAL = {n: (n, n) for n in range(8)} | {
    8: (8, 11), 9: (12, 15), 10: (16, 22), 11: (23, 31), 12: (32, 45), 13: (46, 63), 14: (64, 90), 15: (91, 999),
}
CAUSAL = {n: (n, n) for n in range(16)} | {
    16: (16, 18), 17: (19, 20), 18: (21, 23), 19: (24, 26), 20: (27, 30), 21: (31, 34), 22: (35, 39), 23: (40, 45),
    24: (46, 51), 25: (52, 58), 26: (59, 66), 27: (67, 76), 28: (77, 86), 29: (87, 98), 30: (99, 112), 31: (113, 999),
}


def test_buckets_are_the_published_ones():
    n = np.arange(300)
    assert t5.relative_buckets(-n, bidirectional=True).tolist() == spread(BIDIRECTIONAL, 299)
    assert t5.relative_buckets(n[1:], bidirectional=True).tolist() == [16 + b for b in spread(BIDIRECTIONAL, 299)[1:]]
    assert t5.relative_buckets(-n, bidirectional=False).tolist() == spread(CAUSAL, 299)
    assert not t5.relative_buckets(n, bidirectional=False).any()


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
@pytest.mark.parametrize("length", [1, 7])
def test_bias_is_the_table_at_each_distance(stack, length):
    model = T5(**SMALL, relative_buckets=8, relative_max_distance=6)
    table = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)
    bias = model.position_bias(stack, {f"{stack}_bias": {"embedding": jnp.asarray(table)}}, length)
    assert bias.shape == (1, 3, length, length)
    for i in range(length):
        for j in range(length):
            (bucket,) = t5.relative_buckets(np.array([j - i]), stack == "encoder", 8, 6)
            np.testing.assert_array_equal(bias[0, :, i, j], table[bucket])


def test_bias_at_one_position_is_a_row_of_the_whole_bias():
    model = T5(**SMALL)
    params = {"decoder_bias": {"embedding": jax.random.normal(jax.random.key(0), (32, SMALL["num_heads"]))}}
    whole = model.position_bias("decoder", params, 40)
    for index in (0, 17, 39):
        row = model.position_bias_at(params, jnp.int32(index), 40)
        np.testing.assert_array_equal(row[0, :, 0, : index + 1], whole[0, :, index, : index + 1])


COUNTS = {
    "small": 60_506_624, "base": 222_903_552, "large": 737_668_096, "3b": 2_851_598_336, "11b": 11_307_321_344,
    "1.1-small": 76_961_152, "1.1-base": 247_577_856, "1.1-large": 783_150_080, "1.1-xl": 2_849_757_184,
    "1.1-xxl": 11_135_332_352,
}
TIED_COUNTS = {
    "1.1-small": 60_511_616, "1.1-base": 222_903_552, "1.1-large": 750_251_008, "1.1-xl": 2_783_959_040,
    "1.1-xxl": 11_003_736_064,
}


def count(model: T5) -> int:
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return sum(x.size for x in jax.tree.leaves(shapes))


@pytest.mark.parametrize("size", first_fast(["1.1-small", *(x for x in T5.published_sizes if x != "1.1-small")]))
def test_published_parameter_counts(size):
    assert count(T5.published(size)) == COUNTS[size]
    if size in TIED_COUNTS:
        assert count(T5.published(size, tied_head=True)) == TIED_COUNTS[size]


@pytest.mark.parametrize("tied", [pytest.param(tied, marks=pytest.mark.slow) for tied in (True, False)])
def test_initialization(tied):
    model = T5(vocab_size=2000, hidden_size=64, num_layers=3, num_heads=4, head_dim=32, intermediate_size=256,
                         tied_head=tied, scaled_head=tied, activation="relu" if tied else "gated-gelu")
    params = fresh(model)
    layer = unstack(params["decoder"]["layers"])[2]
    expected = {
        "query": (layer["attention"]["query"]["kernel"], (64 * 32) ** -0.5),
        "key": (layer["attention"]["key"]["kernel"], 64**-0.5),
        "cross value": (layer["cross_attention"]["value"]["kernel"], 64**-0.5),
        "out": (layer["attention"]["out"]["kernel"], (4 * 32) ** -0.5),
        "wi": (layer["mlp"]["wi" if tied else "wi_1"]["kernel"], 64**-0.5),
        "wo": (layer["mlp"]["wo"]["kernel"], 256**-0.5),
        "embedding": (params["shared"]["embedding"], 1.0),
    } | ({} if tied else {"head": (params["lm_head"]["kernel"], 64**-0.5)})
    for name, (weights, std) in expected.items():
        assert float(jnp.std(weights)) == pytest.approx(std, rel=0.03), name
    assert float(jnp.std(params["encoder_bias"]["embedding"])) == pytest.approx(64**-0.5, rel=0.25)
    assert (layer["mlp_norm"]["scale"] == 1).all() and (params["encoder"]["final_norm"]["scale"] == 1).all()


@pytest.mark.parametrize("changes", [
    pytest.param({}, marks=pytest.mark.slow),
    dict(tied_head=False, scaled_head=False, activation="gated-gelu", num_layers=1),
])
def test_cached_decoding_has_the_same_logits(changes):
    """Also over padded prompts, wherever the padding is: only distances matter."""
    model = T5(**(SMALL | changes), dropout=0.0, attention_dropout=0.0)
    params = fresh(model, 1)
    rng = np.random.default_rng(0)
    ids, targets = jnp.asarray(rng.integers(1, 50, (2, 9))), jnp.asarray(rng.integers(1, 50, (2, 20)))
    mask = jnp.array([[1] * 9, [1] * 4 + [0] * 5])

    @jax.jit
    def run(ids, mask, targets):
        memory = model.hidden_states(params, Inputs(ids, mask=mask))
        return model.predict_tokens(params, model.decoder_states(params, targets, memory, mask))

    left = (jnp.stack([ids[0], jnp.roll(ids[1], 5)]), jnp.stack([mask[0], jnp.roll(mask[1], 5)]))
    np.testing.assert_allclose(run(*left, targets), run(ids, mask, targets), atol=2e-5)
    # `prefill` reads the start symbol, here the first target of every row; `decode` reads the others.
    targets = targets.at[:, 0].set(7)
    expected = run(*left, targets)
    logits, state = jax.jit(model.prefill, static_argnums=(3, 4))(params, left[0], left[1] > 0, 20, 7)
    decode = jax.jit(model.decode)
    for index in range(20):
        if index:
            logits, state = decode(params, targets[:, index], state)
        np.testing.assert_allclose(logits, expected[:, index], atol=5e-5)


@pytest.mark.slow  # tests/huggingface/test_t5.py compares padded rows
def test_padding_and_later_targets_change_nothing():
    model = T5(**SMALL)
    params = fresh(model)
    ids, targets = jnp.arange(1, 9)[None], jnp.arange(11, 17)[None]
    mask = jnp.array([[1] * 5 + [0] * 3])

    @jax.jit
    def hidden(ids, targets):
        return model.decoder_states(params, targets, model.hidden_states(params, Inputs(ids, mask=mask)), mask)

    first = hidden(ids, targets)
    other_padding, other_future = ids.at[:, 5:].set(40), targets.at[:, 4:].set(41)
    np.testing.assert_array_equal(first, hidden(other_padding, targets))
    np.testing.assert_array_equal(first[:, :4], hidden(ids, other_future)[:, :4])
    assert np.abs(first[:, 4:] - hidden(ids, other_future)[:, 4:]).max() > 1e-3


@pytest.mark.slow  # test_gpt2.py has it
def test_dropout_needs_a_key():
    model = T5(**SMALL, dropout=0.3, attention_dropout=0.3)
    params = fresh(model)
    ids = jnp.tile(jnp.arange(1, 9), (60, 1))

    @jax.jit
    def both(key):
        keys = (None, None) if key is None else jax.random.split(key)
        memory = model.hidden_states(params, Inputs(ids), key=keys[0])
        return memory, model.decoder_states(params, ids, memory, key=keys[1])

    # The last dropout is on a stack's output: three in ten of its elements are zero.
    for plain, dropped in zip(both(None), both(jax.random.key(1)), strict=True):
        assert (plain == plain[:1]).all() and (plain != 0).all()
        assert float(jnp.mean(dropped == 0)) == pytest.approx(0.3, abs=0.02)
    # Dropout acts before it too: the nonzero elements of the rows differ.
    assert (jnp.where(dropped == 0, 0, dropped - dropped[:1]) != 0).any()


@pytest.mark.parametrize("changes, sentence", [
    (dict(num_heads=0), r"objective.model.num_heads is 0; it must be in \[1, "),
    (dict(num_decoder_layers=0), r"objective.model.num_decoder_layers is 0; it must be in \[1, "),
    (dict(dropout=1.0), r"objective.model.dropout is 1.0; it must be in \[0, 1\)."),
    (dict(norm_eps=-1.0), r"objective.model.norm_eps is -1.0; it must be in \(0, inf\)."),
    (dict(relative_buckets=10), "objective.model.relative_buckets is 10; it must be a multiple of 4"),
    (dict(relative_max_distance=16), "objective.model.relative_max_distance is 16; it must be above half"),
    (dict(tied_head=False), "objective.model.scaled_head goes with tied_head only"),
])
def test_invalid_configurations(changes, sentence):
    with pytest.raises(UserError, match=sentence):
        T5(**changes)
