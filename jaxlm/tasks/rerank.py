"""Reranking: a cross-encoder reads a query and a passage together and scores the pair."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, Self

import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from jaxlm.data.labelled import Arrays, EncodedExample, LabelledData, LabelledSource, Record
from jaxlm.errors import UserError
from jaxlm.fields import field
from jaxlm.objectives.base import Line, Term, Terms
from jaxlm.tasks.base import Answer, Task
from jaxlm.tasks.multiple_choice import MultipleChoice
from jaxlm.tasks.vectors import CUTOFF, label_metrics, ranking_metrics
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.types import Params

NO_PASSAGE = -1
"""Label where a row has fewer passages than another one."""


@dataclasses.dataclass(frozen=True)
class Rerank(MultipleChoice):
    """Score each passage of a query by one logit (a cross-encoder), over rows of `jaxlm.tasks.text_groups.TextGroups`.

    softmax: the mean over rows of -log softmax of the positive's score among the row's passages, which is ListNet (Cao
    et al. 2007) with one relevant passage.

    binary: the mean binary cross-entropy over all passages. Hard negatives have the label 0, and the positive 1, or the
    0 or 1 in --data.score-field.

    The label of a row is float32 [texts]: 1 for a relevant passage, 0 for another one, else `NO_PASSAGE`.
    """

    criterion: Literal["softmax", "binary"] = "softmax"
    """The loss: of lists of passages, or of single ones."""
    negatives: int = field(0, range="[0, 1024]")
    """Hard negatives of each row that are read, the first ones; 0: all."""

    name = "rerank"

    @property
    def num_texts(self) -> int:
        return 1 + self.negatives if self.negatives else MultipleChoice.num_texts

    def with_rows(self, rows: LabelledSource, data: LabelledData) -> Self:
        task = super().with_rows(rows, data)
        if self.criterion == "softmax" and not any(len(self.texts(record)) > 1 for record in rows.records["train"]):
            raise UserError(
                f"{data.source} has no hard negatives; name their columns with --data.negative-fields, or learn from "
                "0/1 labels with --objective.criterion binary --data.score-field COLUMN."
            )
        return task

    def texts(self, record: Record) -> list[tuple[str, ...]]:
        query, positive, negatives = (record.values[name] for name in ("query", "positive", "negatives"))
        negatives = [text for text in negatives if text != positive][: self.negatives or None]
        return [(query, text) for text in (positive, *negatives)]

    def label(self, record: Record) -> np.ndarray:
        return np.array(self.gold(record) or [0.0] * len(self.texts(record)), np.float32)

    def gold(self, record: Record) -> list[float] | None:
        relevance = record.values.get("label", 1.0) if self.criterion == "binary" else 1.0
        if relevance not in (0, 1, None):
            raise UserError(f"{record.place}: the score {relevance:g} is neither 0 nor 1; fix or remove the row.")
        return None if relevance is None else [float(relevance), *[0.0] * (len(self.texts(record)) - 1)]

    def encode(self, records: Sequence[Record], tokenizer: Tokenizer, length: int) -> list[EncodedExample]:
        examples = super().encode(records, tokenizer, length)
        most = max((len(example.arrays["label"]) for example in examples), default=0)

        def padded(name: str, array: np.ndarray) -> np.ndarray:
            sizes = [(0, most - len(array)), *[(0, 0)] * (array.ndim - 1)]
            return np.pad(array, sizes, constant_values=self.padding.get(name, NO_PASSAGE))

        return [
            example._replace(arrays={name: padded(name, array) for name, array in example.arrays.items()})
            for example in examples
        ]

    def synthetic(self, rows: int, length: int) -> Arrays:
        label = np.tile(np.arange(self.num_texts) == 0, (rows, 1)).astype(np.float32)
        return Task.synthetic(self, rows, length) | {"label": label}

    def label_terms(
        self, logits: Float[Array, "batch passages"], label: Array, weights: Float[Array, " batch"]
    ) -> Terms:
        is_passage = label >= 0
        if self.criterion == "binary":
            weights = weights[:, None] * is_passage
            losses, is_right = optax.sigmoid_binary_cross_entropy(logits, label), (logits > 0) == (label > 0)
        else:
            losses = optax.losses.ranking_softmax_loss(logits, label, where=is_passage, reduce_fn=None)
            others = jnp.where(is_passage, logits, -jnp.inf)[:, 1:]
            is_right = logits[:, 0] > jnp.max(others, axis=-1, initial=-jnp.inf)
        return {"task_loss": Term.of(losses, weights, 1.0), "accuracy": Term.of(is_right, weights)}

    def describe(self, batch: Arrays, example: Arrays, row: int) -> list[Line]:
        labels, lines = example["label"][row], Task.describe(self, batch, example, row)
        titles = ["relevant" if label > 0 else "not relevant" for label in labels]
        return [line._replace(title=title) for line, title in zip(lines, titles, strict=True) if line.ids]

    def answer(self, record: Record, parts: Sequence[tuple[EncodedExample, Arrays]]) -> Answer:
        return Answer(parts[0][1]["logits"][: len(self.texts(record))].astype(float).tolist(), {})

    def score(self, golds: Sequence[Any], answers: Sequence[Answer]) -> dict[str, float]:
        """Return nDCG and MRR of the rows with several passages, and with binary labels the metrics of all pairs.

        Of equal scores later passages come first, so that a positive gains nothing by its place in the row.
        """
        rows = [(np.array(gold), np.array(answer.prediction)) for gold, answer in zip(golds, answers, strict=True)]
        lists = [(gold[::-1][np.argsort(-scores[::-1], kind="stable")]) for gold, scores in rows if gold[1:].size]
        lists, found = [gains for gains in lists if gains.any()], {}
        if lists:
            depth = max(map(len, lists))
            gains = np.stack([np.pad(row, (0, depth - len(row))) for row in lists])
            figures = ranking_metrics(gains, [row[row > 0] for row in lists])
            found = {name: float(figures[name].mean()) for name in (f"ndcg_at_{CUTOFF}", f"mrr_at_{CUTOFF}")}
        if self.criterion == "binary":
            found |= label_metrics(*(np.concatenate(each) for each in zip(*(row[::-1] for row in rows), strict=True)))
        return found

    def score_pairs(
        self, params: Params, tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]], length: int
    ) -> Float[np.ndarray, " pairs"]:
        values = [{"query": query, "positive": passage, "negatives": []} for query, passage in pairs]
        source = LabelledSource(tokenizer, {"held_out": [Record("", "", each, ()) for each in values]}, True)
        return np.array([answer.prediction[0] for answer in self.answers(params, source, length, 32)], np.float32)

    def as_text(self, record: Record) -> tuple[str, str]:
        raise UserError("a reranker scores pairs and writes no text; give an encoder or a decoder, without --as-text.")
