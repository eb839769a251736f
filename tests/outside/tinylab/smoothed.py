"""A task: classification with smoothed labels, over rows whose text is in a column of another name."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxlm.fields import field
from jaxlm.objectives.base import Term
from jaxlm.tasks.classification import Classification, TextRows


@dataclasses.dataclass(frozen=True)
class ReviewRows(TextRows):
    """Rows of a review and its label."""

    text_field: str = "review"
    """Column of the review."""


@dataclasses.dataclass(frozen=True)
class Smoothed(Classification):
    """Classification whose target has a share of the probability spread over all labels."""

    smoothing: float = field(0.1, range="[0, 1)")
    """That share."""

    name = "smoothed"

    def label_terms(self, logits, label, weights):
        log_probs = jax.nn.log_softmax(logits)
        right = jnp.take_along_axis(log_probs, label[:, None], 1)[:, 0]
        loss = -(1 - self.smoothing) * right - self.smoothing * jnp.mean(log_probs, -1)
        return super().label_terms(logits, label, weights) | {"task_loss": Term.of(loss, weights, 1.0)}
