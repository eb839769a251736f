"""Sampling from a masked diffusion model: masks are filled in steps, each of which sees the tokens of earlier ones.

In random order this is ancestral sampling (MDLM, Sahoo et al. 2024) in N equal steps from time 1 to 0: each mask at
time t remains with probability s / t at the next time s, so that it is filled at a step that is uniform over all N.
Masks of one step do not see each other's tokens; with many steps, samples follow the model's joint distribution. In the
order of confidence (LLaDA, Nie et al. 2025, section 2.4) every step fills equally many masks, those first whose tokens
are likeliest: fewer steps are enough, but samples do not follow that distribution.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxlm.corruption.masking import write_at
from jaxlm.errors import UserError
from jaxlm.inference.fill_mask import BATCH, masked_row
from jaxlm.inference.generate import Continuation, Settings, choose_tokens, make_sampling, pad
from jaxlm.inference.text import Completion
from jaxlm.models.base import Inputs
from jaxlm.objectives.base import Objective, PretrainedModel
from jaxlm.types import Params


def denoise_text(loaded: PretrainedModel, texts: Sequence[str], settings: Settings) -> list[Completion]:
    """Return texts with their masks filled; a text without [MASK] is continued by `max_new_tokens` tokens.

    Args:
        loaded: The trained model.
        texts: Texts.
        settings: Options of generation.

    Returns:
        The whole texts, and the filled tokens in the order of the text.

    Raises:
        UserError: The objective does not denoise, a text is too long, or an option is for other models.
    """
    objective, tokenizer = loaded.objective, loaded.tokenizer
    if not objective.denoises:
        raise UserError(f"{type(objective).__name__} does not denoise; use a run of masked diffusion.")
    if settings.beams > 1 or settings.stop_ids:
        raise UserError("a masked diffusion model has neither beam search nor stop tokens; leave them out.")
    is_masked = [any(mask in text for mask in ("[MASK]", tokenizer.piece(objective.vocabulary.mask))) for text in texts]
    rows = [
        masked_row(objective, tokenizer, text if has_mask else text + "[MASK]" * settings.max_new_tokens)
        for text, has_mask in zip(texts, is_masked, strict=True)
    ]
    answers = []
    for start in range(0, len(rows), BATCH):
        batch = rows[start : start + BATCH]
        for row, (ids, log_probs) in zip(batch, denoise(objective, loaded.params, batch, settings, start), strict=True):
            tokens = iter(ids)
            filled = [next(tokens) if token == objective.vocabulary.mask else token for token in row[1:-1]]
            answers.append(Completion(tokenizer.decode(filled, skip_special=False), ids, log_probs))
    return answers


def denoise(
    objective: Objective, params: Params, rows: Sequence[Sequence[int]], settings: Settings, stream: int = 0
) -> list[Continuation]:
    """Return the tokens that fill the masks of each row, and the log-probability of each when it was filled.

    Args:
        objective: The objective of the trained model.
        params: Its parameters.
        rows: Token ids, special tokens included, with at least one mask.
        settings: Options of generation.
        stream: Number of the random stream, for independent samples of one seed.
    """
    v = objective.vocabulary
    masks = [[i for i, token in enumerate(row) if token == v.mask] for row in rows]
    ids, mask = (x[:, : objective.model.max_length] for x in pad(rows, value=v.pad))
    positions, is_masked = pad(masks, max(map(len, masks)))
    kind, sampling = make_sampling(settings, v.size, stream)
    tokens, log_probs = jax.device_get(_denoise(
        objective, kind, settings.order, params, ids, mask.astype(np.int32), positions, is_masked, sampling,
        jnp.int32(settings.steps),
    ))
    return [
        Continuation(row[:count].tolist(), each[:count].tolist())
        for row, each, count in zip(tokens, log_probs, map(len, masks), strict=True)
    ]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _denoise(objective, kind, order, params, ids, mask, positions, is_masked, sampling, steps):
    """Return tokens int32 and log-probabilities float32 at the positions, [batch, masks]."""
    never, shape = jnp.asarray(objective.vocabulary.special), positions.shape
    count = jnp.sum(is_masked, axis=1, keepdims=True)
    key_order = jax.random.fold_in(sampling.key, steps)  # tokens take the keys of the steps, 0 … steps - 1
    step_of_mask = jnp.minimum(jnp.floor(jax.random.uniform(key_order, shape) * steps).astype(jnp.int32), steps - 1)

    def fill(step, state):
        ids, is_left, log_probs = state
        logits = objective.model.token_logits(params, Inputs(ids, mask=mask), positions)[..., : never.size]
        logits = jnp.where(never, -jnp.inf, logits).reshape(-1, never.size)
        # Rare tokens of a large vocabulary need the tails of the Gumbel noise (Zheng et al. 2024, arXiv 2409.02908).
        found = choose_tokens(objective, kind, logits, sampling, step, mode="high")
        tokens, each = (x.reshape(shape) for x in found)
        rank = jnp.argsort(jnp.argsort(jnp.where(is_left, -each, jnp.inf), axis=1), axis=1)
        is_now = is_left & (rank < quota(step) if order == "confident" else step_of_mask == step)
        return write_at(ids, positions, is_now, tokens), is_left & ~is_now, jnp.where(is_now, each, log_probs)

    def quota(step: Int[Array, ""]) -> Int[Array, "batch 1"]:
        return count // steps + (step < count % steps)

    def is_due(step: Int[Array, ""], is_left: Bool[Array, "batch masks"]) -> Bool[Array, ""]:
        return jnp.any(is_left & (quota(step) > 0 if order == "confident" else step_of_mask == step))

    def advance(step, state):
        return jax.lax.cond(is_due(step, state[1]), functools.partial(fill, step), lambda state: state, state)

    state = (jnp.asarray(ids), jnp.asarray(is_masked), jnp.zeros(shape, jnp.float32))
    ids, _, log_probs = jax.lax.fori_loop(0, steps, advance, state)
    return jnp.take_along_axis(ids, positions, axis=1), log_probs
