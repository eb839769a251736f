"""Concepts in questions and choices, by the rules of the reference."""

import sys

import pytest

from jaxlm.errors import UserError
from jaxlm.knowledge import grounding
from jaxlm.knowledge.concept_graph import ConceptGraph
from jaxlm.knowledge.grounding import Grounder, lemmatizer, statement


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


# What datasets/convert_csqa.py of INK-USC/KagNet gives.
STATEMENTS = [
    ("Where would you put it?", "a drawer", "A drawer would you put it."),
    ("What's a place where you can see stars?", "New York", "New York is a place where you can see stars."),
    ("I know who came. What did they bring?", "gifts", "I know who came. Gifts did they bring."),
    ("What is it?", "éa", "Éa is it."),
    # In lower case within a sentence, without its period in front of other text.
    ("When tired, he goes to what?", "Bed.", "When tired, he goes to bed."),
    ("What is it?", "...", " is it."),
    ("I like.", "Tea.", "I like tea."),
    # The word before the question mark comes first, in the order of the list; then the first of the last sentence.
    ("Which is what?", "this", "Which is this."),
    ("Who? Or what?", "x", "Who? Or x."),
    ("He is here. Where is she? She is there.", "Home", "He is here. Home is she? She is there."),
    ("Where is she. Tell me", "Home", "Where is she. Tell me home"),
    ("Where is she?? ", "Home", "Home is she?."),
    ("Show me the way", "x", "Sx me the way"),
    ("What.", "x", "What x"),
    ("people who run need what kind of shoes?", "Light", "people who run need light kind of shoes."),
    ("People who run need what kind of shoes?", "light", "People light run need what kind of shoes."),
    ("Which of the following is a fruit?", "Apple", "Apple is a fruit."),
    ("He saw which of these?", "Apple", "He saw apple."),
    ("whats the name?", "Bob", "Bob the name."),
    ("The U.S. city is where?", "New York", "The US city is new york."),
    # Blanks stay blanks.
    ("Where does ____ live?", "Bob", "Bob does Bob live."),
    ("The ____ is blue", "Sky.", "The sky. is blue sky."),
    ("The _ is red.", "x", "The _ is red."),
    # No question word.
    ("Cats and dogs, are them called?", "Pets", "Cats and dogs, are pets."),
    ("He laughed, meaning he was not?", "Sad", "He laughed, he was not sad."),
    ("A cat is one of these?", "Animal", "A cat is animal."),
    ("Every task requires this?", "Energy", "Every task requires energy "),
    ("Every task requires this energy?", "Lots", "Every task requires lots energy?"),
    ("The sky is", "Blue", "The sky is blue"),
    ("Do U.S. students like it?", "Yes", "Do U.S. students like it yes"),
]


@pytest.mark.parametrize(("question", "choice", "expected"), STATEMENTS)
def test_statements_are_the_reference_ones(question, choice, expected):
    assert statement(question, choice) == expected
    assert statement(f" {question} ", choice) == expected


def test_choices_are_no_patterns():
    assert statement("The ____ is blue?", r"\1 sky") == r"The \1 sky is blue?"
    assert statement("What is it?", "") == " is it."


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "simplemma", None)
    lemmatizer.cache_clear()
    with pytest.raises(UserError, match=r"simplemma; in the clone, run .*\[knowledge\]"):
        grounding.lemmatizer()
    lemmatizer.cache_clear()
