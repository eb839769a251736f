"""Beam search on the device, equal to that of Transformers with `early_stopping=False`, its default."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

MIN_SCORE = -1e9
"""Score of beams that do not exist."""


class Beams(NamedTuple):
    """Beams of each prompt, best first.

    Attributes:
        tokens: int32 [batch, beams, max_new_tokens].
        log_probs: float32 [batch, beams, max_new_tokens].
        scores: float32 [batch, beams], the sum of log_probs; of finished beams divided by length ** length_penalty.
        counts: int32 [batch, beams], the number of tokens.
    """

    tokens: Array
    log_probs: Array
    scores: Array
    counts: Array


class Search(NamedTuple):
    """State of a beam search.

    Attributes:
        running: Beams to extend.
        finished: Best beams that ended.
        is_open: bool [batch], whether the finished beams may still improve.
        step: int32 scalar, the number of tokens of running beams.
        state: The model's decoding state, with batch * beams rows.
    """

    running: Beams
    finished: Beams
    is_open: Array
    step: Array
    state: Any


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def search(objective, max_new_tokens, beams, start, params, prompts_and_mask, is_stop, length_penalty):
    """Return the best continuation of each prompt.

    A beam ends with a stop token among the `beams` likeliest continuations, or at max_new_tokens. The search of a
    prompt ends when its best running beam, at its length, scores no better than its worst finished one.

    Prompts int32 and mask bool [batch, length] are padded on the left; is_stop bool [vocab] is True for stop tokens;
    scores are divided by length ** length_penalty.

    Returns:
        tokens int32 and log_probs float32 [batch, max_new_tokens], counts int32 [batch].
    """
    prompts, mask = prompts_and_mask
    batch, vocab = prompts.shape[0], is_stop.shape[0]

    def select(search: Search, logits: Array) -> tuple[Search, Array]:
        """Return the search after one more token, and the parents of its beams, int32 [batch, beams]."""
        running, step = search.running, search.step
        log_probs = jax.nn.log_softmax(logits[:, :vocab], axis=-1).reshape(batch, beams, vocab)
        scores = running.scores[:, :, None] + log_probs
        ending, _ = _extend(running, log_probs, scores, step)
        last = jnp.take_along_axis(ending.tokens, jnp.full((batch, beams, 1), step), axis=2)[:, :, 0]
        ends = (is_stop[last] | (step + 1 == max_new_tokens)) & search.is_open[:, None]
        length = (step + 1).astype(jnp.float32) ** length_penalty
        ending = ending._replace(scores=jnp.where(ends, ending.scores / length, MIN_SCORE))
        both = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), search.finished, ending)
        finished = _take(both, jax.lax.top_k(both.scores, beams)[1])

        running, parent = _extend(running, log_probs, jnp.where(is_stop, MIN_SCORE, 0.0) + scores, step)
        worst = jnp.min(finished.scores, axis=1)
        may_improve = (worst <= MIN_SCORE) | (running.scores[:, 0] / length > worst)
        return Search(running, finished, search.is_open & may_improve, step + 1, search.state), parent

    def is_running(search: Search) -> Array:
        return (search.step < max_new_tokens) & jnp.any(search.is_open)

    def body(search: Search) -> Search:
        last = jax.lax.dynamic_index_in_dim(search.running.tokens, search.step - 1, axis=2, keepdims=False)
        logits, state = objective.model.decode(params, last.reshape(-1), search.state)
        search, parent = select(search, logits)
        return search._replace(state=_take_parents(state, parent))

    logits, state = objective.model.prefill(params, prompts, mask, max_new_tokens, start)
    shape = (batch, beams, max_new_tokens)
    first = jnp.where(jnp.arange(beams) > 0, MIN_SCORE, 0.0)  # all beams start from one text
    counts = jnp.zeros(shape[:2], jnp.int32)
    empty = Beams(jnp.zeros(shape, jnp.int32), jnp.zeros(shape), jnp.full(shape[:2], MIN_SCORE), counts)
    initial = Search(
        empty._replace(scores=jnp.broadcast_to(first, shape[:2])), empty, jnp.ones(batch, bool), jnp.int32(0), None
    )
    initial, _ = select(initial, jnp.repeat(logits, beams, axis=0))
    state = jax.tree.map(lambda x: jnp.repeat(x, beams, axis=0) if x.ndim else x, state)
    finished = jax.lax.while_loop(is_running, body, initial._replace(state=state)).finished
    return finished.tokens[:, 0], finished.log_probs[:, 0], finished.counts[:, 0]


def _extend(running: Beams, log_probs: Array, scores: Array, step: Array) -> tuple[Beams, Array]:
    """Return the best beams one token longer, and their parents, int32 [batch, beams].

    Log-probabilities of the next token and scores of the longer beams are [batch, beams, vocab].
    """
    batch, beams, vocab = scores.shape
    best, index = jax.lax.top_k(scores.reshape(batch, -1), beams)
    parent, token = index // vocab, index % vocab
    log_prob = jnp.take_along_axis(log_probs.reshape(batch, -1), index, axis=1)
    beam = _take(running, parent)
    tokens, beam_log_probs = beam.tokens.at[:, :, step].set(token), beam.log_probs.at[:, :, step].set(log_prob)
    return Beams(tokens, beam_log_probs, best, beam.counts + 1), parent


def _take(beams: Any, which: Array) -> Any:
    """Return the beams with indices `which`, int32 [batch, selected], of arrays [batch, beams, …]."""

    def select(x: Array) -> Array:
        return jnp.take_along_axis(x, which.reshape(*which.shape, *(1,) * (x.ndim - 2)), axis=1)

    return jax.tree.map(select, beams)


def _take_parents(state: Any, parent: Array) -> Any:
    """Return the decoding state of beams with parents int32 [batch, beams]; scalars belong to all rows.

    Indices within a prompt keep every row on its device; with those of rows of the batch, XLA would gather the cache.
    """

    def take(x: Array) -> Array:
        return _take(x.reshape(*parent.shape, *x.shape[1:]), parent).reshape(x.shape) if x.ndim else x

    return jax.tree.map(take, state)
