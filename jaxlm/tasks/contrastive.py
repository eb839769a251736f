"""Contrastive learning of text vectors from rows of texts that belong together, or of pairs with scores."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxlm.data.base import RowFormat
from jaxlm.data.labelled import Arrays, EncodedExample, LabelledSource, Record
from jaxlm.errors import UserError
from jaxlm.fields import field
from jaxlm.objectives.base import Example, Term
from jaxlm.objectives.contrastive import InfoNCE, text_codes
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.types import Params, Vectors

MOST_POSITIVES = 32
"""Positives of a row that are drawn from, the first ones: all are in each batch."""


@dataclasses.dataclass(frozen=True)
class Contrastive(InfoNCE):
    """Train vectors of queries and passages by labelled rows: a query, a positive, and any number of hard negatives.

    info-nce: the loss of `InfoNCE`.

    cosent: log(1 + Σ exp((s_j - s_i) / temperature)) over all pairs i and j of the batch with y_i > y_j, s the score of
    two texts and y that of the data (Huang et al. 2024).

    It is the `jaxlm.data.labelled.RowEncoder` of its rows.
    """

    criterion: Literal["info-nce", "cosent"] = "info-nce"
    """The loss: of queries and their passages, or of pairs of texts with scores (--data.score-field)."""
    negatives: int = field(0, range="[0, 1024]")
    """Most hard negatives of a row that are read, the first ones; rows with fewer are padded and the padding masked."""
    query_prompt: str = field("", weights=True)
    """Text before each query, such as 'query: '."""
    passage_prompt: str = field("", weights=True)
    """Text before each positive and negative."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.criterion == "cosent" and (self.negatives or self.symmetric or self.is_late):
            raise UserError("objective.criterion cosent compares pairs of vectors; leave out objective.negatives, "
                            "symmetric and interaction.")

    @property
    def min_rows(self) -> int:
        """Least rows of a batch: a row without hard negatives is compared with others."""
        return 1 if self.negatives else 2

    @property
    def num_texts(self) -> int:
        """Texts per row: the query, its positive and its hard negatives."""
        return 2 + self.negatives

    def vector_settings(self, length: int | None) -> Vectors:
        has_prompts = bool(self.query_prompt or self.passage_prompt)
        prompts = (("query", self.query_prompt), ("document", self.passage_prompt))
        return super().vector_settings(length)._replace(prompt=None if has_prompts else "", prompts=prompts)

    def settings_like(self, vectors: Vectors) -> dict[str, Any]:
        prompts = {"query_prompt": vectors.prompt_of("query"), "passage_prompt": vectors.prompt_of("document")}
        return super().settings_like(vectors) | prompts

    def with_labels_of(self, source: Any, data: Any) -> Self:
        if not data.has_labels:
            raise UserError("Contrastive reads rows of texts that belong together; text alone is for simcse_tiny.")
        if not source.records["train"]:
            raise UserError("--data.source is empty; give a file of rows to train on.")
        if self.negatives and not _most_negatives(source):
            raise UserError(f"no row has hard negatives in {', '.join(data.negative_fields) or 'any column'}; name "
                            "their columns with --data.negative-fields, or set --objective.negatives 0.")
        if data.score_field and self.criterion != "cosent":
            raise UserError("--data.score-field is for --objective.criterion cosent; give both, or neither.")
        if self.min_rows > 1:
            train, names = source.records["train"], ("query", "positive") if self.criterion == "info-nce" else ()
            if min([len(train), *(len({row.values[name] for row in train}) for name in names)]) < 2:
                raise UserError(f"{data.source} has one pair, or pairs of one text, and so no negatives; give more "
                                "pairs, or hard negatives with --objective.negatives.")
        if data.score_field and len({row.values["label"] for row in source.records["train"]}) < 2:
            raise UserError(f"{data.source}: all rows have the same score, so there is nothing to learn; give others.")
        return self

    def num_examples(self, source: LabelledSource, length: int) -> int:
        return len(source.records["train"])

    def row_format(self, length: int) -> RowFormat:
        return RowFormat(self, length)

    @property
    def padding(self) -> dict[str, int]:
        """Padding value of each array whose last axis is tokens; see `jaxlm.data.labelled.RowEncoder`."""
        return {"input_ids": max(self.vocabulary.pad, 0), "token_type_ids": 0, "attention_mask": 0}

    def encode(self, records: Sequence[Record], tokenizer: Tokenizer, length: int) -> list[EncodedExample]:
        """Return the examples of records; see `jaxlm.data.labelled.RowEncoder`.

        The arrays of a row: input_ids, token_type_ids, attention_mask int32 [texts, length]; score float32 []. The
        texts are the query, as many positives as the row with most has, and the negatives.
        """
        num_positives = max((len(_positives(record)) for record in records), default=1)
        rows = [self._texts(record) for record in records]
        strings = list(dict.fromkeys(itertools.chain.from_iterable(rows)))
        ids = dict(zip(strings, tokenizer.encode_arrays(strings), strict=True))
        template = self.text_template
        room = length - template.num_symbols(False)
        query_room = min(room, (self.query_length or length) - template.num_symbols(False))
        for name, prompt, most in (("query", self.query_prompt, query_room), ("passage", self.passage_prompt, room)):
            if prompt and (size := len(tokenizer.encode(prompt))) >= most:
                raise UserError(f"objective.{name}_prompt has {size} tokens and leaves no room for a text after it; "
                                "shorten it, or raise data.length and objective.query_length.")
        examples = []
        for number, (record, row) in enumerate(zip(records, rows, strict=True)):
            sizes = (query_room, *itertools.repeat(room, len(row) - 1))
            built = [template.build(self.vocabulary, ids[text][:size]) for text, size in zip(row, sizes, strict=True)]
            longest = max(len(text.input_ids) for text in built)
            shape = (self.num_texts + num_positives - 1, longest)
            arrays = {name: np.full(shape, value, np.int32) for name, value in self.padding.items()}
            first = 1 + len(_positives(record))  # of the negatives
            for place, text in zip([*range(first), *range(1 + num_positives, shape[0])], built, strict=False):
                for array, value in zip(arrays.values(), (text.input_ids, text.segments, 1), strict=True):
                    array[place, : len(text.input_ids)] = value
            if self.criterion == "cosent":
                if record.values.get("label") is None:
                    advice = "fill it in, or remove the row" if "label" in record.values else (
                        "name its column with --data.score-field")
                    raise UserError(f"{record.place} has no score; {advice}.")
                arrays["score"] = np.float32(record.values["label"])
            examples.append(EncodedExample(number, arrays))
        return examples

    def _texts(self, record: Record) -> list[str]:
        """Return the texts of a row with their prompts."""
        passages = [*_positives(record), *record.values["negatives"][: self.negatives]]
        return [self.query_prompt + record.values["query"], *(self.passage_prompt + text for text in passages)]

    def synthetic(self, rows: int, length: int) -> Arrays:
        """Return a batch of full rows of random ids."""
        ids = np.random.default_rng(0).integers(0, self.vocabulary.size, (rows, self.num_texts, length), np.int32)
        score = {"score": np.arange(rows, dtype=np.float32)} if self.criterion == "cosent" else {}
        return {"row": np.arange(rows, dtype=np.int32), "input_ids": ids, "token_type_ids": np.zeros_like(ids),
                "attention_mask": np.ones_like(ids)} | score

    def remarks(self, source: LabelledSource, length: int) -> list[str]:
        most, lines = _most_negatives(source), super().remarks(source, length) + source.cut_remarks(self, length)
        examples = source.examples("train", self, length) if self.query_length else []
        if cut := int(np.sum([np.sum(each.arrays["attention_mask"][0]) >= self.query_length for each in examples])):
            lines.append(f"{cut:,} queries reach --objective.query-length {self.query_length}; longer are cut there")
        if several := sum(len(_positives(record)) > 1 for record in source.records["train"]):
            lines.append(f"{several:,} rows have several positives, of which each step draws one (of the first "
                         f"{MOST_POSITIVES})")
        if self.min_rows > 1 and len(source.records.get("held_out", ())) == 1:
            lines.append("1 row is held out and has none to be compared with, so that its loss is 0; give --data.dev")
        if self.criterion == "info-nce" and most != self.negatives:
            lines.append(f"Rows have up to {most} hard negatives; --objective.negatives is {self.negatives}")
        return lines

    def corrupt(self, key: jax.Array, batch: Arrays) -> Example:
        """Return the batch with one positive per row, drawn uniformly, and the codes of all as `positives`."""
        most = batch["input_ids"].shape[1] - self.num_texts + 1
        if most == 1:
            return batch
        ids, mask = (batch[name][:, 1 : 1 + most] for name in ("input_ids", "attention_mask"))
        codes, is_text = text_codes(ids, mask), jnp.any(mask > 0, axis=-1)
        counts = jnp.sum(is_text, axis=1)
        drawn = 1 + jax.random.randint(key, counts.shape, 0, jnp.maximum(counts, 1))[:, None, None]
        return batch | {"positives": jnp.where(is_text, codes, codes[:, :1])} | {
            name: jnp.concatenate([x[:, :1], jnp.take_along_axis(x, drawn, axis=1), x[:, 1 + most :]], axis=1)
            for name, x in batch.items() if name in self.padding}

    def loss(self, params: Params, example: Example, key: jax.Array, train: bool) -> dict[str, Term]:
        if self.criterion == "info-nce":
            return super().loss(params, example, key, train)
        vectors = self.encode_texts(params, example, key if train else None)
        weights = jnp.asarray(example["row"] >= 0, jnp.float32)
        scores = [jnp.sum(each[:, 0] * each[:, 1], axis=-1) for each in self.of_widths(vectors)]
        return self._score_terms(scores, example["score"], weights)

    def _score_terms(
        self, scores: Sequence[Float[Array, " batch"]], labels: Float[Array, " batch"], weights: Float[Array, " batch"]
    ) -> dict[str, Term]:
        """Return the CoSENT loss of each width's scores, and the share of pairs that whole vectors order correctly."""
        is_higher = (labels[:, None] > labels) & (weights[:, None] * weights > 0)
        total = sum(cosent(one / self.divisor, is_higher) for one in scores)
        is_right = scores[-1][:, None] > scores[-1]
        return {
            "contrastive_loss": Term.of(total, jnp.ones(()), 1.0),
            "order_accuracy": Term.of(is_right, is_higher.astype(jnp.float32)),
        }


def _most_negatives(source: LabelledSource) -> int:
    """Return the largest number of hard negatives of a training row."""
    return max(len(record.values["negatives"]) for record in source.records["train"])


def _positives(record: Record) -> list[str]:
    return record.values.get("positives", [record.values["positive"]])[:MOST_POSITIVES]


def cosent(scores: Float[Array, " batch"], is_higher: Bool[Array, "batch batch"]) -> Float[Array, ""]:
    """Return log(1 + Σ exp(s_j - s_i)) over the pairs where row i is to score higher than row j."""
    gaps = jnp.where(is_higher, scores - scores[:, None], -jnp.inf)
    most = jax.lax.stop_gradient(jnp.maximum(jnp.max(gaps), 0.0))
    return most + jnp.log(jnp.exp(-most) + jnp.sum(jnp.exp(gaps - most)))
