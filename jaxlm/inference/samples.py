"""Qualitative samples logged during training: filled masks, or continuations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from jaxlm.inference.fill_mask import fill_rows
from jaxlm.inference.generate import Settings
from jaxlm.inference.score import prompt_of
from jaxlm.inference.text import generate_text
from jaxlm.objectives.base import Objective
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.types import Params

_TOKENS = 32
"""Tokens of a text, and of its continuation."""


def sampler(
    objective: Objective, tokenizer: Tokenizer, rows: Sequence[np.ndarray]
) -> Callable[[Params], list[str]]:
    """Return a function from parameters to one line for each text.

    A line is the text with `[piece probability]` at each mask and the masked pieces behind it; or prompt|continuation,
    sampled at temperature 0.8.
    """
    special, size = objective.vocabulary.special, min(_TOKENS, (objective.model.max_length or 2 * _TOKENS) // 2)
    texts = [text for row in rows if (text := row[~special[row]][: size - 2].tolist())]
    prompts = [objective.prompt_tokens(text) for text in texts]
    settings = Settings(max_new_tokens=size, temperature=0.8, top_p=0.95)

    def filled(params: Params) -> list[str]:
        v, lines = objective.vocabulary, []
        asked = [(text, prompt) for text, prompt in zip(texts, prompts, strict=True) if v.mask in prompt]
        if not asked:
            return []
        masked = [[v.cls, *prompt, v.sep] for _, prompt in asked]
        answers = fill_rows(PretrainedModel(objective, params, tokenizer), masked, top_k=1)
        for (text, prompt), candidates in zip(asked, answers, strict=True):
            line, *parts = tokenizer.decode(prompt, skip_special=False).split(tokenizer.piece(v.mask))
            for ((piece, probability),), part in zip(candidates, parts, strict=False):
                line += f"[{piece} {probability:.0%}]{part}"
            hidden = [token for token, shown in zip(text, prompt, strict=True) if token != shown]
            lines.append(f"{line}  (masked: {' '.join(tokenizer.pieces(hidden))})")
        return lines

    def written(params: Params) -> list[str]:
        begun = [prompt_of(objective, prompt) for prompt in prompts]
        answers = generate_text(PretrainedModel(objective, params, tokenizer), begun, settings)
        asked = [tokenizer.decode(prompt, skip_special=False) for prompt in prompts]
        return [f"{prompt}|{answer.text}" for prompt, answer in zip(asked, answers, strict=True)]

    make = filled if objective.answer_kind == "masks" else written
    return lambda params: [line.replace("\n", "⏎") for line in make(params)]
