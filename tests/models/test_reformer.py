"""The Reformer: LSH attention against a slow version, the reversible stack against a plain one, its memory.

Comparisons with Transformers (logits, gradients, greedy continuations) are in tests/huggingface.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.errors import UserError
from jaxlm.models import reformer
from jaxlm.models.base import AtEnd, Inputs, text_vectors
from jaxlm.models.layers.chunked import LshAttention, RowLayout, permute, previous_chunks, torch_normal
from jaxlm.models.reformer import Reformer
from jaxlm.objectives.causal_lm import CausalLM
from jaxlm.tokenizers.vocabulary import Vocabulary
from tests.params import first_fast, random_params

SMALL = Reformer(
    vocab_size=50, hidden_size=16, num_layers=4, attention_types=("local", "lsh"), num_heads=2, head_dim=8,
    intermediate_size=24, axial_shape=(6, 8), axial_widths=(6, 10), local_chunk_size=4, lsh_chunk_size=6, num_hashes=3,
    buckets=(2, 4), init_std=0.3,
)
IDS = np.random.default_rng(0).permutation(50)[None, :36].astype(np.int32)


@pytest.fixture(scope="module")
def params():
    return jax.jit(SMALL.init)(jax.random.key(0))


def slow_lsh(shared, value, rotations, buckets, chunk):
    """Compute one row and head in float64 (section 2 of the paper); return outputs and the number of visible tokens."""
    length, rounds = len(shared), rotations.shape[1]
    sorted_positions = []
    for r in range(rounds):
        rotated, numbers = shared @ rotations[:, r], []
        for position in range(length):
            number, first, factor = 0, 0, 1
            for count in buckets:
                half = rotated[position, first : first + count // 2]
                number += factor * int(np.argmax([*half, *-half]))
                first, factor = first + count // 2, factor * count
            numbers.append(number)
        sorted_positions += sorted(range(length), key=lambda position, numbers=numbers: (numbers[position], position))
    chunks = np.reshape(sorted_positions, (-1, chunk))
    outs, totals = np.zeros((length, rounds, value.shape[1])), np.zeros((length, rounds))
    others = np.zeros(length, int)
    for index, positions in enumerate(chunks):
        for position in positions:
            visible = [s for s in [*chunks[index - 1], *positions] if s < position] or [position]
            keys = shared[visible] / np.sqrt(np.sum(shared[visible] ** 2, axis=1, keepdims=True))
            scores = keys @ shared[position] if visible != [position] else np.array([-1e5])
            r = index * rounds // len(chunks)
            totals[position, r] = scores.max() + np.log(np.sum(np.exp(scores - scores.max())))
            outs[position, r] = np.exp(scores - totals[position, r]) @ value[visible]
            others[position] += visible != [position]
    shares = np.exp(totals - totals.max(1, keepdims=True))
    return np.einsum("pr,prd->pd", shares / shares.sum(1, keepdims=True), outs), others


@pytest.mark.parametrize(("hashes", "buckets"), first_fast([(3, (2, 4)), (1, (6,))]))
def test_lsh_attention_equals_the_slow_version(hashes, buckets):
    config = dataclasses.replace(SMALL, num_hashes=hashes, buckets=buckets, hash_seed=3).stack
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 36, 16)), jnp.float32)
    rows, module = RowLayout(jnp.ones((2, 36), jnp.int32)), LshAttention(config)
    variables = jax.jit(module.init)(jax.random.key(0), x, rows, None)
    out, found = jax.jit(module.apply)(variables, x, rows, None)
    own = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), variables["params"])
    shared, value = ((np.asarray(x) @ own[name]["kernel"]).reshape(2, 36, 2, 8) for name in ("query", "value"))
    rotations = torch_normal(3, (2, 8, hashes, sum(buckets) // 2))
    assert found.shape == (2, 2, hashes, 36) and len(np.unique(found)) == np.prod(buckets)
    slow = np.zeros((2, 36, 2, 8))
    exact = np.ones((2, 36), bool)
    for row, head in np.ndindex(2, 2):
        slow[row, :, head], others = slow_lsh(shared[row, :, head], value[row, :, head], rotations[head], buckets, 6)
        exact[row] &= others > 0
    error = np.abs(out - slow.reshape(2, 36, 16) @ own["out"]["kernel"]).max(-1)
    assert exact.sum() > 40 and error[exact].max() < 1e-5
    assert error.max() < 0.02  # at a score of -1e5, float32 has steps of 0.008


@pytest.mark.slow
def test_later_tokens_and_other_documents_have_no_gradient(params):
    """The tokens of a row are distinct, so that each has its own vector."""
    # Unequal weights: the plain sum of a normalized vector has a gradient of rounding errors only.
    weights = np.random.default_rng(3).normal(size=32).astype(np.float32)
    segments = np.repeat([1, 2, 3, 0], [9, 12, 10, 5])[None].astype(np.int32)

    @jax.jit
    @functools.partial(jax.jacobian, argnums=0)
    def jacobian(word, params):
        hidden = SMALL.hidden_states(
            params | {"word": {"embedding": word}}, Inputs(jnp.asarray(IDS), documents=jnp.asarray(segments))
        )
        return hidden[0] @ weights

    influence = np.abs(jacobian(params["word"]["embedding"], params)).max(-1)[:, IDS[0]]
    position = np.arange(36)
    allowed = (position[:, None] >= position[None]) & (segments[0][:, None] == segments[0][None])
    real = segments[0] > 0
    assert not influence[~allowed & real[:, None]].any()
    assert (influence[allowed & real[:, None]] > 1e-4).mean() > 0.8


def plain(layers, repeats, loop, params, state, per_layer, shared):
    return reformer.reversible_forward(layers, repeats, loop, params, state, per_layer, shared)[0]


@pytest.mark.parametrize(("types", "loop"), first_fast([
    (("local",), True), (("local", "lsh"), True), (("local", "lsh"), False)
]))
def test_gradients_equal_those_of_a_plain_stack(types, loop, monkeypatch):
    """With dropout and random rotations, which the backward pass must reproduce."""
    model = dataclasses.replace(SMALL, attention_types=types, loop_layers=loop)
    params = random_params(model)
    cotangent = np.random.default_rng(2).normal(size=(1, 36, 32)).astype(np.float32)

    def gradients(*seeds):
        function = jax.jit(jax.grad(
            lambda p, key: jnp.sum(model.hidden_states(p, Inputs(jnp.asarray(IDS)), key=key) * cotangent)
        ))
        return [jax.device_get(function(params, jax.random.key(seed, impl="rbg"))) for seed in seeds]

    found, others = gradients(3, 4)
    monkeypatch.setattr(reformer, "run_reversible", plain)
    (expected,) = gradients(3)
    for (path, leaf), own, other in zip(
        jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(found), jax.tree.leaves(others), strict=True
    ):
        scale = np.abs(leaf).max()
        assert np.abs(own - leaf).max() < 1e-4 * max(scale, 1e-3), jax.tree_util.keystr(path)
        assert "lm_head" in str(path) or np.abs(other - leaf).max() > 1e-2 * scale  # the key has an effect


def temporary_bytes(layers: int) -> int:
    """Return the memory of the compiled gradient without parameters and gradients."""
    model = dataclasses.replace(SMALL, num_layers=layers, axial_shape=(36, 8))
    function = jax.jit(jax.grad(lambda p, ids: jnp.sum(model.hidden_states(p, Inputs(ids), key=jax.random.key(0)))))
    shapes = jax.eval_shape(model.init, jax.random.key(0)), jax.ShapeDtypeStruct((8, 288), jnp.int32)
    return function.lower(*shapes).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_activations_do_not_grow_with_depth(monkeypatch):
    """Only the buckets do: 2 bytes per head, round and token of the LSH layers."""
    few, many = temporary_bytes(4), temporary_bytes(16)
    monkeypatch.setattr(reformer, "run_reversible", plain)
    plain_few, plain_many = temporary_bytes(4), temporary_bytes(16)
    print(f"reversible: {few:,} and {many:,} bytes; plain: {plain_few:,} and {plain_many:,}")
    buckets = 6 * 8 * 288 * SMALL.num_heads * SMALL.num_hashes * 2
    assert many - few < 3 * buckets + 200_000 < (plain_many - plain_few) / 50
    assert few < plain_few


def test_gradient_of_permute():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 3)), jnp.float32)
    order = jnp.asarray([[3, 1, 4, 0, 2], [0, 2, 1, 4, 3]])
    weights = jnp.arange(30.0).reshape(2, 5, 3)
    found = jax.grad(lambda x: jnp.sum(permute(x, order, jnp.argsort(order)) * weights))(x)
    expected = jax.grad(lambda x: jnp.sum(jnp.take_along_axis(x, order[..., None], axis=1) * weights))(x)
    np.testing.assert_array_equal(found, expected)


def test_previous_chunks():
    assert previous_chunks(4, 2, jnp.asarray([4, 3, 1])).tolist() == [
        [7, 0, 1, 2, 3, 4, 5, 6], [6, 0, 1, 2, 2, 4, 5, 6], [4, 0, 1, 2, 0, 4, 5, 6]
    ]


def test_padding_has_no_influence(params):
    ids, first = IDS[:, :21], 8
    alone = jax.jit(SMALL.hidden_states)(params, Inputs(ids[:, :-1]))[:, first - 1 :]  # the last token is not read
    for padding in (0, 1, 15, 16, 31):
        prompts, mask = (np.pad(x, ((0, 0), (padding, 0))) for x in (ids[:, :first], np.ones((1, first), bool)))
        targets, target_mask = np.pad(ids[:, first:], ((0, 0), (0, 2))), np.arange(15)[None] < 13
        found = jax.jit(SMALL.target_features)(params, prompts, mask, targets, target_mask)[:, :13]
        np.testing.assert_allclose(found, alone, atol=1e-4)


def test_a_longer_text_has_no_influence_on_a_vector(params):
    @jax.jit
    def vectors(params, ids, mask):
        return text_vectors(SMALL, params, Inputs(ids, mask=mask, padding=AtEnd()), "mean")

    for length in (7, 17):
        mask = (np.arange(36) < np.array([[36], [length]])).astype(np.int32)
        beside = vectors(params, np.where(mask, IDS, 0), mask)[1:]
        np.testing.assert_allclose(beside, vectors(params, IDS[:, :length], mask[1:, :length]), atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(axial_widths=(8, 9)), "add up to hidden_size 16"), (dict(buckets=(3,)), "even numbers"),
        (dict(buckets=()), "even numbers"), (dict(buckets=(256, 256)), "at most 32767"),
        (dict(num_hashes=0), "num_hashes"), (dict(num_layers=3), "do not divide"),
        (dict(remat="full"), "remat must be none"), (dict(lsh_chunk_size=0), "lsh_chunk_size is 0"),
    ],
)
def test_invalid_configurations(changes, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(SMALL, **changes)


@pytest.mark.parametrize(
    ("length", "message"),
    [(60, "data.length 60 is more than the model's 48 positions"), (30, "data.length 30 is not a multiple of 12")],
)
def test_invalid_lengths(length, message):
    with pytest.raises(UserError, match=message):
        CausalLM(model=SMALL).bind(Vocabulary.stand_in(50), length)
    assert CausalLM(model=SMALL).bind(Vocabulary.stand_in(50), 48)


def test_flops_of_lsh_attention_are_linear_in_the_length():
    model = Reformer()
    assert model.forward_flops(65536, 65536) == pytest.approx(2 * model.forward_flops(32768, 32768))
    local = dataclasses.replace(model, attention_types=("local",))
    assert model.forward_flops(256, 256) < local.forward_flops(256, 256) * 1.1
