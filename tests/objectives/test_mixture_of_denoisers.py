"""UL2's mixture of denoisers: shares, spans and texts of corrupted rows by the paper's formulas; loss; `show`."""

from __future__ import annotations

import math
from collections import Counter

import jax
import numpy as np
import pytest

from jaxlm.corruption.spans import span_lengths
from jaxlm.errors import UserError
from jaxlm.models.t5 import T5
from jaxlm.objectives.base import total_loss
from jaxlm.objectives.mixture_of_denoisers import MODES, MixtureOfDenoisers
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import TokenBatch
from tests.corruption.test_spans import chi_square_p_value, merge
from tests.objectives.test_span_corruption import slow_loss

V = Vocabulary.stand_in(10_200, MODES)
MODEL = T5(hidden_size=12, num_layers=1, num_heads=2, head_dim=4, intermediate_size=16)
LENGTH = 64
RAW = LENGTH - 1
# Table 1 of the paper: mode, corruption rate, mean span → share of the rows with 40 % R, 40 % X and 20 % S.
TABLE = {
    ("[NLU]", 0.15, 3): 0.2, ("[NLU]", 0.15, 8): 0.2, ("[NLG]", 0.5, 3): 0.1, ("[NLG]", 0.5, 8): 0.1,
    ("[NLG]", 0.15, 64): 0.1, ("[NLG]", 0.5, 64): 0.1,
}


def bound(length: int = LENGTH, **changes) -> MixtureOfDenoisers:
    return MixtureOfDenoisers(model=MODEL, **changes).bind(V, length)


def text(sizes: list[int], raw: int = RAW) -> TokenBatch:
    """Distinct tokens in each row, so that a token out of place is seen."""
    rng = np.random.default_rng(0)
    tokens = np.stack([rng.permutation(10_000)[:raw] + 150 for _ in sizes])
    real = np.arange(raw)[None, :] < np.array(sizes)[:, None]
    return TokenBatch(np.where(real, tokens, V.pad).astype(np.int32), real.astype(np.int32))


def corrupted(batch: TokenBatch, objective: MixtureOfDenoisers) -> dict[str, np.ndarray]:
    return jax.tree.map(np.asarray, jax.jit(objective.corrupt)(jax.random.key(1), batch))


def read(example: dict[str, np.ndarray], row: int) -> tuple[str, list[int], list[bool]]:
    """(mode, the text that inputs and targets come from, which of it was taken out)."""
    inputs = example["input_ids"][row][example["attention_mask"][row] > 0].tolist()
    targets = example["labels"][row][example["weights"][row] > 0].tolist()
    mode = next(name for name in MODES if V.id(name) == inputs[0])
    assert inputs[-1] == targets[-1] == V.eos
    if mode != "[S2S]":
        return mode, *merge(inputs[1:], targets)
    return mode, inputs[1:-1] + targets[:-1], [False] * (len(inputs) - 2) + [True] * (len(targets) - 1)


def spans_of(noise: list[bool]) -> list[int]:
    """Lengths of the runs of noise."""
    return [len(run) for run in "".join("x" if is_noise else " " for is_noise in noise).split()]


SIZES = [RAW] * 4000 + list(range(RAW + 1)) * 2
"""Full rows, and two of every size."""


@pytest.fixture(scope="module")
def batch() -> TokenBatch:
    return text(SIZES)


@pytest.fixture(scope="module")
def example(batch) -> dict[str, np.ndarray]:
    return corrupted(batch, bound())


@pytest.fixture(scope="module")
def rows(batch, example) -> list[tuple[str, list[int]]]:
    """(mode, lengths of the spans) of the full rows, from which no token is lost."""
    found = []
    for row in range(4000):
        mode, merged, noise = read(example, row)
        assert merged == batch.tokens[row].tolist()
        found.append((mode, spans_of(noise)))
    return found


def test_denoisers_have_their_shares(rows):
    drawn = Counter((mode, sum(spans), len(spans)) for mode, spans in rows if mode != "[S2S]")
    expected = {(mode, *span_lengths(RAW, rate, mean)[1:3]): share for (mode, rate, mean), share in TABLE.items()}
    assert drawn.keys() == expected.keys() and len(expected) == 6
    shares = {denoiser: count / len(rows) for denoiser, count in drawn.items()}
    shares["S"] = sum(mode == "[S2S]" for mode, _ in rows) / len(rows)
    for denoiser, share in {**expected, "S": 0.2}.items():
        assert abs(shares[denoiser] - share) < 4 * math.sqrt(share * (1 - share) / len(rows)), denoiser


def test_spans_have_the_lengths_of_the_formulas(rows):
    """P(first span = k) = C(n - k - 1, s - 2) / C(n - 1, s - 1) for n tokens in s spans, all compositions alike.
    The S-denoiser's span has a uniform length whose mean is a quarter of the row."""
    for rate, mean in ((0.15, 3), (0.5, 3), (0.5, 8)):
        n, s = span_lengths(RAW, rate, mean)[1:3]
        first = Counter(spans[0] for _, spans in rows if (sum(spans), len(spans)) == (n, s))
        assert first.total() > 300
        for k in range(1, n - s + 2):
            p = math.comb(n - k - 1, s - 2) / math.comb(n - 1, s - 1)
            assert abs(first[k] - p * first.total()) <= 5 * math.sqrt(p * first.total()) + 1, (rate, mean, k)
    lengths = [spans for mode, spans in rows if mode == "[S2S]"]
    assert {len(spans) for spans in lengths} == {1}
    counts = Counter(spans[0] for spans in lengths)
    assert set(counts) == set(range(1, RAW // 2 + 1))
    assert chi_square_p_value(list(counts.values())) > 1e-4
    assert abs(np.mean([spans[0] for spans in lengths]) / RAW - 0.25) < 0.02


def test_short_rows_and_empty_ones(batch, example):
    objective = bound()
    lengths = objective.lengths(LENGTH)
    assert example["input_ids"].shape == (len(SIZES), LENGTH) and objective.row_format(LENGTH).length == RAW
    assert example["labels"].shape == (len(SIZES), lengths.targets) == (len(SIZES), span_lengths(RAW, 0.5).targets)
    np.testing.assert_array_equal(example["attention_mask"], example["input_ids"] > 0)
    np.testing.assert_array_equal(example["weights"], example["labels"] > 0)
    np.testing.assert_array_equal(example["decoder_input_ids"][:, 1:], example["labels"][:, :-1])
    for row, size in list(enumerate(SIZES))[4000:]:
        if size < 2:
            assert not example["input_ids"][row].any() and not example["labels"][row].any()
        else:
            mode, merged, noise = read(example, row)
            assert merged == batch.tokens[row][:size].tolist() and 0 < sum(noise) < size
            whole, shown, target = objective.describe(batch, example, row)
            assert whole.ids == merged and [mark == "span" for mark in whole.marks] == noise
            assert shown.ids[0] == V.id(mode) and shown.marks[0] == "special"
            assert target.ids == example["labels"][row][example["weights"][row] > 0].tolist()


def test_shares_are_those_of_the_kinds():
    assert bound(shares=(0.0, 0.5, 0.5)).rates == [0.0, 0.0, 0.125, 0.125, 0.125, 0.125, 0.5]
    assert sum(bound(shares=(0.25, 0.25, 0.5)).rates) == 1.0


@pytest.mark.slow
def test_the_shortest_rows_lose_nothing_and_have_the_loss_of_the_formulas():
    objective = bound(16, z_loss=0.01)
    batch = text([15] * 100 + [1], 15)
    example = corrupted(batch, objective)
    modes = []
    for row in range(100):
        mode, merged, _ = read(example, row)
        modes.append(mode)
        assert merged == batch.tokens[row].tolist()
    chosen = np.array([*map(modes.index, MODES), 100])
    example = {name: array[chosen] for name, array in example.items()}
    params = jax.jit(objective.init)(jax.random.key(0))
    terms = jax.jit(lambda p, e: objective.loss(p, e, jax.random.key(0), False))(params, example)
    assert set(terms) == {"denoising_loss", "denoising_accuracy", "z_loss"}
    expected = jax.jit(lambda p: slow_loss(objective.model, p, example, 0.01))(params)
    assert float(total_loss(terms)) == pytest.approx(float(expected), abs=1e-5)


@pytest.mark.parametrize(("make", "sentence"), [
    (lambda: bound(15), "data.length 15 is too short for seven denoisers; use 16 or more."),
    (lambda: bound(1024), "data.length 1024 needs 171 sentinels but a stand-in vocabulary of 10200 has 100"),
    (lambda: bound(shares=(0.5, 0.5, 0.5)), "objective.shares is (0.5, 0.5, 0.5); they must be at least 0 and add up"),
    (lambda: bound(shares=(-0.5, 0.5, 1.0)), "they must be at least 0 and add up to 1."),
    (lambda: corrupted(text([RAW]), MixtureOfDenoisers(model=MODEL).bind(Vocabulary.stand_in(300), LENGTH)),
     "a stand-in vocabulary of 300 has no special token [NLU]"),
])
def test_mistakes_are_told_in_one_sentence(make, sentence):
    with pytest.raises(UserError) as caught:
        make()
    assert sentence in str(caught.value) and "\n" not in str(caught.value)
