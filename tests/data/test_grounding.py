"""Concepts in questions and choices, by the rules of the reference."""

import sys

import pytest

from jaxlm.data import grounding
from jaxlm.data.concept_graph import ConceptGraph
from jaxlm.data.grounding import Grounder, lemmatizer, statement
from jaxlm.errors import UserError


def ground(names, question, *choices):
    pytest.importorskip("simplemma")
    graph = ConceptGraph.of([(name, "isa", "unrelated") for name in names])
    found = Grounder(graph).ground(question, choices)
    return [[[graph.concepts[i] for i in side] for side in concepts] for concepts in found]


def test_concepts_are_found_by_lemmas_of_up_to_four_words():
    names = ["dog", "big_dog", "runs_in_the_park", "runs_in_the_park_today", "cat"]
    assert ground(names, "The big dogs ran in the parks today.", "a cat") == [[["big_dog", "dog"], ["cat"]]]
    # A concept with a stop word is kept in an answer only.
    assert ground(names, "Cats?", "running in the park") == [[["cat"], ["runs_in_the_park"]]]


def test_the_question_has_no_concept_of_the_choice():
    names = ["race", "track", "race_track", "car"]
    # Spans that share a word with the choice are left out, and so are concepts of the choice under another word.
    assert ground(names, "Which cars race on a race track?", "tracks", "track", "racing car") == [
        [["car", "race", "race_track"], ["track"]], [["car", "race"], ["track"]],
        [["race_track", "track"], ["car", "race"]],
    ]


def test_at_most_three_concepts_a_span_in_their_base_form():
    # All have the same lemmas; the shortest forms are kept, and a concept in its base form replaces its variants.
    names = ["eat_apple", "eats_apple", "ate_apple", "eating_apples", "eats_apples"]
    assert ground(names, "Who eats apples?", "nobody here")[0][0] == ["eat_apple"]
    # Without the base form three of four remain; a single word always takes its base form.
    names = ["eats_apple", "ate_apple", "eating_apples", "eats_apples", "apples", "apple"]
    assert ground(names, "Who eats apples?", "nobody here")[0][0] == ["apple", "ate_apple", "eats_apple", "eats_apples"]


def test_what_is_pruned():
    names = ["sometimes", "walk", "walker", "you_know", "hat", "up"]
    assert ground(names, "Does a walker walk sometimes, you know?", "hat up")[0] == [["walk"], ["hat"]]


def test_exact_forms_where_nothing_matches():
    # "one" is never a match but found as a lemma, where nothing else is.
    assert ground(["one", "two_of_a_very_long_kind"], "one", "Two of a very long kind") == [
        [["one"], ["two_of_a_very_long_kind"]]
    ]
    assert ground(["cat"], "nothing known", "?") == [[[], []]]


def test_statements():
    assert statement("Where would you put it?", "a drawer") == "A drawer would you put it."
    assert statement("Which is what?", "this") == "Which is this."
    assert statement("When tired, he goes to what?", "bed") == "When tired, he goes to bed."
    assert statement("I know who came. What did they bring?", "gifts") == "I know who came. gifts did they bring."
    assert statement("People who run need what kind of shoes?", "light") == "People who run need light kind of shoes."
    assert statement("The sky is", "blue") == "The sky is blue"
    assert statement("The ____ is blue?", r"\1 sky") == r"The \1 sky is blue?"


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "simplemma", None)
    lemmatizer.cache_clear()
    with pytest.raises(UserError, match=r"simplemma; install jaxlm\[knowledge\]"):
        grounding.lemmatizer()
    lemmatizer.cache_clear()
