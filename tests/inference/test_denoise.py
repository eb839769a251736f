"""Sampling by steps: a known joint distribution, log-probabilities, texts, and what is refused."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxlm.errors import UserError
from jaxlm.inference.denoise import denoise, denoise_text
from jaxlm.inference.generate import Settings
from jaxlm.models.base import Inputs
from jaxlm.models.bert import Bert
from jaxlm.models.layers.stack import at_positions
from jaxlm.objectives.causal_lm import CausalLM
from jaxlm.objectives.masked_diffusion import MaskedDiffusion
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.tokenizers.vocabulary import Vocabulary
from tests.inference.test_fill_mask import NumberTokenizer
from tests.params import random_params


class Numbers(NumberTokenizer):
    """Tokenizer of numbers, also of texts in which masks follow each other without a space."""

    def encode_with_symbols(self, text: str) -> list[int]:
        return super().encode_with_symbols(text.replace("<mask>", " <mask> "))

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str:
        return " ".join(map(str, ids))


V = Vocabulary.stand_in(10)  # text has the ids 7, 8 and 9
JOINT = np.array([[0.30, 0.02, 0.03], [0.01, 0.25, 0.04], [0.05, 0.10, 0.20]])
ROWS = 6_000


@dataclasses.dataclass(frozen=True)
class TwoTokens(Bert):
    """Model of `[CLS] a b [SEP]` that knows the conditionals of JOINT; special tokens have a logit, too."""

    vocab_size: int = V.size
    max_positions: int = 4

    def hidden_states(self, params, inputs, *, key=None, at=None):
        other = inputs.ids[:, jnp.array([0, 2, 1, 3])]
        return at_positions(jax.nn.one_hot(jnp.array([0, 0, 1, 1]) * V.size + other, 2 * V.size), at)

    def token_features(self, params, hidden):
        return hidden

    def output_matrix(self, params):
        return params["table"], None


def table() -> np.ndarray:
    """Return log p(token | place, other token), [vocab, 2 · vocab]; the other one may be [MASK]."""
    logits = np.full((2, V.size, V.size), 1.5)
    logits[..., V.unk] = -np.inf
    for place, joint in enumerate((JOINT.T, JOINT)):  # [the other token, this token]
        logits[place, 7:, 7:] = np.log(joint / joint.sum(1, keepdims=True))
        logits[place, V.mask, 7:] = np.log(joint.sum(0))
    return np.maximum(logits, -1e9).reshape(2 * V.size, V.size).T.astype(np.float32)


@functools.cache
def counts(**options) -> np.ndarray:
    """Return how often each pair of tokens was sampled."""
    objective = MaskedDiffusion(model=TwoTokens()).bind_unchecked(V)
    loaded = PretrainedModel(objective, {"table": jnp.asarray(table())}, Numbers())
    found = denoise(loaded, [[V.cls, V.mask, V.mask, V.sep]] * ROWS, Settings(temperature=1.0, **options))
    pairs = np.array([answer.ids for answer in found]) - 7
    assert pairs.min() >= 0  # symbols are never sampled
    return np.histogram2d(*pairs.T, bins=[range(4)] * 2)[0]


@pytest.mark.slow
def test_many_steps_follow_the_joint_distribution():
    assert stats.chisquare(counts(steps=200).ravel(), ROWS * JOINT.ravel()).pvalue > 1e-3


def test_one_step_follows_the_product_of_the_marginals():
    """Tokens of one step do not see each other, so the test above can fail."""
    product = JOINT.sum(1)[:, None] * JOINT.sum(0)
    assert stats.chisquare(counts(steps=1).ravel(), ROWS * product.ravel()).pvalue > 1e-3
    assert stats.chisquare(counts(steps=1).ravel(), ROWS * JOINT.ravel()).pvalue < 1e-30


def test_two_steps_share_a_step_half_of_the_time():
    """The marginals of ancestral sampling are right with any number of steps; its joint is a mixture."""
    mixed = (JOINT + JOINT.sum(1)[:, None] * JOINT.sum(0)) / 2
    assert stats.chisquare(counts(steps=2).ravel(), ROWS * mixed.ravel()).pvalue > 1e-3


def test_a_sample_is_a_function_of_its_key():
    first = counts(steps=2)
    counts.cache_clear()
    np.testing.assert_array_equal(counts(steps=2), first)
    assert (counts(steps=2, seed=1) != first).any()


SIZE = NumberTokenizer.vocabulary.size
MODEL = Bert(
    vocab_size=SIZE, hidden_size=16, num_layers=2, num_heads=2, intermediate_size=32, max_positions=40, init_std=0.5
)


@pytest.fixture(scope="module")
def loaded() -> PretrainedModel:
    objective = MaskedDiffusion(MODEL).bind(NumberTokenizer.vocabulary, 40)
    params = jax.tree.map(jnp.asarray, random_params(objective, 0, 0.5))
    return PretrainedModel(objective, params, Numbers())


@pytest.mark.slow
def test_log_probabilities_are_those_of_the_step_that_filled_a_mask(loaded):
    """In one step, every mask is filled while the others are masked; symbols have no probability."""
    v, model = loaded.objective.vocabulary, loaded.objective.model
    rows = [[v.cls, 110, *[v.mask] * 7, 120, v.sep], [v.cls, v.mask, 130, v.mask, 131, 132, v.sep]]
    predict = jax.jit(lambda ids: model.predict_tokens(loaded.params, model.hidden_states(loaded.params, Inputs(ids))))
    for row, answer in zip(rows, denoise(loaded, rows, Settings(steps=1)), strict=True):
        logits = np.array(predict(jnp.asarray([row]))[0], float)[np.array(row) == v.mask]
        logits[:, v.special] = -np.inf
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        assert answer.ids == log_probs.argmax(-1).tolist()
        np.testing.assert_allclose(answer.log_probs, log_probs.max(-1), atol=1e-4)


def test_masks_are_filled_and_texts_continued(loaded):
    settings = Settings(temperature=0.7, max_new_tokens=3, steps=8)
    texts = ["110 [MASK] 112 <mask>", "113 114", ""]
    answers = denoise_text(loaded, texts, settings)
    filled, continued, whole = ([int(word) for word in answer.text.split()] for answer in answers)
    assert (filled[0], filled[2], len(filled)) == (110, 112, 4) and filled[1::2] == answers[0].ids
    assert continued == [113, 114, *answers[1].ids] and len(answers[1].ids) == 3 and whole == answers[2].ids
    assert not loaded.objective.vocabulary.special[filled + continued + whole].any()
    assert all(len(answer.log_probs) == len(answer.ids) and max(answer.log_probs) < 0 for answer in answers)
    assert denoise_text(loaded, texts, settings) == answers


def test_refusals(loaded):
    for model, settings, stop in (
        (dataclasses.replace(loaded, objective=CausalLM()), Settings(), ()), (loaded, Settings(beams=2), ()),
        (loaded, Settings(), ["x"]),
    ):
        with pytest.raises(UserError, match="only masked diffusion is sampled in steps, without beams"):
            denoise_text(model, ["7"], settings, stop)
    with pytest.raises(UserError, match="has 41 tokens with special tokens, but the model takes 40"):
        denoise_text(loaded, ["7 " * 38 + "<mask>"], Settings())
    with pytest.raises(UserError, match="steps is 0"):
        Settings(steps=0)
