"""Text generation: prompts in, continuations out, with the whole loop on the device.

Any `Generator` will do: decoders and encoder-decoders look the same from here.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxlm.errors import UserError
from jaxlm.inference.beam import search
from jaxlm.objectives.base import Generator, Objective, Params
from jaxlm.tokenizers.vocabulary import Vocabulary

PROMPT_MULTIPLE = 32
"""Prompts are padded to a multiple of this, so that a session does not compile anew for each length."""
LONGEST = 8192
"""Tokens of a prompt, or new ones: models with relative positions take any number, the machine does not."""
MOST_BEAMS = 256
LEAST_TEMPERATURE = 1e-6
"""Below it, logits divided by it leave float32's range; above 0 it always takes the likeliest token anyway."""

Watch = Callable[[list[list[int]]], Sequence[bool]]
"""Gets the new ids of each prompt so far; says which continuations are over."""


class Continuation(NamedTuple):
    """ids: the new tokens, a stop symbol that ended them included. log_probs: of each, its log-probability under the
    model as it is, before temperature, top_k and top_p."""

    ids: list[int]
    log_probs: list[float]


@dataclasses.dataclass(frozen=True)
class Settings:
    """How continuations are chosen. UserError for values that cannot be meant."""

    max_new_tokens: int = 64
    """New tokens at most."""
    temperature: float = 0.0
    """0 takes the likeliest token; above 0 tokens are drawn from softmax(logits / temperature)."""
    top_k: int = 0
    """Draw from the k likeliest tokens only; 0: from all."""
    top_p: float = 1.0
    """Then from the fewest likeliest tokens whose probabilities add up to top_p (Holtzman et al. 2020)."""
    seed: int = 0
    """Of the draws."""
    beams: int = 1
    """Above 1: beam search with as many beams, which draws nothing."""
    length_penalty: float = 1.0
    """Beams are compared by log-probability / length ** length_penalty; above 0 it favours longer ones."""
    stop_ids: Sequence[int] | None = None
    """Default the vocabulary's end symbol, if it has one; an empty sequence never stops."""

    def __post_init__(self) -> None:
        if not 1 <= self.max_new_tokens <= LONGEST:
            raise UserError(f"max_new_tokens is {self.max_new_tokens}; it must lie between 1 and {LONGEST}.")
        if self.temperature != 0 and not LEAST_TEMPERATURE <= self.temperature < math.inf:
            raise UserError(
                f"temperature is {self.temperature}; it must be 0 (the likeliest token) or at least "
                f"{LEAST_TEMPERATURE}, and finite."
            )
        if self.top_k < 0:
            raise UserError(f"top_k is {self.top_k}; it must be at least 1, or 0 for all tokens.")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}; it must be above 0 and at most 1.")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"seed is {self.seed}; it must lie between 0 and {2**32 - 1}.")
        if not 1 <= self.beams <= MOST_BEAMS:
            raise UserError(f"beams is {self.beams}; it must lie between 1 (no beam search) and {MOST_BEAMS}.")
        if not math.isfinite(self.length_penalty):
            raise UserError(f"length_penalty is {self.length_penalty}; it must be finite.")
        if self.beams > 1 and self.temperature > 0:
            raise UserError(f"beam search draws nothing: with {self.beams} beams the temperature must be 0, not "
                            f"{self.temperature}.")


def generate(objective: Objective, params: Params, prompts: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
    """The new ids alone of `continuations`, with the fields of Settings as options."""
    return [answer.ids for answer in continuations(objective, params, prompts, Settings(**options))]


def continuations(
    objective: Objective, params: Params, prompts: Sequence[Sequence[int]], settings: Settings,
    watch: Watch | None = None, every: int = 1, draw: int = 0,
) -> list[Continuation]:
    """Continues each prompt (token ids) until a stop symbol, or for max_new_tokens. Prompts may differ in length.

    watch: is called after every `every` tokens, and ends what it says is over; not with beams. draw: each number has
    draws of its own with the same seed.
    UserError for prompts that do not fit the model and models that write no text.
    """
    if not isinstance(objective, Generator):
        raise UserError(
            f"{type(objective).__name__} trains no model that writes text; generate works with causal and "
            "encoder-decoder models, and `jaxlm fill-mask` with masked ones."
        )
    vocabulary, s = objective.vocabulary, settings
    assert vocabulary is not None, "bind the objective to a vocabulary first"
    _check(vocabulary, prompts)
    is_stop = _stops(vocabulary, s.stop_ids)
    if not prompts:
        return []
    ids, mask = pad_left(objective.prepare_prompts([list(prompt) for prompt in prompts], s.max_new_tokens))
    params = jax.tree.map(jnp.asarray, params)  # once, however often the device is asked
    if s.beams > 1:
        found = search(objective, s.max_new_tokens, s.beams, params, ids, mask, is_stop, jnp.float32(s.length_penalty))
        return _rows(*found)
    kind: Kind = "greedy"
    if s.temperature > 0:
        kind = "filtered" if 0 < s.top_k < vocabulary.size or s.top_p < 1.0 else "sampled"
    sampling = Sampling(
        jax.random.fold_in(jax.random.key(s.seed), draw), jnp.float32(s.temperature),
        jnp.int32(min(s.top_k or vocabulary.size, vocabulary.size)), jnp.float32(s.top_p),
    )
    progress = _begin(objective, s.max_new_tokens, kind, params, ids, mask, is_stop, sampling)
    for written in range(1, s.max_new_tokens + 1, every if watch else s.max_new_tokens):
        if watch:
            over = watch([answer.ids for answer in _rows(progress.tokens, progress.log_probs, progress.counts)])
            progress = progress._replace(done=progress.done | np.asarray(over, bool))
            if progress.done.all():
                break
        until = min(written + every, s.max_new_tokens) if watch else s.max_new_tokens
        if until > written:
            progress = _advance(objective, kind, params, progress, is_stop, sampling, jnp.int32(until))
    return _rows(progress.tokens, progress.log_probs, progress.counts)


def pad_left(rows: Sequence[Sequence[int]], length: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(ids int32, where they are real, bool) [rows, length], by default the longest row's, rounded up."""
    length = length or -(-max(len(row) for row in rows) // PROMPT_MULTIPLE) * PROMPT_MULTIPLE
    ids, mask = np.zeros((len(rows), length), np.int32), np.zeros((len(rows), length), bool)
    for i, row in enumerate(rows):
        ids[i, length - len(row) :], mask[i, length - len(row) :] = row, True
    return ids, mask


def _rows(tokens: Array, log_probs: Array, counts: Array) -> list[Continuation]:
    tokens, log_probs, counts = jax.device_get((tokens, log_probs, counts))
    return [
        Continuation(ids[:count].tolist(), each[:count].tolist())
        for ids, each, count in zip(tokens, log_probs, counts, strict=True)
    ]


Kind = Literal["greedy", "sampled", "filtered"]


class Sampling(NamedTuple):
    """key, and the settings of the draws as scalars."""

    key: Array
    temperature: Array
    top_k: Array
    top_p: Array


class Progress(NamedTuple):
    """Continuations as far as they are written.

    tokens int32 and log_probs float32 [batch, max_new_tokens]; counts int32 [batch], the tokens of each; done bool
    [batch]; step int32 scalar, the tokens of those that are not done; state: the model's.
    """

    tokens: Array
    log_probs: Array
    counts: Array
    done: Array
    step: Array
    state: Any


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _begin(objective, max_new_tokens, kind, params, prompts, mask, is_stop, sampling):
    """The progress after the first token."""
    logits, state = objective.prefill(params, prompts, mask, max_new_tokens)
    token, log_prob = _choose(objective, kind, logits, sampling, 0)
    rows = prompts.shape[0]
    tokens = jnp.zeros((rows, max_new_tokens), jnp.int32).at[:, 0].set(token)
    log_probs = jnp.zeros((rows, max_new_tokens), jnp.float32).at[:, 0].set(log_prob)
    return Progress(tokens, log_probs, jnp.ones(rows, jnp.int32), is_stop[token], jnp.int32(1), state)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _advance(objective, kind, params, progress, is_stop, sampling, until):
    """The progress at step `until`, or earlier where all is done."""

    def going(p):
        return (p.step < until) & ~jnp.all(p.done)

    def body(p):
        last = jax.lax.dynamic_index_in_dim(p.tokens, p.step - 1, axis=1, keepdims=False)
        logits, state = objective.decode(params, last, p.state)
        token, log_prob = _choose(objective, kind, logits, sampling, p.step)
        tokens = p.tokens.at[:, p.step].set(jnp.where(p.done, 0, token))
        log_probs = p.log_probs.at[:, p.step].set(log_prob)
        return Progress(tokens, log_probs, p.counts + ~p.done, p.done | is_stop[token], p.step + 1, state)

    return jax.lax.while_loop(going, body, progress)


def _choose(objective, kind, logits, sampling, step):
    """(the next tokens int32 [batch], their log-probabilities)."""
    # A model may carry rows that no token has, for the hardware's sake.
    logits = logits[:, : objective.vocabulary.size]
    if kind == "greedy":
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    else:
        tempered = logits / sampling.temperature
        if kind == "filtered":
            tempered = filter_logits(tempered, sampling.top_k, sampling.top_p)
        token = jax.random.categorical(jax.random.fold_in(sampling.key, step), tempered).astype(jnp.int32)
    chosen = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
    return token, chosen - jax.nn.logsumexp(logits, axis=-1)


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


def _stops(vocabulary: Vocabulary, stop_ids: Sequence[int] | None) -> np.ndarray:
    """bool [vocab]: which tokens end a text."""
    stops = ([vocabulary.eos] if vocabulary.eos >= 0 else []) if stop_ids is None else [int(i) for i in stop_ids]
    for stop in stops:
        if not 0 <= stop < vocabulary.size:
            raise UserError(f"the stop symbol with id {stop} is not in {vocabulary.name}, whose ids end at "
                            f"{vocabulary.size - 1}.")
    is_stop = np.zeros(vocabulary.size, bool)
    is_stop[stops] = True
    return is_stop


def _check(vocabulary: Vocabulary, prompts: Sequence[Sequence[int]]) -> None:
    for number, prompt in enumerate(prompts, start=1):
        which = f"prompt {number}" if len(prompts) > 1 else "the prompt"
        if len(prompt) == 0:
            raise UserError(f"{which} is empty; give at least one token to continue.")
        if len(prompt) > LONGEST:
            raise UserError(f"{which} has {len(prompt)} tokens; the most is {LONGEST}, so shorten it.")
        if not all(0 <= token < vocabulary.size for token in prompt):
            raise UserError(f"{which} holds an id that is not in {vocabulary.name}, whose ids end at "
                            f"{vocabulary.size - 1}.")
