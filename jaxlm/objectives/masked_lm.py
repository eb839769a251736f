"""BERT's pretraining: masked language modelling, with next-sentence prediction or without."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxlm.corruption.masking import mask_tokens, max_predictions
from jaxlm.corruption.pairs import sentence_pairs, shorten, single_segments
from jaxlm.errors import UserError
from jaxlm.fields import field
from jaxlm.models import bert
from jaxlm.objectives.base import Example, Line, Metrics, Packing, Params, require_masking, require_share
from jaxlm.objectives.chunked_loss import chunked_cross_entropy
from jaxlm.objectives.losses import cross_entropy, sums, weighted_mean
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import TokenBatch


@dataclasses.dataclass(frozen=True)
class BertPretraining:
    """Masked LM (+ next-sentence prediction) on a BERT encoder: loss = MLM cross-entropy + NSP cross-entropy."""

    model: bert.BertConfig = field(bert.BertConfig(), weights=True)
    """The encoder."""
    mask_rate: float = 0.15
    """Share of tokens that are predicted."""
    mask_share: float = 0.8
    """Of the predicted tokens, the share replaced by [MASK]."""
    random_share: float = 0.1
    """Of the predicted tokens, the share replaced by a random token; the rest stay as they are."""
    whole_word: bool = False
    """Mask all tokens of a word together."""
    next_sentence: bool = field(True, weights=True)
    """Predict whether the second half follows the first."""
    short_rate: float = 0.1
    """Share of rows cut to a random shorter length, so that the model meets short texts too."""
    primary_metric: ClassVar[str] = "mlm_loss"
    vocabulary: Any = field(None, bound=True)
    """Set by `bind`, never by a flag: the tokenizer's Vocabulary."""

    def __post_init__(self) -> None:
        if not 0.0 < self.mask_rate < 1.0:
            raise UserError(f"objective.mask_rate is {self.mask_rate}; it must lie between 0 and 1.")
        require_share("short_rate", self.short_rate)
        if min(self.mask_share, self.random_share) < 0 or self.mask_share + self.random_share > 1.0:
            raise UserError(
                f"objective.mask_share {self.mask_share} and random_share {self.random_share} must be at least 0 and "
                "add up to 1 at most."
            )

    @property
    def packing(self) -> Packing:
        return "document"

    def bind(self, vocabulary: Vocabulary, length: int) -> BertPretraining:
        require_masking(vocabulary, length, self.model.max_positions, "masked language modelling")
        model = dataclasses.replace(self.model, vocab_size=vocabulary.rows(self.model.vocab_size))
        return dataclasses.replace(self, model=model, vocabulary=vocabulary)

    def raw_length(self, length: int) -> int:
        return length - (3 if self.next_sentence else 2)

    def init(self, key: jax.Array) -> Params:
        return bert.init(self.model, key, self.next_sentence)

    def corrupt(self, key: jax.Array, batch: TokenBatch) -> Example:
        """input_ids, token_type_ids, attention_mask [batch, length]; masked_positions, masked_labels, masked_weights
        [batch, predictions]; with next-sentence prediction next_sentence_labels, next_sentence_weights [batch]."""
        v = self.vocabulary
        assert v is not None, "bind the objective to a vocabulary first"
        key_short, key_pairs, key_mask = jax.random.split(key, 3)
        batch = shorten(key_short, batch, rate=self.short_rate, least=2)
        example: Example = {}
        if self.next_sentence:
            pairs = sentence_pairs(key_pairs, batch, cls=v.cls, sep=v.sep, pad=v.pad)
            ids, attention_mask = pairs.input_ids, pairs.attention_mask
            example |= {
                "token_type_ids": pairs.token_type_ids,
                "next_sentence_labels": pairs.is_random,
                "next_sentence_weights": pairs.has_pair.astype(jnp.float32),
            }
        else:
            ids, attention_mask = single_segments(batch, cls=v.cls, sep=v.sep, pad=v.pad)
            example["token_type_ids"] = jnp.zeros_like(ids)
        masked = mask_tokens(
            key_mask, ids, jnp.asarray(v.special), mask=v.mask, attention_mask=attention_mask, rate=self.mask_rate,
            slots=max_predictions(ids.shape[1], self.mask_rate), mask_share=self.mask_share,
            random_share=self.random_share, vocab_size=v.size,
            word_start=jnp.asarray(v.word_start) if self.whole_word else None,
        )
        return example | {
            "input_ids": masked.input_ids,
            "attention_mask": attention_mask,
            "masked_positions": masked.positions,
            "masked_labels": masked.labels,
            "masked_weights": masked.weights,
        }

    def loss(
        self, params: Params, example: Example, key: jax.Array, train: bool
    ) -> tuple[Float[Array, ""], Metrics]:
        positions = example["masked_positions"]
        if self.next_sentence:  # read off [CLS], which comes first
            positions = jnp.pad(positions, ((0, 0), (1, 0)))
        hidden = bert.encode(
            self.model, params, example["input_ids"], example["token_type_ids"], example["attention_mask"],
            dropout_key=key if train else None, positions=positions,
        )
        predicted = hidden[:, 1:] if self.next_sentence else hidden
        weights = example["masked_weights"]
        table, bias = bert.output_matrix(params)
        tokens = chunked_cross_entropy(
            bert.token_features(self.model, params, predicted), table, example["masked_labels"], weights, bias=bias
        )
        loss = tokens.total / jnp.maximum(jnp.sum(weights), 1.0)
        metrics: Metrics = {"mlm_loss": sums(tokens.nll, weights), "mlm_accuracy": sums(tokens.correct, weights)}
        if self.next_sentence:
            logits = bert.predict_next_sentence(self.model, params, hidden)
            labels, weights = example["next_sentence_labels"], example["next_sentence_weights"]
            nll = cross_entropy(logits, labels)
            loss = loss + weighted_mean(nll, weights)
            metrics |= {
                "nsp_loss": sums(nll, weights),
                "nsp_accuracy": sums(jnp.argmax(logits, axis=-1) == labels, weights),
            }
        return loss, metrics

    @property
    def max_length(self) -> int:
        """The longest sequence that the encoder takes."""
        return self.model.max_positions

    def token_logits(
        self,
        params: Params,
        input_ids: Int[Array, "batch length"],
        attention_mask: Int[Array, "batch length"],
        positions: Int[Array, "batch masks"],
    ) -> Float[Array, "batch masks vocab"]:
        """Vocabulary logits at `positions`, for filling masks; one segment, no dropout."""
        hidden = bert.encode(self.model, params, input_ids, attention_mask=attention_mask, positions=positions)
        return bert.predict_tokens(self.model, params, hidden)

    def flops(self, length: int) -> float:
        m = self.model
        h = m.hidden_size
        layers = m.num_layers * length * (8 * h * h + 4 * h * m.intermediate_size + 4 * length * h)
        head = max_predictions(length, self.mask_rate) * (2 * h * h + 2 * h * m.vocab_size)
        pooler = 2 * h * h + 4 * h if self.next_sentence else 0
        return float(layers + head + pooler)

    def describe(self, batch: TokenBatch, example: Example, row: int) -> list[Line]:
        assert self.vocabulary is not None
        real = int(example["attention_mask"][row].sum())
        ids = [int(i) for i in example["input_ids"][row][:real]]
        marks = ["special" if self.vocabulary.special[i] else "" for i in ids]
        original, asked = list(ids), ["" for _ in ids]
        used = np.flatnonzero(np.asarray(example["masked_weights"][row]))
        for slot in used:
            position, label = int(example["masked_positions"][row][slot]), int(example["masked_labels"][row][slot])
            shown = ids[position]
            kind = "masked" if shown == self.vocabulary.mask else "kept" if shown == label else "random"
            marks[position], asked[position], original[position] = kind, "target", label
        lines = [Line("text", original, asked), Line("input", ids, marks)]
        targets = [int(i) for i in example["masked_labels"][row][used]]
        lines.append(Line(f"predict {len(targets)}", targets, ["target"] * len(targets)))
        if self.next_sentence:
            is_random = bool(example["next_sentence_labels"][row])
            lines.append(Line(f"second half is {'RANDOM (1)' if is_random else 'NEXT (0)'}", [], []))
        return lines
