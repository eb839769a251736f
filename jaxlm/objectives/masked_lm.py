"""Masked language modelling (Devlin et al. 2018, section 3.1).

BERT's objective with or without next-sentence prediction, RoBERTa's over packed full sentences, and ALBERT's with
n-grams and sentence order.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, ClassVar, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxlm.corruption.masking import Masked, mask_tokens, max_predictions
from jaxlm.corruption.pairs import at_source, shorten, single_segments
from jaxlm.data.base import RowFormat
from jaxlm.errors import UserError
from jaxlm.fields import field
from jaxlm.models.base import Inputs
from jaxlm.models.bert import Bert
from jaxlm.models.encoder import Encoder
from jaxlm.objectives.base import Example, Line, Objective, Terms, require_masking, require_shares
from jaxlm.objectives.chunked_loss import token_losses
from jaxlm.objectives.next_sentence import NEXT_SENTENCE
from jaxlm.objectives.pair_task import PairTask
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.objectives.sentence_order import SENTENCE_ORDER
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import Params, TokenBatch

PAIR_TASKS = {"next-sentence": NEXT_SENTENCE, "sentence-order": SENTENCE_ORDER}
"""Input formats of two segments, and the task on them."""


@dataclasses.dataclass(frozen=True)
class MaskedLM(Objective):
    """Masked language modelling with an encoder, optionally with a task on pairs of segments.

    Loss: masked-LM cross-entropy (+ next-sentence or sentence-order cross-entropy).
    """

    model: Encoder = field(Bert(), weights=True)
    """The encoder."""
    mask_rate: float = field(0.15, range="(0, 1)")
    """Share of tokens that are predicted."""
    mask_share: float = field(0.8, range="[0, 1]")
    """Share of the predicted tokens replaced by [MASK]."""
    random_share: float = field(0.1, range="[0, 1]")
    """Share of the predicted tokens replaced by a random token; the rest stay unchanged."""
    whole_word: bool = False
    """Mask all tokens of a word together."""
    longest_ngram: int = field(1, range="[1, inf)")
    """Longest n-gram of words (of tokens without whole_word) masked together, with p(n) ∝ 1/n (ALBERT). Above 1, a word
    starts where one does in ALBERT's code (see `Vocabulary.ngram_start`)."""
    max_predictions: int = field(0, range="[0, inf)")
    """Maximum number of predicted tokens per row; 0 derives it from mask_rate."""
    input_format: Literal["next-sentence", "sentence-order", "document", "full-sentences", "packed"] = field(
        "next-sentence", weights=True
    )
    """Rows of two segments of a document, and whether the second follows the first (BERT) or precedes it (ALBERT); rows
    of one segment of a document; full rows across documents, separated by the end symbol (RoBERTa's FULL-SENTENCES, Liu
    et al. 2019, section 4.2); or full rows of documents that do not see each other, each with its special symbols and
    positions (packed). The number of masks in full rows, in packed ones of each document, is rounded at random, and
    random tokens are never special ones, as in fairseq, which also ends rows at sentence ends and masks <s> and </s>
    like any other token. A document that does not fit is cut at the end of a packed row and goes on in another one.
    ModernBERT truncates it, and masks each token independently, [CLS] and [SEP] too."""
    short_rate: float = field(0.1, range="[0, 1]")
    """Share of rows cut to a random shorter length, so that the model also sees short texts; packed rows are not."""
    predicts_next: bool = False
    """Predict a masked token from the hidden state before it, as a decoder has learnt to (LLM2Vec, BehnamGhader et al.
    2024). The first token of a row, a special one, is never masked."""

    primary_metric = "mlm_loss"
    private_params = ("pooler", "nsp_head", "sop_head")
    token_losses = ("mlm_loss",)
    answer_kind = "masks"
    is_causal = False
    preference: ClassVar[Float[Array, " vocab"] | None] = None
    """Relative probability of masking each token; None for uniform."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_shares(self, "mask_share", "random_share")

    @property
    def pair_task(self) -> PairTask | None:
        """Task on pairs of segments; None for rows of one segment."""
        return PAIR_TASKS.get(self.input_format)

    @property
    def min_rows(self) -> int:
        return 2 if self.input_format == "next-sentence" else 1  # a random second segment comes from another row

    @property
    def _has_full_rows(self) -> bool:
        """Whether rows are full across documents; their masks follow fairseq's rules (see `input_format`)."""
        return self.input_format in ("full-sentences", "packed")

    def num_slots(self, length: int) -> int:
        """Return the number of prediction slots per row."""
        most = math.ceil(self.mask_rate * length)
        num_slots = most if self._has_full_rows else max_predictions(length, self.mask_rate)
        return min(num_slots, self.max_predictions) if self.max_predictions else num_slots

    @property
    def never_masked(self) -> Bool[np.ndarray, " vocab"]:
        """Tokens that are never masked, by id."""
        return self.vocabulary.special

    def with_pretrained_model(self, source: PretrainedModel) -> Self:
        """Return a copy with the pretrained model, and with rows of one segment if it has no segment types."""
        objective = super().with_pretrained_model(source)
        is_possible = not objective.pair_task or objective.model.type_vocab_size > 1
        return dataclasses.replace(objective, input_format=self.input_format if is_possible else "document",
                                   predicts_next=self.predicts_next or source.objective.predicts_next)

    def check(self, vocabulary: Vocabulary, length: int) -> None:
        self.require_direction()
        require_masking(vocabulary, length, self.model.max_positions, "masked language modelling")
        # Checked here and not in `__post_init__`: an imported model need not be suitable for training.
        if self.pair_task and self.model.type_vocab_size < 2:
            raise UserError(
                f"objective.input_format {self.input_format} needs 2 segment types, but "
                f"objective.model.type_vocab_size is {self.model.type_vocab_size}; raise it, or choose document."
            )
        if self.input_format == "full-sentences":
            vocabulary.require("eos", purpose="packing documents into rows")
        if self.input_format == "packed" and (self.whole_word or self.longest_ngram > 1 or self.max_predictions):
            raise UserError(
                "objective.input_format packed masks single tokens, as many as mask_rate says; leave out "
                "objective.whole_word, longest_ngram and max_predictions, or choose document."
            )

    def remarks(self, rows: Any, length: int) -> list[str]:
        share = rows.statistics.longest_document
        is_dominant = self.input_format == "next-sentence" and share > 0.5  # up to a half, each row can have a partner
        return [
            f"One document has {share:.1%} of the tokens, so at most {2 - 2 * share:.1%} of the rows can get a random "
            "second segment for next-sentence prediction; divide the text (in a .txt, a blank line ends a document) or "
            "choose --objective.input-format sentence-order or document"
        ] if is_dominant else []

    def row_format(self, length: int) -> RowFormat:
        packing = {"full-sentences": "packed-eos", "packed": "packed-room"}.get(self.input_format, "document")
        return RowFormat(packing, length - (3 if self.pair_task else 2))

    def init(self, key: jax.Array) -> Params:
        key_model, key_pair = jax.random.split(key)
        params = self.model.init(key_model)
        return params | self.pair_task.init(self.model, key_pair) if self.pair_task else params

    def corrupt(self, key: jax.Array, batch: TokenBatch) -> Example:
        """Build rows of one or two segments and mask their tokens.

        Returns:
            `input_ids`, `token_type_ids`, `attention_mask` int32 [batch, length]; `masked_positions`, `masked_labels`
            int32 and `masked_weights` float32 [batch, predictions]; with a pair task `<name>_labels` int32 and
            `<name>_weights` float32 [batch]; `entities` int32 [batch, length] if the batch has them; in packed rows
            `documents` int32 [batch, length], the number of each token's document.
        """
        v = self.vocabulary
        key_short, key_pairs, key_mask = jax.random.split(key, 3)
        is_packed = self.input_format == "packed"
        if not is_packed:
            batch = shorten(key_short, batch, rate=self.short_rate, least=2)
        if self.pair_task:
            example = self.pair_task.corrupt(key_pairs, batch, v)
        else:
            ids, documents, source = single_segments(batch, cls=v.cls, sep=v.sep, pad=v.pad, by_document=is_packed)
            example = {"input_ids": ids, "token_type_ids": jnp.zeros_like(ids), "attention_mask": documents}
            if is_packed:
                example |= {"attention_mask": (documents > 0).astype(jnp.int32), "documents": documents}
            if batch.entities is not None:
                example["entities"] = at_source(batch.entities, source)
        return example | self.mask(key_mask, example)._asdict()

    def mask(self, key: jax.Array, example: Example) -> Masked:
        """Mask tokens of rows that `corrupt` has built; override it to mask others."""
        v, ids = self.vocabulary, example["input_ids"]
        starts = v.word_start if self.longest_ngram == 1 or v.ngram_start is None else v.ngram_start
        return mask_tokens(
            key, ids, jnp.asarray(self.never_masked), mask=v.mask, attention_mask=example["attention_mask"],
            rate=self.mask_rate, slots=self.num_slots(ids.shape[1]), mask_share=self.mask_share,
            random_share=self.random_share, random_ids=v.text_ids if self._has_full_rows else v.random_ids,
            preference=self.preference, round_randomly=self._has_full_rows,
            word_start=jnp.asarray(starts) if self.whole_word else None,
            longest_ngram=self.longest_ngram, documents=example.get("documents"),
        )

    def loss(self, params: Params, example: Example, key: jax.Array, train: bool) -> Terms:
        hidden = self.model.hidden_states(
            params, Inputs.of(example), key=key if train else None, at=self.positions(example)
        )
        return self.token_terms(params, example, hidden)

    def positions(self, example: Example) -> Int[Array, "batch positions"]:
        """Return the positions of `token_terms`: those that predict the masks, after the first one for a pair task."""
        at = self.predicting(example["masked_positions"])
        return jnp.pad(at, ((0, 0), (1 if self.pair_task else 0, 0)))

    def token_terms(
        self, params: Params, example: Example, hidden: Float[Array, "batch positions hidden"]
    ) -> Terms:
        """Return the terms of masked LM and of the pair task, given the hidden states at `positions`."""
        predicted = hidden[:, 1:] if self.pair_task else hidden
        weights = example["masked_weights"]
        terms = token_losses(self.model, params, predicted, example["masked_labels"], weights).terms("mlm", weights)
        return terms | self.pair_task.loss(self.model, params, hidden, example) if self.pair_task else terms

    def flops(self, length: int) -> float:
        heads = self.pair_task.flops(self.model) if self.pair_task else 0.0
        return self.model.forward_flops(length, self.num_slots(length)) + heads

    def describe(self, batch: TokenBatch, example: Example, row: int) -> list[Line]:
        if self.input_format == "packed":
            return document_lines(self.vocabulary, example, row)
        lines = masked_lines(self.vocabulary, example, row)
        if self.pair_task:
            lines.append(Line(self.pair_task.label_names[int(example[f"{self.pair_task.name}_labels"][row])], [], []))
        return lines


def documents_of(example: Example, row: int) -> Iterator[Example]:
    """Yield each document of a packed row as an example of one row."""
    documents = example["documents"][row]
    for number in range(1, int(documents.max()) + 1):
        columns = np.flatnonzero(documents == number)
        positions = example["masked_positions"][row] - columns[0]
        is_inside = (positions >= 0) & (positions < len(columns))
        yield {
            "input_ids": example["input_ids"][row : row + 1, columns], "masked_positions": positions[None],
            "attention_mask": example["attention_mask"][row : row + 1, columns],
            "masked_labels": example["masked_labels"][row : row + 1],
            "masked_weights": (example["masked_weights"][row] * is_inside)[None],
        }


def document_lines(vocabulary: Vocabulary, example: Example, row: int) -> list[Line]:
    """Return the `masked_lines` of each document of a packed row."""
    return [
        line._replace(title=f"{line.title} {number}" if line.title == "text" else line.title)
        for number, document in enumerate(documents_of(example, row), 1)
        for line in masked_lines(vocabulary, document, 0)
    ]


def masked_lines(vocabulary: Vocabulary, example: Example, row: int) -> list[Line]:
    """Return the original text of a row, the corrupted input, and the predicted tokens."""
    size = int(example["attention_mask"][row].sum())
    ids = [int(i) for i in example["input_ids"][row][:size]]
    marks = ["special" if vocabulary.special[i] else "" for i in ids]
    original, target_marks = list(ids), ["" for _ in ids]
    used_slots = np.flatnonzero(np.asarray(example["masked_weights"][row]))
    for slot in used_slots:
        position, label = int(example["masked_positions"][row][slot]), int(example["masked_labels"][row][slot])
        shown = ids[position]
        kind = "masked" if shown == vocabulary.mask else "kept" if shown == label else "random"
        marks[position], target_marks[position], original[position] = kind, "target", label
    targets = [int(i) for i in example["masked_labels"][row][used_slots]]
    return [
        Line("text", original, target_marks),
        Line("input", ids, marks),
        Line(f"predict {len(targets)}", targets, ["target"] * len(targets)),
    ]
