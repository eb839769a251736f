"""The chunked cross-entropy against the written-out formula, and its memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxlm.objectives import chunked_loss
from jaxlm.objectives.chunked_loss import CHUNK_TOKENS, chunk_positions, chunked_cross_entropy
from tests.params import first_fast


def inputs(batch=3, length=11, width=8, vocab=29, seed=0):
    rng = np.random.default_rng(seed)
    hidden = jnp.asarray(rng.normal(size=(batch, length, width)), jnp.float32)
    table = jnp.asarray(rng.normal(size=(vocab, width)), jnp.float32)
    labels = jnp.asarray(rng.integers(0, vocab, (batch, length)), jnp.int32)
    weights = jnp.asarray(rng.integers(0, 2, (batch, length)), jnp.float32)
    bias = jnp.asarray(rng.normal(size=vocab), jnp.float32)
    return hidden, table, bias, labels, weights


def slow(hidden, table, bias, labels, weights, z_loss=0.0):
    """Compute the formula token by token in float64, without log-sum-exp tricks."""
    hidden, table, bias = (np.asarray(x, np.float64) for x in (hidden, table, bias))
    total, nll, correct = 0.0, np.zeros(labels.shape), np.zeros(labels.shape)
    d_hidden, d_table, d_bias = np.zeros_like(hidden), np.zeros_like(table), np.zeros_like(bias)
    for b, t in np.ndindex(*labels.shape):
        label, weight = int(labels[b, t]), float(weights[b, t])
        scores = table @ hidden[b, t] + bias
        normaliser = np.log(np.sum(np.exp(scores)))
        nll[b, t] = normaliser - scores[label]
        correct[b, t] = np.argmax(scores) == label
        total += weight * (nll[b, t] + z_loss * normaliser**2)
        slope = np.exp(scores - normaliser) * (1 + 2 * z_loss * normaliser)
        slope[label] -= 1.0
        d_hidden[b, t] = weight * slope @ table
        d_table += weight * np.outer(slope, hidden[b, t])
        d_bias += weight * slope
    return total, nll, correct, (d_hidden, d_table, d_bias)


@pytest.mark.parametrize(("z_loss", "chunk"), [
    pytest.param(z_loss, chunk, marks=() if z_loss and chunk in (4, None) else pytest.mark.slow)
    for z_loss in (0.0, 0.01) for chunk in (1, 4, 5, 11, 50, None)
])
def test_equals_the_formula(chunk, z_loss):
    hidden, table, bias, labels, weights = inputs()
    total, nll, correct, gradients = slow(hidden, table, bias, labels, weights, z_loss)

    def loss(hidden, table, bias):
        found = chunked_cross_entropy(hidden, table, labels, weights, chunk=chunk, bias=bias, z_loss=z_loss)
        return 0.5 * found.total, found

    (half, found), ours = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(hidden, table, bias)
    assert float(half) == pytest.approx(0.5 * total, rel=1e-5)
    np.testing.assert_allclose(found.nll, nll, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(found.correct, correct)
    for a, b in zip(ours, gradients, strict=True):
        np.testing.assert_allclose(a, 0.5 * b, rtol=1e-4, atol=1e-5)
    # The code path without gradients gives the same numbers.
    plain = chunked_cross_entropy(hidden, table, labels, weights, chunk=chunk, bias=bias, z_loss=z_loss)
    assert plain.drawn is None
    for a, b in zip(plain[:3], found[:3], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("shards", first_fast([1, 2]))
def test_a_label_far_below_the_others(shards, monkeypatch):
    """Labels with a logit far below the others; loss and gradients are those of float64."""
    monkeypatch.setattr(chunked_loss, "num_vocabulary_shards", lambda: shards)
    hidden, table, bias, labels, weights = inputs(batch=2, length=24, vocab=1000)  # few rows take another way
    labels, weights = (labels % 2) * 500, jnp.maximum(weights, 0.5)

    def loss(hidden, table, bias):
        return chunked_cross_entropy(hidden, table, labels, weights, bias=bias, z_loss=0.01, chunk=3).total

    def formula(hidden, table, bias):
        logits = jnp.einsum("blh,vh->blv", hidden, table) + bias
        nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)[..., 0]
        return jnp.sum(weights * (nll + 0.01 * jax.nn.logsumexp(logits, axis=-1) ** 2))

    plain = jax.jit(loss)
    ours, exact = (jax.jit(jax.value_and_grad(function, (0, 1, 2))) for function in (loss, formula))
    for gap in (1.0, 70.0, 80.0, 100.0, 3e4):
        arrays = hidden, table, bias.at[0].set(-gap)
        found = ours(*arrays)
        with jax.enable_x64():
            expected = jax.device_get(exact(*(np.asarray(x, np.float64) for x in arrays)))
        assert expected[0].dtype == np.float64
        without_gradients = plain(*arrays)
        assert float(found[0]) == pytest.approx(float(expected[0]), rel=1e-5)
        assert float(without_gradients) == pytest.approx(float(expected[0]), rel=1e-5)
        for a, b in zip(found[1], expected[1], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


@pytest.mark.slow
def test_bfloat16_stays_near_float32():
    hidden, table, _, labels, weights = inputs()

    def loss(table, dtype):
        return chunked_cross_entropy(hidden.astype(dtype), table, labels, weights, chunk=4).total

    exact, exact_gradient = jax.value_and_grad(loss)(table, jnp.float32)
    near, gradient = jax.value_and_grad(loss)(table, jnp.bfloat16)
    assert gradient.dtype == jnp.float32
    assert float(near) == pytest.approx(float(exact), rel=0.01)
    assert np.abs(gradient - exact_gradient).max() < 0.03 * np.abs(exact_gradient).max()


@pytest.mark.slow
def test_no_weight_no_loss_no_gradient():
    hidden, table, _, labels, weights = inputs()
    total, gradient = jax.value_and_grad(
        lambda t: chunked_cross_entropy(hidden, t, labels, jnp.zeros_like(weights), chunk=3).total
    )(table)
    assert float(total) == 0.0
    assert np.abs(gradient).max() == 0.0


def test_never_holds_all_logits():
    """The compiled step's temporary memory is far below one array of logits, at a sixteenth of GPT-2's vocabulary."""
    batch, length, width, vocab = 4, 1024, 64, 50257 // 16
    all_logits = 4 * batch * length * vocab

    def temporary(chunk):
        def loss(hidden, table):
            return chunked_cross_entropy(hidden, table, labels, weights, chunk=chunk).total

        hidden = jax.ShapeDtypeStruct((batch, length, width), jnp.float32)
        table = jax.ShapeDtypeStruct((vocab, width), jnp.float32)
        labels, weights = jnp.zeros((batch, length), jnp.int32), jnp.ones((batch, length))
        compiled = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(hidden, table).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(length) > 1.5 * all_logits
    assert temporary(16) < 0.3 * all_logits  # four of the 64 chunks are unrolled at a time


def test_chunks_suit_the_devices(monkeypatch):
    def positions(shards, *shape, vocab=30_522):
        monkeypatch.setattr(chunked_loss, "num_batch_shards", lambda: shards)
        return chunk_positions(*shape, vocab)

    assert positions(1, 16, 1024) == CHUNK_TOKENS // 16
    assert positions(64, 1024, 1024) == CHUNK_TOKENS // 16  # same rows per device, same chunks
    assert positions(1, 1, 1024) == 1024
    assert positions(1, 10_000, 128) == 1
    assert positions(1, 16, 1024, vocab=262_144) == CHUNK_TOKENS // 16
    assert positions(1, 16, 1024, vocab=793_471) == 1522 // 16


def test_a_large_vocabulary_has_smaller_chunks(monkeypatch):
    """The evaluation of ELMo with all of its words, and equal losses and gradients at a small size."""
    def loss(hidden, table, bias, labels, weights):
        return chunked_cross_entropy(hidden, table, labels, weights, bias=bias).total

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((384, 20, 512), (793_471, 512), (793_471,))]
    labels = jax.ShapeDtypeStruct((384, 20), jnp.int32)
    compiled = jax.jit(loss).lower(*shapes, labels, jax.ShapeDtypeStruct((384, 20), jnp.float32)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 16 << 30  # 11.8 GiB; 47 in chunks of 4,096 positions

    small = inputs(length=40)
    expected = jax.value_and_grad(loss, (0, 1, 2))(*small)
    monkeypatch.setattr(chunked_loss, "CHUNK_LOGITS", 29 * 9)
    assert chunk_positions(3, 40, 29) == 3
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), expected,
                 jax.value_and_grad(loss, (0, 1, 2))(*small))


@pytest.mark.parametrize("chunk", first_fast([3, 1, None]))
def test_drawn_tokens_follow_the_softmax(chunk):
    """A chi-square test over many rows with the same hidden state, and the same samples with a gradient."""
    _, table, bias, _, _ = inputs(vocab=29)
    hidden = jnp.broadcast_to(jnp.linspace(-0.5, 0.5, 8), (600, 6, 8))
    labels, weights = jnp.zeros((600, 6), jnp.int32), jnp.ones((600, 6))
    uniform = jax.random.uniform(jax.random.key(5), (600, 6))

    def loss(hidden):
        found = chunked_cross_entropy(
            hidden, table, labels, weights, chunk=chunk, bias=bias, uniform=uniform, temperature=1.5
        )
        return found.total, found.drawn

    drawn = np.asarray(jax.jit(loss)(hidden)[1])
    (_, with_gradient), _ = jax.jit(jax.value_and_grad(loss, has_aux=True))(hidden)
    np.testing.assert_array_equal(drawn, with_gradient)
    scores = (np.asarray(table, np.float64) @ np.asarray(hidden[0, 0], np.float64) + np.asarray(bias)) / 1.5
    expected = drawn.size * np.exp(scores) / np.exp(scores).sum()
    assert scipy.stats.chisquare(np.bincount(drawn.ravel(), minlength=29), expected).pvalue > 1e-4
    # Positions of a row, and rows at a position, are sampled independently.
    alike = np.sum((expected / drawn.size) ** 2)
    for a, b in ((drawn[:, :-1], drawn[:, 1:]), (drawn[:-1], drawn[1:])):
        assert abs((a == b).mean() - alike) < 5 * (alike / a.size) ** 0.5
