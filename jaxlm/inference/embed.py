"""Vectors of texts, from any trained model."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxlm.errors import UserError
from jaxlm.models.elmo import Elmo, spell
from jaxlm.models.t5 import T5
from jaxlm.models.word2vec import Word2Vec
from jaxlm.objectives.base import Objective, Params
from jaxlm.tasks.base import Task
from jaxlm.tasks.families import at_last_token, family_of, model_of, params_of
from jaxlm.tasks.text_to_text import TextToText
from jaxlm.tokenizers.template import Template
from jaxlm.tokenizers.tokenizer import Tokenizer

Pooling = Literal["cls", "mean", "last"]
BATCH = 32
"""Texts that go through the model together."""


def embed(
    objective: Objective, params: Params, tokenizer: Tokenizer, texts: Sequence[str], pooling: Pooling = "mean",
    length: int | None = None, normalize: bool = False,
) -> Float[np.ndarray, "texts width"]:
    """One vector for each text, float32, from the last hidden states of its tokens, special symbols included.

    pooling: cls, the token that stands for a text (the last one for XLNet and decoders); mean, of all tokens; last, the
    last token. Of T5 the encoder is asked; of ELMo the mean of all layers, [forward, backward]; word2vec has a vector
    for each word, of which a text gets the mean. length: tokens of the longest text, special symbols included, by
    default as many as the model takes, at most 512; longer texts are cut. normalize: to Euclidean length 1. UserError
    for a model without hidden states, and for an empty text.
    """
    model, own = model_of(objective), params_of(objective, params)
    is_task = isinstance(objective, Task) and not isinstance(objective, TextToText)
    template = objective.template if is_task else getattr(model, "template", Template())
    wanted = length or 512
    most = min(wanted, getattr(model, "max_positions", None) or wanted)
    encoded = tokenizer.encode_arrays(texts)
    room = most - template.num_symbols(False)
    rows = [template.build(tokenizer.vocabulary, ids[:room]) for ids in encoded]
    if empty := [number for number, row in enumerate(rows) if not len(row.input_ids)]:
        raise UserError(f"text {empty[0] + 1} has no tokens; remove it.")
    pooling = place_of(objective, pooling)
    words = jnp.asarray(spell(tokenizer.vocabulary)) if isinstance(model, Elmo) else None
    vectors: list[Any] = [None] * len(rows)
    order = np.argsort([len(row.input_ids) for row in rows], kind="stable")
    for start in range(0, len(order), BATCH):
        # The last batch is filled up with its own rows, and lengths are few, so that there are few compilations.
        chosen = order[start : start + BATCH]
        filled = np.resize(chosen, min(BATCH, len(order)))
        padded = min(most, 32 * -(-len(rows[chosen[-1]].input_ids) // 32))
        ids, segments, mask = (np.zeros((len(filled), padded), np.int32) for _ in range(3))
        ids += max(tokenizer.vocabulary.pad, 0)
        for place, number in enumerate(filled):
            size = len(rows[number].input_ids)
            ids[place, :size], segments[place, :size], mask[place, :size] = *rows[number][:2], 1
        inputs = {"input_ids": ids, "token_type_ids": segments, "attention_mask": mask}
        for number, vector in zip(filled, np.asarray(_vectors(model, pooling, own, inputs, words)), strict=True):
            vectors[number] = vector
    found = np.stack(vectors)
    return found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12) if normalize else found


def place_of(objective: Objective, pooling: Pooling) -> Pooling:
    """The pooling with the place of the token that stands for a text: "cls" is the first token, or "last"."""
    if pooling != "cls":
        return pooling
    model = model_of(objective)
    if isinstance(model, (Elmo, T5, Word2Vec)):
        raise UserError(f"a {type(model).__name__} has no token that stands for a text; choose mean pooling.")
    return "last" if family_of(model).summary == "last" else "cls"


@functools.partial(jax.jit, static_argnums=(0, 1))
def _vectors(
    model: Any, pooling: Pooling, params: Params, inputs: dict[str, Array], words: Int[Array, "vocab characters"] | None
) -> Float[Array, "batch width"]:
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    if isinstance(model, Word2Vec):
        hidden = model.vectors(params)[ids]
    elif isinstance(model, Elmo):
        hidden = jnp.mean(model.encode(params, words[ids], jnp.sum(mask, axis=1)), axis=0)
    elif isinstance(model, T5):
        hidden = model.encode(params, ids, mask)
    else:
        hidden = family_of(model).hidden(model, params, inputs, None)
    hidden = hidden.astype(jnp.float32)
    if pooling == "cls":
        return hidden[:, 0]
    if pooling == "last":
        return at_last_token(hidden, mask)
    weights = mask[..., None] / jnp.sum(mask, axis=1)[:, None, None]
    return jnp.sum(hidden * weights, axis=1)
