"""Span corruption and prefix language modelling (T5, Raffel et al. 2019).

An encoder reads the corrupted text, and a decoder writes the missing tokens.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.corruption.spans import SpanLengths, TextPair, corrupt_spans, raw_span_length, split_prefix
from jaxlm.data.base import RowFormat
from jaxlm.errors import UserError
from jaxlm.fields import field
from jaxlm.models.base import Inputs
from jaxlm.models.t5 import T5
from jaxlm.objectives.base import Example, Line, Objective, Term, Terms
from jaxlm.objectives.chunked_loss import token_losses
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import Params, TokenBatch


@dataclasses.dataclass(frozen=True)
class EncoderDecoderLM(Objective):
    """Denoising with an encoder-decoder: loss = mean of -log p(target token). A subclass makes the inputs and targets.

    Rows are windows of the documents joined without separators, as in T5.
    """

    model: T5 = field(T5(), weights=True)
    """The encoder-decoder."""
    z_loss: float = field(0.0, range="[0, inf)")
    """Weight of the squared log-normalizer of the softmax, added to the loss (1e-4 in T5X)."""
    loss_chunk: int = field(0, resumable=True, range="[0, inf)")
    """Number of target positions per row whose logits are in memory at a time; 0 for 4,096 per device."""

    answer_kind = "text"
    purpose: ClassVar[str]
    """Name of the corruption, for messages."""

    def check(self, vocabulary: Vocabulary, length: int) -> None:
        vocabulary.require("eos", "pad", purpose=self.purpose)
        if spans := self.lengths(length).spans:
            vocabulary.require("sentinel", purpose=self.purpose)
            if spans > vocabulary.num_sentinels:
                raise UserError(
                    f"data.length {length} needs {spans} sentinels but {vocabulary.name} has "
                    f"{vocabulary.num_sentinels}; lower data.length or raise the mean length of the spans."
                )

    def lengths(self, length: int) -> SpanLengths:
        """Return raw tokens, noise, spans, input and target length for an encoder input of `length` tokens."""
        raise NotImplementedError

    def make_pair(self, key: jax.Array, batch: TokenBatch) -> TextPair:
        """Return the inputs and targets of a batch."""
        raise NotImplementedError

    def row_format(self, length: int) -> RowFormat:
        return RowFormat("packed", self.lengths(length).raw)

    def corrupt(self, key: jax.Array, batch: TokenBatch) -> Example:
        """Corrupt a batch by `make_pair`.

        Returns:
            `input_ids`, `attention_mask` int32 [batch, inputs]; `decoder_input_ids`, `labels` int32 and `weights`
            float32 [batch, targets]. `decoder_input_ids` are the labels shifted by one, after the decoder's start.
        """
        pair = self.make_pair(key, batch)
        is_input = jnp.arange(pair.inputs.shape[1])[None, :] < pair.inputs_size[:, None]
        is_target = jnp.arange(pair.targets.shape[1])[None, :] < pair.targets_size[:, None]
        start = self.model.decoder_start(self.vocabulary)
        shifted = jnp.pad(pair.targets[:, :-1], ((0, 0), (1, 0)), constant_values=start)
        return {
            "input_ids": pair.inputs,
            "attention_mask": is_input.astype(jnp.int32),
            "decoder_input_ids": shifted,
            "labels": pair.targets,
            "weights": is_target.astype(jnp.float32),
        }

    def loss(self, params: Params, example: Example, key: jax.Array, train: bool) -> Terms:
        m = self.model
        key_encoder, key_decoder = jax.random.split(key) if train else (None, None)
        inputs = Inputs.of(example)
        memory = m.hidden_states(params, inputs, key=key_encoder)
        hidden = m.decoder_states(
            params, example["decoder_input_ids"], memory, inputs.mask, memory_lengths=inputs.lengths, key=key_decoder
        )
        weights = example["weights"]
        losses = token_losses(
            m, params, hidden, example["labels"], weights, chunk=self.loss_chunk or None, z_loss=self.z_loss
        )
        loss = Term(losses.total, jnp.sum(weights), 1.0)
        terms = {self.primary_metric.replace("loss", "accuracy"): Term.of(losses.correct, weights)}
        if not self.z_loss:
            return {self.primary_metric: loss} | terms
        # No gradient flows through the likelihood alone, so all of it comes from the term that adds the rest.
        nll = Term.of(losses.nll, weights, coefficient=1.0)
        return {self.primary_metric: nll} | terms | {"z_loss": loss._replace(total=loss.total - nll.total)}

    def flops(self, length: int) -> float:
        inputs, targets = self.lengths(length)[3:]
        return self.model.forward_flops(inputs, targets)

    def describe(self, batch: TokenBatch, example: Example, row: int) -> list[Line]:
        v = self.vocabulary
        inputs = np.asarray(example["input_ids"][row])[: int(np.sum(example["attention_mask"][row]))].tolist()
        targets = np.asarray(example["labels"][row])[: int(np.sum(example["weights"][row]))].tolist()
        if not inputs:
            return [Line("padding", [], [])]

        def marks(ids: list[int], plain: str) -> list[str]:
            return ["masked" if self._is_sentinel(i) else "special" if v.special[i] else plain for i in ids]

        text, taken = self._text(inputs[:-1], targets[:-1])
        return [
            Line("text", text, taken),
            Line("input", inputs, marks(inputs, "")),
            Line(f"target {len(targets)}", targets, marks(targets, "target")),
        ]

    def _is_sentinel(self, token: int) -> bool:
        v = self.vocabulary
        return 0 <= (token - v.sentinel) * v.sentinel_step < v.num_sentinels

    def _text(self, inputs: list[int], targets: list[int]) -> tuple[list[int], list[str]]:
        """Return the original text of an input and target without end symbols, and the marks of its removed spans."""
        if not any(map(self._is_sentinel, inputs)):  # the target continues the input
            return inputs + targets, [""] * len(inputs) + ["span"] * len(targets)
        spans: dict[int, list[int]] = {}
        for token in targets:
            if self._is_sentinel(token):
                spans[token] = current = []
            else:
                current.append(token)
        text: list[int] = []
        marks: list[str] = []
        for token in inputs:
            piece = spans.get(token)
            text += [token] if piece is None else piece
            marks += [""] if piece is None else ["span"] * len(piece)
        return text, marks


@dataclasses.dataclass(frozen=True)
class SpanCorruption(EncoderDecoderLM):
    """Span corruption or prefix language modelling on an encoder-decoder: loss = mean of -log p(target token).

    Rows are windows of the documents joined without separators, as in T5.
    """

    task: Literal["spans", "prefix"] = "spans"
    """Either "spans" (the target spells out spans that sentinels replace) or "prefix" (it continues the input)."""
    noise_density: float = field(0.15, range="(0, 1)")
    """Share of the tokens that span corruption removes."""
    mean_span: float = field(3.0, range="[1, inf)")
    """Mean length of the spans, in tokens."""

    @property
    def primary_metric(self) -> str:  # type: ignore[override]
        """Either "span_loss" or "prefix_lm_loss"."""
        return "span_loss" if self.task == "spans" else "prefix_lm_loss"

    @property
    def purpose(self) -> str:  # type: ignore[override]
        """Name of the corruption, for messages."""
        return "span corruption" if self.task == "spans" else "prefix language modelling"

    def lengths(self, length: int) -> SpanLengths:
        if self.task == "spans":
            return raw_span_length(length, self.noise_density, self.mean_span)
        if length < 3:
            raise UserError(f"data.length {length} is too short for a prefix and a continuation; use 3 or more.")
        return SpanLengths(raw=length, noise=0, spans=0, inputs=length, targets=length)

    def prompt_tokens(self, tokens: Sequence[int]) -> list[int]:
        if self.task == "prefix":
            return super().prompt_tokens(tokens)
        middle = len(tokens) // 2
        return [*tokens[:middle], self.vocabulary.sentinel, *tokens[middle + math.ceil(self.mean_span) :]]

    def make_pair(self, key: jax.Array, batch: TokenBatch) -> TextPair:
        v = self.vocabulary
        if self.task == "prefix":
            return split_prefix(key, batch, eos=v.eos, pad=v.pad)
        return corrupt_spans(
            key, batch, sentinel=v.sentinel, eos=v.eos, pad=v.pad, density=self.noise_density, mean_span=self.mean_span,
            sentinel_step=v.sentinel_step,
        )
