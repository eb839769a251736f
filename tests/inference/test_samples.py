"""Samples of models that write: what they are asked, and what is printed."""

from __future__ import annotations

import numpy as np
import pytest

from jaxlm.config.experiment import Experiment, TrainConfig
from jaxlm.errors import UserError
from jaxlm.inference.samples import sampler
from jaxlm.models.bert import Bert
from jaxlm.models.gpt2 import Gpt2
from jaxlm.models.t5 import T5
from jaxlm.objectives.causal_lm import CausalLM
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.objectives.mixture_of_denoisers import MixtureOfDenoisers
from jaxlm.objectives.skip_gram import SkipGram
from jaxlm.objectives.span_corruption import SpanCorruption
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.tokenizers.training import train_tokenizer
from tests.params import random_params
from tests.training.support import write_text

T5_TINY = T5(hidden_size=16, num_layers=1, num_heads=2, head_dim=8, intermediate_size=32)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    text = write_text(folder / "text.txt").read_text()
    return train_tokenizer([text], str(folder / "bpe"), kind="bpe", vocab_size=600, symbols=MixtureOfDenoisers.symbols)


@pytest.mark.parametrize(
    ("objective", "prompt"),
    [
        (CausalLM(model=Gpt2(hidden_size=16, num_layers=1, num_heads=2, max_positions=64)), [*range(15)]),
        pytest.param(SpanCorruption(model=T5_TINY), [*range(15), "<extra_id_0>", *range(18, 30)],
                     marks=pytest.mark.slow),
        pytest.param(SpanCorruption(model=T5_TINY, task="prefix"), [*range(15)], marks=pytest.mark.slow),
        pytest.param(MixtureOfDenoisers(model=T5_TINY), ["[S2S]", *range(15)], marks=pytest.mark.slow),
    ],
    ids=["decoder", "spans", "prefix", "ul2"],
)
def test_prompts_of_models_that_write(objective, prompt, tokenizer):
    """A text of 40 tokens, of which 30 are read, and its special tokens are not."""
    v = tokenizer.vocabulary
    ids = np.arange(v.size - 40, v.size, dtype=np.int32)
    objective = objective.bind(v, 64)
    # The last batch of the held-out text may end with empty rows.
    sample = sampler(objective, tokenizer, [np.array([v.cls, *ids, v.sep]), np.array([], np.int32)])
    params = random_params(objective, 0, 0.02)
    (line,) = sample(params)
    shown = [v.symbols[place] if isinstance(place, str) else ids[place] for place in prompt]
    assert line.startswith(tokenizer.decode(shown, skip_special=False) + "|") and not line.endswith("|")
    assert sample(params) == [line]


def test_texts_too_short_for_a_mask_are_left_out(tokenizer):
    v, model = tokenizer.vocabulary, Bert(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=16)
    objective = MaskedLM(model=model, input_format="document").bind(v, 64)
    params = random_params(objective, 0, 0.02)
    short, ids = np.array([v.cls, v.size - 1, v.sep]), np.arange(v.size - 12, v.size)
    assert sampler(objective, tokenizer, [short])(params) == []
    (line,) = sampler(objective, tokenizer, [short, np.array([v.cls, *ids, v.sep])])(params)
    assert "(masked: " in line


def test_objectives_without_answers_are_refused():
    with pytest.raises(UserError, match=r"train.sample_every is for pretraining .*0 for SkipGram"):
        Experiment(objective=SkipGram(), train=TrainConfig(sample_every=1)).validate()
