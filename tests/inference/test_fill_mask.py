"""Fill-mask against direct calls of the model, one unpadded text at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.errors import UserError
from jaxlm.inference import fill_mask as module
from jaxlm.inference.fill_mask import fill_mask
from jaxlm.models.base import Inputs
from jaxlm.models.bert import Bert
from jaxlm.models.deberta import DebertaV3
from jaxlm.models.electra import Electra
from jaxlm.objectives.causal_lm import CausalLM
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.objectives.replaced_tokens import ReplacedTokens
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.tokenizers.vocabulary import Vocabulary
from tests.params import random_params

SIZE = 150


class NumberTokenizer(Tokenizer):
    """Tokenizer of texts that are rows of numbers, one token each; the mask is `<mask>`, as in RoBERTa."""

    vocabulary = Vocabulary.stand_in(SIZE)

    def __init__(self) -> None:
        """It has no file."""

    def encode_with_symbols(self, text: str) -> list[int]:
        return [self.vocabulary.mask if word == "<mask>" else int(word) for word in text.split()]

    def piece(self, number: int) -> str:
        return {self.vocabulary.mask: "<mask>"}.get(number, str(number))

    def pieces(self, ids: list[int]) -> list[str]:
        return [f"<{i}>" for i in ids]


@pytest.fixture(scope="module")
def filler():
    config = Bert(
        vocab_size=SIZE, hidden_size=16, num_layers=2, num_heads=2, intermediate_size=32, max_positions=40, init_std=0.5
    )
    objective = MaskedLM(config, input_format="document")
    return objective, random_params(objective, 0, 0.5)


@pytest.mark.parametrize("kind", [Bert, Electra, DebertaV3])
def test_a_text_has_its_special_tokens(kind):
    objective = MaskedLM(kind()) if kind is Bert else ReplacedTokens(kind(), two_segments=kind is Electra)
    v, row = NumberTokenizer.vocabulary, module.masked_row(objective, NumberTokenizer(), "110 <mask>")
    assert row == [v.cls, 110, v.mask, v.sep]


def direct(objective, params, row):
    """Return probabilities [length, vocab] of the forward pass over one unpadded row."""
    @jax.jit
    def probabilities(params, ids):
        hidden = objective.model.hidden_states(params, Inputs(ids))
        return jax.nn.softmax(objective.model.predict_tokens(params, hidden))

    return np.asarray(probabilities(params, jnp.asarray([row])))[0]


def test_equals_direct_calls_of_the_model(filler, monkeypatch):
    objective, params = filler
    monkeypatch.setattr(module, "BATCH", 2)  # so that three texts need two batches
    v = NumberTokenizer.vocabulary
    texts = ["110 <mask> 112", "[MASK] 120 121 122 [MASK] [MASK] 123", " ".join(["130"] * 36) + " [MASK]"]
    answers = fill_mask(PretrainedModel(objective, params, NumberTokenizer()), texts, top_k=4)
    assert [len(answer) for answer in answers] == [1, 3, 1]
    for text, answer in zip(texts, answers, strict=True):
        row = [v.cls, *NumberTokenizer().encode_with_symbols(text.replace("[MASK]", "<mask>")), v.sep]
        probabilities = direct(objective, params, row)
        masks = [i for i, token in enumerate(row) if token == v.mask]
        for position, best in zip(masks, answer, strict=True):
            expected = np.argsort(-probabilities[position])[:4]
            assert [piece for piece, _ in best] == [f"<{i}>" for i in expected]
            np.testing.assert_allclose([p for _, p in best], probabilities[position][expected], atol=1e-5)


def test_no_texts(filler):
    assert fill_mask(PretrainedModel(*filler, NumberTokenizer()), []) == []


@pytest.mark.parametrize(
    "text, top_k, message",
    [
        ("110 111", 5, "no \\[MASK\\]"),
        (" ".join(["110"] * 38) + " [MASK]", 5, "41 tokens .* takes 40"),
        ("[MASK]", 0, "top_k is 0"),
        ("[MASK]", SIZE + 1, f"top_k is {SIZE + 1}"),
    ],
)
def test_mistakes_are_refused(filler, text, top_k, message):
    with pytest.raises(UserError, match=message):
        fill_mask(PretrainedModel(*filler, NumberTokenizer()), [text], top_k)


def test_tokenizer_without_mask_is_named(filler):
    tokenizer = NumberTokenizer()
    nothing = np.zeros(SIZE, bool)
    tokenizer.vocabulary = Vocabulary(size=SIZE, special=nothing, word_start=~nothing, sentence_end=nothing, pad=0)
    with pytest.raises(UserError, match=r"\[MASK\]"):
        fill_mask(PretrainedModel(*filler, tokenizer), ["[MASK]"])


def test_objective_that_fills_no_masks(filler):
    with pytest.raises(UserError, match="does not fill masks"):
        fill_mask(PretrainedModel(CausalLM(), filler[1], NumberTokenizer()), ["[MASK]"])
