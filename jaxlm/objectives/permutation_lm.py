"""Permutation language modelling with a recurrence memory (XLNet, Yang et al. 2019)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from jaxlm.corruption.masking import in_slots, max_predictions
from jaxlm.corruption.pairs import sentence_starts
from jaxlm.corruption.permutation import choose_spans, draw_order
from jaxlm.corruption.streams import in_reading_order, reads_backward
from jaxlm.data.base import RowFormat
from jaxlm.errors import UserError
from jaxlm.fields import field
from jaxlm.models.base import Inputs
from jaxlm.models.xlnet import Xlnet
from jaxlm.objectives.base import Example, Line, Memory, Objective, Terms
from jaxlm.objectives.chunked_loss import token_losses
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import Params, TokenBatch


@dataclasses.dataclass(frozen=True)
class PermutationLM(Objective):
    """Permutation language modelling: loss = mean of -log p(token | tokens before it in a random order).

    A sixth of the tokens, in spans, is predicted. The first half of a row continues the stream; the rest is `A [SEP] B
    [SEP] [CLS]`. A follows that half up to a random sentence end; B follows A or comes from another row; the longer of
    the two is cut on its right. The next row begins after the first half, whose hidden states enter the memory. Every
    second row reads the text backward.
    """

    model: Xlnet = field(Xlnet(), weights=True)
    """The network."""
    predict_share: float = field(1 / 6, range="(0, 0.5]")
    """Share of a row's tokens that are predicted."""
    random_rate: float = field(0.5, range="[0, 1]")
    """Share of rows whose last segment comes from another row.

    Above 0, rows without a sentence end always take it from another row.
    """
    memory_length: int = field(384, range="[0, 65536]")
    """Length of the recurrence memory in tokens; 0 disables it."""

    primary_metric = "plm_loss"
    token_losses = ("plm_loss",)
    answer_kind = "text"

    @property
    def min_rows(self) -> int:
        return 4 if self.random_rate else 1  # a last segment comes from another row of the same direction

    def check(self, vocabulary: Vocabulary, length: int) -> None:
        vocabulary.require("cls", "sep", "pad", "eos", purpose="permutation language modelling")
        if length < 16 or length % 2:
            raise UserError(f"data.length is {length}; permutation language modelling needs an even one of 16 or more.")

    def row_format(self, length: int) -> RowFormat:
        # The text of a row, and half a row more: B is extended to its sentence end before the longer segment is cut.
        return RowFormat("stream-both-ways", length - 3 + length // 2, stride=length // 2)

    def corrupt(self, key: jax.Array, batch: TokenBatch) -> Example:
        """Build rows of two segments and draw a factorization order for each half.

        Returns:
            `input_ids`, `token_type_ids` (0 up to the first [SEP], 1 up to the second, 2 for [CLS]), `rank` and `limit`
            (see corruption.permutation.Order) int32 [batch, length]; `positions`, `labels` int32 and `weights` float32
            [batch, predictions]; `is_backward` int32 [batch].
        """
        v = self.vocabulary
        key_rows, key_first, key_second, key_order = jax.random.split(key, 4)
        is_backward = reads_backward(batch)
        ids, types, is_text, is_added = self._segments(key_rows, batch)
        half, count = ids.shape[1] // 2, max_predictions(ids.shape[1], self.predict_share)
        special = jnp.asarray(v.special)[ids]
        starts = jnp.asarray(v.word_start)[ids] | special

        def in_text_order(x: jax.Array) -> jax.Array:  # words begin where they begin in the text
            return jnp.where(is_backward[:, None] > 0, x[:, ::-1], x)

        is_chosen = jnp.concatenate([
            in_text_order(choose_spans(key, in_text_order(part), number))
            for key, part, number in (
                (key_first, starts[:, :half], count - count // 2), (key_second, starts[:, half:], count // 2)
            )
        ], axis=1)
        order = draw_order(key_order, is_chosen, is_added, 2)
        length = ids.shape[1]
        positions, is_used = in_slots(jnp.where(is_chosen & is_text, jnp.arange(length), length), length, count)
        return {
            "input_ids": ids, "token_type_ids": types, "rank": order.rank, "limit": order.limit,
            "positions": positions, "labels": jnp.take_along_axis(ids, positions, axis=1),
            "weights": is_used.astype(jnp.float32), "is_backward": is_backward,
        }

    def _segments(self, key: jax.Array, batch: TokenBatch) -> tuple[Array, Array, Array, Array]:
        """Build rows `reused text, A [SEP] B [SEP] [CLS]`.

        As in the official code, A ends at a random sentence end, and B begins with a sentence and ends with one; what
        exceeds the row is cut from the right of the longer of the two. If no sentence ends inside the row, A extends
        to the next sentence end and B comes from another row.

        Returns:
            Token ids, segment types, the mask of text tokens (no padding), and the mask of [SEP] and [CLS], [batch,
            length] each.
        """
        v = self.vocabulary
        key_cut, key_swap, key_other, key_begin = jax.random.split(key, 4)
        starts, batch = self._sentence_starts(batch), in_reading_order(batch)
        rows, raw = batch.tokens.shape
        half = raw // 3 + 1
        room, number, position = half - 3, jnp.arange(rows), jnp.arange(raw)
        last_start = jax.lax.cummax(jnp.where(starts, position, -1), axis=1)
        next_start = jax.lax.cummin(jnp.where(starts, position, raw), axis=1, reverse=True)
        next_start = jnp.pad(next_start, ((0, 0), (0, 1)), constant_values=raw)
        is_inside = (position > half) & (position < half + room)
        ends, draw = starts & is_inside, jax.random.uniform(key_cut, starts.shape)
        end_a, end = jnp.argmax(jnp.where(is_inside, ends + draw, -1.0), axis=1), next_start[:, half + room]
        # Another row of the same reading direction.
        other = (number + 2 * jax.random.randint(key_other, (), 1, max(rows // 2, 2))) % rows
        is_swapped = jax.random.bernoulli(key_swap, float(self.random_rate), (rows,))
        if self.random_rate:
            is_swapped |= ~jnp.any(ends, axis=1)
            end_a = jnp.where(jnp.any(ends, axis=1), end_a, end)
        source = jnp.where(is_swapped, other, number)
        size = jnp.maximum(1, room - (end_a - half))  # of a B from another row, before it is extended to sentences
        begin = jax.random.randint(key_begin, (rows,), 0, raw - size + 1)
        sentence = last_start[source, begin]
        end_b = jnp.where(is_swapped, next_start[source, begin + size], end)
        begin_b = jnp.where(is_swapped, jnp.where(sentence < 0, begin, sentence), end_a)
        size_a = jnp.minimum(end_a - half, jnp.maximum(room - (end_b - begin_b), -(-room // 2)))
        first_sep, begin_b = (half + size_a)[:, None], begin_b[:, None]
        position = jnp.broadcast_to(jnp.arange(2 * half), (rows, 2 * half))

        def segments(x: jax.Array) -> jax.Array:
            second = jnp.take_along_axis(x[source], jnp.clip(position - 1 - first_sep + begin_b, 0, raw - 1), axis=1)
            return jnp.where(position < first_sep, x[:, : 2 * half], second)

        is_added = (position == first_sep) | (position >= 2 * half - 2)
        symbols = jnp.where(position == 2 * half - 1, v.cls, v.sep)
        ids = jnp.where(is_added, symbols, segments(batch.tokens)).astype(jnp.int32)
        types = (position > first_sep).astype(jnp.int32) + (position == 2 * half - 1)
        is_row = jnp.any(batch.segment_ids > 0, axis=1, keepdims=True)
        return ids, types, ~is_added & is_row & (segments(batch.segment_ids) > 0), is_added

    def _sentence_starts(self, batch: TokenBatch) -> Bool[Array, "batch length"]:
        """Return the mask of tokens that begin a sentence or a document in reading order.

        In backward rows, a sentence begins where the previous one is left.
        """
        v, documents = self.vocabulary, jnp.asarray(batch.segment_ids)
        starts = sentence_starts(jnp.asarray(batch.tokens), jnp.asarray(v.word_start), jnp.asarray(v.sentence_end))
        starts |= jnp.pad(documents[:, 1:] != documents[:, :-1], ((0, 0), (1, 0)))
        return jnp.where(reads_backward(batch)[:, None] > 0, jnp.roll(starts[:, ::-1], 1, axis=1), starts)

    def initial_memory(self, rows: int) -> Memory:
        return self.model.initial_memory(rows, self.memory_length)

    def stream_loss(
        self, params: Params, example: Example, memory: Memory, key: jax.Array, train: bool
    ) -> tuple[Terms, Memory]:
        weights, half = example["weights"], example["input_ids"].shape[1] // 2
        streams = self.model.streams(
            params, Inputs.of(example), memory=memory, key=key if train else None,
            **{name: example[name] for name in ("rank", "limit", "positions", "is_backward")},
        )
        terms = token_losses(self.model, params, streams.query, example["labels"], weights).terms("plm", weights)
        if memory is None:
            return terms, None
        new = streams.entered[:, :, :half].swapaxes(0, 1)
        return terms, jax.lax.stop_gradient(jnp.concatenate([memory, new], axis=2)[:, :, -self.memory_length :])

    def flops(self, length: int) -> float:
        return self.model.forward_flops(length, max_predictions(length, self.predict_share), self.memory_length)

    def describe(self, batch: TokenBatch, example: Example, row: int) -> list[Line]:
        """Return the row, then the context of the first, middle and last prediction of its second half."""
        v = self.vocabulary
        ids, rank, limit = (np.asarray(example[name][row]) for name in ("input_ids", "rank", "limit"))
        positions = np.asarray(example["positions"][row])[np.asarray(example["weights"][row]) > 0]
        if not len(positions):
            return [Line("padding", [], [])]
        direction = "backward" if example["is_backward"][row] else "forward"
        marks = np.where(v.special[ids], "special", "").astype(object)
        marks[positions] = "target"
        lines = [Line(f"read {direction}", ids.tolist(), marks.tolist())]
        order = positions[np.argsort(rank[positions])]
        second_half = order[order >= len(ids) // 2]
        blank_id = v.mask if v.mask >= 0 else v.unk
        for number in sorted({0, len(second_half) // 2, len(second_half) - 1} if len(second_half) else ()):
            position = second_half[number]
            is_visible = rank < limit[position]
            kinds = marks.copy()
            kinds[~is_visible], kinds[is_visible & (marks == "target")], kinds[position] = "padding", "span", "masked"
            lines.append(Line(f"prediction {number + 1}", np.where(is_visible, ids, blank_id).tolist(), kinds.tolist()))
        return [*lines, Line(f"in order, {len(order)}", ids[order].tolist(), ["target"] * len(order))]
