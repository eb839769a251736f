"""ELMo: words from characters, both directions over a stream, LSTM states, the sampled softmax, published sizes."""

from __future__ import annotations

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxlm.config.experiment import OptimizerConfig, TrainConfig
from jaxlm.config.presets import load_preset
from jaxlm.corruption.sampled import draw_words, expected_counts, log_uniform
from jaxlm.data.base import Statistics
from jaxlm.errors import UserError
from jaxlm.models.elmo import BEGIN_WORD, END_TEXT, END_WORD, PAD_WORD, Elmo, scalar_mix, spell
from jaxlm.objectives.bidirectional_lm import BidirectionalLM
from jaxlm.parallel.mesh import MeshConfig, check_batch, make_mesh
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.training.program import Program, gradients
from jaxlm.types import TokenBatch
from tests.params import first_fast

V, LENGTH, ROWS = Vocabulary.stand_in(150), 6, 8
COUNTS = np.random.default_rng(0).permutation(150)
OBJECTIVE = BidirectionalLM(
    model=Elmo(hidden_size=8, cell_size=12, filter_widths=3, num_highways=1, dropout=0.0), noise_words=20
).bind(V, LENGTH, Statistics(COUNTS, 0.0))
OBJECTIVE = OBJECTIVE.with_constants(jax.tree.map(jnp.asarray, OBJECTIVE.load_constants(OBJECTIVE.vocabulary, None)))


@functools.cache
def params():
    shapes, rng = jax.eval_shape(OBJECTIVE.init, jax.random.key(0)), np.random.default_rng(1)
    return jax.tree.map(lambda leaf: jnp.asarray(0.3 * rng.normal(size=leaf.shape), jnp.float32), shapes)


def stream(length: int, steps: int) -> np.ndarray:
    """Return the tokens of `steps` windows, [steps, rows, length + 1]; odd rows read backward."""
    text = np.random.default_rng(2).integers(107, 150, (ROWS // 2, steps * length + 1)).astype(np.int32)
    windows = np.stack([text[:, k * length : (k + 1) * length + 1] for k in range(steps)])
    return np.stack([windows, windows[::-1]], axis=2).reshape(steps, ROWS, length + 1)


@functools.cache
def step():
    @jax.jit
    def run(params, tokens, memory):
        example = OBJECTIVE.corrupt(jax.random.key(0), TokenBatch(tokens, jnp.ones_like(tokens)))
        return OBJECTIVE.stream_loss(params, example, memory, jax.random.key(0), False)

    return run


def test_windows_of_a_stream_give_the_states_and_losses_of_one_long_window():
    long, whole = step()(params(), stream(3 * LENGTH, 1)[0], OBJECTIVE.initial_memory(ROWS))
    memory, totals = OBJECTIVE.initial_memory(ROWS), {}
    for tokens in stream(LENGTH, 3):
        terms, memory = step()(params(), tokens, memory)
        totals = {name: totals.get(name, 0.0) + term.total for name, term in terms.items()}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), memory, whole)
    for name, term in long.items():
        assert float(totals[name]) == pytest.approx(float(term.total), rel=1e-5)
    assert abs(long["forward_loss"].total - long["backward_loss"].total) > 1e-2
    assert long["lm_loss"].weight == ROWS * 3 * LENGTH


@pytest.mark.slow
def test_bits_per_byte_are_those_of_both_directions():
    """Id i stands for i bytes here, and the held-out text has twice as many as its tokens."""
    vocabulary = dataclasses.replace(V, num_bytes=np.arange(150))
    counts = np.where(np.arange(150) > 1, 7, 0)
    statistics = Statistics(COUNTS, 0.0, 0.0, counts, 2 * int(counts @ np.arange(150)))
    objective = dataclasses.replace(OBJECTIVE, vocabulary=vocabulary, statistics=statistics)
    tokens, memory = stream(LENGTH, 1)[0], OBJECTIVE.initial_memory(ROWS)
    example = objective.corrupt(jax.random.key(0), TokenBatch(tokens, jnp.ones_like(tokens)))
    terms, _ = objective.stream_loss(params(), example, memory, jax.random.key(0), False)
    targets = [row[1:] if number % 2 == 0 else row[:-1] for number, row in enumerate(tokens)]  # odd rows read backward
    assert float(terms["bits_per_byte"].weight) == 2 * np.sum(targets)
    assert float(terms["bits_per_byte"].total) == pytest.approx(float(terms["lm_loss"].total) / np.log(2), rel=1e-6)
    assert "bits_per_byte" not in objective.stream_loss(params(), example, memory, jax.random.key(0), True)[0]


def test_each_direction_knows_only_what_it_has_read():
    tokens = stream(LENGTH, 1)[0]
    memory = OBJECTIVE.initial_memory(ROWS)
    example = jax.device_get(OBJECTIVE.corrupt(jax.random.key(0), TokenBatch(tokens, np.ones_like(tokens))))
    np.testing.assert_array_equal(example["forward_labels"], tokens[::2, 1:])
    np.testing.assert_array_equal(example["backward_ids"], tokens[1::2, :0:-1])
    np.testing.assert_array_equal(example["backward_labels"], tokens[1::2, -2::-1])
    # A changed word changes the states of all words read after it, and of none before.
    before = run_words(params(), "backward", example["backward_ids"], memory)
    changed = example["backward_ids"].copy()
    changed[:, 3] = 107 + (changed[:, 3] - 106) % 40
    difference = np.abs(run_words(params(), "backward", changed, memory) - before).max(axis=(0, 2))
    assert (difference[:3] == 0).all() and (difference[3:] > 1e-5).all()


def test_sentences_between_symbols():
    """Words read and predicted are those of bilm-tf: each sentence between <s> and </s>, swapped in backward rows."""
    rng = np.random.default_rng(5)
    sentences = [rng.integers(107, 150, size).tolist() for size in (4, 1, 7)]
    text = [V.eos, *(token for sentence in sentences for token in (*sentence, V.eos))]
    batch = TokenBatch(np.array([text, text], np.int32), np.ones((2, len(text)), np.int32))
    example = jax.device_get(OBJECTIVE.corrupt(jax.random.key(0), batch))
    for name, first, last, order in (("forward", V.bos, V.eos, 1), ("backward", V.eos, V.bos, -1)):
        wrapped = [[first, *sentence[::order], last] for sentence in sentences[::order]]
        assert example[f"{name}_ids"][0].tolist() == [token for sentence in wrapped for token in sentence[:-1]]
        assert example[f"{name}_labels"][0].tolist() == [token for sentence in wrapped for token in sentence[1:]]


@functools.partial(jax.jit, static_argnums=1)
def states(params, direction, ids, memory):
    words = OBJECTIVE.model.word_vectors(params, OBJECTIVE.constants["characters"][ids])
    return OBJECTIVE.model.run(params[direction], words, memory[direction])[0][-1]


def run_words(params, direction, ids, memory):
    return np.asarray(states(params, direction, ids, memory))


word_vectors = jax.jit(OBJECTIVE.model.word_vectors)


def test_words_come_from_their_characters():
    """Same word vectors as the convolutions and highways in PyTorch."""
    ids = np.arange(100, 112)
    found = word_vectors(params(), OBJECTIVE.constants["characters"][ids])
    own = jax.tree.map(torch.tensor, jax.device_get(params()))
    characters = torch.tensor(np.asarray(OBJECTIVE.constants["characters"][ids])).long()
    x = own["characters"]["embedding"][characters].transpose(1, 2)
    features = torch.cat([
        torch.relu(torch.nn.functional.conv1d(x, f["kernel"].permute(2, 1, 0), f["bias"]).amax(dim=2))
        for f in own["filters"].values()
    ], dim=1)
    highway = own["highways"]["0"]
    carry = torch.sigmoid(features @ highway["carry"]["kernel"] + highway["carry"]["bias"])
    new = torch.relu(features @ highway["transform"]["kernel"] + highway["transform"]["bias"])
    features = carry * new + (1 - carry) * features
    expected = features @ own["token_projection"]["kernel"] + own["token_projection"]["bias"]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_spelling():
    vocabulary = Vocabulary(size=4, special=np.zeros(4, bool), word_start=np.ones(4, bool),
                            sentence_end=np.zeros(4, bool), eos=0, pieces=("</s>", "é", "a" * 60, "b"))
    table = spell(vocabulary)
    assert table.shape == (4, 50)
    assert table[0, :4].tolist() == [BEGIN_WORD, END_TEXT, END_WORD, PAD_WORD]
    assert table[1, :5].tolist() == [BEGIN_WORD, 0xC3, 0xA9, END_WORD, PAD_WORD]
    assert table[2].tolist() == [BEGIN_WORD, *[97] * 48, END_WORD]


def test_the_sampled_softmax_is_its_formula():
    tokens = stream(LENGTH, 1)[0]
    example = OBJECTIVE.corrupt(jax.random.key(0), TokenBatch(tokens, np.ones_like(tokens)))
    memory = OBJECTIVE.initial_memory(ROWS)
    terms, _ = jax.jit(OBJECTIVE.stream_loss, static_argnums=4)(params(), example, memory, jax.random.key(0), True)
    example = jax.device_get(example)
    shares = np.empty(150)
    order = [V.bos, V.eos, *(i for i in np.argsort(-COUNTS) if i not in (V.bos, V.eos))]
    shares[order] = log_uniform(150)  # the two symbols, as in bilm-tf's vocabulary, then the most frequent word
    expected = expected_counts(shares, 20)
    table, bias = (np.asarray(params()["softmax"][part], float) for part in ("embedding", "bias"))
    for name in ("forward", "backward"):
        features = run_words(params(), name, example[f"{name}_ids"], memory)
        noise = example[f"{name}_noise"]
        assert (noise == noise[0]).all() and len(set(noise[0].tolist())) == 20
        total = 0.0
        for row, place in np.ndindex(ROWS // 2, LENGTH):
            label = example[f"{name}_labels"][row, place]
            logits = [table[i] @ features[row, place] + bias[i] - np.log(expected[i])
                      for i in [label, *(i for i in noise[0] if i != label)]]
            total += np.log(np.sum(np.exp(logits))) - logits[0]
        assert float(terms[f"{name}_loss"].total) == pytest.approx(total, rel=1e-4)


def test_noise_words_are_drawn_log_uniformly_without_replacement():
    """Same distribution as successive draws without repeats, as in TensorFlow's sampler."""
    shares, rng, count = log_uniform(40), np.random.default_rng(0), 12
    assert shares.sum() == pytest.approx(1.0) and (np.diff(shares) < 0).all()
    draws = 3000
    ours = jax.jit(jax.vmap(lambda key: draw_words(key, jnp.asarray(shares), count)))(
        jax.random.split(jax.random.key(0), draws)
    )
    ours = np.bincount(np.asarray(ours).ravel(), minlength=40) / draws
    theirs = np.zeros(40)
    for _ in range(draws):
        theirs[rng.choice(40, count, replace=False, p=shares)] += 1 / draws
    np.testing.assert_allclose(ours, theirs, atol=5 * np.sqrt(0.5 / draws))
    np.testing.assert_allclose(expected_counts(shares, count), theirs, atol=0.03)
    assert expected_counts(shares, count).sum() == pytest.approx(count)


@pytest.mark.slow
def test_microbatches_give_the_gradients_and_states_of_the_whole():
    tokens = stream(LENGTH, 1)[0]
    batch = TokenBatch(tokens, np.where(np.arange(ROWS)[:, None] == 5, 0, np.ones_like(tokens)))
    example = OBJECTIVE.corrupt(jax.random.key(0), batch)
    memory = jax.tree.map(lambda x: x + 0.1, OBJECTIVE.initial_memory(ROWS))
    run = jax.jit(functools.partial(gradients, OBJECTIVE), static_argnames="num_microbatches")
    whole, parts = (
        run(params(), example, memory, jax.random.key(0), num_microbatches=count) for count in (1, 2)
    )
    for expected, found in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


def slow_lstm(params, words):
    """Return the hidden states of an LSTM with projection over `words` from a zero state, by the formulas."""
    kernel, bias, projection = (np.asarray(x, float) for x in
                                (params["kernel"], params["bias"], params["projection"]["kernel"]))
    cell, hidden, result = np.zeros(len(projection)), np.zeros(projection.shape[1]), []
    for word in words:
        into, candidate, forget, out = np.split(np.concatenate([word, hidden]) @ kernel + bias, 4)
        cell = np.clip(cell / (1 + np.exp(-forget - 1)) + np.tanh(candidate) / (1 + np.exp(-into)), -3, 3)
        hidden = np.clip(np.tanh(cell) / (1 + np.exp(-out)) @ projection, -3, 3)
        result.append(hidden)
    return np.array(result)


def test_layers_of_a_text_are_those_of_bilm_tf():
    """<s> and </s> around the text, both LSTMs over all of it from zero states, then the symbols' vectors dropped.

    Where </s> separates two texts, the forward LSTMs read <s>, as in training.
    """
    texts = np.array([[120, 130, 140, 125, 149], [110, V.eos, 111, 0, 0]])
    lengths = [5, 3]
    spelt = spell(V)
    found = jax.jit(OBJECTIVE.model.layers)(params(), spelt[texts], jnp.array(lengths))
    for row, length in enumerate(lengths):
        ids = [V.bos, *texts[row, :length], V.eos]
        words = np.asarray(word_vectors(params(), spelt[np.array(ids)]), float)
        inputs = {"forward": [V.bos if i == V.eos else i for i in ids], "backward": ids[::-1]}
        both = []
        for name, order in (("forward", 1), ("backward", -1)):
            x = np.asarray(word_vectors(params(), spelt[np.array(inputs[name])]), float)
            first = slow_lstm(params()[name]["0"], x)
            second = first + slow_lstm(params()[name]["1"], first)
            both.append([layer[::order][1:-1] for layer in (first, second)])
        expected = [(words[1:-1], words[1:-1]), *zip(*both, strict=True)]
        expected = np.stack([np.concatenate(pair, axis=-1) for pair in expected])
        np.testing.assert_allclose(found[:, row, :length], expected, atol=1e-5)


@pytest.mark.slow
def test_layers_to_mix():
    """Word vectors twice, then both directions; a padded row has the same states as alone."""
    model, rng = OBJECTIVE.model, np.random.default_rng(4)
    characters = (OBJECTIVE.constants["characters"][rng.integers(107, 150, (2, 6))])
    layers = model.layers(params(), characters, jnp.array([6, 4]))
    assert layers.shape == (3, 2, 6, 16)
    np.testing.assert_array_equal(layers[0, ..., :8], layers[0, ..., 8:])
    alone = model.layers(params(), characters[1:, :4], jnp.array([4]))
    np.testing.assert_allclose(layers[:, 1, :4], alone[:, 0], atol=1e-6)
    mixed = scalar_mix(jnp.array([0.0, 1.0, -1.0]), jnp.float32(2.0), layers)
    weights = np.exp([0.0, 1.0, -1.0]) / np.exp([0.0, 1.0, -1.0]).sum()
    np.testing.assert_allclose(mixed, 2 * np.tensordot(weights, np.asarray(layers), 1), atol=1e-5)


def test_more_noise_than_words_is_refused():
    with pytest.raises(UserError, match="noise_words is 200"):
        BidirectionalLM(model=OBJECTIVE.model, noise_words=200).bind(V, LENGTH)


@pytest.mark.parametrize(("rows", "accumulate"), [(7, 1), (6, 2)])
def test_rows_that_cannot_be_halved_are_refused(rows, accumulate):
    train, optimizer = TrainConfig(batch_size=rows, accumulate=accumulate), OptimizerConfig()
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    with pytest.raises(UserError, match=f"batch_size {rows}.* is not divisible .*groups of 2 rows .*; change") as error:
        Program(OBJECTIVE, train, optimizer, mesh)
    assert "\n" not in str(error.value)
    Program(OBJECTIVE, dataclasses.replace(train, batch_size=8), optimizer, mesh)
    with pytest.raises(UserError, match="data x fsdp = 4 devices, of which each takes groups of 2 rows"):
        check_batch(4, 1, types.SimpleNamespace(shape=dict(data=2, fsdp=2, tensor=1)), OBJECTIVE.row_group)


@pytest.mark.parametrize(
    ("name", "parameters"), first_fast([("elmo_small", 13_593_296), ("elmo_medium", 28_027_728), ("elmo", 93_600_848)])
)
def test_published_sizes_and_recipe(name, parameters):
    """Parameters without the softmax as published; Adagrad at 0.2, 3 × 128 rows of 20 words per direction (bilm-tf)."""
    experiment = load_preset(f"configs/{name}.py")
    shapes = jax.eval_shape(experiment.objective.init, jax.random.key(0))
    count = {key: sum(leaf.size for leaf in jax.tree.leaves(value)) for key, value in shapes.items()}
    assert sum(count.values()) - count["softmax"] == parameters
    assert count["softmax"] == 793_471 * (experiment.objective.model.hidden_size + 1)
    o, t = experiment.optimizer, experiment.train
    assert (o.name, o.learning_rate, o.eps, o.clip_norm) == ("adagrad", 0.2, 1 / 20**2, 10 / 20)
    assert (t.batch_size, experiment.data.length, experiment.objective.noise_words) == (2 * 3 * 128, 20, 8192)
