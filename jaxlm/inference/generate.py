"""Text generation: prompts in, continuations out, with the whole loop on the device.

Any `Generator` will do: decoders and encoder-decoders look the same from here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxlm.errors import UserError
from jaxlm.objectives.base import Generator, Objective, Params
from jaxlm.tokenizers.vocabulary import Vocabulary

PROMPT_MULTIPLE = 32
"""Prompts are padded to a multiple of this, so that a session does not compile anew for each length."""
LONGEST = 8192
"""Tokens of a prompt, or new ones: models with relative positions take any number, the machine does not."""
LEAST_TEMPERATURE = 1e-6
"""Below it, logits divided by it leave float32's range; above 0 it always takes the likeliest token anyway."""


def generate(
    objective: Objective,
    params: Params,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_ids: Sequence[int] | None = None,
) -> list[list[int]]:
    """Continues each prompt (token ids) until a stop symbol, which is included, or for max_new_tokens.

    Prompts may differ in length. Returns the new ids only.
    temperature: 0 takes the likeliest token; above 0 tokens are drawn from softmax(logits / temperature).
    top_k: draw from the k likeliest tokens only (0: from all).
    top_p: then from the fewest likeliest tokens whose probabilities add up to top_p (Holtzman et al. 2020).
    stop_ids: default the vocabulary's end symbol, if it has one; an empty sequence never stops.
    UserError for values that cannot be meant and prompts that do not fit the model.
    """
    if not isinstance(objective, Generator):
        raise UserError(
            f"{type(objective).__name__} trains no model that writes text; generate works with causal and "
            "encoder-decoder models, and `jaxlm fill-mask` with masked ones."
        )
    vocabulary = objective.vocabulary
    assert vocabulary is not None, "bind the objective to a vocabulary first"
    stops = ([vocabulary.eos] if vocabulary.eos >= 0 else []) if stop_ids is None else [int(i) for i in stop_ids]
    _check(vocabulary, prompts, max_new_tokens, temperature, top_k, top_p, seed, stops)
    if not prompts:
        return []
    rows = objective.prepare_prompts([list(prompt) for prompt in prompts], max_new_tokens)

    longest = max(len(row) for row in rows)
    length = -(-longest // PROMPT_MULTIPLE) * PROMPT_MULTIPLE
    ids = np.zeros((len(rows), length), np.int32)
    mask = np.zeros((len(rows), length), bool)
    for i, row in enumerate(rows):
        ids[i, length - len(row) :] = row
        mask[i, length - len(row) :] = True

    tokens, counts = _generate(
        objective, max_new_tokens, temperature > 0, 0 < top_k < vocabulary.size or top_p < 1.0,
        params, ids, mask, jnp.asarray(stops, jnp.int32), jax.random.key(seed),
        jnp.float32(temperature), jnp.int32(min(top_k or vocabulary.size, vocabulary.size)), jnp.float32(top_p),
    )
    return [row[:count].tolist() for row, count in zip(np.asarray(tokens), np.asarray(counts), strict=True)]


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _generate(
    objective, max_new_tokens, sample, keep_likeliest, params, prompts, mask, stops, key, temperature, top_k, top_p
):
    """tokens int32 [batch, max_new_tokens] and how many of each row are the answer, int32 [batch]."""

    def choose(logits, step):
        # A model may carry rows that no token has, for the hardware's sake.
        logits = logits[:, : objective.vocabulary.size]
        if not sample:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        logits = logits / temperature
        if keep_likeliest:
            logits = filter_logits(logits, top_k, top_p)
        return jax.random.categorical(jax.random.fold_in(key, step), logits).astype(jnp.int32)

    def is_stop(tokens):
        return jnp.any(tokens[:, None] == stops[None, :], axis=1)

    logits, state = objective.prefill(params, prompts, mask, max_new_tokens)
    first = choose(logits, 0)
    out = jnp.zeros((prompts.shape[0], max_new_tokens), jnp.int32).at[:, 0].set(first)

    def going(carry):
        step, _, _, _, done, _ = carry
        return (step < max_new_tokens) & ~jnp.all(done)

    def body(carry):
        step, out, last, state, done, counts = carry
        logits, state = objective.decode(params, last, state)
        token = choose(logits, step)
        out = out.at[:, step].set(jnp.where(done, 0, token))
        return step + 1, out, token, state, done | is_stop(token), counts + ~done

    start = (jnp.int32(1), out, first, state, is_stop(first), jnp.ones(prompts.shape[0], jnp.int32))
    _, out, _, _, _, counts = jax.lax.while_loop(going, body, start)
    return out, counts


def filter_logits(
    logits: Float[Array, "batch vocab"], top_k: Int[Array, ""], top_p: Float[Array, ""]
) -> Float[Array, "batch vocab"]:
    """-inf for all but the top_k likeliest tokens, and of those all but the fewest likeliest that hold top_p of their
    probability. At least one token stays."""
    ordered = jnp.sort(logits, axis=-1, descending=True)
    ordered = jnp.where(jnp.arange(logits.shape[-1]) < top_k, ordered, -jnp.inf)
    probabilities = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    kept = (before < top_p) & (ordered > -jnp.inf)
    threshold = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits >= threshold, logits, -jnp.inf)


def _check(
    vocabulary: Vocabulary, prompts: Sequence[Sequence[int]], max_new_tokens: int, temperature: float, top_k: int,
    top_p: float, seed: int, stops: list[int],
) -> None:
    if not 1 <= max_new_tokens <= LONGEST:
        raise UserError(f"max_new_tokens is {max_new_tokens}; it must lie between 1 and {LONGEST}.")
    if temperature != 0 and not LEAST_TEMPERATURE <= temperature < math.inf:
        raise UserError(
            f"temperature is {temperature}; it must be 0 (the likeliest token) or at least {LEAST_TEMPERATURE}, and "
            "finite."
        )
    if top_k < 0:
        raise UserError(f"top_k is {top_k}; it must be at least 1, or 0 for all tokens.")
    if not 0 < top_p <= 1:
        raise UserError(f"top_p is {top_p}; it must be above 0 and at most 1.")
    if not 0 <= seed < 2**32:
        raise UserError(f"seed is {seed}; it must lie between 0 and {2**32 - 1}.")
    for stop in stops:
        if not 0 <= stop < vocabulary.size:
            raise UserError(f"the stop symbol with id {stop} is not in {vocabulary.name}, whose ids end at "
                            f"{vocabulary.size - 1}.")
    for number, prompt in enumerate(prompts, start=1):
        which = f"prompt {number}" if len(prompts) > 1 else "the prompt"
        if len(prompt) == 0:
            raise UserError(f"{which} is empty; give at least one token to continue.")
        if len(prompt) > LONGEST:
            raise UserError(f"{which} has {len(prompt)} tokens; the most is {LONGEST}, so shorten it.")
        if not all(0 <= token < vocabulary.size for token in prompt):
            raise UserError(f"{which} holds an id that is not in {vocabulary.name}, whose ids end at "
                            f"{vocabulary.size - 1}.")
