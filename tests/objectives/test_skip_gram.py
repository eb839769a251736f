"""Word vectors: sampling as in the C code, a pass against its inner loops in NumPy, the text format."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.cli import main
from jaxlm.config.presets import load_preset
from jaxlm.corruption.context import (
    _long_product,
    draw_noise,
    keep_probabilities,
    noise_table,
    sample_contexts,
    subsample,
)
from jaxlm.data.base import Statistics
from jaxlm.errors import UserError
from jaxlm.models.word2vec import Word2Vec
from jaxlm.objectives.base import total_loss
from jaxlm.objectives.skip_gram import SkipGram
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.training.program import gradients
from jaxlm.types import TokenBatch
from tests.params import first_fast

V, WINDOW, NEGATIVES, LENGTH, ROWS = Vocabulary.stand_in(140), 3, 2, 20, 6
COUNTS = np.where(V.special | (np.arange(140) == V.unk), 0, 10_000 // np.maximum(np.arange(140) - 105, 1))
OBJECTIVES = {
    bag: SkipGram(
        model=Word2Vec(vocab_size=140, hidden_size=8), bag_of_words=bag, window=WINDOW, negatives=NEGATIVES,
        threshold=1e-2,
    ).bind(V, LENGTH, Statistics(COUNTS, 0.0))
    for bag in (False, True)
}


def batch() -> TokenBatch:
    rng = np.random.default_rng(0)
    tokens = rng.choice(140, (ROWS, LENGTH), p=COUNTS / COUNTS.sum()).astype(np.int32)
    real = np.arange(LENGTH) < np.array([20, 13, 1, 0, 20, 9])[:, None]
    tokens[0, 3] = V.unk
    return TokenBatch(np.where(real, tokens, 0), real.astype(np.int32))


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + np.exp(-x))


def one_pass(example, vectors, output, bag: bool):
    """Run the C code's inner loops over an example, each update from the initial vectors.

    Returns:
        The gradients of both tables, the number of predictions, and the sum of their losses.
    """
    to_vectors, to_output, losses = np.zeros_like(vectors), np.zeros_like(output), []
    for row in range(ROWS):
        for place in range(LENGTH):
            word = example["words"][row, place]
            used = [c for c in range(2 * WINDOW) if example["weights"][row, place, c]]
            for group in ([used] if bag and used else [[c] for c in used]):
                members = [example["context"][row, place, c] for c in group]
                hidden = np.mean([vectors[member] for member in members], axis=0)
                error, loss = np.zeros(8), 0.0
                noise = example["noise"][row, place, 0 if bag else group[0]]
                for target, label in [(word, 1), *((n, 0) for n in noise if n != word)]:
                    score = hidden @ output[target]
                    gradient = label - sigmoid(score)
                    loss -= np.log(sigmoid(score if label else -score))
                    error += gradient * output[target]
                    to_output[target] += gradient * hidden
                for member in members:
                    to_vectors[member] += error
                losses.append(loss)
    return to_vectors, to_output, len(losses), sum(losses)


@pytest.mark.parametrize("bag", first_fast([False, True]))
def test_a_pass_is_that_of_the_c_code(bag):
    objective = OBJECTIVES[bag]
    example = jax.device_get(jax.jit(objective.corrupt)(jax.random.key(0), batch()))
    rng = np.random.default_rng(1)
    vectors, output = (rng.normal(size=(140, 8)).astype(np.float32) for _ in range(2))
    params = {"word": {"embedding": vectors}, "output": {"embedding": output}}

    def loss(params):
        terms = objective.loss(params, example, jax.random.key(0), True)
        return total_loss(terms), terms["noise_loss"]

    (_, term), found = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    to_vectors, to_output, count, total = one_pass(example, vectors.astype(float), output.astype(float), bag)
    assert term.weight == count > 30 and float(term.total) == pytest.approx(total, rel=1e-5)
    np.testing.assert_allclose(-count * found["word"]["embedding"], to_vectors, atol=1e-4)
    np.testing.assert_allclose(-count * found["output"]["embedding"], to_output, atol=1e-4)
    assert {V.unk, *np.flatnonzero(V.special)}.isdisjoint(np.unique(example["noise"]))
    kept = example["attention_mask"] > 0
    assert not V.special[example["words"][kept]].any() and kept[3].sum() == 0


@pytest.mark.parametrize("bag", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_microbatches_give_the_gradients_of_the_whole(bag):
    objective = OBJECTIVES[bag]
    example = jax.jit(objective.corrupt)(jax.random.key(0), batch())
    rng = np.random.default_rng(1)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32),
        jax.eval_shape(objective.init, jax.random.key(0)),
    )
    step = jax.jit(functools.partial(gradients, objective), static_argnames="num_microbatches")
    whole, parts = (
        step(params, example, (), jax.random.key(0), num_microbatches=count) for count in (1, 3)
    )
    for expected, found in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.slow
def test_fresh_vectors_know_nothing():
    objective = OBJECTIVES[False]
    params = jax.jit(objective.init)(jax.random.key(0))
    assert np.abs(params["word"]["embedding"]).max() <= 0.5 / 8 and not np.asarray(params["output"]["embedding"]).any()
    example = jax.jit(objective.corrupt)(jax.random.key(0), batch())
    term = objective.loss(params, example, jax.random.key(0), False)["noise_loss"]
    noise = np.asarray(example["noise"] != example["words"][:, :, None, None]).sum(axis=-1)
    expected = np.sum(np.asarray(example["weights"]) * (1 + noise)) * np.log(2)
    assert float(term.total) == pytest.approx(expected, rel=1e-5)


def test_frequent_words_are_left_out_by_the_law_of_the_code():
    counts = np.array([0, 500, 50, 5])
    for word in (1, 2, 3):
        share = 0.02 * counts.sum() / counts[word]
        expected = min(1.0, (np.sqrt(1 / share) + 1) * share)
        assert keep_probabilities(counts, 0.02)[word] == pytest.approx(expected, rel=1e-6)
    draws = 4000
    keep = jnp.broadcast_to(jnp.array([1.0, 0.3, 0.0, 0.7]), (draws, 4))
    tokens, sizes = jax.jit(subsample)(jax.random.key(0), jnp.broadcast_to(jnp.arange(4), (draws, 4)), keep)
    kept = [tuple(row[:size]) for row, size in zip(np.asarray(tokens), np.asarray(sizes), strict=True)]
    for outcome, share in (((0,), 0.21), ((0, 1), 0.09), ((0, 3), 0.49), ((0, 1, 3), 0.21)):
        assert kept.count(outcome) / draws == pytest.approx(share, abs=5 * np.sqrt(share / draws))


def test_contexts_reach_one_to_window_words_evenly():
    draws = 4000
    tokens = jnp.broadcast_to(jnp.arange(10, 20), (draws, 10))
    found, inside = jax.jit(functools.partial(sample_contexts, window=WINDOW))(
        jax.random.key(0), tokens, jnp.full(draws, 8)
    )
    found, inside = np.asarray(found), np.asarray(inside)
    offsets = np.array([-3, -2, -1, 1, 2, 3])
    for place in range(10):
        reach = np.where(inside[:, place], np.abs(offsets), 0).max(axis=1)
        if 3 <= place < 5:
            shares = np.bincount(reach, minlength=4)[1:] / draws
            np.testing.assert_allclose(shares, 1 / 3, atol=5 * np.sqrt(2 / 9 / draws))
            np.testing.assert_array_equal(inside[:, place], np.abs(offsets) <= reach[:, None])
        there = (place + offsets >= 0) & (place + offsets < 8) & (place < 8)
        assert not inside[:, place, ~there].any() and inside[:, place, there & (np.abs(offsets) == 1)].all()
        np.testing.assert_array_equal(found[0, place, there], 10 + place + offsets[there])


@pytest.mark.parametrize("power", [0.0, 0.75, 1.0])
@pytest.mark.parametrize("size", [1, 2, 3, 50, 4096])
def test_the_noise_table_holds_the_counts_to_the_power(size, power):
    rng = np.random.default_rng(size)
    equal = [np.full(size, count) for count in (1, 2, 8, 15)]
    for counts in (*equal, rng.zipf(1.3, size).clip(0, 10**9), rng.integers(0, 2, size)):
        counts[0] += counts.sum() == 0
        table = noise_table(counts, power)
        shares = table.probability / 2.0**32
        np.add.at(shares, table.alias, 1 - shares)
        expected = np.where(counts > 0, np.maximum(counts, 1) ** power, 0)
        np.testing.assert_allclose(shares / size, expected / expected.sum(), atol=2.0**-31)
        assert not shares[counts == 0].any()


@pytest.mark.parametrize("size", [1, 2, 4096, 65_535, 65_536, 3_000_001, 2**31 - 1])
def test_products_of_64_bits(size):
    bits = np.random.default_rng(size).integers(0, 2**32, 1000, np.uint32)
    high, low = _long_product(jnp.asarray(bits), size)
    product = bits.astype(np.uint64) * size
    np.testing.assert_array_equal(high, product >> np.uint64(32))
    np.testing.assert_array_equal(low, product.astype(np.uint32))


def test_noise_is_drawn_by_counts_to_the_power():
    counts = np.array([0, 1000, 0, 100, 10, 1])
    draws = np.asarray(draw_noise(jax.random.key(0), noise_table(counts, 0.75), (200, 200)))
    expected = np.where(counts > 0, counts, 0) ** 0.75
    expected = expected / expected.sum()
    shares = np.bincount(draws.ravel(), minlength=6) / draws.size
    assert shares[0] == shares[2] == 0
    np.testing.assert_allclose(shares, expected, atol=5 * np.sqrt(0.25 / draws.size))


@pytest.mark.slow
def test_a_run_learns_neighbours_and_is_exported(tmp_path, capsys):
    """Words of two classes occur beside their own class only; the exported vectors reflect it."""
    rng = np.random.default_rng(0)
    kinds = [[f"{kind}{i}" for i in range(230)] for kind in "ab"]
    lines = [" ".join(rng.choice(kinds[number % 2], 40)) for number in range(160)]
    (tmp_path / "text.txt").write_text("\n\n".join(lines))
    run = str(tmp_path / "run")
    preset = "configs/word2vec_tiny.py"
    assert main([
        "pretrain", preset, "--run-dir", run, "--data.source", str(tmp_path / "text.txt"), "--data.vocab-size", "560",
        "--train.steps", "60", "--optimizer.learning-rate", "0.05", "--train.tracker", "none",
        "--data.cache-dir", str(tmp_path / "cache"), "--objective.model.hidden-size", "8", "--train.eval-every", "0",
        "--train.checkpoint-every", "0", "--objective.threshold", "0",
    ]) == 0
    assert main(["export", run, str(tmp_path / "out")]) == 0
    header, *rows = (tmp_path / "out" / "vectors.txt").read_text().splitlines()
    assert header == "453 8" == f"{len(rows)} 8"
    words = [row.split(" ")[0] for row in rows]
    vectors = np.array([row.split(" ")[1:] for row in rows], np.float32)
    vectors -= vectors.mean(axis=0)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    is_a = np.array([word.startswith("a") for word in words])
    cosines = vectors @ vectors.T
    assert cosines[is_a][:, is_a].mean() - cosines[is_a][:, ~is_a].mean() > 0.5
    gensim = pytest.importorskip("gensim")
    loaded = gensim.models.KeyedVectors.load_word2vec_format(str(tmp_path / "out" / "vectors.txt"))
    assert loaded.index_to_key == words


@pytest.mark.parametrize(
    ("name", "value"),
    [("window", 0), ("window", 2**31), ("negatives", -1), ("threshold", -1.0), ("noise_power", float("inf"))],
)
def test_values_out_of_range_are_refused(name, value):
    with pytest.raises(UserError, match=f"{name} is {value}"):
        dataclasses.replace(OBJECTIVES[False], **{name: value})


def test_the_published_size():
    objective = load_preset("configs/word2vec.py").objective
    shapes = jax.eval_shape(objective.init, jax.random.key(0))
    assert [leaf.size for leaf in jax.tree.leaves(shapes)] == [900_000_000] * 2
