"""Generation as text: stop strings, streaming, and decoding of continuations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxlm.errors import UserError
from jaxlm.inference.generate import PROMPT_MULTIPLE, Settings, continuations, max_length
from jaxlm.inference.score import text_begin
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.parallel.inference import num_row_shards
from jaxlm.tokenizers.tokenizer import Tokenizer

CHECK_EVERY = 8
"""Tokens between two checks for a stop string."""
BATCH = 32
"""Prompts in a batch, at most."""
SCORES = 1 << 26
"""Attention scores of a head on a device, at most: those of all heads of a layer are in memory, 4 bytes each."""
UNKNOWN = "\N{REPLACEMENT CHARACTER}"


class Completion(NamedTuple):
    """Continuation of one prompt as text.

    Attributes:
        text: Text up to the first stop string.
        ids: Token ids, as in `Continuation`.
        log_probs: Log-probabilities of the tokens.
    """

    text: str
    ids: list[int]
    log_probs: list[float]


def stop_strings(tokenizer: Tokenizer, stop: Sequence[str]) -> list[str]:
    """Return stop strings, and those that the vocabulary spells otherwise in its own form too."""
    spelled = [text.replace(inner, tokenizer.spelled(inner)) for text in stop if (inner := text.strip())]
    return list(dict.fromkeys([*stop, *spelled]))


def generate_text(
    loaded: PretrainedModel, prompts: Sequence[Sequence[int]], settings: Settings, stop: Sequence[str] = (),
    on_text: Callable[[str], None] | None = None, skip_special: bool = False,
) -> list[Completion]:
    """Continue prompts until the end token, a stop string or max_new_tokens.

    Args:
        loaded: The trained model.
        prompts: Token ids of each prompt.
        settings: Options of generation.
        stop: Strings that end a continuation and are left out, also as the vocabulary spells them; special tokens
            ("</s>") are one token. Beams end with a token that contains a stop string; a string spread over several
            tokens only truncates the text.
        on_text: Receives the text of a single prompt in pieces while it is generated.
        skip_special: Leave special tokens out of the text.

    Raises:
        UserError: A stop string is empty, or `on_text` is given for several prompts or with beams.
    """
    if any(not text for text in stop):
        raise UserError("a stop string is empty; give the text that ends a continuation.")
    if on_text and (len(prompts) != 1 or settings.beams > 1):
        raise UserError("streaming needs one prompt and no beam search; pass one prompt with 1 beam.")
    v = loaded.tokenizer.vocabulary
    symbols = [v.symbols[text] for text in stop if text in v.symbols]
    strings = stop_strings(loaded.tokenizer, [text for text in stop if text not in v.symbols])
    ends = (loaded.settings.stop_ids if settings.stop_ids is None else ()) or settings.stops(v)
    settings = dataclasses.replace(settings, stop_ids=[*ends, *symbols])
    answers: list[Completion] = []
    while rest := prompts[len(answers) :]:
        longest = -(-max(map(len, rest[:BATCH])) // PROMPT_MULTIPLE) * PROMPT_MULTIPLE  # as rows are padded
        most = max(1, SCORES // (longest * (longest + settings.max_new_tokens) + 1)) * num_row_shards(loaded.params)
        rest = rest[: min(BATCH, most)]
        answers += _generate_batch(loaded, rest, settings, strings, on_text, skip_special, len(answers))
    return answers


def _generate_batch(loaded, prompts, settings, strings, on_text, skip_special, stream):
    tokenizer, shown = loaded.tokenizer, 0

    def text_of(number: int, ids: Sequence[int]) -> tuple[str, bool]:
        ids = [i for i in ids if i not in settings.stop_ids]
        before = [] if loaded.objective.model.has_encoder else prompts[number]
        return cut(continuation(tokenizer, before, ids, skip_special), strings)

    def show(text: str) -> None:
        nonlocal shown
        on_text(text[shown:])
        shown = max(shown, len(text))

    def watch(rows: list[list[int]]) -> list[bool]:
        texts = [text_of(number, ids) for number, ids in enumerate(rows)]
        if on_text:
            (text, is_done), = texts
            show(text if is_done else text[: stable_length(text, strings)])
        return [is_done for _, is_done in texts]

    watched = settings
    if settings.beams > 1 and strings:
        containing = [i for i in range(len(tokenizer)) if any(text in tokenizer.decode([i]) for text in strings)]
        watched = dataclasses.replace(settings, stop_ids=[*settings.stop_ids, *containing])
    answers = []
    found = continuations(
        loaded.objective, loaded.params, prompts, watched, watch if on_text or strings else None,
        1 if on_text else CHECK_EVERY, stream,
    )
    for number, (ids, log_probs) in enumerate(found):
        text, is_cut = text_of(number, ids)
        count = len(ids)
        while is_cut and text_of(number, ids[: count - 1])[1]:  # drop tokens after the stop string
            count -= 1
        answers.append(Completion(text, ids[:count], log_probs[:count]))
    if on_text:
        show(answers[0].text)
    return answers


def fit_prompts(loaded: PretrainedModel, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
    """Truncate prompts on the left so that they fit the model with `new_tokens`; empty ones become the begin token."""
    has_encoder, limit = loaded.objective.model.has_encoder, max_length(loaded)
    # An encoder appends the end token; a decoder never reads the last new token.
    room = limit - 1 if has_encoder else limit + 1 - new_tokens
    if room < 1:
        raise UserError(f"{new_tokens} new tokens leave no room for a prompt: the model takes {limit} tokens.")
    v = loaded.tokenizer.vocabulary
    return [
        list(ids[-room:]) or [v.eos if has_encoder else text_begin(loaded)] for ids in prompts
    ]


def cut(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """Return the text before the first stop string, and whether there is one.

    A string of white space is looked for after the spaces that a continuation begins with.
    """
    lead = len(text) - len(text.lstrip(" "))
    starts = [start for string in stop if (start := text.find(string, 0 if string.strip() else lead)) >= 0]
    return (text[: min(starts)], True) if starts else (text, False)


def stable_length(text: str, stop: Sequence[str] = ()) -> int:
    """Return the number of leading characters that later tokens cannot change.

    Excluded are the bytes of an incomplete character and a possible beginning of a stop string.
    """
    size = len(text.rstrip(UNKNOWN))
    partial = [
        start for string in stop for start in range(max(0, size - len(string) + 1), size)
        if string.startswith(text[start:size])
    ]
    return min([size, *partial])


def continuation(
    tokenizer: Tokenizer, prompt: Sequence[int], answer: Sequence[int], skip_special: bool = False
) -> str:
    """Return the answer as text, with special tokens (T5's sentinels) except for end and padding tokens.

    The answer of a decoder is decoded with its prompt: alone it would lose a leading space.
    """
    omitted = {tokenizer.vocabulary.eos, tokenizer.vocabulary.pad}
    answer = [token for token in answer if token not in omitted]
    before = tokenizer.decode(prompt, skip_special=skip_special)
    both = tokenizer.decode([*prompt, *answer], skip_special=skip_special)
    # A character whose bytes are split between prompt and answer changes the prompt's text.
    return both[len(before) :] if both.startswith(before) else tokenizer.decode(answer, skip_special=skip_special)
