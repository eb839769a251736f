"""Sampling from a masked diffusion model: masks are filled in steps, each of which sees the tokens of earlier ones.

This is ancestral sampling (MDLM, Sahoo et al. 2024) in N equal steps from time 1 to 0: each mask at time t remains with
probability s / t at the next time s, so that it is filled at a step that is uniform over all N. Masks of one step do
not see each other's tokens; with many steps, samples follow the model's joint distribution.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.corruption.masking import write_at
from jaxlm.errors import UserError
from jaxlm.inference.fill_mask import masked_row
from jaxlm.inference.generate import Settings, choose_tokens, make_sampling, pad
from jaxlm.inference.text import Completion
from jaxlm.models.base import Inputs
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.parallel.inference import run_rows


def denoise_text(
    loaded: PretrainedModel, texts: Sequence[str], settings: Settings, stop: Sequence[str] = ()
) -> list[Completion]:
    """Fill the masks of texts; a text without [MASK] is continued by `max_new_tokens` tokens. See `denoise`."""
    if not loaded.objective.denoises or settings.beams > 1 or stop:
        raise UserError("only masked diffusion is sampled in steps, without beams and stop strings; leave these out.")
    symbol = loaded.tokenizer.piece(loaded.tokenizer.vocabulary.mask)
    texts = [text.replace("[MASK]", symbol) for text in texts]
    texts = [text if symbol in text else text + symbol * settings.max_new_tokens for text in texts]
    return denoise(loaded, [masked_row(loaded.objective, loaded.tokenizer, text) for text in texts], settings)


def denoise(loaded: PretrainedModel, rows: Sequence[Sequence[int]], settings: Settings) -> list[Completion]:
    """Fill the masks of rows `[CLS] text [SEP]` of token ids, as one batch.

    Returns:
        The whole texts, the tokens that fill their masks, and the log-probability of each at the step that filled it,
        before temperature, top_k and top_p.
    """
    objective, tokenizer, v = loaded.objective, loaded.tokenizer, loaded.objective.vocabulary
    masks = [[i for i, token in enumerate(row) if token == v.mask] for row in rows]
    ids, mask = (x[:, : objective.model.max_length].astype(np.int32) for x in pad(rows, value=v.pad))
    places = pad(masks, max(map(len, masks)))
    kind, sampling = make_sampling(settings, v.size)
    fill = functools.partial(_denoise, objective, kind)
    found = run_rows(fill, loaded.params, (ids, mask, *places), sampling, settings.steps)
    answers = []
    for row, at, ids, log_probs in zip(rows, masks, *found, strict=True):
        text = tokenizer.decode(ids[1 : len(row) - 1].tolist(), skip_special=False)
        answers.append(Completion(text, ids[at].tolist(), log_probs[: len(at)].tolist()))
    return answers


@functools.partial(jax.jit, static_argnums=(0, 1))
def _denoise(objective, kind, params, rows, sampling, steps):
    """Return the filled rows int32 [batch, length], and log-probabilities float32 [batch, masks]."""
    ids, mask, positions, is_masked = rows
    never, shape = jnp.asarray(objective.vocabulary.special), positions.shape
    # Tokens take the keys of the steps, 0 … steps - 1.
    step_of_mask = jnp.floor(jax.random.uniform(jax.random.fold_in(sampling.key, steps), shape) * steps)

    def advance(step, state):
        is_now = is_masked & (step_of_mask == step)

        def fill():
            ids, log_probs = state
            logits = objective.model.token_logits(params, Inputs(ids, mask=mask), positions)[..., : never.size]
            logits = jnp.where(never, -jnp.inf, logits).reshape(-1, never.size)
            # Rare tokens need the tails of the Gumbel noise (Zheng et al. 2024, arXiv 2409.02908).
            tokens, each = choose_tokens(objective, kind, logits, sampling, step, mode="high")
            ids = write_at(ids, positions, is_now, tokens.reshape(shape))
            return ids, jnp.where(is_now, each.reshape(shape), log_probs)

        return jax.lax.cond(jnp.any(is_now), fill, lambda: state)

    return jax.lax.fori_loop(0, steps, advance, (jnp.asarray(ids), jnp.zeros(shape, jnp.float32)))
