"""Causal language modelling over packed documents (GPT-2, Radford et al. 2019)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxlm.data.base import RowFormat
from jaxlm.errors import UserError
from jaxlm.fields import field
from jaxlm.models.base import Inputs, Writer
from jaxlm.models.gpt2 import Gpt2
from jaxlm.objectives.base import Example, Line, Objective, Terms, require_positions
from jaxlm.objectives.chunked_loss import token_losses
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import Params, TokenBatch


@dataclasses.dataclass(frozen=True)
class CausalLM(Objective):
    """Next-token prediction with a decoder: loss = mean of -log p(token | previous tokens of its document).

    Rows are windows of the stream of documents, each closed by the end symbol, joined without padding.
    """

    model: Writer = field(Gpt2(), weights=True)
    """The decoder."""
    plain_stream: bool = False
    """Treat a row as one stream, as the original code does.

    Attention and positions cross document borders, and the first token of a document is predicted from the previous
    document. Otherwise documents are isolated.
    """
    loss_chunk: int = field(0, resumable=True, range="[0, inf)")
    """Number of positions per row whose vocabulary logits are in memory at a time; 0 for 4,096 per device."""

    primary_metric = "lm_loss"
    token_losses = ("lm_loss",)
    answer_kind = "text"
    is_causal = True

    def check(self, vocabulary: Vocabulary, length: int) -> None:
        self.require_direction()
        vocabulary.require("eos", purpose="causal language modelling")
        require_positions(length, self.model.max_positions)
        if length < 2:
            raise UserError(f"data.length {length} is too short to predict a token from another; use 2 or more.")
        if length % (multiple := self.model.length_multiple):
            raise UserError(f"data.length {length} is not a multiple of {multiple}, the model's chunk size; change it.")

    def row_format(self, length: int) -> RowFormat:
        return RowFormat("packed-text", length + 1)

    def corrupt(self, key: jax.Array, batch: TokenBatch) -> Example:
        """Split rows of length + 1 tokens into inputs and labels. Nothing is random.

        Returns:
            `input_ids`, `segment_ids`, `labels` int32 and `weights` float32 [batch, length]; weights are 1 where the
            label is a target.
        """
        # Published vocabularies may lack a padding symbol; padding is never attended to, but must be a valid id.
        tokens = jnp.maximum(batch.tokens, 0)
        segment_ids, following = batch.segment_ids[:, :-1], batch.segment_ids[:, 1:]
        is_target = following > 0 if self.plain_stream else (following > 0) & (segment_ids == following)
        return {
            "input_ids": tokens[:, :-1], "segment_ids": segment_ids, "labels": tokens[:, 1:],
            "weights": is_target.astype(jnp.float32),
        }

    def loss(self, params: Params, example: Example, key: jax.Array, train: bool) -> Terms:
        hidden, weights = self.hidden(params, example, key if train else None), example["weights"]
        losses = token_losses(self.model, params, hidden, example["labels"], weights, chunk=self.loss_chunk or None)
        terms = losses.terms("lm", weights)
        return terms if train else terms | self.bits_per_byte(losses.total, example["labels"], weights)

    def hidden(
        self, params: Params, example: Example, dropout_key: jax.Array | None = None
    ) -> Float[Array, "batch length hidden"]:
        """Return the last hidden states of an example."""
        # Padding comes at the end of a row, where causal attention hides it: a plain stream needs no segments.
        segment_ids = None if self.plain_stream else example["segment_ids"]
        return self.model.hidden_states(params, Inputs(example["input_ids"], documents=segment_ids), key=dropout_key)

    def flops(self, length: int) -> float:
        return self.model.forward_flops(length, length)

    def describe(self, batch: TokenBatch, example: Example, row: int) -> list[Line]:
        segment_ids, weights = np.asarray(example["segment_ids"][row]), np.asarray(example["weights"][row])
        input_ids, labels = np.asarray(example["input_ids"][row]), np.asarray(example["labels"][row])
        special = self.vocabulary.special
        lines = []
        for number in range(1, int(segment_ids.max(initial=0)) + 1):
            is_document = segment_ids == number
            ids, is_target = input_ids[is_document].tolist(), weights[is_document] > 0
            lines.append(Line(f"document {number}", ids, ["special" if special[i] else "" for i in ids]))
            lines.append(Line(f"predict {int(is_target.sum())}", labels[is_document][is_target].tolist(),
                              ["target"] * int(is_target.sum())))
        return lines
