"""Reranking: a cross-encoder reads a query and a passage together and scores the pair."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxlm.data.labelled import Arrays, EncodedExample, LabelledData, LabelledSource, Record
from jaxlm.errors import UserError
from jaxlm.fields import field
from jaxlm.objectives.base import Line, Term, Terms
from jaxlm.objectives.losses import cross_entropy
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.tasks.base import Answer, Task
from jaxlm.tasks.metrics import CUTOFF
from jaxlm.tasks.multiple_choice import MultipleChoice
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.types import Params


@dataclasses.dataclass(frozen=True)
class Rerank(MultipleChoice):
    """loss = -log softmax of the positive's logit over the passages of its row (cross-entropy over a list).

    Each passage follows the query in a row of its own (`jaxlm.tasks.text_groups.TextGroups` has the rows). The label of
    a row is float32 [texts]: 0 for each passage, -1 where another row has more of them.
    """

    negatives: int = field(0, range="[0, 1024]")
    """Hard negatives of each row that are read, the first ones, also where rows are ranked for nDCG and MRR; 0: all."""
    query_prompt: str = ""
    """Text before each query, such as 'query: '."""

    name = "rerank"

    @property
    def num_texts(self) -> int:
        return 1 + self.negatives if self.negatives else MultipleChoice.num_texts

    def with_pretrained_model(self, source: PretrainedModel) -> Self:
        """Return a copy with the pretrained model, and a reranker's prompt where the preset has none."""
        theirs = source.objective
        prompt = self.query_prompt or (theirs.query_prompt if isinstance(theirs, Rerank) else "")
        return dataclasses.replace(super().with_pretrained_model(source), query_prompt=prompt)

    def select_params(self, source: PretrainedModel) -> Params:
        params, theirs = super().select_params(source), source.objective
        if getattr(theirs, "target", "") == "number":  # such as a published reranker's: no file says what the number is
            params |= {"classifier": source.params["classifier"]}
        return params

    def with_labels_of(self, source: LabelledSource, data: LabelledData) -> Self:
        if not any(len(self.texts(record)) > 1 for record in source.records["train"]):
            raise UserError(f"{data.source} has no hard negatives; name their columns with --data.negative-fields.")
        return super().with_labels_of(source, data)

    def remarks(self, source: LabelledSource, length: int) -> list[str]:
        sizes = [len(self.texts(record)) for record in source.records["train"]]
        most, mean = max(sizes), np.mean(sizes)
        padded = f"Rows have {mean:.1f} passages on average and are padded to {most}; --objective.negatives reads fewer"
        several = sum("positives" in record.values for record in source.records["train"])
        first = f"{several:,} rows have several positives, of which the first is read"
        return super().remarks(source, length) + [padded] * bool(most > 2 * mean) + [first] * bool(several)

    def texts(self, record: Record) -> list[tuple[str, ...]]:
        query, positive, negatives = (record.values[name] for name in ("query", "positive", "negatives"))
        negatives = [text for text in negatives if text != positive][: self.negatives or None]
        return [(self.query_prompt + query, text) for text in (positive, *negatives)]

    def label(self, record: Record) -> np.ndarray:
        return np.zeros(len(self.texts(record)), np.float32)

    def encode(self, records: Sequence[Record], tokenizer: Tokenizer, length: int) -> list[EncodedExample]:
        rows = [example.arrays for example in super().encode(records, tokenizer, length)]
        most = max((len(arrays["label"]) for arrays in rows), default=0)
        for arrays in rows:
            for name, x in arrays.items():
                sizes = [(0, most - len(x)), *[(0, 0)] * (x.ndim - 1)]
                arrays[name] = np.pad(x, sizes, constant_values=self.padding.get(name, -1))
        return [EncodedExample(number, arrays) for number, arrays in enumerate(rows)]

    def synthetic(self, rows: int, length: int) -> Arrays:
        return Task.synthetic(self, rows, length) | {"label": np.zeros((rows, self.num_texts), np.float32)}

    def label_terms(
        self, logits: Float[Array, "batch passages"], label: Array, weights: Float[Array, " batch"]
    ) -> Terms:
        logits = jnp.where(label >= 0, logits, -jnp.inf)
        is_right = logits[:, 0] > jnp.max(logits[:, 1:], axis=-1, initial=-jnp.inf)
        losses = cross_entropy(logits, jnp.zeros(len(logits), jnp.int32))
        has_negatives = jnp.any(label[:, 1:] >= 0, axis=-1)  # the loss counts other rows too, as ListNetLoss does
        return {"task_loss": Term.of(losses, weights, 1.0), "accuracy": Term.of(is_right, weights * has_negatives)}

    def describe(self, batch: Arrays, example: Arrays, row: int) -> list[Line]:
        positive, *negatives = Task.describe(self, batch, example, row)
        return [positive._replace(title="positive"), *(x._replace(title="negative") for x in negatives if x.ids)]

    def answer(self, record: Record, parts: Sequence[tuple[EncodedExample, Arrays]]) -> Answer:
        return Answer(parts[0][1]["logits"][: len(self.texts(record))].astype(float).tolist(), {})

    def gold(self, record: Record) -> Any:
        return [1, *[0] * (len(self.texts(record)) - 1)]

    def score(self, golds: Sequence[Any], answers: Sequence[Answer]) -> dict[str, float]:
        """Return nDCG and MRR of the rows with negatives; a negative with the positive's score comes before it."""
        scores = [np.array(answer.prediction) for answer in answers if len(answer.prediction) > 1]
        if not scores:
            return {}
        ranks = np.array([np.sum(~(row < row[0])) for row in scores])  # a positive with NaN is the last
        gains = {"ndcg": 1 / np.log2(ranks + 1), "mrr": 1 / ranks}
        return {f"{name}_at_{CUTOFF}": float(np.mean(gain * (ranks <= CUTOFF))) for name, gain in gains.items()}

    def as_text(self, record: Record) -> tuple[str, str]:
        raise UserError("a reranker scores pairs and writes no text; give an encoder or a decoder, without --as-text.")
