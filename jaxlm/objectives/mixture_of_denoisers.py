"""Mixture of denoisers (UL2, Tay et al. 2022, section 3.1).

Each row is corrupted by one of seven denoisers, whose mode symbol the encoder reads in front of the text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxlm.corruption.spans import SpanLengths, TextPair, corrupt_spans, span_lengths, split_prefix
from jaxlm.errors import UserError
from jaxlm.objectives.base import Example, Line
from jaxlm.objectives.span_corruption import EncoderDecoderLM
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import TokenBatch

MODES = ("[NLU]", "[NLG]", "[S2S]")
"""Symbols of R-, X- and S-denoisers, as in the published models; the paper writes [R], [X], [S]."""


class Denoiser(NamedTuple):
    """A denoiser of the paper's table 1.

    Attributes:
        mode: index of its symbol in MODES.
        density: mean share of the tokens that become targets.
        mean_span: mean length of the spans; None for a single span of uniform length at the end of the row.
    """

    mode: int
    density: float
    mean_span: float | None

    def corrupt(self, key: jax.Array, batch: TokenBatch, vocabulary: Vocabulary) -> TextPair:
        """Return inputs without the mode symbol, and targets."""
        v = vocabulary
        if self.mean_span is None:
            return split_prefix(key, batch, eos=v.eos, pad=v.pad, density=self.density)
        return corrupt_spans(
            key, batch, sentinel=v.sentinel, eos=v.eos, pad=v.pad, density=self.density, mean_span=self.mean_span,
            sentinel_step=v.sentinel_step,
        )


DENOISERS = (
    Denoiser(0, 0.15, 3), Denoiser(0, 0.15, 8),
    Denoiser(1, 0.5, 3), Denoiser(1, 0.5, 8), Denoiser(1, 0.15, 64), Denoiser(1, 0.5, 64),
    Denoiser(2, 0.25, None),
)


@dataclasses.dataclass(frozen=True)
class MixtureOfDenoisers(EncoderDecoderLM):
    """UL2's mixture of denoisers on an encoder-decoder: loss = mean of -log p(target token).

    Rows are windows of the documents joined without separators, of the same length for all denoisers.
    """

    shares: tuple[float, float, float] = (0.4, 0.4, 0.2)
    """Shares of the rows that get an R-denoiser (short spans), an X-denoiser (long or many spans) and the S-denoiser
    (prefix LM). The denoisers of one kind are equally likely. S-denoisers are a fifth in the paper, half in U-PaLM."""

    symbols = MODES
    primary_metric = "denoising_loss"
    purpose = "a mixture of denoisers"

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.shares) < 0 or abs(sum(self.shares) - 1) > 1e-6:
            raise UserError(f"objective.shares is {self.shares}; they must be at least 0 and add up to 1.")

    @property
    def rates(self) -> list[float]:
        """Probability of each denoiser."""
        modes = [denoiser.mode for denoiser in DENOISERS]
        return [self.shares[mode] / modes.count(mode) for mode in modes]

    def lengths(self, length: int) -> SpanLengths:
        if length < 16:  # a span of one token would be no shorter as a sentinel
            raise UserError(f"data.length {length} is too short for seven denoisers; use 16 or more.")
        raw = length - 1  # the S-denoiser's longest input: all tokens but one, the mode symbol and the end symbol
        corrupted = [span_lengths(raw, d.density, d.mean_span) for d in DENOISERS if d.mean_span]
        most = SpanLengths(*map(max, zip(*corrupted, strict=True)))
        return most._replace(inputs=length)

    def make_pair(self, key: jax.Array, batch: TokenBatch) -> TextPair:
        v, rows = self.vocabulary, batch.tokens.shape[0]
        widths = self.lengths(batch.tokens.shape[1] + 1)
        key, *keys = jax.random.split(key, len(DENOISERS) + 1)
        drawn = jax.random.choice(key, len(DENOISERS), (rows,), p=jnp.array(self.rates))
        is_drawn = [drawn == number for number in range(len(DENOISERS))]
        pairs = [denoiser.corrupt(key, batch, v) for denoiser, key in zip(DENOISERS, keys, strict=True)]
        modes = jnp.select(is_drawn, [jnp.int32(v.id(MODES[d.mode])) for d in DENOISERS])

        inputs = _select(is_drawn, [pair.inputs for pair in pairs], widths.inputs - 1, v.pad)
        inputs_size = jnp.select(is_drawn, [pair.inputs_size for pair in pairs])
        has_text = inputs_size > 0
        return TextPair(
            jnp.concatenate([jnp.where(has_text, modes, v.pad)[:, None], inputs], axis=1), inputs_size + has_text,
            _select(is_drawn, [pair.targets for pair in pairs], widths.targets, v.pad),
            jnp.select(is_drawn, [pair.targets_size for pair in pairs]),
        )

    def prompt_tokens(self, tokens: Sequence[int]) -> list[int]:
        return [self.vocabulary.id(MODES[2]), *super().prompt_tokens(tokens)]

    def describe(self, batch: TokenBatch, example: Example, row: int) -> list[Line]:
        text, *rest = super().describe(batch, example, row)
        return [text._replace(ids=text.ids[1:], marks=text.marks[1:]), *rest]  # the mode symbol is none of the text


def _select(
    is_drawn: list[Bool[Array, " batch"]], arrays: list[Int[Array, "batch _"]], width: int, pad: int
) -> Int[Array, "batch width"]:
    """Return each row from the array that is drawn for it. Arrays are padded or cut to `width`, behind all tokens."""
    fitted = [jnp.pad(x[:, :width], ((0, 0), (0, max(width - x.shape[1], 0))), constant_values=pad) for x in arrays]
    return jnp.select([mask[:, None] for mask in is_drawn], fitted)
