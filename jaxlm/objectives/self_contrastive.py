"""Contrastive learning of text vectors from text without labels: unsupervised SimCSE and the inverse cloze task."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.corruption.pairs import inverse_cloze, single_segments
from jaxlm.data.base import RowFormat
from jaxlm.errors import UserError
from jaxlm.fields import field
from jaxlm.objectives.base import Example
from jaxlm.objectives.contrastive import InfoNCE
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import TokenBatch


@dataclasses.dataclass(frozen=True)
class SelfContrastive(InfoNCE):
    """Find a text among those of the batch, given itself under other dropout, or a sentence of it.

    The loss is that of `InfoNCE`.
    """

    positives: Literal["dropout", "cloze"] = "dropout"
    """What belongs together: a text under two draws of dropout (unsupervised SimCSE, Gao et al. 2021), or a sentence
    and the passage around it (inverse cloze task, Lee et al. 2019)."""
    keep_rate: float = field(0.1, range="[0, 1]")
    """Probability that a sentence also stays in its passage (cloze)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.positives == "dropout" and self.query_length:
            raise UserError("objective.positives dropout reads a text twice; leave out objective.query_length.")

    def check(self, vocabulary: Vocabulary, length: int) -> None:
        super().check(vocabulary, length)
        model = self.model
        has_dropout = any(getattr(model, f"{part}dropout", 0.0) for part in ("", "attention_", "mlp_"))
        if self.positives == "dropout" and not has_dropout:
            raise UserError(
                "objective.positives dropout draws dropout twice, and the model has none; set "
                "--objective.model.dropout 0.1."
            )
        if model.template.single != "cls $A sep":
            name = type(model).__name__
            raise UserError(f"objective.positives {self.positives} reads no rows of a {name}; take pairs.")

    def with_labels_of(self, source: Any, data: Any) -> Self:
        if data.has_labels:
            raise UserError("SelfContrastive reads text without labels; rows of texts are for contrastive_tiny.")
        if self.positives == "cloze" and getattr(data, "sentences", False):
            raise UserError("objective.positives cloze takes sentences out of passages; set --data.sentences False.")
        return self

    def row_format(self, length: int) -> RowFormat:
        return RowFormat("document", length - 2)

    def corrupt(self, key: jax.Array, batch: TokenBatch) -> Example:
        """Return the texts of each row: the text twice, or a sentence of it and the rest."""
        v = self.vocabulary
        pair = (batch, batch)
        if self.positives == "cloze":
            pair = inverse_cloze(
                key, batch, jnp.asarray(v.word_start), jnp.asarray(v.sentence_end), keep_rate=self.keep_rate,
                longest=(self.query_length or batch.tokens.shape[1] + 2) - 2,
            )
        texts = [single_segments(each, cls=v.cls, sep=v.sep, pad=v.pad) for each in pair]
        ids, mask = (jnp.stack([getattr(text, name) for text in texts], 1) for name in ("input_ids", "documents"))
        return {"input_ids": ids, "attention_mask": mask, "row": jnp.where(mask[:, 0, 0] > 0, np.arange(len(ids)), -1)}
