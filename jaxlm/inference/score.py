"""Log-likelihoods of continuations and of long texts, and pseudo-log-likelihoods of masked language models.

Texts are grouped into a few static shapes, each of which is compiled once.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxlm.errors import UserError
from jaxlm.inference.generate import decoder_start, max_length, pad, prepare_prompts
from jaxlm.models.base import Inputs
from jaxlm.models.layers.embeddings import logits as vocabulary_logits
from jaxlm.objectives.base import Objective
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.parallel.activations import constrain, num_batch_shards
from jaxlm.parallel.inference import num_row_shards, run_rows
from jaxlm.types import Params

CONTEXTS = tuple(32 * 2**k for k in range(9))
TARGETS = tuple(16 * 4**k for k in range(6))
"""Lengths to which contexts and targets are padded, up to the model's maximum length."""
BATCH_TOKENS = 4096
"""Tokens in a batch of a device, with padding."""
LOGITS_ROWS = 512
"""Tokens whose vocabulary logits a device computes at once."""


class Pair(NamedTuple):
    """Context and targets to score.

    Attributes:
        context: Tokens before the targets; the encoder's input of an encoder-decoder.
        targets: Tokens that follow.
        num_unscored: Number of targets, from the first, that are not scored.
    """

    context: Sequence[int]
    targets: Sequence[int]
    num_unscored: int = 0


class Score(NamedTuple):
    """Log-probability (float32) of each scored target, and whether it is the likeliest token (bool)."""

    log_probs: np.ndarray
    is_likeliest: np.ndarray

    @property
    def total(self) -> float:
        """Log-likelihood in nats."""
        return float(self.log_probs.sum(dtype=np.float64))


NO_SCORE = Score(np.zeros(0, np.float32), np.zeros(0, bool))
"""Score of no targets."""


def encode_pair(
    loaded: PretrainedModel, context: str, continuation: str, sentinel: bool = False, keep_space: bool = False
) -> Pair:
    """Tokenize a context and its continuation; special tokens written in them are tokens, as in lm_eval.

    For a decoder both are encoded as one text and split where it differs from the context alone, so that a token that
    joins both is scored; white space at the end of the context belongs to the continuation, as in lm_eval. (lm_eval
    splits after as many tokens as the context has, which leaves the joining token of some continuations out.) An empty
    context becomes the begin token.

    Args:
        loaded: The trained model.
        context: Text before the continuation.
        continuation: Text to score.
        sentinel: Format a pair for an encoder-decoder pretrained on spans: the encoder reads `context <extra_id_0>`,
            the decoder `<extra_id_0> continuation`. Otherwise the decoder reads the continuation.
        keep_space: Keep the leading space of what the decoder of an encoder-decoder reads, as lm_eval does.
    """
    objective, tokenizer, v = loaded.objective, loaded.tokenizer, loaded.tokenizer.vocabulary
    space = len(context) - len(context.rstrip())
    if space:
        context, continuation = context[:-space], context[-space:] + continuation
    if objective.answer_kind == "text" and objective.model.has_encoder:
        before = tokenizer.encode_with_symbols(context)
        after = tokenizer.encode_with_symbols(continuation if keep_space else continuation.lstrip(" "))
        if sentinel:
            v.require("sentinel", purpose="the continuation of a sentinel")
            return Pair([*before, v.sentinel], [v.sentinel, *after], 1)
        return Pair(before or [v.eos], after)
    if not context:
        after = tokenizer.encode_with_symbols(continuation)
        if objective.answer_kind == "masks":
            return Pair([], after)
        begin = text_begin(loaded)
        return Pair(after[:1], after[1:]) if after[:1] == [begin] else Pair([begin], after)
    both, before = map(tokenizer.encode_with_symbols, (context + continuation, context))
    common = itertools.takewhile(lambda ids: ids[0] == ids[1], zip(both, before, strict=False))
    at = len(list(common))  # 好 and 人 may be one token together
    if continuation and at == len(both):
        raise UserError(f"{continuation!r} has no tokens of its own after {context[-40:]!r}; it cannot be scored.")
    prompt = prompt_of(objective, both[:at])
    return Pair(prompt if prompt or objective.answer_kind == "masks" else [text_begin(loaded)], both[at:])


def text_prefix(objective: Objective) -> list[int]:
    """Return the special tokens that a decoder's own tokenizer puts before a text, such as <bos>."""
    is_decoder = objective.answer_kind == "text" and not objective.model.has_encoder
    return objective.text_template.before(objective.vocabulary) if is_decoder else []


def prompt_of(objective: Objective, ids: Sequence[int]) -> list[int]:
    """Return a prompt with the tokens of `text_prefix` before it, unless it begins with them."""
    prefix = text_prefix(objective)
    return [*ids] if [*ids[: len(prefix)]] == prefix else [*prefix, *ids]


def text_begin(loaded: PretrainedModel) -> int:
    """Return the token before a decoder's text: what its tokenizer puts there, the begin token, or the end token.

    In the plain streams of a run the end token of the previous text stood there.
    """
    v = loaded.tokenizer.vocabulary
    if prefix := text_prefix(loaded.objective):
        return prefix[-1]
    if v.bos < 0 or (loaded.step and getattr(loaded.objective, "plain_stream", False)):
        v.require("eos", purpose="a text without a context")
        return v.eos
    return v.bos


def windows(tokens: Sequence[int], begin: int, length: int, stride: int) -> Iterator[Pair]:
    """Split a long text into pairs in which every token is a target once.

    Args:
        tokens: The text.
        begin: Context of the first window.
        length: Maximum number of tokens that the model reads, and of targets in the first window.
        stride: Number of targets in other windows; their contexts are as long as fits. lm_eval uses `length`.
    """
    if tokens:
        yield Pair([begin], tokens[:length])
    for start in range(length, len(tokens), stride):
        end = min(start + stride, len(tokens))
        yield Pair(tokens[max(end - length - 1, 0) : start], tokens[start:end])


def window(loaded: PretrainedModel) -> int:
    """Return the tokens of the longest window of a text: those of its training, where they are known."""
    most = max_length(loaded)
    return min(most, loaded.length or most)


def score_texts(loaded: PretrainedModel, texts: Sequence[str], stride: int, symbols: bool = False) -> list[Score]:
    """Return the scores of whole texts, in windows that move by `stride` tokens (see `windows`).

    With `symbols`, special tokens that are written in a text are tokens, as in lm_eval; else plain characters.
    """
    objective, tokenizer = loaded.objective, loaded.tokenizer
    if objective.answer_kind != "text" or not objective.model.is_causal:
        raise UserError(
            "only causal models score whole texts; choose one, or the kind pseudo-likelihood for a masked model."
        )
    length = window(loaded)
    if not 0 < stride <= length:
        raise UserError(f"stride is {stride}; it must be 1 to {length}, the tokens that the model reads at a time.")
    begin = text_begin(loaded)
    encode = tokenizer.encode_with_symbols if symbols else tokenizer.encode
    pairs = [list(windows(encode(text), begin, length, stride)) for text in texts]
    found = iter(score(loaded, [pair for parts in pairs for pair in parts]))
    scores = [[NO_SCORE, *(next(found) for _ in parts)] for parts in pairs]
    return [Score(*map(np.concatenate, zip(*parts, strict=True))) for parts in scores]


def score(loaded: PretrainedModel, pairs: Sequence[Pair]) -> list[Score]:
    """Return the scores of each pair's targets.

    A masked language model scores each target with only that one masked (Salazar et al. 2020, "Masked Language Model
    Scoring"). Contexts that are too long for a generator are truncated on the left.

    Raises:
        UserError: The model can do neither, or the targets alone are too long for it.
    """
    objective, params = loaded.objective, jax.tree.map(jnp.asarray, loaded.params)
    shards, limit = num_row_shards(params), max_length(loaded)
    if objective.answer_kind == "masks":
        return _score_masked(objective, params, pairs, shards, limit)
    if objective.answer_kind != "text":
        raise UserError(f"{type(objective).__name__} cannot score texts; use a causal, an encoder-decoder or a "
                        "masked model.")
    fitted = [fit(objective, pair, limit) for pair in pairs]
    found = [NO_SCORE] * len(pairs)
    shapes = {
        i: (_padded(len(pair.context), CONTEXTS, limit), _padded(len(pair.targets), TARGETS, limit))
        for i, pair in enumerate(fitted) if pair.targets
    }
    for (length, count), batch, rows in _batches(shapes, shards):
        chosen = [fitted[i] for i in batch] + [Pair([0], [0])] * (rows - len(batch))
        ids, mask = pad([pair.context for pair in chosen], length, left=True)
        targets, target_mask = pad([pair.targets for pair in chosen], count)
        inputs = ids, mask, targets, target_mask
        log_probs, likeliest = run_rows(functools.partial(_score, objective), params, inputs)
        for row, i in enumerate(batch):
            kept = slice(fitted[i].num_unscored, len(fitted[i].targets))
            found[i] = Score(log_probs[row, kept], likeliest[row, kept])
    return found


def fit(objective: Objective, pair: Pair, room: int) -> Pair:
    """Truncate the context of a pair on the left so that the pair fits the model, which takes `room` tokens."""
    if len(pair.targets) > room:
        raise UserError(f"a continuation has {len(pair.targets)} tokens, but the model takes {room}; shorten it.")
    context = list(pair.context)
    if objective.model.has_encoder:  # `prepare_prompts` appends the end token
        return pair._replace(context=prepare_prompts(objective, [context[-room + 1 :]], 1)[0])
    return pair._replace(context=context[-(room + 1 - len(pair.targets)) :])


def _padded(size: int, lengths: Sequence[int], limit: int) -> int:
    return min(next((length for length in lengths if length >= size), size), max(limit, size))


def _batches(
    shapes: Mapping[int, tuple[int, int]], shards: int
) -> Iterator[tuple[tuple[int, int], list[int], int]]:
    """Yield (shape, numbers of the batch's items, number of rows) of batches of at most BATCH_TOKENS on a device."""
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, shape in shapes.items():
        groups[shape].append(number)
    for shape, numbers in sorted(groups.items()):
        own = -(-len(numbers) // shards)  # of each device
        rows = shards * min(max(1, BATCH_TOKENS // sum(shape)), 1 << (own - 1).bit_length())
        for start in range(0, len(numbers), rows):
            yield shape, numbers[start : start + rows], rows


@functools.partial(jax.jit, static_argnums=0)
def _score(objective, params, inputs):
    """Return log-probabilities, float32, and whether a target is the likeliest token, bool: [batch, targets]."""
    ids, mask, targets, target_mask = inputs
    features = objective.model.target_features(params, ids, mask, targets, target_mask, decoder_start(objective))
    table, bias = objective.model.output_matrix(params)
    table, bias = jax.tree.map(lambda x: x[: objective.vocabulary.size], (table, bias))  # without padding

    def score_columns(columns: tuple[Array, Array]) -> tuple[Array, Array]:
        features, labels = map(constrain, columns)
        found = score_logits(vocabulary_logits(features, table, bias).reshape(labels.size, -1), labels.reshape(-1))
        return tuple(x.reshape(labels.shape) for x in found)

    # Parts of all rows, so that each device has its own rows of every part.
    rows, count = targets.shape
    chunk = min(count, max(1, LOGITS_ROWS * num_batch_shards() // rows))

    def split(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, -count % chunk), *[(0, 0)] * (x.ndim - 2)))
        return x.reshape(rows, -1, chunk, *x.shape[2:]).swapaxes(0, 1)

    found = jax.lax.map(score_columns, (split(features), split(targets)))
    return tuple(x.swapaxes(0, 1).reshape(rows, -1)[:, :count] for x in found)


def score_logits(
    logits: Float[Array, "rows vocab"], labels: Int[Array, " rows"]
) -> tuple[Float[Array, " rows"], Bool[Array, " rows"]]:
    """Return the log-probability of each label, and whether it is the likeliest token."""
    chosen = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    return chosen - jax.nn.logsumexp(logits, axis=1), jnp.argmax(logits, axis=1) == labels


def _score_masked(
    objective: Objective, params: Params, pairs: Sequence[Pair], shards: int, limit: int
) -> list[Score]:
    if not pairs:
        return []
    v = objective.vocabulary
    v.require("mask", "cls", "sep", "pad", purpose="scoring texts")
    texts = [[v.cls, *pair.context, *pair.targets, v.sep] for pair in pairs]
    longest = max(map(len, texts))
    if longest > limit:
        raise UserError(f"a text has {longest} tokens with special tokens, but the model takes {limit}; shorten it.")
    scored = [(i, 1 + len(pair.context) + k) for i, pair in enumerate(pairs) for k in range(len(pair.targets))]
    values, likeliest = np.zeros(len(scored), np.float32), np.zeros(len(scored), bool)
    shapes = {k: (_padded(len(texts[i]), CONTEXTS, limit), 0) for k, (i, _) in enumerate(scored)}
    for (length, _), batch, rows in _batches(shapes, shards):
        chosen = [scored[number] for number in batch]
        # Rows that fill up the batch need one token for a finite softmax.
        ids, mask = pad([texts[i] for i, _ in chosen] + [[v.pad]] * (rows - len(batch)), length, v.pad)
        positions, labels = np.zeros((rows, 1), np.int32), np.zeros(rows, np.int32)
        for row, (i, position) in enumerate(chosen):
            ids[row, position], positions[row], labels[row] = v.mask, position, texts[i][position]
        inputs = ids, mask.astype(np.int32), positions, labels
        found = run_rows(functools.partial(_score_masks, objective), params, inputs)
        values[batch], likeliest[batch] = (x[: len(batch)] for x in found)
    ends = np.cumsum([len(pair.targets) for pair in pairs])[:-1]
    return [Score(*parts) for parts in zip(np.split(values, ends), np.split(likeliest, ends), strict=True)]


@functools.partial(jax.jit, static_argnums=0)
def _score_masks(objective, params, inputs):
    ids, attention_mask, positions, labels = inputs
    inputs = Inputs(ids, mask=attention_mask)
    logits = objective.model.token_logits(params, inputs, objective.predicting(positions))[:, 0]
    return score_logits(logits[:, : objective.vocabulary.size], labels)
