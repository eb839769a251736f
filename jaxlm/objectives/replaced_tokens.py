"""Replaced-token detection (ELECTRA, Clark et al. 2020).

A generator fills masks; a discriminator detects the tokens that it replaced.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from jaxlm.corruption.masking import mask_tokens
from jaxlm.corruption.pairs import sentence_pairs, shorten, single_segments
from jaxlm.corruption.replaced import max_replacements, write_tokens
from jaxlm.data.base import RowFormat
from jaxlm.errors import UserError
from jaxlm.fields import field
from jaxlm.models.base import Inputs
from jaxlm.models.electra import Electra, NetworkPair
from jaxlm.models.layers.stack import call
from jaxlm.objectives.base import Example, Line, Objective, Term, Terms, require_masking
from jaxlm.objectives.chunked_loss import token_losses
from jaxlm.objectives.masked_lm import masked_lines
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import Params, TokenBatch


@dataclasses.dataclass(frozen=True)
class ReplacedTokens(Objective):
    """Replaced-token detection with a generator and a discriminator.

    Loss: the generator's masked-LM cross-entropy + 50 × the discriminator's sigmoid cross-entropy over all tokens.
    """

    model: NetworkPair = field(Electra(), weights=True)
    """The discriminator and its generator."""
    mask_rate: float = field(0.15, range="(0, 1)")
    """Share of tokens that the generator predicts."""
    mask_share: float = field(0.85, range="[0, 1]")
    """Share of the predicted tokens that the generator sees as [MASK]; it sees the rest unchanged."""
    generator_weight: float = field(1.0, range="[0, inf)")
    """Weight of the generator's loss."""
    discriminator_weight: float = field(50.0, range="[0, inf)")
    """Weight of the discriminator's loss."""
    judge: Literal["all", "masked"] = "all"
    """Tokens that the discriminator judges: all, or only those that the generator predicted ("ELECTRA 15%", section
    3.4)."""
    temperature: float = field(1.0, range="(0, inf)")
    """Sampling temperature of the generator."""
    two_segments: bool = True
    """Split each row into two consecutive segments, so that both segment types are trained."""
    single_rate: float = field(0.1, range="[0, 1]")
    """Share of rows that stay one segment in spite of two_segments."""
    short_rate: float = field(0.05, range="[0, 1]")
    """Share of rows cut to a random shorter length, so that the model also sees short texts."""
    with_replacement: bool = False
    """Draw positions with replacement, as the original code does.

    Fewer positions are distinct then, and two tokens drawn for one position become the mean of their ids.
    """

    # The discriminator's loss is not comparable over time: its task gets harder as the generator improves.
    primary_metric = "generator_loss"
    token_losses = ("generator_loss",)
    answer_kind = "masks"

    def check(self, vocabulary: Vocabulary, length: int) -> None:
        if self.two_segments and self.model.type_vocab_size < 2:
            raise UserError(
                f"objective.two_segments needs 2 segment types, but objective.model.type_vocab_size is "
                f"{self.model.type_vocab_size}; raise it, or set two_segments to False."
            )
        require_masking(vocabulary, length, self.model.max_positions, "replaced-token detection")

    def row_format(self, length: int) -> RowFormat:
        return RowFormat("document", length - (3 if self.two_segments else 2))

    def corrupt(self, key: jax.Array, batch: TokenBatch) -> Example:
        """Build rows, mask tokens for the generator, and draw the numbers that decide its samples.

        The loss replaces the tokens, since the samples depend on the generator's parameters.

        Returns:
            `original_ids`, `input_ids` (masked, for the generator), `token_type_ids`, `attention_mask` int32 [batch,
            length]; `masked_positions`, `masked_labels` int32 and `masked_weights`, `uniform` float32 [batch, slots].
        """
        v = self.vocabulary
        key_short, key_pairs, key_mask, key_draw = jax.random.split(key, 4)
        batch = shorten(key_short, batch, rate=self.short_rate, least=5)
        if self.two_segments:  # consecutive segments: no second segment is ever random
            pairs = sentence_pairs(
                key_pairs, batch, jnp.asarray(v.word_start), jnp.asarray(v.sentence_end), cls=v.cls, sep=v.sep,
                pad=v.pad, random_rate=0.0, single_rate=self.single_rate,
            )
            ids, token_type_ids, attention_mask = pairs.input_ids, pairs.token_type_ids, pairs.attention_mask
        else:
            ids, attention_mask, _ = single_segments(batch, cls=v.cls, sep=v.sep, pad=v.pad)
            token_type_ids = jnp.zeros_like(ids)
        masked = mask_tokens(
            key_mask, ids, jnp.asarray(v.special), mask=v.mask, attention_mask=attention_mask, rate=self.mask_rate,
            slots=max_replacements(ids.shape[1], self.mask_rate), mask_share=self.mask_share, random_share=0.0,
            random_ids=v.random_ids, with_replacement=self.with_replacement,
        )
        return masked._asdict() | {
            "original_ids": ids,
            "token_type_ids": token_type_ids,
            "attention_mask": attention_mask,
            "uniform": jax.random.uniform(key_draw, masked.masked_positions.shape),
        }

    def loss(self, params: Params, example: Example, key: jax.Array, train: bool) -> Terms:
        m = self.model
        key_generator, key_discriminator = jax.random.split(key) if train else (None, None)
        positions, weights = example["masked_positions"], example["masked_weights"]

        generator_params = m.generator_params(params)
        inputs = Inputs.of(example)
        hidden = m.generator.hidden_states(generator_params, inputs, key=key_generator, at=positions)
        generated = token_losses(
            m.generator, generator_params, hidden, example["masked_labels"], weights, uniform=example["uniform"],
            temperature=self.temperature,
        )
        # A sample that equals the original token counts as original, hence the comparison of ids.
        ids = write_tokens(example["original_ids"], positions, weights, generated.drawn)
        is_replaced = ids != example["original_ids"]

        discriminator_params = m.discriminator_params(params)
        hidden = m.discriminator.hidden_states(discriminator_params, inputs._replace(ids=ids), key=key_discriminator)
        logits = call(m.replaced_head, params["rtd_head"], hidden)[..., 0]
        token_weights = inputs.mask.astype(jnp.float32)
        if self.judge == "masked":
            judged = jnp.zeros_like(ids).at[jnp.arange(len(ids))[:, None], positions].max(weights.astype(ids.dtype))
            token_weights *= judged
        is_suspected = logits > 0
        # -log sigmoid(logit) of replaced tokens, -log(1 - sigmoid(logit)) of the others.
        losses = jax.nn.softplus(jnp.where(is_replaced, -logits, logits))
        return generated.terms("generator", weights, self.generator_weight) | {
            "discriminator_loss": Term.of(losses, token_weights, self.discriminator_weight),
            "discriminator_accuracy": Term.of(is_suspected == is_replaced, token_weights),
            "discriminator_precision": Term.of(is_replaced, token_weights * is_suspected),
            "discriminator_recall": Term.of(is_suspected, token_weights * is_replaced),
        }

    def flops(self, length: int) -> float:
        return self.model.forward_flops(length, max_replacements(length, self.mask_rate))

    def describe(self, batch: TokenBatch, example: Example, row: int) -> list[Line]:
        text, masked, targets = masked_lines(self.vocabulary, example, row)
        judged = len(text.ids if self.judge == "all" else targets.ids)
        return [
            text, masked._replace(title="generator sees"),
            targets._replace(title=f"generator predicts {len(targets.ids)}"),
            Line(
                f"discriminator judges {judged} tokens, with the generator's guesses in place of the targets",
                [], [],
            ),
        ]
