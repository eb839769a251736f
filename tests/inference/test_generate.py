"""Generation: the loop against a slow one, sampling against Transformers' filters, stops, and what is refused.

Greedy ids against Transformers' own `generate` stand in tests/huggingface.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.errors import UserError
from jaxlm.inference.generate import _advance, filter_logits, generate
from jaxlm.models.base import Inputs
from jaxlm.models.gpt2 import Gpt2
from jaxlm.objectives.causal_lm import CausalLM
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.tokenizers.vocabulary import Vocabulary

VOCABULARY = Vocabulary.stand_in(130)
MODEL = Gpt2(hidden_size=16, num_layers=2, num_heads=2, intermediate_size=32, max_positions=40)


@pytest.fixture(scope="module")
def bound() -> CausalLM:
    return CausalLM(model=MODEL).bind(VOCABULARY, 32)


def random_params(objective, seed):
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(objective.init, jax.random.key(0))
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.4, leaf.shape), jnp.float32), shapes)
    # A norm of ones and zeros, or one token wins everywhere.
    norm = params["decoder"]["final_norm"]
    params["decoder"]["final_norm"] = {"scale": jnp.ones_like(norm["scale"]), "bias": jnp.zeros_like(norm["bias"])}
    return params


@pytest.fixture(scope="module")
def params(bound):
    return random_params(bound, 0)


PROMPTS = [[7, 8, 9], [120], [50, 51, 52, 53, 54, 55]]


@pytest.mark.slow
def test_a_reloaded_model_reuses_compiled_programs(bound, params):
    assert generate(bound, params, PROMPTS, max_new_tokens=3) == generate(bound, params, PROMPTS, max_new_tokens=3)
    compiled = _advance._cache_size()
    again = CausalLM(model=MODEL).bind(Vocabulary.stand_in(130), 32)
    assert again == bound and hash(again) == hash(bound) and again.vocabulary is not bound.vocabulary
    generate(again, params, PROMPTS, max_new_tokens=3)
    assert _advance._cache_size() == compiled
    words = np.arange(130) % 2 == 0
    assert CausalLM(model=MODEL).bind(dataclasses.replace(VOCABULARY, word_start=words), 32) != bound


def slow_greedy(objective, params, prompt, count):
    """Return greedy continuations by running the model over the whole text for each token."""
    ids = list(prompt)

    @jax.jit
    def likeliest(row, last):
        hidden = objective.model.hidden_states(params, Inputs(row))
        return jnp.argmax(objective.model.predict_tokens(params, hidden)[0, last])

    for _ in range(count):
        row = jnp.asarray([ids + [0] * (40 - len(ids))])
        ids.append(int(likeliest(row, len(ids) - 1)))
    return ids[len(prompt) :]


def test_greedy_decoding_equals_the_uncached_forward_pass(bound, params):
    wanted = [slow_greedy(bound, params, prompt, 12) for prompt in PROMPTS]
    got = generate(bound, params, PROMPTS, max_new_tokens=12, stop_ids=[])
    assert got == wanted
    assert len({tuple(row) for row in got}) == 3
    # A prompt has the same continuation alone as among others.
    assert generate(bound, params, PROMPTS[:1], max_new_tokens=12, stop_ids=[]) == wanted[:1]


@pytest.mark.slow
def test_a_text_may_fill_every_position(bound, params):
    prompt = list(range(100, 125))
    got = generate(bound, params, [prompt], max_new_tokens=16, stop_ids=[])
    assert got == [slow_greedy(bound, params, prompt, 16)]


def test_stops_at_each_stop_symbol_and_includes_it(bound, params):
    whole = generate(bound, params, PROMPTS, max_new_tokens=12, stop_ids=[])
    stops = [whole[0][2], whole[2][5]]
    got = generate(bound, params, PROMPTS, max_new_tokens=12, stop_ids=stops)
    for row, full in zip(got, whole, strict=True):
        ends = [i for i, token in enumerate(full) if token in stops]
        assert row == full[: ends[0] + 1] if ends else row == full
    assert len(got[0]) <= 3
    # By default the vocabulary's end symbol stops.
    ended = dataclasses.replace(bound, vocabulary=dataclasses.replace(VOCABULARY, eos=whole[0][0]))
    assert generate(ended, params, PROMPTS[:1], max_new_tokens=12) == [whole[0][:1]]


def test_sampling_depends_on_the_seed_only(bound, params):
    def sample(seed):
        return generate(bound, params, PROMPTS, max_new_tokens=12, temperature=1.0, seed=seed, stop_ids=[])

    assert sample(0) == sample(0)
    assert sample(0) != sample(1)


def test_each_token_is_drawn_anew(bound, params):
    """Zeros make all 130 tokens equally likely, so that two tokens of a row are equal in 1 of 130 rows."""
    zeros = jax.tree.map(jnp.zeros_like, params)
    rows = np.array(generate(bound, zeros, [[7, 8, 9]] * 500, max_new_tokens=2, temperature=1.0, stop_ids=[]))
    assert np.mean(rows[:, 0] == rows[:, 1]) < 0.03 and len(set(map(tuple, rows))) > 450


@pytest.mark.slow
def test_top_k_1_a_small_nucleus_and_a_low_temperature_are_greedy(bound, params):
    greedy = generate(bound, params, PROMPTS, max_new_tokens=8, stop_ids=[])
    for options in ({"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-39}):
        options = {"temperature": 1.3} | options
        assert generate(bound, params, PROMPTS, max_new_tokens=8, stop_ids=[], **options) == greedy


def test_samples_follow_the_probabilities(bound, params):
    """The first token over many seeds: chi-square against softmax(logits / temperature), few tokens apart."""
    ids, mask = jnp.asarray([[7, 8, 9]] * 2000), jnp.ones((2000, 3), bool)
    prefill = jax.jit(bound.model.prefill, static_argnums=3)
    logits = prefill(params, ids[:1], mask[:1], 1)[0][0]
    chances = np.asarray(jax.nn.softmax(logits / 2.0))
    rows = generate(bound, params, [[7, 8, 9]] * 2000, max_new_tokens=1, temperature=2.0, stop_ids=[])
    drawn = [row[0] for row in rows]
    common = np.argsort(chances)[::-1][:20]
    counts = np.array([drawn.count(token) for token in common] + [sum(token not in common for token in drawn)])
    expected = 2000 * np.append(chances[common], 1 - chances[common].sum())
    assert expected.min() > 5
    assert np.sum((counts - expected) ** 2 / expected) < 45.3  # 20 degrees of freedom, p = 0.001


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (130, 0.7), (20, 0.5), (3, 0.05), (130, 0.999)])
def test_filters_equal_those_of_transformers(top_k, top_p):
    torch = pytest.importorskip("torch")
    warpers = pytest.importorskip("transformers.generation.logits_process")
    logits = np.random.default_rng(top_k).normal(0, 2, (6, 130)).astype(np.float32)
    logits[3:5] = logits[3:5].round(1)  # equal ones
    logits[5] = 0.0
    scores = warpers.TopKLogitsWarper(top_k)(None, torch.tensor(logits))
    if top_p < 1:
        scores = warpers.TopPLogitsWarper(top_p)(None, scores)
    ours = np.asarray(filter_logits(jnp.asarray(logits), jnp.int32(top_k), jnp.float32(top_p)))
    theirs = scores.numpy()
    np.testing.assert_array_equal(np.isfinite(ours[:3]), np.isfinite(theirs[:3]))
    np.testing.assert_array_equal(np.sort(ours), np.sort(theirs))  # which of equal ones remain is open
    np.testing.assert_array_equal(ours[np.isfinite(ours)], logits[np.isfinite(ours)])
    assert np.isfinite(ours).sum(axis=-1).min() >= 1


@pytest.mark.slow
def test_rows_beyond_the_vocabulary_are_never_written(bound):
    """The embedding may have more rows than the vocabulary; here they would always win."""
    model = dataclasses.replace(bound.model, vocab_size=160)
    wide = dataclasses.replace(bound, model=model)
    params = random_params(wide, 1)
    params["embeddings"]["word"]["embedding"] = params["embeddings"]["word"]["embedding"].at[130:].multiply(30.0)
    for temperature in (0.0, 1.0):
        rows = generate(wide, params, PROMPTS, max_new_tokens=10, temperature=temperature, stop_ids=[])
        assert max(max(row) for row in rows) < 130


@pytest.mark.slow
def test_top_k_beyond_the_vocabulary_means_all_tokens(bound, params):
    everything = generate(bound, params, PROMPTS, max_new_tokens=5, temperature=1.0, top_p=0.9)
    assert generate(bound, params, PROMPTS, max_new_tokens=5, temperature=1.0, top_p=0.9, top_k=10**12) == everything


def test_no_prompts(bound, params):
    assert generate(bound, params, []) == []


@pytest.mark.parametrize(("prompts", "options", "words"), [
    ([[7, 8]], {"max_new_tokens": 0}, "max_new_tokens is 0"),
    ([[7, 8]], {"temperature": -0.5}, "temperature is -0.5"),
    ([[7, 8]], {"temperature": float("nan")}, "temperature is nan"),
    ([[7, 8]], {"top_k": -1}, "top_k is -1"),
    ([[7, 8]], {"top_p": 0.0}, "top_p is 0.0"),
    ([[7, 8]], {"top_p": 1.5}, "top_p is 1.5"),
    ([[7, 8]], {"seed": -1}, "seed is -1"),
    ([[7, 8]], {"max_new_tokens": 10**9}, "max_new_tokens is 1000000000"),
    ([[7] * 100_000], {}, "the prompt has 100000 tokens; .* at most 8192"),
    ([[]], {}, "the prompt is empty"),
    ([[7], []], {}, "prompt 2 is empty"),
    ([[7, 131]], {}, "the id 131 in the prompt is not in .* .0 to 129"),
    ([[7] * 41], {"max_new_tokens": 1}, "41 tokens and 1 new ones exceed the model's 40 positions"),
    ([[7] * 30], {"max_new_tokens": 12}, "30 tokens and 12 new ones exceed the model's 40 positions"),
])
def test_mistakes_are_refused(prompts, options, words, bound, params):
    with pytest.raises(UserError, match=words) as error:
        generate(bound, params, prompts, **options)
    assert "\n" not in str(error.value)


def test_refuses_a_model_that_writes_no_text():
    with pytest.raises(UserError, match="MaskedLM trains no model that writes text"):
        generate(MaskedLM(), {}, [[1]])
