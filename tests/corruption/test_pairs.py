"""Next-sentence pairs: the tokens they preserve, the rate of swaps, the choice of partners."""

from __future__ import annotations

import collections
import functools
import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxlm.corruption.pairs import at_source, inverse_cloze, sentence_pairs, shorten, single_segments
from jaxlm.types import TokenBatch
from tests.params import first_fast

PAD, CLS, SEP = 0, 1, 2
V = 70_000
EVERY = 7  # a sentence ends with the tokens at positions 6, 13, 20, ... of a row
WORD_START, SENTENCE_END = np.ones(V, bool), np.arange(V) % 1000 % EVERY == EVERY - 1
NOWHERE = np.zeros(V, bool)


def batch(sizes: list[int], length: int, documents: list[int] | None = None) -> TokenBatch:
    """Return rows of one document each with token = 1000·row + position, so that every token shows its origin."""
    tokens = 1000 * (1 + np.arange(len(sizes)))[:, None] + np.arange(length)[None]
    real = np.arange(length)[None] < np.array(sizes)[:, None]
    documents = np.array(documents or range(1, 1 + len(sizes)))[:, None]
    return TokenBatch(np.where(real, tokens, PAD).astype(np.int32), np.where(real, documents, 0).astype(np.int32))


@functools.partial(jax.jit, static_argnames=("rate", "single"))
def make_pairs(key: jax.Array, b: TokenBatch, word_start, sentence_end, rate: float, single: float):
    return sentence_pairs(
        key, b, word_start, sentence_end, cls=CLS, sep=SEP, pad=PAD, random_rate=rate, single_rate=single
    )


def pairs(seed: int, b: TokenBatch, rate: float = 0.5, word_start=WORD_START, sentence_end=SENTENCE_END, single=0.0):
    return jax.device_get(make_pairs(jax.random.key(seed), b, word_start, sentence_end, rate=rate, single=single))


def split(p, row: int) -> tuple[list[int], list[int]]:
    """Check the form of a row and return its A and B."""
    real = int(p.attention_mask[row].sum())
    ids, types = p.input_ids[row].tolist(), p.token_type_ids[row].tolist()
    middle = ids.index(SEP)
    assert ids[0] == CLS and ids[real - 1] == SEP and set(ids[real:]) <= {PAD}
    assert types == [0] * (middle + 1) + [1] * (real - middle - 1) + [0] * (len(ids) - real)
    return ids[1:middle], ids[middle + 1 : real - 1]


def test_rows_are_cut_where_a_sentence_ends():
    """Every sentence end outside the first and last tenth of a row is equally likely."""
    sizes = [29, 29, 10, 28, 5, 2, 1, 112]
    b, cuts = batch(sizes, 112), {row: [] for row in range(len(sizes))}
    for seed in range(150):
        p = pairs(seed, b, rate=0.0)
        assert not p.label.any() and p.has_pair.tolist() == [1, 1, 1, 1, 1, 1, 0, 1]
        for row, size in enumerate(sizes):
            first, second = split(p, row)
            assert first + second == b.tokens[row][:size].tolist()  # nothing is lost
            cuts[row].append(len(first))
    assert pairs(0, b, rate=0).has_pair.any()  # a whole number is a rate, too
    assert set(cuts[0]) == {7, 14, 21} and set(cuts[2]) == {7} and set(cuts[7]) == set(range(14, 99, 7))
    assert set(cuts[4]) == {2, 3} and set(cuts[5]) == {1}  # no sentence end: split at the middle
    share = np.bincount(cuts[0] + cuts[1])[[7, 14, 21]] / 300
    assert (abs(share - 1 / 3) < 4 * np.sqrt(2 / 9 / 300)).all()


@pytest.mark.parametrize("single", first_fast([0.5, 0.0]))
def test_what_belongs_to_a_token_goes_where_the_token_goes(single):
    sizes = [*range(40), 39, 0]
    b = batch(sizes, 40)
    swapped = 0
    for seed in range(10):
        p = pairs(seed, b, single=single)
        copied = np.asarray(at_source(jnp.asarray(b.tokens), jnp.asarray(p.source)))
        is_text = ~np.isin(p.input_ids, [CLS, SEP, PAD])
        np.testing.assert_array_equal(copied, np.where(is_text, p.input_ids, -1))
        swapped += p.label.sum()
    assert swapped > 20


def test_where_nothing_ends_rows_are_cut_at_a_word_near_the_middle():
    b = batch([29, 29, 29], 29)
    starts = NOWHERE.copy()
    starts[[1000 + 16, 1000 + 10, 2000 + 3]] = True  # near, farther, and too far to be chosen
    p = pairs(0, b, 0.0, starts, NOWHERE)
    found = [len(split(p, row)[0]) for row in range(3)]
    assert found[0] == 16 and set(found[1:]) <= {14, 15}  # either of two equally near positions


def test_a_sentence_ends_after_its_last_sign_and_before_a_word():
    """"?!" ends one sentence; the point in "3.14", whose pieces begin no word, ends none."""
    b = batch([20] * 2, 20)
    ends, starts = NOWHERE.copy(), WORD_START.copy()
    ends[[1000 + 4, 1000 + 5, 2000 + 4, 2000 + 11]] = True
    starts[2000 + 5] = False
    for seed in range(20):
        p = pairs(seed, b, 0.0, starts, ends)
        assert [len(split(p, row)[0]) for row in range(2)] == [6, 12]


def test_the_second_part_is_of_another_row():
    b = batch([29, 29, 10, 2, 1, 0, 28, 5], 29)
    swaps = {row: set() for row in range(8)}
    for seed in range(60):
        p = pairs(seed, b)
        assert not p.attention_mask[5].any() and not p.input_ids[5].any() and not p.has_pair[5]
        for row, size in enumerate([29, 29, 10, 2, 1, 0, 28, 5]):
            if size == 0:
                continue
            (first, second), text = split(p, row), b.tokens[row][:size].tolist()
            assert first == text[: len(first)]
            other = second[0] // 1000 - 1 if second else row
            swaps[row].add(other)
            assert p.label[row] == (other != row)
            if other == row:  # its own part, cut to the size of its partner's
                assert second == text[len(first) :][: len(second)]
            else:  # the text after the partner's cut
                start = second[0] % 1000
                assert start % EVERY == 0 or b.segment_ids[other].sum() // (other + 1) in (2, 5)
                assert second == b.tokens[other][start : start + len(second)].tolist()
    assert swaps[4] == {4} and all(row in swaps[row] and len(swaps[row]) > 1 for row in (0, 1, 2, 3, 6, 7))


@pytest.mark.slow
def test_rows_without_a_sentence_end_swap_among_themselves():
    """A part that begins within a sentence would reveal that it does not belong to a first part that ends one."""
    b = batch([29] * 32, 29)
    ends = SENTENCE_END.copy()
    ends[16_500:] = False  # rows from the 17th on
    for seed in range(20):
        p = pairs(seed, b, 1.0, sentence_end=ends)
        assert p.label.all()
        other = np.array([split(p, row)[1][0] // 1000 - 1 for row in range(32)])
        assert ((other >= 16) == (np.arange(32) >= 16)).all()


@pytest.mark.slow
def test_rows_of_one_size_have_every_partner():
    b, met = batch([20] * 6, 20), {row: set() for row in range(6)}
    for seed in range(160):
        for row, ids in enumerate(pairs(seed, b, 1.0, sentence_end=NOWHERE).input_ids):
            met[row].add(int(ids[-2]) // 1000 - 1)
    assert all(met[row] == set(range(6)) - {row} for row in range(6))


def test_the_second_part_is_never_of_the_same_document():
    rng = np.random.default_rng(0)
    documents = rng.integers(1, 5, 64).tolist()  # a random partner shares the document with probability 1/4
    b = batch(rng.integers(20, 31, 64).tolist(), 30, documents)
    swapped, labelled = 0, 0
    for seed in range(40):
        p = pairs(seed, b)
        for row in np.flatnonzero(p.label):
            assert documents[split(p, row)[1][0] // 1000 - 1] != documents[row]
        swapped += p.label.sum()
        labelled += p.has_pair.sum()
    assert labelled > 0.9 * 40 * 64 and abs(swapped / labelled - 0.5) < 5 * np.sqrt(0.25 / labelled)
    alone = pairs(0, batch([30] * 8, 30, [3] * 8), rate=1.0)
    assert not alone.label.any() and not alone.has_pair.any()  # the label would be constant


@pytest.mark.parametrize("num_documents", first_fast([4, 2, 16, 64]))
def test_length_and_position_do_not_tell_the_label(num_documents):
    """Partners are mutual; so the label depends neither on the row's size, place and cut nor on where B breaks off."""
    rng = np.random.default_rng(0)
    sizes, documents = rng.integers(15, 31, 64), rng.integers(1, num_documents + 1, 64)
    b, found, rows = batch(sizes.tolist(), 30, documents.tolist()), [], np.arange(64)
    for seed in range(120):
        every = pairs(seed, b, 1.0)
        size = every.attention_mask.sum(1)
        last = every.input_ids[rows, size - 2]
        source = last // 1000 - 1
        assert (source[source] == rows).all() and ((source != rows) == every.has_pair).all()
        p = pairs(seed, b)  # the same partners
        last = p.input_ids[rows, size - 2]
        is_whole = last % 1000 == sizes[last // 1000 - 1] - 1
        cut = p.token_type_ids.sum(1)
        shapes = [size, cut, rows, is_whole, sizes, documents]
        found.append(np.stack([p.label, *shapes])[:, p.has_pair > 0])
    label, *features = np.concatenate(found, axis=1)
    assert len(label) > 0.5 * 120 * 64
    for feature in features:
        table = np.stack([np.bincount(feature[label == value], minlength=feature.max() + 1) for value in (0, 1)])
        assert scipy.stats.chi2_contingency(table[:, table.sum(0) >= 20]).pvalue > 1e-4


@pytest.mark.slow
def test_sizes_do_not_tell_what_was_swapped():
    """With the same key, hence the same partners, rows have the same shape whether all swap or none."""
    b = batch(np.random.default_rng(0).integers(0, 31, 33).tolist(), 30)
    for seed in range(20):
        none, every = pairs(seed, b, rate=1e-9), pairs(seed, b, rate=1.0)
        assert none.label.sum() == 0 and every.label.sum() >= every.has_pair.sum() - 4
        np.testing.assert_array_equal(none.attention_mask, every.attention_mask)
        np.testing.assert_array_equal(none.token_type_ids, every.token_type_ids)


def test_half_of_the_rows_are_swapped():
    b = batch([30] * 64, 30)
    share = np.mean([pairs(seed, b).label.mean() for seed in range(60)])
    assert abs(share - 0.5) < 5 * np.sqrt(0.25 / (60 * 64))
    assert pairs(0, b, rate=0.0).label.sum() == 0
    assert pairs(0, b, rate=1.0).label.sum() == 64


def test_a_batch_of_one_row_has_no_partner():
    p = pairs(0, batch([20], 20), rate=1.0)
    assert p.label.tolist() == [0]
    assert [*split(p, 0)[0], *split(p, 0)[1]] == list(range(1000, 1020))


def bert_lengths(documents: list[list[int]], length: int, draw: random.Random) -> list[tuple[int, int]]:
    """Run BERT's create_pretraining_data.py (Devlin et al. 2018) over documents given as lengths of sentences.

    Returns:
        For each full row the number of tokens of A, and whether B is random.
    """
    found, target = [], length - 3
    for document in documents:
        chunk, i = [], 0
        while i < len(document):
            chunk.append(document[i])
            if i == len(document) - 1 or sum(chunk) >= target:
                cut = 1 if len(chunk) == 1 else draw.randint(1, len(chunk) - 1)
                a, b = sum(chunk[:cut]), sum(chunk[cut:])
                is_random = len(chunk) == 1 or draw.random() < 0.5
                if is_random:
                    other = draw.choice(documents)
                    b = 0
                    for size in other[draw.randint(0, len(other) - 1) :]:
                        b += size
                        if b >= target - a:
                            break
                    i -= len(chunk) - cut
                while a + b > target:
                    a, b = (a - 1, b) if a > b else (a, b - 1)
                found.append((a, is_random))
                chunk = []
            i += 1
    return found


@pytest.mark.slow
def test_lengths_spread_as_in_the_reference():
    """Segment A in rows of 128: BERT's own algorithm and ours over the same sentences."""
    draw, rng = random.Random(0), np.random.default_rng(0)
    documents = [[int(n) for n in np.clip(rng.lognormal(3.1, 0.5, 40), 4, 80)] for _ in range(150)]
    theirs = np.array([a for a, _ in bert_lengths(documents, 128, draw)])

    ends, rows = np.arange(V) == 5, []
    for document in documents:
        text = np.concatenate([np.r_[np.full(size - 1, 3), 5] for size in document])
        rows += [text[start : start + 125] for start in range(0, len(text) - 125, 125)]
    rows = np.stack(rows[:512]).astype(np.int32)
    numbers = np.broadcast_to(np.arange(1, 513, dtype=np.int32)[:, None], rows.shape)
    ours, ended = [], []
    for seed in range(8):
        p = pairs(seed, TokenBatch(rows, numbers), sentence_end=ends)
        size = ((p.token_type_ids == 0) & (p.attention_mask > 0)).sum(1) - 2
        ours.append(size)
        ended.append(p.input_ids[np.arange(512), size] == 5)
    assert 27 < theirs.std() < 31
    assert abs(np.std(ours) - theirs.std()) < 2
    assert abs(np.mean(ours) - theirs.mean()) < 8  # where B is random, the reference starts the next row in this one
    assert np.mean(ended) > 0.99


one_segment = jax.jit(functools.partial(single_segments, cls=CLS, sep=SEP, pad=PAD))


def test_single_segments():
    b = batch([5, 0, 3], 5)
    device = TokenBatch(jnp.asarray(b.tokens), jnp.asarray(b.segment_ids))
    ids, mask, source = one_segment(device)
    assert ids.tolist() == [[1, 1000, 1001, 1002, 1003, 1004, 2], [0] * 7, [1, 3000, 3001, 3002, 2, 0, 0]]
    assert mask.tolist() == [[1] * 7, [0] * 7, [1] * 5 + [0] * 2]
    assert source.tolist() == [[-1, 0, 1, 2, 3, 4, -1], [-1] * 7, [-1, 10, 11, 12, -1, -1, -1]]


def test_a_row_across_documents_is_one_segment():
    """RoBERTa's full sentences: one [CLS], one [SEP], and attention across the end of a document."""
    b = batch([5, 3], 5)
    device = TokenBatch(jnp.asarray(b.tokens), jnp.asarray([[1, 1, 2, 3, 3], [1, 2, 2, 0, 0]], jnp.int32))
    for one, many in zip(
        one_segment(TokenBatch(*map(jnp.asarray, b[:2]))), one_segment(device), strict=True,
    ):
        np.testing.assert_array_equal(many, one)


@pytest.mark.parametrize(("rate", "least"), first_fast([(0.05, 5), (0.1, 2), (1.0, 2), (0.0, 2)]))
def test_short_rows(rate, least):
    """BERT's short_seq_prob of 0.1 from 2 tokens on, ELECTRA's 0.05 from 5; all lengths are equally likely."""
    width, rows, draws = 29, 64, 200
    b = batch([width] * rows, width)
    b = b._replace(entities=b.tokens)
    cut = jax.jit(lambda key: shorten(key, b, rate=rate, least=least))
    sizes = []
    for seed in range(draws):
        short = jax.device_get(cut(jax.random.key(seed)))
        size = (short.segment_ids > 0).sum(1)
        kept = np.arange(width) < size[:, None]
        np.testing.assert_array_equal(short.tokens, np.where(kept, b.tokens, PAD))
        np.testing.assert_array_equal(short.segment_ids, np.where(kept, b.segment_ids, 0))
        np.testing.assert_array_equal(short.entities, np.where(kept, b.tokens, -1))
        sizes.append(size)
    sizes = np.concatenate(sizes)
    assert sizes.min() >= least
    counts = np.bincount(sizes, minlength=width + 1)[least:]
    expected = np.full(len(counts), rate / len(counts))
    expected[-1] += 1 - rate  # the whole width is one of the lengths drawn
    assert (abs(counts - len(sizes) * expected) <= 4.5 * np.sqrt(len(sizes) * expected * (1 - expected))).all()
    if rate == 1:
        chi = ((counts - len(sizes) * expected) ** 2 / (len(sizes) * expected)).sum()
        assert chi < scipy.stats.chi2.ppf(0.999, len(counts) - 1)


@pytest.mark.slow
def test_short_rows_of_rows_that_are_short_already():
    b = batch([3, 0, 29], 29)
    for seed in range(40):
        short = shorten(jax.random.key(seed), b, rate=1.0, least=5)
        sizes = (np.asarray(short.segment_ids) > 0).sum(1)
        assert sizes[:2].tolist() == [3, 0] and sizes[2] >= 5


def test_some_rows_stay_one_segment():
    """ELECTRA's one in ten: [CLS] text [SEP] without loss, all of the first type, never swapped."""
    b = batch([29, 29, 10, 2], 29)
    single = 0
    for seed in range(400):
        p = pairs(seed, b, rate=0.0, single=0.1)
        for row, size in enumerate([29, 29, 10, 2]):
            ids = p.input_ids[row][p.attention_mask[row] > 0].tolist()
            text = b.tokens[row][:size].tolist()
            assert [i for i in ids if i not in (CLS, SEP)] == text
            if ids.count(SEP) == 1:
                single += 1
                assert ids == [CLS, *text, SEP] and not p.token_type_ids[row].any() and not p.has_pair[row]
            else:
                assert min(map(len, split(p, row))) >= 1 and p.has_pair[row]
    assert abs(single - 160) < 4 * np.sqrt(1600 * 0.1 * 0.9)


def test_inverse_cloze_takes_any_sentence_out_of_its_row():
    """By chi-square every sentence is as likely, also the one that the row cuts off, and a tenth of them stays."""
    sizes = [40, 31, 7, 2, 1, 0]
    b, longest = batch(sizes, 40), 5
    tables = jnp.asarray(WORD_START), jnp.asarray(SENTENCE_END)
    make = jax.jit(lambda key: inverse_cloze(key, b, *tables, keep_rate=0.1, longest=longest))
    drawn, kept = {row: collections.Counter() for row in range(len(sizes))}, []
    for seed in range(600):
        pair = jax.device_get(make(jax.random.key(seed)))
        texts = [[row[real > 0].tolist() for row, real in zip(*each[:2], strict=True)] for each in pair]
        for row, (size, query, rest) in enumerate(zip(sizes, *texts, strict=True)):
            if size < 2:
                assert query == rest == []
                continue
            text = b.tokens[row][:size].tolist()
            # Sentences of seven tokens; a row of one sentence is in two halves.
            starts = [0, size // 2, size] if size <= EVERY else [*range(0, size, EVERY), size]
            spans = [text[i:j] for i, j in itertools.pairwise(starts)]
            if size == EVERY:  # the middle is between two tokens
                spans = [text[:3], text[3:]] if query in (text[:3], text[3:]) else [text[:4], text[4:]]
            place = [span[:longest] for span in spans].index(query)
            drawn[row][place] += 1
            left = [token for i, span in enumerate(spans) if i != place for token in span]
            assert rest in (left, text)
            kept.append(rest == text)
    for row in range(2):
        counts = [drawn[row][place] for place in range(-(-sizes[row] // EVERY))]
        assert scipy.stats.chisquare(counts).pvalue > 1e-3
    assert scipy.stats.binomtest(sum(kept), len(kept), 0.1).pvalue > 1e-3
