"""Beam search and log-probabilities against Transformers' `generate`, for every generative family."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
import transformers

from jaxlm.huggingface import import_folder
from jaxlm.inference.generate import Settings, continuations, generate
from jaxlm.models.gpt1 import Gpt1
from jaxlm.models.gpt2 import Gpt2
from jaxlm.models.t5 import T5
from jaxlm.models.xlnet import Xlnet
from jaxlm.tokenizers.export import export
from jaxlm.tokenizers.training import train_tokenizer
from tests.params import first_fast

NEW = 12
SMALL = {
    "gpt2": transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=420),
    "openai-gpt": transformers.OpenAIGPTConfig(n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=420),
    "xlnet": transformers.XLNetConfig(d_model=32, n_layer=2, n_head=4, d_inner=64, vocab_size=420, dropout=0.0),
    "t5": transformers.T5Config(
        d_model=32, d_kv=6, d_ff=48, num_layers=2, num_heads=5, vocab_size=512, pad_token_id=0, eos_token_id=3,
        decoder_start_token_id=0,
    ),
}
CLASSES = {"gpt2": "GPT2LMHeadModel", "openai-gpt": "OpenAIGPTLMHeadModel", "xlnet": "XLNetLMHeadModel",
           "t5": "T5ForConditionalGeneration"}
TEMPLATES = {"gpt2": Gpt2.template, "openai-gpt": Gpt1.template, "xlnet": Xlnet.template, "t5": T5.template}


@pytest.fixture(scope="module", params=first_fast(SMALL))
def sides(request, tmp_path_factory):
    """Return the family, a Transformers model with random weights, and its import."""
    family, folder = request.param, tmp_path_factory.mktemp(request.param)
    letters = "abcdefghijklmnopqrstuvwxyz"
    texts = [" ".join(a + b + c for c in letters[:6]) + f" {a}{b}." for a in letters for b in letters]
    kind, size = ("bpe", 512) if family == "t5" else ("byte-bpe", 420)
    tokenizer = train_tokenizer(texts, tmp_path_factory.mktemp("tokenizer"), kind=kind, vocab_size=size)
    torch.manual_seed(1)
    spread = 0.3 if family == "openai-gpt" else 0.12
    model = getattr(transformers, CLASSES[family])(SMALL[family]).eval()
    with torch.no_grad():  # layers that outweigh the embedding: it alone would repeat one token
        for name, parameter in model.named_parameters():
            is_out = name.endswith((".wo.weight", ".o.weight"))
            parameter.add_(torch.randn_like(parameter) * (0.6 if is_out else spread))
    model.save_pretrained(folder)
    export(tokenizer, folder, TEMPLATES[family], 64)
    return family, model, import_folder(folder)


def ask(family: str, model, prompts: list[list[int]], stops: list[int], **options) -> list[list[int]]:
    """Return their continuations, of all prompts together if the class supports padding on the left."""
    groups = [prompts] if family in ("gpt2", "t5") else [[prompt] for prompt in prompts]
    found = []
    for group in groups:
        longest = max(map(len, group)) + (family == "t5")
        ids, mask = np.zeros((len(group), longest), np.int64), np.zeros((len(group), longest), np.int64)
        for row, prompt in enumerate(group):
            prompt = [*prompt, 3] if family == "t5" else prompt
            place = slice(0, len(prompt)) if family == "t5" else slice(longest - len(prompt), None)
            ids[row, place], mask[row, place] = prompt, 1
        with torch.no_grad():
            out = model.generate(
                torch.from_numpy(ids), attention_mask=torch.from_numpy(mask), max_new_tokens=NEW, do_sample=False,
                eos_token_id=stops or None, pad_token_id=0, **({"use_mems": False} if family == "xlnet" else {}),
                **options,
            )
        begin = 1 if family == "t5" else longest
        for row in out[:, begin:].tolist():
            end = min((row.index(stop) + 1 for stop in stops if stop in row), default=None)
            found.append(row[:end])
    return found


def prompts_of(ours) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(110, ours.tokenizer.vocabulary.size, size).tolist() for size in (3, 9, 1, 14)]


# The search is the same for all families.
@pytest.mark.parametrize(("sides", "beams", "penalty"), [
    pytest.param(family, *case, marks=() if (family, *case) == ("gpt2", 5, -1.0) else pytest.mark.slow)
    for family in SMALL for case in ((4, 1.0), (3, 0.0), (2, 2.5), (5, -1.0))
], indirect=["sides"])
def test_beams_are_theirs(sides, beams, penalty):
    family, model, ours = sides
    prompts = prompts_of(ours)
    greedy = ask(family, model, prompts, [])
    assert len({tuple(row) for row in greedy}) > 2  # the prompts have an effect
    whole = ask(family, model, prompts, [], num_beams=beams, length_penalty=penalty)
    common = [token for token, _ in Counter(token for row in whole for token in row[2:]).most_common(2)]
    for stops in ([], common[:1], common):  # stop symbols that are generated, so that texts of all lengths compete
        wanted = ask(family, model, prompts, stops, num_beams=beams, length_penalty=penalty)
        options = dict(max_new_tokens=NEW, beams=beams, length_penalty=penalty, stop_ids=stops)
        assert wanted == generate(ours.objective, ours.params, prompts, **options)
    assert penalty > 0 or any(len(row) < NEW for row in wanted)  # favours short texts


@pytest.mark.slow  # test_gpt2.py has greedy continuations
def test_beams_and_greedy_differ(sides):
    family, model, ours = sides
    prompts = prompts_of(ours)
    options = dict(max_new_tokens=NEW, stop_ids=[])
    one, many = (generate(ours.objective, ours.params, prompts, beams=beams, **options) for beams in (1, 4))
    assert one == ask(family, model, prompts, []) and one != many


@pytest.mark.slow  # they order the beams above
@pytest.mark.parametrize("beams", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_log_probabilities_are_theirs(sides, beams):
    family, model, ours = sides
    prompt = prompts_of(ours)[1]
    ids = torch.tensor([[*prompt, 3] if family == "t5" else prompt])
    options = {"use_mems": False} if family == "xlnet" else {}
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, num_beams=beams,
            pad_token_id=0, eos_token_id=None, output_scores=True, return_dict_in_generate=True, **options,
        )
    wanted = model.compute_transition_scores(
        out.sequences, out.scores, out.get("beam_indices"), normalize_logits=beams == 1
    )[0].numpy()
    (answer,) = continuations(
        ours.objective, ours.params, [prompt], Settings(max_new_tokens=NEW, beams=beams, stop_ids=[])
    )
    np.testing.assert_allclose(answer.log_probs, wanted, atol=2e-4)
