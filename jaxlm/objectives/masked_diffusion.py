"""Masked diffusion language modelling (MDLM, Sahoo et al. 2024; LLaDA, Nie et al. 2025)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxlm.corruption.pairs import single_segments
from jaxlm.data.base import RowFormat
from jaxlm.errors import UserError
from jaxlm.fields import field
from jaxlm.models.base import Inputs
from jaxlm.models.bert import Bert
from jaxlm.models.encoder import Encoder
from jaxlm.objectives.base import Bound, Example, Line, Objective, Term, Terms, require_masking
from jaxlm.objectives.chunked_loss import token_losses
from jaxlm.objectives.masked_lm import document_lines
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import Params, TokenBatch

EPSILON = 1e-3
"""Smallest time of MDLM, and smallest masking probability of LLaDA."""
MASK_BIAS = -100.0
"""Output bias of [MASK], in place of a logit of -inf: its probability is 0 in float32, and so is its gradient."""
EVAL_DRAWS = 4
"""Number of masks of each row in evaluation."""


@dataclasses.dataclass(frozen=True)
class MaskedDiffusion(Objective):
    """Absorbing-state diffusion over tokens with an encoder: text becomes masks token by token, and is restored.

    Loss: at a time t of each row, every token is masked on its own with probability p(t); the cross-entropies of the
    masked ones, weighted by the noise schedule, are divided by the number of all tokens of text. The expectation is a
    bound on the negative log-likelihood per token (the negative ELBO, MDLM section 3.4), and equals the mean over all
    orders of the autoregressive one. There is no time input, and no 80/10/10.

    Held-out loss is the same bound without the discretization of t: with k of a row's n tokens masked, k uniform in
    1 … n, it is n / k times the sum (LLaDA, section 2.4). Each row has several masks, with equally spaced k. The bound
    is comparable with the unigram entropy and with a causal loss, between vocabularies as bits_per_byte, and not with a
    masked-LM loss.

    As in MDLM (section 3.2.3), visible tokens are copied, and [MASK] is never predicted; here its output bias says so,
    so that the exported model does not predict it either. Special tokens are never masked; theirs may be. Rows are full
    rows of documents that do not see each other, each with its special symbols and positions.
    """

    model: Encoder = field(Bert(), weights=True)
    """The encoder."""
    schedule: Literal["mdlm", "llada"] = "mdlm"
    """Masking probability p and weight w at a time t. mdlm: the log-linear schedule, p = (1 - ε) t, w = 1/t, with t in
    [ε, 1). llada: p = (1 - ε) t + ε, w = 1/p, with t in [0, 1). ε is 0.001. Times are equally spaced over the batch,
    from a random first one (Kingma et al. 2021, appendix I.1)."""

    input_format: ClassVar[str] = "packed"
    """Name of the format of rows in `MaskedLM`, as which the model is exported."""
    primary_metric = "diffusion_loss"
    token_losses = ("diffusion_loss",)
    answer_kind = "masks"
    is_causal = False
    denoises = True

    def check(self, vocabulary: Vocabulary, length: int) -> None:
        self.require_direction()
        require_masking(vocabulary, length, self.model.max_positions, "masked diffusion")
        if "mlm_head" not in jax.eval_shape(self.model.init, jax.random.key(0)):
            raise UserError(
                f"the {type(self.model).__name__} has no bias of its output, by which masked diffusion never predicts "
                "[MASK]; choose another model, such as a Bert or a ModernBert."
            )

    def row_format(self, length: int) -> RowFormat:
        return RowFormat("packed-room", length - 2)

    def init(self, key: jax.Array) -> Params:
        return self._without_mask(super().init(key))

    def merge_pretrained(self, params: Params, source: PretrainedModel | None) -> Params:
        return self._without_mask(super().merge_pretrained(params, source))

    def _without_mask(self, params: Params) -> Params:
        """Return the parameters of a model that does not predict [MASK]; only a bound objective knows its id."""
        if not isinstance(self, Bound):
            return params
        bias = jnp.asarray(params["mlm_head"]["bias"]).at[self.vocabulary.mask].set(MASK_BIAS)
        return params | {"mlm_head": params["mlm_head"] | {"bias": bias}}

    def noise_schedule(self, uniform: Float[Array, " batch"]) -> tuple[Array, Array]:
        """Return the masking probability and the weight of a masked token, [batch], for numbers in [0, 1)."""
        t = (1.0 - EPSILON) * uniform + EPSILON
        return (t if self.schedule == "llada" else (1.0 - EPSILON) * t), 1.0 / t

    def corrupt(self, key: jax.Array, batch: TokenBatch) -> Example:
        """Build rows of documents and mask their tokens.

        Returns:
            `input_ids`, `attention_mask` and `documents` int32 [batch, length]; `masked_positions`, which are all, and
            `masked_labels`, the row before it was masked, int32, and `masked_weights` float32, [batch, length];
            `is_text` float32 [batch, length], 1 where a token could be masked; `time` float32 [batch] and `noise`
            float32 [batch, EVAL_DRAWS, length], in [0, 1), from which evaluation makes its own masks.
        """
        v = self.vocabulary
        key_time, key_mask, key_noise = jax.random.split(key, 3)
        ids, documents, _ = single_segments(batch, cls=v.cls, sep=v.sep, pad=v.pad, by_document=True)
        rows, length = ids.shape
        is_row = jnp.any(documents > 0, axis=1)  # the last batch of an evaluation has few
        place = (jnp.cumsum(is_row) - 1) / jnp.maximum(jnp.sum(is_row), 1)
        time = (jax.random.uniform(key_time) + place) % 1.0
        probability, weight = self.noise_schedule(time)
        is_text = (documents > 0) & ~jnp.asarray(v.special)[ids]
        is_masked = is_text & (jax.random.uniform(key_mask, ids.shape) < probability[:, None])
        return {
            "input_ids": jnp.where(is_masked, v.mask, ids), "documents": documents,
            "attention_mask": (documents > 0).astype(jnp.int32), "is_text": is_text.astype(jnp.float32),
            "masked_positions": jnp.broadcast_to(jnp.arange(length), ids.shape), "masked_labels": ids,
            "masked_weights": jnp.where(is_masked, weight[:, None], 0.0), "time": time,
            "noise": jax.random.uniform(key_noise, (rows, EVAL_DRAWS, length)),
        }

    def loss(self, params: Params, example: Example, key: jax.Array, train: bool) -> Terms:
        def total(example: Example) -> Array:
            hidden = self.model.hidden_states(params, Inputs.of(example), key=key if train else None)
            return token_losses(self.model, params, hidden, example["masked_labels"], example["masked_weights"]).total

        def total_of_draw(draw: tuple[Array, Array]) -> Array:
            weights = self._draw_weights(example, *draw)
            ids = jnp.where(weights > 0, self.vocabulary.mask, example["masked_labels"])
            return total(example | {"input_ids": ids, "masked_weights": weights})

        draws = jnp.arange(EVAL_DRAWS) / EVAL_DRAWS, jnp.moveaxis(example["noise"], 1, 0)
        bound = total(example) if train else jnp.mean(jax.lax.map(total_of_draw, draws))
        terms = {"diffusion_loss": Term(bound, jnp.sum(example["is_text"]), 1.0)}
        return terms if train else terms | self.bits_per_byte(bound, example["masked_labels"], example["is_text"])

    def _draw_weights(self, example: Example, shift: Array, noise: Float[Array, "batch length"]) -> Array:
        """Return n / k at k uniformly chosen ones of each row's n tokens of text, 0 at the others."""
        n = jnp.sum(example["is_text"], axis=1, keepdims=True)
        k = jnp.minimum(1.0 + jnp.floor((example["time"][:, None] + shift) % 1.0 * n), n)
        rank = jnp.argsort(jnp.argsort(jnp.where(example["is_text"] > 0, noise, jnp.inf), axis=1), axis=1)
        return jnp.where(rank < k, n / jnp.maximum(k, 1.0), 0.0)

    def flops(self, length: int) -> float:
        return self.model.forward_flops(length, length)

    def describe(self, batch: TokenBatch, example: Example, row: int) -> list[Line]:
        (probability,), (weight,) = self.noise_schedule(jnp.asarray(example["time"][row : row + 1]))
        title = f"tokens masked with probability {probability:.3f}, weight {weight:.2f}"
        return [Line(title, [], []), *document_lines(self.vocabulary, example, row)]
