"""Scores of decoders, encoder-decoders, masked models and long texts against PyTorch's logits."""

from __future__ import annotations

import dataclasses
import json
import types

import numpy as np
import pytest
import torch
import transformers

from jaxlm.errors import UserError
from jaxlm.huggingface import import_folder
from jaxlm.inference import score as module
from jaxlm.inference.generate import max_length, prepare_prompts
from jaxlm.inference.score import Pair, encode_pair, score, score_texts, text_begin, window, windows
from jaxlm.inference.text import fit_prompts
from jaxlm.models.bert import Bert
from jaxlm.models.gpt2 import Gpt2
from jaxlm.models.t5 import T5
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.objectives.skip_gram import SkipGram
from jaxlm.tokenizers.export import export
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.tokenizers.training import train_tokenizer
from tests.params import first_fast

MODELS = {
    "gpt2": ("GPT2LMHeadModel", transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, n_positions=40, vocab_size=420
    )),
    "t5": ("T5ForConditionalGeneration", transformers.T5Config(
        d_model=32, d_kv=6, d_ff=48, num_layers=2, num_heads=5, vocab_size=512, pad_token_id=0, eos_token_id=3,
        decoder_start_token_id=0,
    )),
    "bert": ("BertForMaskedLM", transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, max_position_embeddings=40,
        vocab_size=512,
    )),
}
TEMPLATES = {"gpt2": Gpt2.template, "t5": T5.template, "bert": Bert.template}


def side(family: str, folder):
    """Return a Transformers model with random weights, and the same model imported."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    texts = [" ".join(a + b + c for c in letters[:6]) + f" {a}{b}." for a in letters for b in letters]
    kind, size = ("byte-bpe", 420) if family == "gpt2" else ("bpe", 512)
    tokenizer = train_tokenizer(texts, folder / "tokenizer", kind=kind, vocab_size=size)
    torch.manual_seed(1)
    name, config = MODELS[family]
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    model.save_pretrained(folder / "hf")
    export(tokenizer, folder / "hf", TEMPLATES[family], 40)
    return model, import_folder(folder / "hf")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return side("gpt2", tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    return side("t5", tmp_path_factory.mktemp("t5"))


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return side("bert", tmp_path_factory.mktemp("bert"))


def random_pairs(size: int) -> list[Pair]:
    rng = np.random.default_rng(3)
    sizes = [(3, 5), (1, 1), (20, 2), (17, 17), (9, 30), (30, 11), (16, 16), (2, 5)]
    return [Pair(*(rng.integers(110, size, n).tolist() for n in both)) for both in sizes]


def of_torch(logits: torch.Tensor, labels: list[int]) -> tuple[np.ndarray, list[bool]]:
    found = torch.log_softmax(logits, -1)[torch.arange(len(labels)), torch.tensor(labels)]
    return found.detach().numpy(), (logits.argmax(-1) == torch.tensor(labels)).tolist()


def check(found, wanted) -> None:
    for ours, (log_probs, likeliest) in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours.log_probs, log_probs, atol=1e-4)
        assert ours.is_likeliest.tolist() == likeliest


@pytest.mark.parametrize("tokens", first_fast([4096, 64]))
def test_decoder(gpt2, tokens, monkeypatch):
    monkeypatch.setattr(module, "BATCH_TOKENS", tokens)
    monkeypatch.setattr(module, "LOGITS_ROWS", 24)  # so that logits come in several chunks
    model, ours = gpt2
    pairs = random_pairs(420)
    wanted = []
    for pair in pairs:
        row = [*pair.context, *pair.targets[:-1]]
        logits = model(torch.tensor([row])).logits[0, len(pair.context) - 1 :]
        wanted.append(of_torch(logits, pair.targets))
    check(score(ours, pairs), wanted)
    # The likeliest continuation says so, and `given` targets are read but not scored.
    best = [int(model(torch.tensor([[7, 8, 9]])).logits[0, -1].argmax())]
    assert score(ours, [Pair([7, 8, 9], best)])[0].is_likeliest.tolist() == [True]
    (whole, part) = score(ours, [pairs[3], pairs[3]._replace(num_unscored=4)])
    np.testing.assert_array_equal(part.log_probs, whole.log_probs[4:])


def test_long_contexts_are_truncated_on_the_left(gpt2):
    model, ours = gpt2
    ids = np.random.default_rng(0).integers(110, 420, 70).tolist()
    logits = model(torch.tensor([ids[-41:-1]])).logits[0, -6:]
    check(score(ours, [Pair(ids[:64], ids[64:])]), [of_torch(logits, ids[64:])])
    with pytest.raises(UserError, match="41 tokens, but the model takes 40"):
        score(ours, [Pair([5], ids[:41])])


def test_long_prompts_are_truncated_on_the_left(gpt2, t5):
    ids = [7] + [8] * 600
    for (_, ours), room, begin in ((gpt2, 35, "bos"), (t5, 511, "eos")):
        found = fit_prompts(ours, [ids, ids[:9], []], 6)
        assert found == [ids[-room:], ids[:9], [getattr(ours.tokenizer.vocabulary, begin)]]
        read = prepare_prompts(ours.objective, found, 6)
        assert len(read[0]) + 5 * (begin == "bos") == max_length(ours)
    longer = [fit_prompts(dataclasses.replace(ours, length=600), [ids * 2], 6)[0] for _, ours in (gpt2, t5)]
    assert list(map(len, longer)) == [35, 599]  # relative positions have no limit but that of training
    with pytest.raises(UserError, match="41 new tokens leave no room for a prompt: the model takes 40"):
        fit_prompts(gpt2[1], [ids], 41)


@pytest.mark.slow
def test_encoder_decoder(t5):
    model, ours = t5
    pairs = random_pairs(512)
    wanted = []
    for context, targets, _ in pairs:
        logits = model(input_ids=torch.tensor([[*context, 3]]), labels=torch.tensor([targets])).logits[0, :, :512]
        wanted.append(of_torch(logits, targets))
    check(score(ours, pairs), wanted)


def test_masked_model(bert):
    model, ours = bert
    v = ours.tokenizer.vocabulary
    pairs = [Pair(p.context[:12], p.targets[:12]) for p in random_pairs(500)]
    wanted = []
    for context, targets, _ in pairs:
        rows = [([v.cls, *context, *targets, v.sep], 1 + len(context) + k) for k in range(len(targets))]
        logits = []
        for row, place in rows:
            masked = torch.tensor([[v.mask if i == place else token for i, token in enumerate(row)]])
            logits.append(model(masked).logits[0, place, : v.size])
        wanted.append(of_torch(torch.stack(logits), targets))
    check(score(ours, pairs), wanted)
    assert score(ours, []) == []
    with pytest.raises(UserError, match=r"42 tokens .* takes 40"):
        score(ours, [Pair([110] * 20, [110] * 20)])


@pytest.mark.slow
def test_perplexity_of_a_long_text(gpt2):
    """Windows are those of lm_eval, and overlapping ones those of Transformers' documentation on perplexity."""
    model, ours = gpt2
    ids = np.random.default_rng(2).integers(110, 420, 150).tolist()
    for stride in (40, 10, 7):
        found = score(ours, list(windows(ids, 5, 40, stride)))
        assert sum(len(each.log_probs) for each in found) == 150
        nll, seen = 0.0, 0
        for end in [40, *range(40 + stride, 150, stride), 150]:
            row = [5, *ids][max(end - 40, 0) : end + 1]
            logits = model(torch.tensor([row[:-1]])).logits[0]
            log_probs, _ = of_torch(logits, row[1:])
            nll, seen = nll - log_probs[seen - end :].sum(), end
        theirs, own = np.exp(nll / 150), np.exp(-sum(each.total for each in found) / 150)
        assert abs(own / theirs - 1) < 1e-3


def test_special_tokens_in_a_text_are_plain_characters_unless_lm_eval_asks(gpt2):
    end = gpt2[1].tokenizer.piece(gpt2[1].tokenizer.vocabulary.eos)
    plain, symbols = (score_texts(gpt2[1], [f"a{end}b"], 8, found)[0].log_probs for found in (False, True))
    assert len(symbols) == 3 < len(plain)


def test_windows_are_those_of_lm_eval():
    from lm_eval import utils

    for size in (0, 1, 9, 10, 11, 25, 40):
        tokens = list(range(100, 100 + size))
        wanted = map(utils.make_disjoint_window, utils.get_rolling_token_windows(tokens, 5, 10, 1)) if size else []
        assert [(list(p.context), list(p.targets)) for p in windows(tokens, 5, 10, 10)] == [tuple(w) for w in wanted]


def test_a_pair_is_divided_where_the_context_ends(tmp_path, gpt2, t5):
    from tokenizers.pre_tokenizers import ByteLevel

    pieces = [*sorted(ByteLevel.alphabet()), "th", "the", "Ġa", "Ġan", "<|endoftext|>"]
    (tmp_path / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(pieces)}), encoding="utf-8")
    (tmp_path / "merges.txt").write_text("#version: 0.2\nt h\nth e\nĠ a\nĠa n\n", encoding="utf-8")
    tokenizer = Tokenizer.load(tmp_path)

    def shown(context: str, continuation: str) -> list[list[str]]:
        pair = encode_pair(dataclasses.replace(gpt2[1], tokenizer=tokenizer), context, continuation)
        return [[tokenizer.piece(i) for i in ids] for ids in pair[:2]]

    assert shown("is", " an") == [["i", "s"], ["Ġan"]]
    assert shown("is ", "an") == [["i", "s"], ["Ġan"]]  # white space belongs to what follows
    assert shown("is", "") == [["i", "s"], []]
    assert shown("is th", "e") == [["i", "s", "Ġ"], ["the"]]  # where lm_eval stops: no token would be scored
    assert shown("is th", "ea") == [["i", "s", "Ġ"], ["the", "a"]]  # and where it would score "a" alone
    assert shown("th", "e") == [["<|endoftext|>"], ["the"]]
    assert shown("", "the") == [["<|endoftext|>"], ["the"]]

    def begin(is_plain: bool = False, step: int = 0, **roles: int) -> int:
        vocabulary = dataclasses.replace(tokenizer.vocabulary, **roles)
        objective = dataclasses.replace(gpt2[1].objective, plain_stream=is_plain)
        return text_begin(types.SimpleNamespace(
            tokenizer=types.SimpleNamespace(vocabulary=vocabulary), objective=objective, step=step))

    with pytest.raises(UserError, match="which a text without a context needs"):
        begin(bos=-1, eos=-1)
    assert shown("is<|endoftext|>", "the") == [["i", "s", "<|endoftext|>"], ["the"]]  # as in lm_eval
    # In the plain streams of a run a text stands after the end of the previous one.
    assert [begin(*case, bos=3, eos=4) for case in ((False, 1), (True, 0), (True, 1))] == [3, 3, 4]
    assert [window(dataclasses.replace(gpt2[1], length=length)) for length in (16, None, 10_000)] == [16, 40, 40]
    # An encoder reads its text apart; after a sentinel where that was learnt.
    model = t5[1]
    v = model.tokenizer.vocabulary
    context, continuation = model.tokenizer.encode("abc"), model.tokenizer.encode("abd")
    assert encode_pair(model, "abc", " abd") == (context, continuation, 0)
    assert encode_pair(model, "abc", " abd", sentinel=True) == (
        [*context, v.sentinel], [v.sentinel, *continuation], 1
    )


def test_models_without_likelihoods_are_refused():
    with pytest.raises(UserError, match="SkipGram cannot score texts"):
        score(PretrainedModel(SkipGram(), {}), [Pair([1], [2])])
