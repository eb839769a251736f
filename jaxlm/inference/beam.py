"""Beam search on the device, as Transformers has it with `early_stopping=False`, its default."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

NEVER = -1e9
"""The score of what is not there."""


class Beams(NamedTuple):
    """Texts, best first. tokens int32 and log_probs float32 [batch, beams, max_new_tokens]; scores float32 [batch,
    beams]: the sum of log_probs, and for finished ones that over length ** length_penalty; counts int32 [batch, beams],
    the tokens of each."""

    tokens: Array
    log_probs: Array
    scores: Array
    counts: Array


class Search(NamedTuple):
    """running: those that go on; finished: the best that ended; open: bool [batch], where they may yet improve; step:
    int32 scalar, the tokens of running ones; state: the model's, with rows batch · beams."""

    running: Beams
    finished: Beams
    open: Array
    step: Array
    state: Any


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def search(objective, max_new_tokens, beams, params, prompts, mask, is_stop, length_penalty):
    """The best text of each prompt: tokens int32 and log_probs float32 [batch, max_new_tokens], counts int32 [batch].

    A text is finished by a token of is_stop (bool [vocab]) among the `beams` likeliest, or by max_new_tokens. The
    search ends when the best running text, at its length, is no better than the worst of `beams` finished ones.
    """
    batch, vocab = prompts.shape[0], is_stop.shape[0]

    def select(search: Search, logits: Array) -> tuple[Search, Array]:
        """The search one token on, and which rows of the state it goes on from, int32 [batch · beams]."""
        running, step = search.running, search.step
        log_probs = jax.nn.log_softmax(logits[:, :vocab], axis=-1).reshape(batch, beams, vocab)
        scores = running.scores[:, :, None] + log_probs

        def extended(scores: Array) -> tuple[Beams, Array]:
            best, place = jax.lax.top_k(scores.reshape(batch, -1), beams)
            parent, token = place // vocab, place % vocab
            gained = jnp.take_along_axis(log_probs.reshape(batch, -1), place, axis=1)
            chosen = _take(running, parent)
            return Beams(
                chosen.tokens.at[:, :, step].set(token), chosen.log_probs.at[:, :, step].set(gained), best,
                chosen.counts + 1,
            ), parent

        ending, _ = extended(scores)
        last = jnp.take_along_axis(ending.tokens, jnp.full((batch, beams, 1), step), axis=2)[:, :, 0]
        ends = (is_stop[last] | (step + 1 == max_new_tokens)) & search.open[:, None]
        length = (step + 1).astype(jnp.float32) ** length_penalty
        ending = ending._replace(scores=jnp.where(ends, ending.scores / length, NEVER))
        both = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), search.finished, ending)
        finished = _take(both, jax.lax.top_k(both.scores, beams)[1])

        running, parent = extended(jnp.where(is_stop, NEVER, 0.0) + scores)
        worst = jnp.min(finished.scores, axis=1)
        may_improve = (worst <= NEVER) | (running.scores[:, 0] / length > worst)
        rows = (jnp.arange(batch)[:, None] * beams + parent).reshape(-1)
        return Search(running, finished, search.open & may_improve, step + 1, search.state), rows

    def going(search: Search) -> Array:
        return (search.step < max_new_tokens) & jnp.any(search.open)

    def body(search: Search) -> Search:
        last = jax.lax.dynamic_index_in_dim(search.running.tokens, search.step - 1, axis=2, keepdims=False)
        logits, state = objective.decode(params, last.reshape(-1), search.state)
        search, rows = select(search, logits)
        return search._replace(state=_of_rows(state, rows))

    logits, state = objective.prefill(params, prompts, mask, max_new_tokens)
    shape = (batch, beams, max_new_tokens)
    first = jnp.where(jnp.arange(beams) > 0, NEVER, 0.0)  # only one text is there to go on from
    counts = jnp.zeros(shape[:2], jnp.int32)
    none = Beams(jnp.zeros(shape, jnp.int32), jnp.zeros(shape), jnp.full(shape[:2], NEVER), counts)
    begun = Search(
        none._replace(scores=jnp.broadcast_to(first, shape[:2])), none, jnp.ones(batch, bool), jnp.int32(0), None
    )
    begun, _ = select(begun, jnp.repeat(logits, beams, axis=0))
    every = jnp.repeat(jnp.arange(batch), beams)
    finished = jax.lax.while_loop(going, body, begun._replace(state=_of_rows(state, every))).finished
    return finished.tokens[:, 0], finished.log_probs[:, 0], finished.counts[:, 0]


def _take(beams: Beams, which: Array) -> Beams:
    """Beams `which`, int32 [batch, chosen]."""

    def taken(x: Array) -> Array:
        return jnp.take_along_axis(x, which.reshape(*which.shape, *(1,) * (x.ndim - 2)), axis=1)

    return jax.tree.map(taken, beams)


def _of_rows(state: Any, rows: Array) -> Any:
    """A model's state with these of its rows; scalars are of all rows."""
    return jax.tree.map(lambda x: jnp.take(x, rows, axis=0) if x.ndim else x, state)
