"""Bootstrap intervals and paired comparisons of evaluations."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats

from jaxlm.data.labelled import Record
from jaxlm.errors import UserError
from jaxlm.tasks import evaluate as evaluation
from jaxlm.tasks.base import Answer
from jaxlm.tasks.classification import Classification


def canned_answers(right, group=1):
    """Return answers to rows of which `right` are right, by groups of one text, and one more row without a label."""
    records = [Record(str(i), f"row {i}", {"label": "a"}, (f"text {i // group}",)) for i in range(len(right) + 1)]
    answers = [Answer("a" if is_right else "b", {}) for is_right in right] + [Answer("b", {})]
    return evaluation.AnsweredRows(
        Classification(labels=("a", "b")), records, ["a"] * len(right) + [None], answers, 0
    )


def test_intervals_as_scipy_has_them():
    right = np.random.default_rng(1).random(200) < 0.8
    found = evaluation.intervals(canned_answers(right), 2000)["intervals"]
    wanted = scipy.stats.bootstrap((right,), np.mean, method="percentile", n_resamples=2000, rng=0).confidence_interval
    assert found["accuracy"] == pytest.approx(wanted, abs=0.012)  # two draws of 2,000 resamples differ by so much


def test_the_coverage_of_intervals_of_grouped_rows(monkeypatch):
    """Five rows about a passage are right together with a probability of its own, of which the mean is 0.5."""
    monkeypatch.setattr(Classification, "score", lambda self, golds, answers: {"accuracy": np.mean(
        [answer.prediction == gold for gold, answer in zip(golds, answers, strict=True)])})
    draws, covered = np.random.default_rng(0), 0
    for _ in range(120):
        right = draws.random((30, 5)) < draws.choice([0.1, 0.9], (30, 1))
        found = evaluation.intervals(canned_answers(right.ravel(), 5), 100)
        assert found["groups"] == 30
        low, high = found["intervals"]["accuracy"]
        covered += low <= 0.5 <= high
    assert 0.88 <= covered / 120 <= 0.98, covered


def test_a_metric_that_a_resample_lacks_has_an_interval(monkeypatch):
    """As questions without an answer, of which a file may have one."""
    monkeypatch.setattr(Classification, "score", lambda self, golds, answers: {"all": 1.0} | (
        {} if all(answer.prediction == "a" for answer in answers) else {"some": 0.5}))
    found = evaluation.intervals(canned_answers([True] * 5 + [False]), 100)["intervals"]
    assert found == {"all": [1.0, 1.0], "some": [0.5, 0.5]}
    assert evaluation.intervals(canned_answers([True] * 5, 9), 100) == {"groups": 1, "intervals": {}}


def test_a_comparison_is_paired():
    right = np.random.default_rng(1).random(400) < 0.7
    better = right.copy()
    better[np.flatnonzero(~right)[:20]] = True  # 5 points, always in the same direction
    found = evaluation.compare(canned_answers(better), canned_answers(right), 500)
    assert found["differences"]["accuracy"] == pytest.approx(0.05)
    low, high = found["intervals"]["accuracy"]
    assert 0.02 < low < 0.05 < high < 0.08  # unpaired, the interval would be about ±0.06 and hold 0
    same = evaluation.compare(canned_answers(right), canned_answers(right), 50)
    assert same["intervals"]["accuracy"] == [0.0, 0.0]
    with pytest.raises(UserError, match="not of the same task and rows"):
        evaluation.compare(canned_answers(right), canned_answers(right[:-1]), 50)
