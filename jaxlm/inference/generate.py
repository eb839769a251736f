"""Generation of token ids with decoders and encoder-decoders, with the whole loop on the device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxlm.errors import UserError
from jaxlm.fields import check_ranges, field
from jaxlm.inference.beam import search
from jaxlm.keys import Purpose, purpose_key
from jaxlm.objectives.base import Objective
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.parallel.inference import constraints, fetch, num_row_shards, place_batch, run_rows
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import Params

PROMPT_MULTIPLE = 32
"""Rows are padded to a multiple of this length, which limits the number of compilations."""
MAX_TOKENS = 8192
"""Maximum length of a continuation, and of the prompt of a model without a number of positions."""
MIN_TEMPERATURE = 1e-6
"""Lower temperatures, which would overflow float32 logits, are raised to this one, at which sampling is greedy."""

Watch = Callable[[list[list[int]]], Sequence[bool]]
"""Function from the new ids of each prompt so far to whether each continuation is done."""


class Continuation(NamedTuple):
    """Continuation of one prompt.

    Attributes:
        ids: The new tokens, with the stop token that ended them.
        log_probs: Log-probability of each token before temperature, top_k and top_p.
    """

    ids: list[int]
    log_probs: list[float]


@dataclasses.dataclass(frozen=True)
class Settings:
    """Options of generation.

    Raises:
        UserError: An option is out of range.
    """

    max_new_tokens: int = field(64, range=f"[1, {MAX_TOKENS}]")
    """Maximum number of new tokens."""
    temperature: float = field(0.0, range="[0, inf)")
    """0 means greedy decoding; otherwise tokens are sampled from softmax(logits / temperature)."""
    top_k: int = field(0, range="[0, inf)")
    """Sample from the k likeliest tokens only; 0 means all. Ignored at temperature 0, as are top_p and seed."""
    top_p: float = field(1.0, range="(0, 1]")
    """Sample from the fewest likeliest tokens whose probabilities add up to top_p (Holtzman et al. 2020)."""
    seed: int = field(0, range="[0, 4294967296)")
    """Sampling seed."""
    beams: int = field(1, range="[1, 256]")
    """Number of beams; 1 means no beam search."""
    length_penalty: float = field(1.0, range="(-inf, inf)")
    """Beams are ranked by log-probability / length ** length_penalty; positive values favour longer ones.

    Ignored without beam search.
    """
    steps: int = field(1024, range="[1, 65536]")
    """Number of denoising steps of a masked diffusion model (see `jaxlm.inference.denoise`); ignored by others. A step
    without a mask to fill costs nothing."""
    stop_ids: Sequence[int] | None = None
    """Stop tokens. None for the vocabulary's end-of-sequence token; an empty sequence for none."""

    def __post_init__(self) -> None:
        """Check the options."""
        check_ranges(self, "")
        if self.beams > 1 and self.temperature > 0:
            raise UserError(f"beam search does not sample: with {self.beams} beams the temperature must be 0, not "
                            f"{self.temperature}.")

    def stops(self, vocabulary: Vocabulary) -> list[int]:
        """Return the stop tokens."""
        default = [vocabulary.eos] if vocabulary.eos >= 0 else []
        return default if self.stop_ids is None else list(self.stop_ids)


def generate(objective: Objective, params: Params, prompts: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
    """Return only the ids of `continuations`; the options are the fields of Settings."""
    return [answer.ids for answer in continuations(objective, params, prompts, Settings(**options))]


def continuations(
    objective: Objective, params: Params, prompts: Sequence[Sequence[int]], settings: Settings,
    watch: Watch | None = None, watch_every: int = 1, stream: int = 0,
) -> list[Continuation]:
    """Continue prompts until a stop token or for max_new_tokens.

    Args:
        objective: The objective of the trained model.
        params: Its parameters.
        prompts: Token ids of each prompt; lengths may differ.
        settings: Options of generation.
        watch: Ends continuations early; not called with beams.
        watch_every: Number of tokens between two calls of `watch`.
        stream: Number of the random stream, for independent samples of one seed.

    Raises:
        UserError: A prompt does not fit the model, or the model does not generate text.
    """
    if objective.answer_kind != "text":
        raise UserError(
            f"{type(objective).__name__} trains no model that writes text; generate works with causal and "
            "encoder-decoder models, and `jaxlm fill-mask` with masked ones. Where an earlier phase of a run trained a "
            "decoder, give RUN@STEP. The export of a masked diffusion run is a masked model; generate with the run."
        )
    vocabulary, s = objective.vocabulary, settings
    assert vocabulary is not None, "bind the objective to a vocabulary first"
    _check(vocabulary, prompts, max(objective.model.max_length or 0, MAX_TOKENS))
    is_stop = np.isin(np.arange(vocabulary.size), s.stops(vocabulary))
    if not prompts:
        return []
    ids, mask = pad(prepare_prompts(objective, prompts, s.max_new_tokens), left=True)
    params = jax.tree.map(jnp.asarray, params)  # one transfer for all steps
    if s.beams > 1:
        write = functools.partial(search, objective, s.max_new_tokens, s.beams, decoder_start(objective))
        return _rows(run_rows(write, params, (ids, mask), is_stop, np.float32(s.length_penalty)))
    kind, sampling = make_sampling(s, vocabulary.size, stream)
    done, shards = np.zeros(len(prompts), bool), num_row_shards(params)
    is_filler = np.arange(-(-len(ids) // shards) * shards) >= len(ids)
    with constraints(params):
        progress = _start(
            objective, s.max_new_tokens, kind, params, place_batch((ids, mask), params), is_stop, sampling
        )
        progress = progress._replace(done=progress.done | place_batch(is_filler, params))
        for step in range(1, s.max_new_tokens + 1, watch_every if watch else s.max_new_tokens):
            if watch:
                done |= np.asarray(watch([answer.ids for answer in _rows(_written(progress, len(prompts)))]), bool)
                done |= fetch(progress.done, len(prompts))
                if done.all():
                    break
                progress = progress._replace(done=place_batch(done, params))
            until = min(step + watch_every, s.max_new_tokens) if watch else s.max_new_tokens
            if until > step:
                progress = _advance(objective, kind, params, progress, is_stop, sampling, np.int32(until))
    return _rows(_written(progress, len(prompts)))


def prepare_prompts(
    objective: Objective, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> list[list[int]]:
    """Return the token ids that the model reads of each prompt.

    An encoder's prompt ends with the end token, which every training input has.
    """
    rows, limit = [list(prompt) for prompt in prompts], objective.model.max_length
    if objective.model.has_encoder:
        eos = objective.vocabulary.eos
        return [row if row[-1:] == [eos] else [*row, eos] for row in rows]
    for row in rows if limit else ():
        # The model never reads the last new token, so it needs no position.
        if len(row) + max_new_tokens - 1 > limit:
            raise UserError(
                f"a prompt of {len(row)} tokens and {max_new_tokens} new ones exceed the model's {limit} positions "
                "(the last new token needs none); shorten the prompt, or ask for fewer new tokens."
            )
    return rows


def decoder_start(objective: Objective) -> int:
    """Return the token that the decoder of an encoder-decoder begins with."""
    return objective.model.decoder_start(objective.vocabulary)


def max_length(loaded: PretrainedModel) -> int:
    """Return the most tokens that a text is scored with; for relative positions those of training, or T5's 512."""
    return loaded.objective.model.max_length or min(max(loaded.length or 0, 512), MAX_TOKENS)


def pad(
    rows: Sequence[Sequence[int]], length: int = 0, value: int = 0, left: bool = False
) -> tuple[Int[np.ndarray, "rows length"], Bool[np.ndarray, "rows length"]]:
    """Pad rows of token ids.

    A length of 0 is that of the longest row, rounded up.

    Returns:
        Ids int32, and the mask of non-padding tokens.
    """
    length = length or -(-max(len(row) for row in rows) // PROMPT_MULTIPLE) * PROMPT_MULTIPLE
    ids, mask = np.full((len(rows), length), value, np.int32), np.zeros((len(rows), length), bool)
    for i, row in enumerate(rows):
        place = slice(length - len(row), length) if left else slice(len(row))
        ids[i, place], mask[i, place] = row, True
    return ids, mask


def _written(progress: Progress, count: int) -> tuple[np.ndarray, ...]:
    """Return tokens, log-probabilities and counts of the first `count` rows."""
    return fetch((progress.tokens, progress.log_probs, progress.counts), count)


def _rows(written: tuple[np.ndarray, ...]) -> list[Continuation]:
    tokens, log_probs, counts = written
    return [
        Continuation(ids[:count].tolist(), each[:count].tolist())
        for ids, each, count in zip(tokens, log_probs, counts, strict=True)
    ]


Kind = Literal["greedy", "sampled", "filtered"]


class Sampling(NamedTuple):
    """Random key, and the sampling options as scalars."""

    key: Array
    temperature: Array
    top_k: Array
    top_p: Array


def make_sampling(s: Settings, size: int, stream: int = 0) -> tuple[Kind, Sampling]:
    """Return the kind and the options of sampling from `size` tokens; for `stream` see `continuations`."""
    is_filtered = 0 < s.top_k < size or s.top_p < 1.0
    return "greedy" if s.temperature == 0 else "filtered" if is_filtered else "sampled", Sampling(
        jax.random.fold_in(purpose_key(s.seed, Purpose.GENERATION), stream),
        jnp.float32(max(s.temperature, MIN_TEMPERATURE)), jnp.int32(min(s.top_k or size, size)), jnp.float32(s.top_p),
    )


class Progress(NamedTuple):
    """State of generation.

    Attributes:
        tokens: int32 [batch, max_new_tokens].
        log_probs: float32 [batch, max_new_tokens].
        counts: int32 [batch], the number of tokens.
        done: bool [batch].
        step: int32 scalar, the number of tokens of continuations that are not done.
        state: The model's decoding state.
    """

    tokens: Array
    log_probs: Array
    counts: Array
    done: Array
    step: Array
    state: Any


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _start(objective, max_new_tokens, kind, params, prompts_and_mask, is_stop, sampling):
    """Return the progress after the first token."""
    prompts, mask = prompts_and_mask
    logits, state = objective.model.prefill(params, prompts, mask, max_new_tokens, decoder_start(objective))
    token, log_prob = choose_tokens(objective, kind, logits, sampling, 0)
    rows = prompts.shape[0]
    tokens = jnp.zeros((rows, max_new_tokens), jnp.int32).at[:, 0].set(token)
    log_probs = jnp.zeros((rows, max_new_tokens), jnp.float32).at[:, 0].set(log_prob)
    return Progress(tokens, log_probs, jnp.ones(rows, jnp.int32), is_stop[token], jnp.int32(1), state)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _advance(objective, kind, params, progress, is_stop, sampling, until):
    """Return the progress at step `until`, or earlier if all continuations are done."""

    def is_running(p):
        return (p.step < until) & ~jnp.all(p.done)

    def body(p):
        last = jax.lax.dynamic_index_in_dim(p.tokens, p.step - 1, axis=1, keepdims=False)
        logits, state = objective.model.decode(params, last, p.state)
        token, log_prob = choose_tokens(objective, kind, logits, sampling, p.step)
        tokens = p.tokens.at[:, p.step].set(jnp.where(p.done, 0, token))
        log_probs = p.log_probs.at[:, p.step].set(log_prob)
        return Progress(tokens, log_probs, p.counts + ~p.done, p.done | is_stop[token], p.step + 1, state)

    return jax.lax.while_loop(is_running, body, progress)


def choose_tokens(
    objective: Objective, kind: Kind, logits: Float[Array, "batch vocab"], sampling: Sampling,
    step: Int[Array, ""] | int, mode: str | None = None,
) -> tuple[Int[Array, " batch"], Float[Array, " batch"]]:
    """Return the next tokens and their log-probabilities; `mode` is that of `jax.random.categorical`."""
    logits = logits[:, : objective.vocabulary.size]  # the embedding may be padded
    if kind == "greedy":
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    else:
        tempered = logits / sampling.temperature
        if kind == "filtered":
            tempered = filter_logits(tempered, sampling.top_k, sampling.top_p)
        key = jax.random.fold_in(sampling.key, step)
        token = jax.random.categorical(key, tempered, mode=mode).astype(jnp.int32)
    chosen = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
    return token, chosen - jax.nn.logsumexp(logits, axis=-1)


def filter_logits(
    logits: Float[Array, "batch vocab"], top_k: Int[Array, ""], top_p: Float[Array, ""]
) -> Float[Array, "batch vocab"]:
    """Set logits outside of top_k, then outside of top_p, to -inf; at least one token remains.

    Args:
        logits: Logits of the next token.
        top_k: Number of likeliest tokens to keep, and those as likely as the last of them.
        top_p: Share of their probability to keep, in the fewest likeliest tokens; of equally likely ones the first.
    """
    ordered = jnp.sort(logits, axis=-1, descending=True)
    ordered = jnp.where(ordered >= jnp.take(ordered, top_k - 1, axis=-1)[..., None], ordered, -jnp.inf)
    probabilities = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    kept = ((before < top_p) | (top_p >= 1.0)) & (ordered > -jnp.inf)
    threshold = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
    is_last = logits == threshold
    num_last = jnp.sum(kept & (ordered == threshold), axis=-1, keepdims=True)
    return jnp.where((logits > threshold) | (is_last & (jnp.cumsum(is_last, axis=-1) <= num_last)), logits, -jnp.inf)


def _check(vocabulary: Vocabulary, prompts: Sequence[Sequence[int]], limit: int) -> None:
    for number, prompt in enumerate(prompts, start=1):
        which = f"prompt {number}" if len(prompts) > 1 else "the prompt"
        if not prompt:
            raise UserError(f"{which} is empty; give at least one token.")
        if len(prompt) > limit:
            raise UserError(f"{which} has {len(prompt)} tokens; give at most {limit}.")
        if wrong := [i for i in prompt if not 0 <= i < vocabulary.size]:
            raise UserError(f"the id {wrong[0]} in {which} is not in {vocabulary.name} (0 to {vocabulary.size - 1}).")
