"""Masked diffusion: its bound by enumeration of all masks and orders, its schedules, masks and rows."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.data.base import Statistics
from jaxlm.errors import UserError
from jaxlm.models.base import Inputs
from jaxlm.models.bert import Bert
from jaxlm.objectives.base import Example, total_loss
from jaxlm.objectives.masked_diffusion import EVAL_DRAWS, MASK_BIAS, MaskedDiffusion
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.training.microbatches import gradients
from jaxlm.types import TokenBatch
from tests.params import random_params

MODEL = Bert(
    hidden_size=16, num_layers=2, num_heads=2, intermediate_size=32, max_positions=24, dropout=0.0,
    attention_dropout=0.0,
)
V = Vocabulary.stand_in(12)  # symbols 0 to 6, of which [UNK] is text
TEXT = [7, 9, 9, 1]
N = len(TEXT)
SUBSETS = [np.array(mask) for mask in itertools.product((False, True), repeat=N)]


def bound(**changes) -> MaskedDiffusion:
    return MaskedDiffusion(model=MODEL, **changes).bind(V, 8)


def token_batch(rows: list[list[int]], width: int = 6) -> TokenBatch:
    tokens = np.array([row + [0] * (width - len(row)) for row in rows], np.int32)
    segments = np.array([[1] * len(row) + [0] * (width - len(row)) for row in rows], np.int32)
    return TokenBatch(tokens, segments)


# Jitted once for the file: a frozen objective is static.
corrupt = jax.jit(MaskedDiffusion.corrupt, static_argnums=0)
loss = jax.jit(MaskedDiffusion.loss, static_argnums=0, static_argnames="train")
KEY = jax.random.key(0)


@functools.cache
def params():
    objective = bound()
    return jax.tree.map(jnp.asarray, objective.merge_pretrained(random_params(objective, 0, 0.4), None))


@functools.cache
def token_nlls() -> dict[tuple[bool, ...], np.ndarray]:
    """Return -log p of each token of TEXT for every set of masks, float64; [MASK] has the logit -inf."""
    rows = np.array([[V.cls, *np.where(mask, V.mask, TEXT), V.sep] for mask in SUBSETS], np.int32)
    at = np.broadcast_to(np.arange(1, N + 1), (len(rows), N))
    model = MODEL.for_vocabulary(V)
    logits = np.array(jax.jit(model.token_logits)(params(), Inputs(rows), at), float)
    logits[..., V.mask] = -np.inf
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return {tuple(mask.tolist()): -log_probs[i, range(N), TEXT] for i, mask in enumerate(SUBSETS)}


def masked_sum(mask) -> float:
    """Return the sum of -log p over the masked tokens."""
    return float(token_nlls()[tuple(np.asarray(mask).tolist())][np.asarray(mask)].sum())


def all_orders() -> float:
    """Return the mean over all orders of the autoregressive -log p of TEXT."""
    totals = []
    for order in itertools.permutations(range(N)):
        is_hidden = np.ones(N, bool)
        totals.append(0.0)
        for place in order:
            totals[-1] += token_nlls()[tuple(is_hidden.tolist())][place]
            is_hidden[place] = False
    return float(np.mean(totals))


def all_noise(time: float) -> Example:
    """Return an example with a row for each permutation of the ranks of TEXT's tokens, the same in all its draws."""
    orders = np.array(list(itertools.permutations(range(N))), np.float32)
    noise = np.zeros((len(orders), EVAL_DRAWS, 8), np.float32)
    noise[:, :, 1 : N + 1] = orders[:, None] / N
    times = np.full(len(orders), time, np.float32)
    return corrupt(bound(), KEY, token_batch([TEXT] * len(orders))) | {"noise": noise, "time": times}


def test_evaluation_enumerated_is_the_mean_over_all_orders():
    """Four draws with 1 to 4 masks × all permutations of the tokens as noise are all that the estimator can draw."""
    term = loss(bound(), params(), all_noise(0.125), KEY, train=False)["diffusion_loss"]
    assert (term.weight, term.coefficient) == (N * 24, 1.0)
    assert float(term.total) / 24 == pytest.approx(all_orders(), rel=1e-6)
    # The same in float64, without jaxlm: the identity itself.
    by_count = np.mean([
        N / k * np.mean([masked_sum(mask) for mask in SUBSETS if mask.sum() == k]) for k in range(1, N + 1)
    ])
    assert by_count == pytest.approx(all_orders(), rel=1e-12)


@pytest.mark.slow
def test_the_loss_integrated_over_time_is_the_mean_over_all_orders():
    """∫ 1/t · t^k (1 - t)^(n - k) dt = B(k, n - k + 1) is the weight of each set of k masks."""
    objective, masks = bound(), [mask for mask in SUBSETS if mask.any()]
    example = dict(corrupt(objective, KEY, token_batch([TEXT] * len(masks))))
    weights = np.zeros((len(masks), 8), np.float32)
    for row, mask in enumerate(masks):
        k = int(mask.sum())
        weights[row, 1 : N + 1] = mask * math.factorial(k - 1) * math.factorial(N - k) / math.factorial(N)
    example |= {"masked_weights": weights, "input_ids": np.where(weights > 0, V.mask, example["masked_labels"])}
    term = loss(objective, params(), example, KEY, train=True)["diffusion_loss"]
    assert float(term.total) == pytest.approx(all_orders(), rel=1e-6)


@pytest.mark.parametrize(("schedule", "missing"), [("mdlm", 2e-3), ("llada", 3e-4)])
def test_schedules(schedule, missing):
    """p and w are those of the papers; their ε of 0.001 takes less than this share from the bound."""
    objective = bound(schedule=schedule)
    nodes, weights = np.polynomial.legendre.leggauss(400)
    u = (nodes + 1) / 2
    p, w = (np.asarray(x, float) for x in objective.noise_schedule(jnp.asarray(u, jnp.float32)))
    t = 0.999 * u + 0.001
    np.testing.assert_allclose(p, 0.999 * t if schedule == "mdlm" else t, rtol=1e-5)
    # MDLM: σ'(t) / (exp(σ(t)) - 1) with σ(t) = -log(1 - (1 - ε) t).
    np.testing.assert_allclose(w, 0.999 / (1 - 0.999 * t) / (1 / (1 - 0.999 * t) - 1) if schedule == "mdlm" else 1 / t,
                               rtol=1e-5)
    total = sum(
        np.sum(weights / 2 * w * p ** mask.sum() * (1 - p) ** (N - mask.sum())) * masked_sum(mask) for mask in SUBSETS
    )
    assert 0 < 1 - total / all_orders() < missing


@pytest.mark.slow
@pytest.mark.parametrize("train", [True, False])
def test_the_estimator_is_unbiased(train):
    """Over 10,000 rows the mean lies within four standard errors of independent draws."""
    objective, rows = bound(schedule="llada"), 10_000
    example = corrupt(objective, jax.random.key(5), token_batch([TEXT] * rows))
    term = loss(objective, params(), example, KEY, train=train)["diffusion_loss"]
    assert term.weight == N * rows
    if train:
        u = np.linspace(0, 1, 20_001)[:-1] + 0.5 / 20_000
        p, w = (np.asarray(x, float) for x in objective.noise_schedule(jnp.asarray(u, jnp.float32)))
        cases = [(p ** m.sum() * (1 - p) ** (N - m.sum()) / len(u), w * masked_sum(m)) for m in SUBSETS]
    else:
        cases = [(1 / N / math.comb(N, m.sum()), N / m.sum() * masked_sum(m)) for m in SUBSETS if m.any()]
    mean, square = (sum(np.sum(chance * value**power) for chance, value in cases) for power in (1, 2))
    error = math.sqrt((square - mean**2) / rows)
    assert abs(float(term.total) / rows - mean) < 4 * error < 0.1 * mean


@pytest.mark.parametrize("time", [0.0, 0.37, 0.9])
def test_a_unigram_model_scores_the_unigram_entropy(time):
    """The network is zero, so that its logits are the output bias: log of 1/2, 1/4, 1/4 for four of such tokens."""
    objective = bound()
    zeros = jax.tree.map(np.zeros_like, random_params(objective))
    zeros["mlm_head"]["bias"] += np.log(np.isin(np.arange(12), [7, 1]) / 4 + (np.arange(12) == 9) / 2 + 1e-30)
    terms = loss(objective, zeros, all_noise(time), KEY, train=False)
    assert float(total_loss(terms)) == pytest.approx(1.5 * math.log(2), rel=1e-6)


def test_masks_and_weights():
    """Text is masked with the probability of its row's time, and nothing else is masked or has a weight."""
    objective, rows = bound(), 4_000
    batch = token_batch([[7, V.sep, 8, 1, 9, 10]] * (rows - 1) + [[]])
    example = jax.device_get(corrupt(objective, jax.random.key(1), batch))
    is_text = np.zeros((rows, 8), bool)
    is_text[:-1, [1, 3, 4, 5, 6]] = True
    np.testing.assert_array_equal(example["is_text"], is_text)
    is_masked = example["masked_weights"] > 0
    np.testing.assert_array_equal(example["input_ids"] == V.mask, is_masked)
    np.testing.assert_array_equal(example["input_ids"], np.where(is_masked, V.mask, example["masked_labels"]))
    assert not is_masked[~is_text].any()
    # Times of the rows with text are equally spaced, from a random first one.
    time = example["time"].astype(float)
    np.testing.assert_allclose(np.diff(np.sort(time[:-1])), 1 / (rows - 1), atol=1e-6)
    assert np.min(np.abs([time[0], time[0] - 1])) > 0.01 and time.min() >= 0 and time.max() < 1
    t = 0.999 * time + 0.001
    np.testing.assert_allclose((example["masked_weights"] * t[:, None])[is_masked], 1.0, rtol=1e-4)
    probability = np.broadcast_to(0.999 * t[:, None], (rows, 8))[is_text]
    for low, high in ((0.0, 0.1), (0.1, 0.5), (0.5, 0.9), (0.9, 1.0)):
        inside = (probability >= low) & (probability < high)
        found, expected = is_masked[is_text][inside].mean(), probability[inside].mean()
        assert abs(found - expected) < 4 * math.sqrt(0.25 / inside.sum())
    # Tokens of a row are masked independently: E[k²] at a given t is that of a binomial distribution.
    k, p = is_masked[:-1].sum(1), 0.999 * t[:-1]
    assert abs(np.mean((k - 5 * p) ** 2 - 5 * p * (1 - p))) < 0.15
    assert (example["noise"].min(), example["noise"].max()) == pytest.approx((0, 1), abs=1e-3)


def test_times_are_spread_over_the_rows_that_have_text():
    """The last batch of an evaluation has few."""
    first, second = np.asarray(corrupt(bound(), KEY, token_batch([TEXT, [9], [], [], []]))["time"])[:2]
    assert (second - first) % 1.0 == pytest.approx(0.5)


@pytest.mark.slow
def test_rows_without_text_have_no_weight_and_no_nan():
    objective = bound()
    rows = [TEXT, [9], [7, 8, 9, 10, 11, 8]]
    example = corrupt(objective, KEY, token_batch([*rows, [], [V.sep]]))
    alone, padded, nothing = (
        loss(objective, params(), {name: array[kept] for name, array in example.items()}, KEY, train=False)
        for kept in (slice(3), slice(5), slice(3, 5))
    )
    assert alone["diffusion_loss"].weight == padded["diffusion_loss"].weight == 11
    assert float(total_loss(alone)) == pytest.approx(float(total_loss(padded)), rel=1e-6)
    assert float(total_loss(nothing)) == 0.0


@pytest.mark.slow
def test_accumulated_gradients_are_those_of_the_batch():
    objective = bound()
    example = corrupt(objective, KEY, token_batch([TEXT, [9], [7, 8, 9, 10, 11, 8], [8, 8]] * 2))
    run = jax.jit(gradients, static_argnums=(0, 5))
    whole, parts = (run(objective, params(), example, (), KEY, number) for number in (1, 4))
    assert float(whole[1]["loss"].total) == pytest.approx(float(parts[1]["loss"].total), rel=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), whole[0], parts[0])
    assert whole[0]["mlm_head"]["bias"][V.mask] == 0.0  # so that [MASK] stays out of reach


@pytest.mark.slow
def test_the_mask_is_never_predicted():
    """Neither by fresh parameters nor by those of a model that began as a masked language model."""
    objective = bound()
    fresh = jax.jit(objective.init)(KEY)
    assert fresh["mlm_head"]["bias"][V.mask] == MASK_BIAS
    source = MaskedLM(model=MODEL).bind(V, 8)
    begun = objective.merge_pretrained(fresh, PretrainedModel(source, random_params(source, 1)))
    expected = np.array(random_params(source, 1)["mlm_head"]["bias"])
    expected[V.mask] = MASK_BIAS
    np.testing.assert_array_equal(begun["mlm_head"]["bias"], expected)


@pytest.mark.slow
def test_packed_rows_have_the_losses_of_their_documents():
    """Training: each document with its masks alone. Evaluation: k counts the tokens of the whole row."""
    objective = MaskedDiffusion(model=MODEL).bind(V, 16)
    packed = TokenBatch(np.array([[7, 8, 9, 10, 11, 7, 7, 0, 0, 0]], np.int32),
                        np.array([[1, 1, 1, 1, 2, 2, 2, 0, 0, 0]], np.int32))
    example = jax.device_get(corrupt(objective, jax.random.key(2), packed))
    ids, documents = example["masked_labels"][0], example["documents"][0]
    assert ids.tolist() == [V.cls, 7, 8, 9, 10, V.sep, V.cls, 11, 7, 7, V.sep, V.pad]
    model = objective.model
    predict = jax.jit(lambda ids: model.predict_tokens(params(), model.hidden_states(params(), Inputs(ids))))

    def slow(masked, weights):
        """Return Σ w · -log p over documents that pass through the model alone."""
        total = 0.0
        for number in (1, 2):
            at = documents == number
            logits = np.array(predict(masked[None, at])[0], float)
            logits[:, V.mask] = -np.inf
            log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            total -= np.sum(weights[at] * log_probs[range(at.sum()), ids[at]])
        return total

    assert example["masked_weights"].sum() > 0
    trained = loss(objective, params(), example, KEY, train=True)["diffusion_loss"]
    assert (float(trained.total), float(trained.weight)) == (
        pytest.approx(slow(example["input_ids"][0], example["masked_weights"][0]), rel=1e-5), 7
    )
    totals = []
    for draw in range(EVAL_DRAWS):
        k = 1 + int((float(example["time"][0]) + draw / EVAL_DRAWS) % 1 * 7)
        places = np.flatnonzero(example["is_text"][0])
        chosen = places[np.argsort(example["noise"][0, draw][places])[:k]]
        weights = np.zeros(len(ids))
        weights[chosen] = 7 / k
        totals.append(slow(np.where(weights > 0, V.mask, ids), weights))
    evaluated = loss(objective, params(), example, KEY, train=False)["diffusion_loss"]
    assert float(evaluated.total) == pytest.approx(np.mean(totals), rel=1e-5)
    sizes = np.arange(V.size)
    counts = (sizes != V.unk).astype(np.int64)
    statistics = Statistics(counts, 0.0, held_out_counts=counts, held_out_bytes=counts @ sizes)
    known = MaskedDiffusion(model=MODEL).bind(dataclasses.replace(V, num_bytes=sizes), 16, statistics)
    bits = loss(known, params(), example, KEY, train=False)["bits_per_byte"]
    assert float(bits.total) == pytest.approx(np.mean(totals) / math.log(2), rel=1e-5)
    assert float(bits.weight) == 7 + 8 + 9 + 10 + 11 + 7 + 7


def test_describe():
    objective = bound()
    batch = token_batch([TEXT])
    example = dict(jax.device_get(corrupt(objective, KEY, batch)))
    example |= {"time": np.array([0.5], np.float32), "input_ids": np.array([[4, 7, 6, 9, 6, 5, 0, 0]]),
                "masked_weights": np.array([[0, 0, 2, 0, 2, 0, 0, 0]], np.float32)}
    lines = objective.describe(batch, example, 0)
    assert lines[0].title == "tokens masked with probability 0.500, weight 2.00"
    assert [line.ids for line in lines[1:]] == [[4, *TEXT, 5], [4, 7, 6, 9, 6, 5], [9, 1]]
    assert lines[2].marks == ["special", "", "masked", "", "masked", "special"]


@pytest.mark.parametrize(("vocabulary", "length", "words"), [
    (V, 25, "data.length 25 is more than the model's 24 positions"),
    (dataclasses.replace(V, mask=-1), 8, r"has no \[MASK\], which masked diffusion needs"),
])
def test_bind_refuses(vocabulary, length, words):
    with pytest.raises(UserError, match=words):
        MaskedDiffusion(model=MODEL).bind(vocabulary, length)
