"""How likely a model finds given texts: log-likelihoods of continuations, of whole texts in windows, and pseudo-log-
likelihoods of masked models.

Texts are sorted into few static shapes, each of which is compiled once.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxlm.errors import UserError
from jaxlm.inference.generate import pad_left
from jaxlm.models.layers.embeddings import logits as vocabulary_logits
from jaxlm.objectives.base import Generator, MaskFiller, Objective, Params
from jaxlm.tokenizers.tokenizer import Tokenizer

CONTEXTS = tuple(32 * 2**k for k in range(9))
TARGETS = tuple(16 * 4**k for k in range(6))
"""The lengths to which contexts and targets are padded, where the model takes as many."""
BATCH_TOKENS = 4096
"""Tokens that go through the model together, padding included."""
LOGITS_ROWS = 512
"""Tokens whose vocabulary logits are in memory together."""


class Pair(NamedTuple):
    """context: what the model reads; for an encoder-decoder, the encoder. targets: the tokens that follow. given: how
    many targets, from the first, are read but not scored."""

    context: Sequence[int]
    targets: Sequence[int]
    given: int = 0


class Score(NamedTuple):
    """Of each scored target its log-probability, float32, and whether it is the likeliest token, bool."""

    log_probs: np.ndarray
    is_likeliest: np.ndarray

    @property
    def total(self) -> float:
        """The log-likelihood, in nats."""
        return float(self.log_probs.sum(dtype=np.float64))


def encode_pair(
    objective: Objective, tokenizer: Tokenizer, context: str, continuation: str, sentinel: bool = False
) -> Pair:
    """The tokens of a context and what continues it.

    A decoder reads one text: both are encoded together and divided where the context's own tokens end, and white space
    at the end of the context belongs to the continuation (as in lm_eval). After no context stands the symbol that a
    text begins with. sentinel: an encoder-decoder pretrained on spans reads `context <extra_id_0>` and continues
    `<extra_id_0>`; otherwise the decoder writes the continuation alone, which begins a text, so that the space before
    it falls away.
    """
    v = tokenizer.vocabulary
    space = len(context) - len(context.rstrip())
    if space:
        context, continuation = context[:-space], context[-space:] + continuation
    if isinstance(objective, Generator) and objective.has_encoder:
        before, after = tokenizer.encode(context), tokenizer.encode(continuation.lstrip(" "))
        if sentinel:
            v.require("sentinel", purpose="the continuation of a sentinel")
            return Pair([*before, v.sentinel], [v.sentinel, *after], 1)
        return Pair(before or [v.eos], after)
    if not context:
        after = tokenizer.encode(continuation)
        if isinstance(objective, MaskFiller):
            return Pair([], after)
        begin = text_begin(tokenizer)
        return Pair(after[:1], after[1:]) if after[:1] == [begin] else Pair([begin], after)
    both, before = tokenizer.encode(context + continuation), tokenizer.encode(context)
    return Pair(both[: len(before)], both[len(before) :])


def text_begin(tokenizer: Tokenizer) -> int:
    """The token that a decoder's text follows: the vocabulary's begin symbol, or the end of the text before.
    UserError where it has neither."""
    v = tokenizer.vocabulary
    if v.bos < 0:
        v.require("eos", purpose="a text without a context")
    return v.bos if v.bos >= 0 else v.eos


def windows(tokens: Sequence[int], begin: int, length: int, stride: int) -> Iterator[Pair]:
    """A long text as pairs of at most `length` tokens read. Each token is a target once: the first `length` after
    `begin` alone, then `stride` at a time after as many before them as fit. lm_eval's windows do not overlap: its
    stride is `length`."""
    if tokens:
        yield Pair([begin], tokens[:length])
    for start in range(length, len(tokens), stride):
        end = min(start + stride, len(tokens))
        yield Pair(tokens[max(end - length - 1, 0) : start], tokens[start:end])


def score(objective: Objective, params: Params, pairs: Sequence[Pair]) -> list[Score]:
    """The scores of the targets of each pair; of a masked model those of masking each target alone, with all other
    tokens seen (Salazar et al. 2020, "Masked Language Model Scoring").

    Contexts that are too long for the model lose their beginning. UserError where the model can do neither, and for
    targets that alone are too long for it.
    """
    params = jax.tree.map(jnp.asarray, params)
    if isinstance(objective, MaskFiller):
        return _score_masked(objective, params, pairs)
    if not isinstance(objective, Generator):
        raise UserError(f"{type(objective).__name__} gives texts no likelihood; use a causal, an encoder-decoder or a "
                        "masked model.")
    fitted = [fit(objective, pair) for pair in pairs]
    found: list[Score] = [Score(np.zeros(0, np.float32), np.zeros(0, bool))] * len(pairs)
    most = objective.max_length
    shapes = ((_padded(len(p.context), CONTEXTS, most), _padded(len(p.targets), TARGETS, most)) for p in fitted)
    for (length, count), batch, rows in _batches(shapes, [len(pair.targets) > 0 for pair in fitted]):
        chosen = [fitted[i] for i in batch] + [Pair([0], [0])] * (rows - len(batch))
        ids, mask = pad_left([pair.context for pair in chosen], length)
        targets, target_mask = (x[:, ::-1] for x in pad_left([pair.targets[::-1] for pair in chosen], count))
        log_probs, likeliest = jax.device_get(_score(objective, params, ids, mask, targets, target_mask))
        for row, i in enumerate(batch):
            place = slice(fitted[i].given, len(fitted[i].targets))
            found[i] = Score(log_probs[row, place], likeliest[row, place])
    return found


def fit(objective: Generator, pair: Pair) -> Pair:
    """The pair with as much of the end of its context as the model can read. UserError where there is room for none."""
    room = objective.max_length
    if len(pair.targets) > room:
        raise UserError(f"a continuation has {len(pair.targets)} tokens, but the model takes {room}; shorten it.")
    context = list(pair.context)
    if objective.has_encoder:  # the end symbol closes it
        return pair._replace(context=objective.prepare_prompts([context[-room + 1 :]], 1)[0])
    return pair._replace(context=context[-(room + 1 - len(pair.targets)) :])


def _padded(size: int, lengths: Sequence[int], limit: int) -> int:
    return min(next((length for length in lengths if length >= size), size), max(limit, size))


def _batches(
    shapes: Iterable[tuple[int, int]], wanted: Sequence[bool]
) -> Iterator[tuple[tuple[int, int], list[int], int]]:
    """(shape, the numbers of the items that have it, rows of the batch): as many as BATCH_TOKENS allow."""
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, (shape, is_wanted) in enumerate(zip(shapes, wanted, strict=True)):
        if is_wanted:
            groups[shape].append(number)
    for shape, numbers in sorted(groups.items()):
        rows = min(max(1, BATCH_TOKENS // sum(shape)), 1 << (len(numbers) - 1).bit_length())
        for start in range(0, len(numbers), rows):
            yield shape, numbers[start : start + rows], rows


@functools.partial(jax.jit, static_argnums=0)
def _score(objective, params, ids, mask, targets, target_mask):
    """float32 and bool [batch, targets]: log-probabilities, and whether the target is the likeliest token."""
    features = objective.target_features(params, ids, mask, targets, target_mask)
    table, bias = objective.model.output_matrix(params)
    table, bias = jax.tree.map(lambda x: x[: objective.vocabulary.size], (table, bias))  # rows beyond are of no token

    def of_rows(rows: tuple[Array, Array]) -> tuple[Array, Array]:
        features, labels = rows
        return of_logits(vocabulary_logits(features, table, bias), labels)

    size, chunk = targets.size, min(LOGITS_ROWS, targets.size)
    labels = jnp.pad(targets.reshape(size), (0, -size % chunk))
    features = jnp.pad(features.reshape(size, -1), ((0, -size % chunk), (0, 0)))
    found = jax.lax.map(of_rows, (features.reshape(-1, chunk, features.shape[1]), labels.reshape(-1, chunk)))
    return tuple(x.reshape(-1)[:size].reshape(targets.shape) for x in found)


def of_logits(
    logits: Float[Array, "rows vocab"], labels: Int[Array, " rows"]
) -> tuple[Float[Array, " rows"], Bool[Array, " rows"]]:
    """The log-probability of each label, and whether no token is likelier."""
    chosen = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    return chosen - jax.nn.logsumexp(logits, axis=1), jnp.argmax(logits, axis=1) == labels


def _score_masked(objective: MaskFiller, params: Params, pairs: Sequence[Pair]) -> list[Score]:
    if not pairs:
        return []
    v = objective.vocabulary
    v.require("mask", "cls", "sep", "pad", purpose="scoring texts")
    texts = [[v.cls, *pair.context, *pair.targets, v.sep] for pair in pairs]
    longest = max(map(len, texts), default=0)
    if longest > objective.max_length:
        raise UserError(f"a text has {longest} tokens with the symbols around it, but the model takes "
                        f"{objective.max_length}; shorten it.")
    places = [(i, 1 + len(pair.context) + k) for i, pair in enumerate(pairs) for k in range(len(pair.targets))]
    values, likeliest = np.zeros(len(places), np.float32), np.zeros(len(places), bool)
    shapes = ((_padded(len(texts[i]), CONTEXTS, objective.max_length), 0) for i, _ in places)
    for (length, _), batch, rows in _batches(shapes, [True] * len(places)):
        ids, attention_mask = np.full((rows, length), v.pad, np.int32), np.zeros((rows, length), np.int32)
        positions, labels = np.zeros((rows, 1), np.int32), np.zeros(rows, np.int32)
        for row, number in enumerate(batch):
            i, place = places[number]
            ids[row, : len(texts[i])], attention_mask[row, : len(texts[i])] = texts[i], 1
            ids[row, place], positions[row], labels[row] = v.mask, place, texts[i][place]
        attention_mask[len(batch) :, 0] = 1  # rows that only fill up the batch
        found = jax.device_get(_score_masks(objective, params, ids, attention_mask, positions, labels))
        values[batch], likeliest[batch] = (x[: len(batch)] for x in found)
    ends = np.cumsum([len(pair.targets) for pair in pairs])[:-1]
    return [Score(*parts) for parts in zip(np.split(values, ends), np.split(likeliest, ends), strict=True)]


@functools.partial(jax.jit, static_argnums=0)
def _score_masks(objective, params, ids, attention_mask, positions, labels):
    logits = objective.token_logits(params, ids, attention_mask, positions)[:, 0]
    return of_logits(logits[:, : objective.vocabulary.size], labels)
