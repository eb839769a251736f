"""Generation from text to text: prompts are tokenised, stop strings end continuations, tokens become readable."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxlm.errors import UserError
from jaxlm.inference.generate import Settings, continuations
from jaxlm.inference.score import text_begin
from jaxlm.objectives.base import Generator, Objective, Params
from jaxlm.tokenizers.tokenizer import Tokenizer

LOOK_EVERY = 8
"""Tokens that are written between two looks for a stop string."""
BATCH = 32
"""Prompts that are continued together."""
UNKNOWN = "\N{REPLACEMENT CHARACTER}"


class Written(NamedTuple):
    """text: the continuation, up to the first stop string. ids, log_probs: its tokens, as `Continuation` has them."""

    text: str
    ids: list[int]
    log_probs: list[float]


def write(
    objective: Objective, params: Params, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], settings: Settings,
    stop: Sequence[str] = (), on_text: Callable[[str], None] | None = None, skip_special: bool = False,
) -> list[Written]:
    """Continues prompts (token ids) until the vocabulary's end symbol, one of the strings in `stop`, which is left out,
    or max_new_tokens.

    A stop that is a special symbol ("</s>") is one token. Beams end by tokens that hold a stop string; one that is
    spread over several tokens only cuts the text. on_text: gets the text of a single prompt in pieces as it grows.
    skip_special: leave special symbols out of the text, which otherwise has them by name.
    """
    if any(not text for text in stop):
        raise UserError("a stop string is empty; give the text that ends a continuation.")
    if on_text and (len(prompts) != 1 or settings.beams > 1):
        raise UserError("text can be shown as it grows for one prompt without beams only.")
    v = tokenizer.vocabulary
    symbols = [v.symbols[text] for text in stop if text in v.symbols]
    strings = [text for text in stop if text not in v.symbols]
    stop_ids = [v.eos] * (v.eos >= 0) if settings.stop_ids is None else list(settings.stop_ids)
    settings = dataclasses.replace(settings, stop_ids=[*stop_ids, *symbols])
    return [
        answer for start in range(0, len(prompts), BATCH)
        for answer in _write(
            objective, params, tokenizer, prompts[start : start + BATCH], settings, strings, on_text, skip_special,
            start,
        )
    ]


def _write(objective, params, tokenizer, prompts, settings, strings, on_text, skip_special, draw):
    shown = 0

    def text_of(number: int, ids: Sequence[int]) -> tuple[str, bool]:
        ids = [i for i in ids if i not in settings.stop_ids]
        return cut(continuation(tokenizer, prompts[number], ids, skip_special), strings)

    def show(text: str) -> None:
        nonlocal shown
        on_text(text[shown:])
        shown = max(shown, len(text))

    def watch(rows: list[list[int]]) -> list[bool]:
        texts = [text_of(number, ids) for number, ids in enumerate(rows)]
        if on_text:
            (text, is_over), = texts
            show(text if is_over else text[: settled_length(text, strings)])
        return [is_over for _, is_over in texts]

    ends = settings
    if settings.beams > 1 and strings:
        holding = [i for i in range(len(tokenizer)) if any(text in tokenizer.decode([i]) for text in strings)]
        ends = dataclasses.replace(settings, stop_ids=[*settings.stop_ids, *holding])
    asked = watch if on_text or strings else None
    answers = []
    for number, (ids, log_probs) in enumerate(
        continuations(objective, params, prompts, ends, asked, 1 if on_text else LOOK_EVERY, draw)
    ):
        text, is_cut = text_of(number, ids)
        count = len(ids)
        while is_cut and text_of(number, ids[: count - 1])[1]:  # tokens written before the stop was seen
            count -= 1
        answers.append(Written(text, ids[:count], log_probs[:count]))
    if on_text:
        show(answers[0].text)
    return answers


def fit_prompts(
    objective: Generator, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], new_tokens: int
) -> list[list[int]]:
    """Prompts (token ids) with as much of their ends as the model reads beside `new_tokens`; an empty one is the symbol
    that a text begins with. UserError where there is room for none."""
    v, most = tokenizer.vocabulary, objective.max_length
    # Of an encoder-decoder the end symbol closes the prompt; of a decoder the last new token is never read.
    room = most - 1 if objective.has_encoder else most + 1 - new_tokens
    if room < 1:
        raise UserError(f"{new_tokens} new tokens leave no room for a prompt: the model takes {most} tokens.")
    return [list(ids[-room:]) or [v.eos if objective.has_encoder else text_begin(tokenizer)] for ids in prompts]


def cut(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """(the text before the first stop string, whether it has one)"""
    places = [place for string in stop if (place := text.find(string)) >= 0]
    return (text[: min(places)], True) if places else (text, False)


def settled_length(text: str, stop: Sequence[str] = ()) -> int:
    """How many characters of a growing text no later token can change: not the bytes of an unfinished character, nor
    what may be the beginning of a stop string."""
    size = len(text.rstrip(UNKNOWN))
    begun = [
        place for string in stop for place in range(max(0, size - len(string) + 1), size)
        if string.startswith(text[place:size])
    ]
    return min([size, *begun])


def continuation(
    tokenizer: Tokenizer, prompt: Sequence[int], answer: Sequence[int], skip_special: bool = False
) -> str:
    """The answer as text, with special symbols by name (T5's sentinels) except for the end symbol and padding. It is
    decoded together with its prompt, since alone it would lose a leading space."""
    left_out = {tokenizer.vocabulary.eos, tokenizer.vocabulary.pad}
    answer = [token for token in answer if token not in left_out]
    before = tokenizer.decode(prompt, skip_special=skip_special)
    both = tokenizer.decode([*prompt, *answer], skip_special=skip_special)
    # A character whose bytes are on both sides can only be decoded as a whole.
    return both[len(before) :] if both.startswith(before) else tokenizer.decode(answer, skip_special=skip_special)
