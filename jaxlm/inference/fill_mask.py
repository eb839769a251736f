"""Fill-mask: the likeliest tokens of a masked language model at each mask of a text."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import numpy as np

from jaxlm.errors import UserError
from jaxlm.inference.generate import pad
from jaxlm.models.base import Inputs
from jaxlm.objectives.base import Objective
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.parallel.inference import num_row_shards, run_rows
from jaxlm.tokenizers.tokenizer import Tokenizer

BATCH = 32
"""Texts in a batch of a device."""


def fill_mask(loaded: PretrainedModel, texts: Sequence[str], top_k: int = 5) -> list[list[list[tuple[str, float]]]]:
    """Return the `top_k` likeliest (piece, probability) of each mask of each text, best first.

    Each mask is filled on its own, while the others stay masked. Probabilities are over the whole vocabulary.

    Masks are written [MASK] or as the tokenizer's own symbol.

    Raises:
        UserError: The objective does not fill masks, a text has no mask or is too long, the tokenizer lacks a special
            token, or top_k is out of range.
    """
    objective, tokenizer = loaded.objective, loaded.tokenizer
    if objective.answer_kind != "masks":
        other = ", or `jaxlm generate`" if objective.answer_kind == "text" else ""
        raise UserError(
            f"{type(objective).__name__} does not fill masks; use a run of a masked language model such as BERT{other}."
        )
    vocabulary = tokenizer.vocabulary
    vocabulary.require("mask", "cls", "sep", "pad", purpose="filling masks")
    if not 1 <= top_k <= vocabulary.size:
        raise UserError(f"top_k is {top_k}; it must lie between 1 and the vocabulary's size, {vocabulary.size}.")
    return fill_rows(loaded, [masked_row(objective, tokenizer, text) for text in texts], top_k)


def fill_rows(
    loaded: PretrainedModel, rows: Sequence[Sequence[int]], top_k: int
) -> list[list[list[tuple[str, float]]]]:
    """Fill the masks of rows of token ids, special tokens included; see `fill_mask`."""
    objective, tokenizer, answers = loaded.objective, loaded.tokenizer, []
    vocabulary = tokenizer.vocabulary
    size = BATCH * num_row_shards(loaded.params)
    for start in range(0, len(rows), size):
        batch = rows[start : start + size]
        masks = [[i for i, token in enumerate(row) if token == vocabulary.mask] for row in batch]
        ids, mask = pad(batch, value=vocabulary.pad)
        ids, mask = (x[:, : objective.model.max_length] for x in (ids, mask.astype(np.int32)))
        positions, _ = pad(masks, max(map(len, masks)))
        most_likely = functools.partial(_most_likely, objective, vocabulary, top_k)
        probabilities, tokens = run_rows(most_likely, loaded.params, (ids, mask, positions))
        for i, masked in enumerate(masks):
            answers.append([
                list(zip(tokenizer.pieces(tokens[i, j].tolist()), probabilities[i, j].tolist(), strict=True))
                for j in range(len(masked))
            ])
    return answers


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _most_likely(objective, vocabulary, top_k, params, rows):
    """Return probabilities and ids, [batch, masks, top_k], of the rows' ids, attention mask and positions."""
    input_ids, attention_mask, positions = rows
    logits = objective.model.token_logits(
        params, Inputs(input_ids, mask=attention_mask), objective.predicting(positions))
    # The embedding may be padded beyond the vocabulary.
    return jax.lax.top_k(jax.nn.softmax(logits[..., : vocabulary.size], axis=-1), top_k)


def masked_row(objective: Objective, tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text with its special tokens, in which [MASK] stands for the tokenizer's own symbol."""
    v = tokenizer.vocabulary
    ids = tokenizer.encode_with_symbols(text.replace("[MASK]", tokenizer.piece(v.mask)))
    template = objective.model.text_model.template.for_vocabulary(v)
    row = template.build(v, np.array(ids, np.int32)).input_ids.tolist()
    shown = text if len(text) <= 60 else text[:57] + "..."
    if v.mask not in row:
        raise UserError(f"{shown!r} has no [MASK]; write [MASK] where a token is to be filled in.")
    if len(row) > objective.model.max_length:
        raise UserError(
            f"{shown!r} has {len(row)} tokens with special tokens, but the model takes {objective.model.max_length}; "
            "shorten it."
        )
    return row
