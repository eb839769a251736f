"""Concepts that a question and a choice mention, found by the lemmas of up to four words (KagNet).

The rules are those of the reference, with the lemmas of the package simplemma for spaCy's. The vocabulary is that of
the pruned graph, since other concepts have no paths. Matches may overlap.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxlm.errors import UserError, install
from jaxlm.knowledge.concept_graph import STOP_WORDS, ConceptGraph

LONGEST = 4
"""Words of a concept at most."""
_PER_SPAN = 3
_PRONOUNS = frozenset((
    "i", "my", "you", "your", "he", "his", "she", "her", "it", "its", "we", "our", "they", "them", "their",
))
_IGNORED = frozenset((
    "actually", "likely", "possibly", "sometimes", "would", "could", "could_be", "want", "want_to", "make", "my", "one",
    "someone", "somebody", "everybody", "something", "sometimes_people",
))
"""Concepts without content that are never taken from a text."""
_QUESTION_WORDS = ("which", "what", "where", "when", "how", "who", "why")
_BLANK = "___"
_BLANK_PHRASES = {" them called?": f" {_BLANK}.", " meaning he was not?": f" he was not {_BLANK}.",
                  " one of these?": f" {_BLANK}."}
"""Ends of questions without a question word, and what stands for each."""
_word = re.compile(r"[^\W_]+")


class Concepts(NamedTuple):
    """Numbers of the concepts of a question and of one choice, each ascending and without duplicates."""

    question: tuple[int, ...]
    answer: tuple[int, ...]


class _Match(NamedTuple):
    words: frozenset[str]
    """Words of the span."""
    concepts: tuple[str, ...]


class Grounder:
    """Finder of the concepts of a graph in texts."""

    def __init__(self, graph: ConceptGraph) -> None:
        """Index the concepts by their lemmas; raise UserError without the package simplemma."""
        self._lemma = lemmatizer()
        self._ids = graph.ids
        self._index: dict[tuple[str, ...], list[str]] = {}
        for name in graph.concepts:
            words = _words(name.replace("_", " "))
            if not 1 <= len(words) <= LONGEST or words[0] in _PRONOUNS or words[-1] in _PRONOUNS:
                continue
            lemmas = tuple(map(self._lemma, words))
            if any(w not in STOP_WORDS and x not in STOP_WORDS for w, x in zip(words, lemmas, strict=True)):
                self._index.setdefault(lemmas, []).append(name)

    def ground(self, question: str, choices: Sequence[str]) -> list[Concepts]:
        """Return the concepts of the question, as seen beside each choice, and of the choice.

        A match in the question is left out beside a choice that shares a word with it or has its concept.
        """
        matches, found = self._matches(question), []
        for choice in choices:
            words = frozenset(_words(choice))
            answer = {name for match in self._matches(choice) for name in match.concepts}
            asked = {name for match in matches if not match.words & words for name in match.concepts} - answer
            asked = _unvaried(asked or self._exact(question))
            answer = _unvaried(answer or self._exact(choice))
            found.append(Concepts(
                self._kept(name for name in asked if STOP_WORDS.isdisjoint(name.split("_"))),
                self._kept(name for name in answer if not STOP_WORDS.issuperset(name.split("_"))),
            ))
        return found

    def _matches(self, text: str) -> list[_Match]:
        words = _words(text)
        lemmas = [self._lemma(word) for word in words]
        matches = []
        for start in range(len(words)):
            for end in range(start + 1, min(len(words), start + LONGEST) + 1):
                if names := self._index.get(tuple(lemmas[start:end])):
                    matches.append(_Match(frozenset(words[start:end]), self._shortest(names)))
        return matches

    def _shortest(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the concepts of a span: its shortest ones, in their base form if that is among them."""
        base = {name: "_".join(map(self._lemma, _words(name.replace("_", " ")))) for name in names}
        forms = {name if "_" in name else base[name] for name in names}  # a single word always in its base form
        shortest = sorted(forms, key=lambda name: (len(name), name))[:_PER_SPAN]
        base |= {name: name for name in forms if name not in base}
        return tuple(dict.fromkeys(
            base[name] if base[name] in shortest else name for name in shortest if name not in _IGNORED
        ))

    def _exact(self, text: str) -> set[str]:
        """Return the concepts that are a lemma of the text, or the text itself."""
        words = _words(text)
        return {name for name in [*map(self._lemma, words), "_".join(words)] if name in self._ids}

    def _kept(self, names: Iterable[str]) -> tuple[int, ...]:
        return tuple(sorted(self._ids[name] for name in names if name in self._ids))


def statement(question: str, choice: str) -> str:
    """Return question and choice as one sentence, in which the choice stands for the question word.

    The rules are those of the reference, which finds the letters of question words within other words, too ("show"),
    and writes a choice in lower case unless it begins a sentence.
    """
    text = _with_blank(question.strip())
    is_first = text.startswith(_BLANK) or f". {_BLANK}" in text
    choice = choice[:1].upper() + choice[1:] if is_first else choice.lower()
    choice = choice if text.endswith(_BLANK) else choice.rstrip(".")
    return re.sub("__+", lambda _: choice, text)


def _with_blank(question: str) -> str:
    """Return the question with a blank for its question word, or for what else asks for the choice.

    The question word is one before a question mark in the last sentence, in the order of `_QUESTION_WORDS`, else the
    first one of the last sentence. Blanks that the question has already stay, besides the new one.
    """
    text = question.replace("What's", "What is").replace("whats", "what").replace("U.S.", "US")
    words = [word for word in _QUESTION_WORDS if word != "who" or "people who" not in text]
    patterns = [*(rf"{word}(?=\?[^.]*[. ]*$)" for word in words), rf"({'|'.join(words)})(?=[ ,][^.]*[. ]*$)"]
    for found in filter(None, (re.search(pattern, text.lower()) for pattern in patterns)):
        text = text[: found.start()] + _BLANK + re.sub(r"\?$", ".", text[found.end() :])
        return text.replace(f"{_BLANK} of the following", _BLANK).replace(f"{_BLANK} of these", _BLANK)
    for phrase, end in _BLANK_PHRASES.items():
        if phrase in text:
            return text.replace(phrase, end)
    text = re.sub(r" this[ ?]", f" {_BLANK} ", text) if text.endswith((".", "?")) else f"{text} {_BLANK}"
    return text if "_" in text else f"{question.rstrip('.? ')} {_BLANK}"


def _words(text: str) -> list[str]:
    return _word.findall(text.lower())


def _unvaried(names: set[str]) -> set[str]:
    """Return the names without those that are another one of them with "-er" or "-e" at its end."""
    return {name for name in names if not any(
        name.endswith(end) and name.removesuffix(end) in names for end in ("er", "e")
    )}


@functools.cache
def lemmatizer():
    """Return a function from an English word to its lemma; raise UserError without the package simplemma."""
    try:
        import simplemma
    except ImportError:
        raise UserError(
            f"KagNet finds concepts by their lemmas, which needs the package simplemma; {install('knowledge')}."
        ) from None

    @functools.lru_cache(maxsize=1 << 18)
    def lemma(word: str) -> str:
        return simplemma.lemmatize(word, lang="en").lower()

    return lemma
