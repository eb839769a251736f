"""Groups of rows that share texts, and the selection of held-out groups."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from jaxlm.data.holdout import draw_rows, group_rows


def groups_of(rows, documents=None):
    """Return the groups as sets of row numbers."""
    found = group_rows(rows, documents or [""] * len(rows))
    return {frozenset(np.flatnonzero(found == group).tolist()) for group in found}


@pytest.mark.parametrize(("rows", "groups"), [
    ([("a b c d", "e f g h"), ("e f g h", "i j k l"), ("i j k m", "n o p q")], {(0, 1), (2,)}),  # in either place
    ([("He is, in fact, old.",), ("in fact he IS in fact old!",), ("is in fact he old",)], {(0, 1), (2,)}),
    ([("a b c d e f",), ("c d e f",), ("x c d e f y",), ("d e f a b",)], {(0, 1, 2), (3,)}),
    ([("a good one here",), ("good",), ("a very good one here",), ("good",)], {(0,), (1, 2, 3)}),  # the longest
    ([("a b c d", "yes"), ("e f g h", "yes"), ("i j", "yes"), ("no", "yes i j")], {(0,), (1,), (2, 3)}),
    ([("!",), ("",), ("good",)], {(0, 1), (2,)}),
    ([("我非常爱你们大家。", "a b c d"), ("他说我非常爱你们大家", "e f g h"), ("我们走吧现在就走", "x")],
     {(0, 1), (2,)}),
    ([("लड़का सो रहा है",), ("लड़की सो रही है",), ("बहुत अच्छा",), ("यह बहुत अच्छा दिन है",), ("बहुत अच्छा काम है",)],
     {(0,), (1,), (2, 3), (4,)}),  # marks are letters: two words are few
])
def test_rows_that_share_texts_are_one_group(rows, groups):
    assert groups_of(rows) == set(map(frozenset, groups))


def test_rows_of_one_document_are_one_group():
    rows = [("Thanks .",), ("a b c d",), ("Thanks .",), ("e f g h",)]
    assert groups_of(rows, ["1", "1", "2", "2"]) == {frozenset({0, 1}), frozenset({2, 3})}
    assert groups_of(rows, ["1", "", "", "2"]) == {frozenset({0}), frozenset({1}), frozenset({2}), frozenset({3})}


def test_groups_are_those_of_all_pairs():
    """They equal those of comparing every pair of texts of four words or more."""
    random = np.random.default_rng(0)
    rows = [tuple("".join(random.choice(list("abcde"), random.integers(4, 9))) for _ in range(2)) for _ in range(150)]
    texts = [tuple(" ".join(text) for text in row) for row in rows]
    near = np.array([[any(x in y or y in x for x, y in itertools.product(a, b)) for b in rows] for a in rows])
    for _ in range(8):
        near = near @ near
    assert 30 < len(np.unique(near, axis=0)) < 120
    assert groups_of(texts) == {frozenset(np.flatnonzero(row).tolist()) for row in near}


def test_groups_are_drawn_up_to_the_rows_that_are_wanted():
    groups = np.repeat(np.arange(201), [600] + [2] * 200)
    drawn = draw_rows(groups, 100)
    assert drawn.sum() == 100 and not drawn[groups == 0].any()
    np.testing.assert_array_equal(drawn, draw_rows(groups, 100))
    assert set(groups[drawn]) & set(range(1, 101)) and set(groups[drawn]) & set(range(101, 201))
    np.testing.assert_array_equal(draw_rows(np.array([0, 0, 1, 1, 1]), 1), [True, True, False, False, False])
    assert not draw_rows(np.zeros(9, int), 1).any()
