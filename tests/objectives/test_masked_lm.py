"""Masked LM: its loss against the formula, FLOPs at published sizes, invalid configurations."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxlm.config.experiment import Experiment
from jaxlm.data.base import Statistics
from jaxlm.data.text import TextData
from jaxlm.errors import UserError
from jaxlm.fields import with_value
from jaxlm.models.albert import Albert
from jaxlm.models.base import Inputs
from jaxlm.models.bert import Bert
from jaxlm.objectives import masked_lm
from jaxlm.objectives.base import total_loss
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.objectives.next_sentence import NEXT_SENTENCE
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import TokenBatch

TINY = Bert(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32, max_positions=64)


def bound(length: int = 32, **changes) -> MaskedLM:
    return MaskedLM(model=TINY, **changes).bind(Vocabulary.stand_in(300), length)


def token_batch(rows: int, raw: int, seed: int = 0) -> TokenBatch:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, raw + 1, rows)
    sizes[0] = raw
    real = np.arange(raw)[None] < sizes[:, None]
    documents = np.where(real, 1 + np.arange(rows)[:, None], 0).astype(np.int32)
    return TokenBatch(np.where(real, rng.integers(107, 300, (rows, raw)), 0).astype(np.int32), documents)


@pytest.mark.parametrize(
    ("size", "length", "predictions", "giga"),
    [("base", 128, 20, 23.31), ("base", 512, 77, 100.3), ("large", 128, 20, 80.21), ("large", 512, 80, 340.2)],
)
def test_flops_at_published_sizes(size, length, predictions, giga):
    rate = predictions / length
    objective = MaskedLM(model=Bert.published(size), mask_rate=rate)
    trained = objective.flops(length)
    assert objective.step_flops(length, 5) == 15 * trained
    assert trained / 1e9 == pytest.approx(giga, rel=1e-3)


# Op by op, jax compiles each small operation separately; jitted, each of these compiles once for the whole file.
@functools.cache
def compiled(length: int = 32, input_format: str = "next-sentence"):
    """Return objective, params, and the jitted corrupt and loss."""
    objective = bound(length, input_format=input_format)
    params = jax.jit(objective.init)(jax.random.key(0))
    return objective, params, jax.jit(objective.corrupt), jax.jit(objective.loss, static_argnames="train")


@pytest.mark.slow
def test_random_tokens_are_no_symbols_of_our_vocabularies():
    objective, _, corrupt, _ = compiled(input_format="document")
    full = np.full((4000, objective.row_format(32).length), 120, np.int32)
    found = np.unique(corrupt(jax.random.key(0), TokenBatch(full, np.ones_like(full)))["input_ids"])
    v = objective.vocabulary
    assert found.tolist() == [v.pad, v.cls, v.sep, v.mask, *range(107, 300)]


@pytest.mark.slow
def test_rows_of_full_sentences_are_masked_as_in_fairseq():
    """19 or 20 of 128 tokens, 19.2 on average, and random tokens are text also in a published vocabulary."""
    special = np.isin(np.arange(300), [0, 1, 2, 299])
    v = Vocabulary(size=300, special=special, word_start=~special, sentence_end=np.zeros(300, bool),
                   bos=0, cls=0, pad=1, eos=2, sep=2, unk=3, mask=299)
    model = dataclasses.replace(TINY, max_positions=128)
    objective = MaskedLM(model=model, input_format="full-sentences", short_rate=0.0, random_share=0.2).bind(v, 128)
    batch = TokenBatch(np.full((4000, 126), 120, np.int32), np.ones((4000, 126), np.int32))
    example = jax.jit(objective.corrupt)(jax.random.key(0), batch)
    counts = np.asarray(example["masked_weights"]).sum(axis=1)
    assert set(counts) == {19, 20} and counts.mean() == pytest.approx(19.2, abs=0.03)
    assert np.unique(example["input_ids"]).tolist() == [0, 2, *range(4, 300)]


def test_fields_reach_the_corruption(monkeypatch):
    seen, mask_tokens = {}, masked_lm.mask_tokens

    def stand_in(key, ids, never, **given):
        seen.update(given)
        return mask_tokens(key, ids, never, **given)

    monkeypatch.setattr(masked_lm, "mask_tokens", stand_in)
    v = Vocabulary.stand_in(160)
    example = dict.fromkeys(("input_ids", "attention_mask"), jax.numpy.ones((1, 24), np.int32))
    shares = dict(mask_rate=0.3, mask_share=0.6, random_share=0.3)
    MaskedLM(**shares, whole_word=True, longest_ngram=2, max_predictions=5).bind(v, 24).mask(jax.random.key(0), example)
    assert (seen["rate"], seen["mask_share"], seen["random_share"]) == (0.3, 0.6, 0.3)
    assert seen["word_start"] is not None and (seen["longest_ngram"], seen["slots"]) == (2, 5)
    assert not seen["round_randomly"] and seen["random_ids"] is v.random_ids
    MaskedLM(input_format="full-sentences").bind(v, 24).mask(jax.random.key(0), example)
    assert seen["word_start"] is None and seen["round_randomly"] and seen["random_ids"] is v.text_ids


@pytest.mark.slow
def test_ngrams_have_words_of_their_own():
    """A row that is one word otherwise has as many words as tokens for n-grams, so that some of it is masked."""
    stand_in = Vocabulary.stand_in(300)
    v = dataclasses.replace(stand_in, word_start=np.zeros(300, bool), ngram_start=~stand_in.special)
    batch = TokenBatch(np.full((8, 30), 120, np.int32), np.ones((8, 30), np.int32))
    counts = [
        MaskedLM(model=TINY, input_format="document", whole_word=True, short_rate=0.0, longest_ngram=longest)
        .bind(v, 32).corrupt(jax.random.key(0), batch)["masked_weights"].sum(axis=1).tolist()
        for longest in (1, 3)
    ]
    assert counts == [[0] * 8, [5] * 8]


@pytest.mark.parametrize("input_format", [pytest.param("next-sentence", marks=pytest.mark.slow), "document"])
def test_one_row_in_ten_is_short(input_format):
    """BERT's short_seq_prob of 0.1 (create_pretraining_data.py), also without sentence pairs."""
    objective, _, corrupt, _ = compiled(input_format=input_format)
    rows, raw = 4000, objective.row_format(32).length
    batch = TokenBatch(np.full((rows, raw), 120, np.int32), np.ones((rows, raw), np.int32))
    sizes = np.asarray(corrupt(jax.random.key(3), batch)["attention_mask"]).sum(1) - (32 - raw)
    rate = 0.1 * (raw - 2) / (raw - 1)  # the full width may be drawn too
    # Both partners have the size of the shorter: rows of similar size are partners, so at most one odd row differs.
    assert abs((sizes < raw - 1).mean() - rate) < 4 * np.sqrt(rate / rows) + 1 / rows


@pytest.mark.parametrize("input_format", [pytest.param("next-sentence", marks=pytest.mark.slow), "document"])
def test_unknown_words_are_masked_like_any_other(input_format):
    """Only [CLS], [SEP] and padding are never masked, as in create_pretraining_data.py."""
    objective, _, corrupt, _ = compiled(input_format=input_format)
    unk = objective.vocabulary.unk
    batch = TokenBatch(*(np.array(array) for array in token_batch(64, objective.row_format(32).length)[:2]))
    batch.tokens[:, ::3] = np.where(batch.tokens[:, ::3] > 0, unk, 0)
    asked = total = 0
    for seed in range(30):
        example = corrupt(jax.random.key(seed), batch)
        labels = np.asarray(example["masked_labels"])[np.asarray(example["masked_weights"]) > 0]
        assert not set(labels.tolist()) & {objective.vocabulary.cls, objective.vocabulary.sep, objective.vocabulary.pad}
        asked, total = asked + (labels == unk).sum(), total + labels.size
    share = (batch.tokens == unk).sum() / (batch.tokens > 0).sum()
    assert abs(asked / total - share) < 5 * np.sqrt(share * (1 - share) / total) + 0.02  # rows count by their size


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def test_loss_is_the_formula_over_full_logits():
    """get_masked_lm_output of run_pretraining.py computed slowly: logits everywhere, a loop over the targets."""
    objective, params, corrupt, compiled_loss = compiled()
    example = corrupt(jax.random.key(1), token_batch(6, objective.row_format(32).length))
    terms = compiled_loss(params, example, jax.random.key(2), train=False)

    m = objective.model

    @jax.jit
    def all_logits(example):
        hidden = m.hidden_states(params, Inputs.of(example))
        return m.predict_tokens(params, hidden), NEXT_SENTENCE.predict(m, params, hidden)

    tokens, pairs = all_logits(example)
    example = jax.device_get(example)
    full = log_softmax(np.asarray(tokens, np.float64))
    nll = [
        -full[row, int(position), int(label)]
        for row in range(6)
        for position, label, weight in zip(
            example["masked_positions"][row], example["masked_labels"][row], example["masked_weights"][row], strict=True
        )
        if weight
    ]
    pair = log_softmax(np.asarray(pairs, np.float64))
    nsp = [-pair[row, int(example["next_sentence_labels"][row])] for row in range(6)]
    assert float(total_loss(terms)) == pytest.approx(np.mean(nll) + np.mean(nsp), abs=1e-5)
    assert [float(x) for x in terms["mlm_loss"]] == pytest.approx([sum(nll), len(nll), 1], rel=1e-5)
    assert [float(x) for x in terms["nsp_loss"]] == pytest.approx([sum(nsp), 6, 1], rel=1e-5)


def test_rows_of_padding_carry_no_loss():
    objective, params, corrupt, compiled_loss = compiled()
    batch = token_batch(6, objective.row_format(32).length)
    tokens, segments = batch.tokens.copy(), batch.segment_ids.copy()
    tokens[2:], segments[2:] = 0, 0
    example = corrupt(jax.random.key(1), TokenBatch(tokens, segments))
    terms = compiled_loss(params, example, jax.random.key(2), train=False)
    assert float(example["masked_weights"][2:].sum()) == 0
    assert float(terms["nsp_loss"].weight) == 2


@pytest.mark.slow
def test_dropout_only_in_training():
    _, params, corrupt, compiled_loss = compiled()
    example = corrupt(jax.random.key(1), token_batch(6, 29))
    def value(key, train):
        return float(total_loss(compiled_loss(params, example, jax.random.key(key), train=train)))

    assert value(0, False) == value(1, False)
    assert value(0, True) != value(1, True)


def test_describe_shows_what_was_corrupted():
    objective, _, corrupt, _ = compiled()
    batch = token_batch(6, 29)
    example = jax.device_get(corrupt(jax.random.key(1), batch))
    text, given, targets, pair = objective.describe(batch, example, 0)
    changed = [i for i, (a, b) in enumerate(zip(text.ids, given.ids, strict=True)) if a != b]
    assert changed and all(given.marks[i] in ("masked", "random") for i in changed)
    assert [text.ids[i] for i, mark in enumerate(text.marks) if mark == "target"] == targets.ids
    assert "second segment" in pair.title


def test_partners_of_a_dominant_document():
    """Every row of a document with up to half of the text can have a partner; one of three quarters leaves a half."""
    objective = MaskedLM(model=TINY)
    half, most = (SimpleNamespace(statistics=Statistics(np.ones(1), 0.0, share)) for share in (0.5, 0.75))
    assert not objective.remarks(half, 128)
    assert "at most 50.0% of the rows" in objective.remarks(most, 128)[0]


@pytest.mark.slow
def test_without_next_sentence_there_is_neither_pooler_nor_its_loss():
    objective, params, corrupt, compiled_loss = compiled(input_format="document")
    assert objective.row_format(32).length == 30
    assert set(params) == {"embeddings", "encoder", "mlm_head"}
    example = corrupt(jax.random.key(1), token_batch(3, 30))
    assert example["input_ids"].shape == (3, 32)
    terms = jax.eval_shape(lambda: compiled_loss(params, example, jax.random.key(2), train=True))
    assert set(terms) == {"mlm_loss", "mlm_accuracy"}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: dataclasses.replace(TINY, num_heads=3), "not divisible"),
        (lambda: MaskedLM(mask_rate=0.0), "mask_rate"),
        (lambda: MaskedLM(mask_share=0.9, random_share=0.2), "sum to at most"),
        (lambda: MaskedLM(longest_ngram=0), "longest_ngram is 0"),
        (lambda: MaskedLM(max_predictions=-1), "max_predictions is -1"),
        (lambda: Albert(num_layers=2, num_groups=3), "num_groups 3 is more than num_layers 2"),
        (lambda: MaskedLM(model=Bert(type_vocab_size=1)).bind(Vocabulary.stand_in(300), 32), "needs 2 segment types"),
        (lambda: bound(length=65), "65 is more than the model's 64"),
        (lambda: bound(length=4), "no room"),
        (
            lambda: MaskedLM(model=TINY).bind(dataclasses.replace(Vocabulary.stand_in(300), mask=-1), 32),
            r"\[MASK\]",
        ),
    ],
)
def test_mistakes_are_one_sentence(make, words):
    with pytest.raises(UserError, match=words) as error:
        make()
    assert "\n" not in str(error.value)


def test_a_batch_has_another_row_for_a_second_segment():
    """A row alone has no partner, so that next-sentence prediction would have no labels."""
    for input_format, least in (("next-sentence", 2), ("sentence-order", 1), ("document", 1)):
        preset = Experiment(MaskedLM(model=TINY, input_format=input_format), data=TextData(length=32))
        with_value(preset, "train.batch_size", least).validate()
    with pytest.raises(UserError, match=r"train.batch_size is 1; MaskedLM needs 2 or more"):
        with_value(with_value(preset, "objective.input_format", "next-sentence"), "train.batch_size", 1).validate()
