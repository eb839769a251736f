"""Masked language modelling over spans with the span boundary objective (SpanBERT, Joshi et al. 2019)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxlm.corruption.pairs import shorten, single_segments
from jaxlm.corruption.span_masks import mask_spans, span_budget
from jaxlm.data.base import RowFormat
from jaxlm.fields import field
from jaxlm.models.base import Inputs
from jaxlm.models.bert import Bert
from jaxlm.models.encoder import Encoder
from jaxlm.models.heads import BoundaryHead
from jaxlm.models.layers.stack import call
from jaxlm.objectives.base import Example, Line, Objective, Terms, require_masking, require_shares
from jaxlm.objectives.chunked_loss import chunked_cross_entropy, token_losses
from jaxlm.objectives.masked_lm import masked_lines
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import Params, TokenBatch


@dataclasses.dataclass(frozen=True)
class SpanBoundary(Objective):
    """Masked language modelling over spans of whole words, in rows of one segment, with the span boundary objective.

    Loss: masked-LM cross-entropy + cross-entropy of the same tokens, predicted from the tokens on both sides of their
    span and their offset in it. The original code divides the second sum by one more than the number of its targets;
    here both are means.
    """

    model: Encoder = field(Bert(), weights=True)
    """The encoder."""
    mask_rate: float = field(0.15, range="(0, 1)")
    """Share of tokens that are masked."""
    mask_share: float = field(0.8, range="[0, 1]")
    """Share of the spans replaced by [MASK]."""
    random_share: float = field(0.1, range="[0, 1]")
    """Share of the spans replaced by random tokens; the rest stay unchanged."""
    longest_span: int = field(10, range="[1, 65536]")
    """Maximum number of words in a span."""
    span_success: float = field(0.2, range="(0, 1)")
    """Parameter p of the geometric distribution of span lengths, truncated at longest_span."""
    boundary_weight: float = field(1.0, range="[0, inf)")
    """Weight of the span boundary loss."""
    boundary_offsets: int = field(15, weights=True, range="[1, 65536]")
    """Number of tokens of a span that its boundaries predict; only the masked LM predicts the rest."""
    offset_size: int = field(200, weights=True, range="[1, 65536]")
    """Width of the embedding of a token's offset in its span."""
    short_rate: float = field(0.0, range="[0, 1]")
    """Share of rows cut to a random shorter length, so that the model also sees short texts."""

    primary_metric = "mlm_loss"
    private_params = ("sbo_head",)
    token_losses = ("mlm_loss",)
    answer_kind = "masks"
    is_causal = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_shares(self, "mask_share", "random_share")

    def check(self, vocabulary: Vocabulary, length: int) -> None:
        self.require_direction()
        require_masking(vocabulary, length, self.model.max_positions, "masked language modelling")

    def row_format(self, length: int) -> RowFormat:
        return RowFormat("document", length - 2)

    @property
    def boundary_head(self) -> BoundaryHead:
        """Head of the span boundary objective, with parameters at `sbo_head`."""
        m = self.model
        return BoundaryHead(m.stack, m.embedding_width, m.vocab_size, self.boundary_offsets, self.offset_size)

    def init(self, key: jax.Array) -> Params:
        key_model, key_head = jax.random.split(key)
        return self.model.init(key_model) | {"sbo_head": self.boundary_head.init_params(key_head)}

    def corrupt(self, key: jax.Array, batch: TokenBatch) -> Example:
        """Build rows of one segment and mask spans.

        Returns:
            `input_ids`, `attention_mask` int32 [batch, length]; `masked_positions`, `masked_labels`, `boundary_left`,
            `boundary_right`, `boundary_offsets` int32 and `masked_weights`, `boundary_weights` float32 [batch,
            predictions].
        """
        v = self.vocabulary
        key_short, key_mask = jax.random.split(key)
        batch = shorten(key_short, batch, rate=self.short_rate, least=2)
        ids, attention_mask, _ = single_segments(batch, cls=v.cls, sep=v.sep, pad=v.pad)
        masked = mask_spans(
            key_mask, ids, jnp.asarray(v.special), jnp.asarray(v.word_start), self._token_share(), mask=v.mask,
            attention_mask=attention_mask, rate=self.mask_rate, slots=self._slots(ids.shape[1]),
            success=self.span_success, longest=self.longest_span, mask_share=self.mask_share,
            random_share=self.random_share,
        )
        return masked._asdict() | {
            "attention_mask": attention_mask,
            "boundary_offsets": jnp.minimum(masked.boundary_offsets, self.boundary_offsets - 1),
            "boundary_weights": masked.boundary_weights * (masked.boundary_offsets < self.boundary_offsets),
        }

    def loss(self, params: Params, example: Example, key: jax.Array, train: bool) -> Terms:
        positions = [example[name] for name in ("masked_positions", "boundary_left", "boundary_right")]
        hidden = self.model.hidden_states(
            params, Inputs.of(example), key=key if train else None, at=jnp.concatenate(positions, axis=1)
        )
        masked, left, right = jnp.split(hidden, 3, axis=1)
        labels, weights, boundary_weights = (
            example[name] for name in ("masked_labels", "masked_weights", "boundary_weights")
        )
        table, _ = self.model.output_matrix(params)
        tokens = token_losses(self.model, params, masked, labels, weights)
        features = call(self.boundary_head, params["sbo_head"], left, right, example["boundary_offsets"])
        spans = chunked_cross_entropy(features, table, labels, boundary_weights, bias=params["sbo_head"]["bias"])
        return tokens.terms("mlm", weights) | spans.terms("sbo", boundary_weights, self.boundary_weight)

    def flops(self, length: int) -> float:
        m, slots = self.model, self._slots(length)
        h, e = m.hidden_size, m.embedding_width
        head = 2 * (2 * h + self.offset_size) * h + 2 * h * e + 2 * e * m.vocab_size
        return m.forward_flops(length, slots) + float(slots * head)

    def describe(self, batch: TokenBatch, example: Example, row: int) -> list[Line]:
        lines = masked_lines(self.vocabulary, example, row)
        text = lines[0].ids
        values = [np.asarray(example[f"boundary_{name}"][row]) for name in ("left", "right", "weights")]
        spans: dict[tuple[int, int], int] = {}
        for left, right, weight in zip(*values, strict=True):
            if weight:
                spans[int(left), int(right)] = spans.get((int(left), int(right)), 0) + 1
        for (left, right), count in spans.items():
            predicted = text[left + 1 : left + 1 + count]
            ids, marks = [text[left], *predicted, text[right]], ["", *["target"] * count, ""]
            lines.append(Line("span and its boundaries", ids, marks))
        return lines

    def _slots(self, length: int) -> int:
        return span_budget(self.row_format(length).length, self.mask_rate)

    def _token_share(self) -> Float[Array, " vocab"]:
        """Return the cumulative distribution of ids in the corpus; that of uniform text without a corpus."""
        size = self.vocabulary.size
        if self.statistics is None:
            first, end = self.vocabulary.random_ids
            counts = (np.arange(size) >= first) & (np.arange(size) < end)
        else:
            counts = self.statistics.token_counts[:size]
        return jnp.asarray(np.cumsum(counts) / max(1, np.sum(counts)), jnp.float32)
