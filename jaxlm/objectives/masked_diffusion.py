"""Masked diffusion language modelling (MDLM, Sahoo et al. 2024; LLaDA, Nie et al. 2025)."""

from __future__ import annotations

import dataclasses
from typing import Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxlm.corruption.pairs import shorten, single_segments
from jaxlm.data.base import RowFormat
from jaxlm.fields import field
from jaxlm.models.base import Inputs
from jaxlm.models.bert import Bert
from jaxlm.models.encoder import Encoder
from jaxlm.objectives.base import Example, Line, Objective, PretrainedModel, Term, Terms, require_masking
from jaxlm.objectives.chunked_loss import TokenLosses, token_losses
from jaxlm.objectives.masked_lm import document_lines, masked_lines
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import Params, TokenBatch

EPSILON = 1e-3
"""Smallest time of MDLM, and smallest masking probability of LLaDA."""
MASK_BIAS = -100.0
"""Output bias of [MASK], in place of a logit of -inf: its probability is 0 in float32, and so is its gradient."""


@dataclasses.dataclass(frozen=True)
class MaskedDiffusion(Objective):
    """Absorbing-state diffusion over tokens with an encoder: text becomes masks token by token, and is restored.

    Loss: at a time t of each row, every token is masked on its own with probability p(t); the cross-entropies of the
    masked ones, weighted by the noise schedule, are divided by the number of all tokens of text. The expectation is a
    bound on the negative log-likelihood per token (the negative ELBO, MDLM section 3.4), and equals the mean over all
    orders of the autoregressive one. There is no time input, and no 80/10/10.

    Held-out loss is the same bound without the discretization of t: with k of a row's n tokens masked, k uniform in
    1 … n, it is n / k times the sum (LLaDA, section 2.4). It is comparable with the unigram entropy and with a causal
    loss, which it bounds from above, and not with a masked-LM loss.

    As in MDLM (section 3.2.3), visible tokens are copied, and [MASK] is never predicted; here its output bias says so,
    so that the exported model does not predict it either. Special tokens are never masked; theirs may be.
    """

    model: Encoder = field(Bert(), weights=True)
    """The encoder."""
    schedule: Literal["mdlm", "llada"] = "mdlm"
    """Masking probability p and weight w at a time t. mdlm: the log-linear schedule, p = (1 - ε) t, w = 1/t, with t in
    [ε, 1). llada: p = (1 - ε) t + ε, w = 1/p, with t in [0, 1). ε is 0.001. Times are equally spaced over the batch,
    from a random first one (Kingma et al. 2021, appendix I.1)."""
    input_format: Literal["document", "packed"] = "document"
    """Rows of one document; or full rows of documents that do not see each other, each with its special symbols and
    positions (packed)."""
    short_rate: float = field(0.0, range="[0, 1]")
    """Share of rows cut to a random shorter length (LLaDA: 0.01); packed rows are not."""
    eval_draws: int = field(4, resumable=True, range="[1, 1024]")
    """Number of masks of each row in evaluation, with shares of masked tokens equally spaced over [0, 1)."""

    primary_metric = "diffusion_loss"
    token_losses = ("diffusion_loss",)
    answer_kind = "masks"
    denoises = True

    @property
    def _is_packed(self) -> bool:
        return self.input_format == "packed"

    def bind(self, vocabulary: Vocabulary, length: int, statistics: object = None) -> Self:
        require_masking(vocabulary, length, self.model.max_positions, "masked diffusion")
        return super().bind(vocabulary, length, statistics)

    def row_format(self, length: int) -> RowFormat:
        return RowFormat("packed-room" if self._is_packed else "document", length - 2)

    def init(self, key: jax.Array) -> Params:
        return self._without_mask(super().init(key))

    def merge_pretrained(self, params: Params, source: PretrainedModel | None) -> Params:
        return self._without_mask(super().merge_pretrained(params, source))

    def _without_mask(self, params: Params) -> Params:
        """Return the parameters of a model that does not predict [MASK]."""
        head = params["mlm_head"]
        return params | {"mlm_head": head | {"bias": jnp.asarray(head["bias"]).at[self.vocabulary.mask].set(MASK_BIAS)}}

    def noise_schedule(
        self, uniform: Float[Array, " batch"]
    ) -> tuple[Float[Array, " batch"], Float[Array, " batch"]]:
        """Return the masking probability and the weight of a masked token, for numbers in [0, 1)."""
        p = (1.0 - EPSILON) * uniform + EPSILON
        return (p, 1.0 / p) if self.schedule == "llada" else ((1.0 - EPSILON) * p, 1.0 / p)

    def corrupt(self, key: jax.Array, batch: TokenBatch) -> Example:
        """Build rows of text and mask their tokens.

        Returns:
            `input_ids` and `labels`, the row before it was masked, int32 [batch, length]; `weights` float32 [batch,
            length], those of the masked tokens; `is_text` float32 [batch, length], 1 where a token could be masked;
            `attention_mask` int32 [batch, length], and `documents`, too, in packed rows; `time` float32 [batch] and
            `noise` float32 [batch, draws, length], in [0, 1), from which evaluation makes its own masks.
        """
        v = self.vocabulary
        key_short, key_time, key_mask, key_noise = jax.random.split(key, 4)
        if not self._is_packed:
            batch = shorten(key_short, batch, rate=self.short_rate, least=2)
        ids, documents, _ = single_segments(batch, cls=v.cls, sep=v.sep, pad=v.pad, by_document=self._is_packed)
        rows, length = ids.shape
        time = (jax.random.uniform(key_time) + jnp.arange(rows) / rows) % 1.0
        is_text = (documents > 0) & ~jnp.asarray(v.special)[ids]
        probability, weight = self.noise_schedule(time)
        is_masked = is_text & (jax.random.uniform(key_mask, ids.shape) < probability[:, None])
        return {
            "input_ids": jnp.where(is_masked, v.mask, ids), "labels": ids,
            "weights": jnp.where(is_masked, weight[:, None], 0.0), "is_text": is_text.astype(jnp.float32),
            "attention_mask": (documents > 0).astype(jnp.int32), "time": time,
            "noise": jax.random.uniform(key_noise, (rows, self.eval_draws, length)),
        } | ({"documents": documents} if self._is_packed else {})

    def loss(self, params: Params, example: Example, key: jax.Array, train: bool) -> Terms:
        if train:
            return self._terms(example, self._token_losses(params, example, key), example["weights"])

        def one_draw(draw: tuple[Array, Array]) -> Terms:
            weights = self._draw_weights(example, *draw)
            masked = example | {
                "input_ids": jnp.where(weights > 0, self.vocabulary.mask, example["labels"]), "weights": weights,
            }
            terms = self._terms(example, self._token_losses(params, masked, None), weights)
            return {name: (term.total, term.weight) for name, term in terms.items()}

        shifts = jnp.arange(self.eval_draws) / self.eval_draws
        sums = jax.lax.map(one_draw, (shifts, jnp.moveaxis(example["noise"], 1, 0)))
        means = {name: [jnp.mean(part) for part in parts] for name, parts in sums.items()}
        return {name: Term(*parts, float(name == self.primary_metric)) for name, parts in means.items()}

    def _draw_weights(
        self, example: Example, shift: Float[Array, ""], noise: Float[Array, "batch length"]
    ) -> Float[Array, "batch length"]:
        """Return n / k at k uniformly chosen ones of each row's n tokens of text, 0 at the others."""
        is_text = example["is_text"] > 0
        n = jnp.sum(is_text, axis=1, keepdims=True)
        share = (example["time"][:, None] + shift) % 1.0
        k = jnp.minimum(1 + jnp.floor(share * n).astype(n.dtype), n)
        rank = jnp.argsort(jnp.argsort(jnp.where(is_text, noise, jnp.inf), axis=1), axis=1)
        return jnp.where(is_text & (rank < k), n / jnp.maximum(k, 1), 0.0)

    def _token_losses(self, params: Params, example: Example, key: jax.Array | None) -> TokenLosses:
        hidden = self.model.hidden_states(params, Inputs.of(example), key=key)
        return token_losses(self.model, params, hidden, example["labels"], example["weights"])

    def _terms(self, example: Example, losses: TokenLosses, weights: Float[Array, "batch length"]) -> Terms:
        return {
            "diffusion_loss": Term(losses.total, jnp.sum(example["is_text"]), 1.0),
            "diffusion_accuracy": Term.of(losses.correct, (weights > 0).astype(jnp.float32)),
        }

    def flops(self, length: int) -> float:
        return self.model.forward_flops(length, length)

    def describe(self, batch: TokenBatch, example: Example, row: int) -> list[Line]:
        labels, weights = example["labels"], example["weights"]
        slots = example | {
            "masked_positions": np.broadcast_to(np.arange(labels.shape[1]), labels.shape), "masked_labels": labels,
            "masked_weights": weights,
        }
        probability, weight = self.noise_schedule(jnp.asarray(example["time"][row : row + 1]))
        lines = (document_lines if self._is_packed else masked_lines)(self.vocabulary, slots, row)
        return [Line(f"tokens masked with probability {probability[0]:.3f}, weight {weight[0]:.2f}", [], []), *lines]
