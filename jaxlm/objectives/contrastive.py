"""Contrastive learning of text vectors: InfoNCE over pairs, CoSENT over scored pairs; SimCSE and ICT over text."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxlm.corruption.pairs import inverse_cloze, single_segments
from jaxlm.data.base import RowFormat
from jaxlm.data.labelled import Arrays, EncodedExample, LabelledSource, Record
from jaxlm.errors import UserError
from jaxlm.fields import field
from jaxlm.models.base import Inputs, Model, text_vectors
from jaxlm.models.bert import Bert
from jaxlm.objectives.base import Example, Line, Objective, PretrainedModel, Term, require_positions, with_options
from jaxlm.parallel.activations import constrain
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import Params, Pooling, TokenBatch, Vectors

PRECISION = jax.lax.Precision.HIGHEST
"""Of the products of vectors: TPUs multiply float32 in bfloat16 by default, and a small temperature amplifies the
error."""
MOST_POSITIVES = 32
"""Positives of a row that are drawn from, the first ones: all are in each batch."""


@dataclasses.dataclass(frozen=True)
class Contrastive(Objective):
    """Train one vector per text, so that texts that belong together score higher than others.

    info-nce: the mean over queries of -log softmax of the positive's score / temperature, over the positives and hard
    negatives of all queries of the batch (van den Oord et al. 2018; MultipleNegativesRankingLoss). A passage with the
    text of the query's own positive, or the positive in a row of the same query, is no negative.

    cosent: log(1 + Σ exp((s_j - s_i) / temperature)) over all pairs i and j of the batch with y_i > y_j, s the score of
    two texts and y that of the data (Huang et al. 2024).

    The batch is that of all devices. A microbatch has fewer negatives, and so another loss; `chunks` saves the same
    memory.
    """

    model: Model = field(Bert(), weights=True)
    """The encoder; `--init-from` brings it, of any family."""
    criterion: Literal["info-nce", "cosent"] = "info-nce"
    """The loss: of queries and their passages, or of pairs of texts with scores (--data.score-field)."""
    positives: Literal["rows", "dropout", "cloze"] = "rows"
    """What a query's positive is: that of its row; or, for text without labels, the same text under another draw of
    dropout (unsupervised SimCSE, Gao et al. 2021), or the passage around a sentence (inverse cloze task, Lee et al.
    2019)."""
    keep_rate: float = field(0.1, range="[0, 1]")
    """Probability that a sentence also stays in its passage (cloze)."""
    temperature: float = field(0.05, range="(0, inf)")
    """Divisor of the scores; 1 / scale in sentence-transformers."""
    symmetric: bool = False
    """Average with the loss of the positive, over all queries, for two texts of the same kind."""
    negatives: int = field(0, range="[0, 1024]")
    """Most hard negatives of a row that are read, the first ones; rows with fewer are padded and the padding masked."""
    pooling: Pooling = field("mean", weights=True)
    """Vector of a text: that of its summary token, the mean of all tokens, or the last token."""
    normalize: bool = field(True, weights=True)
    """Scale vectors to unit length, so that the score of two is their cosine; otherwise their dot product."""
    query_prompt: str = field("", weights=True)
    """Text before each query, such as 'query: '."""
    passage_prompt: str = field("", weights=True)
    """Text before each positive and negative."""
    query_length: int = field(0, range="[0, inf)")
    """Longest query in tokens, special tokens included; 0: data.length, as for passages."""
    widths: tuple[int, ...] = field((), weights=True)
    """Numbers of leading components that also serve as vectors (Matryoshka, Kusupati et al. 2022): the loss is the sum
    of the losses of these prefixes and of whole vectors, by their cosines also without `normalize`, as in the
    MatryoshkaLoss of sentence-transformers."""
    chunks: int = field(1, resumable=True, range="[1, inf)")
    """Parts of a batch for gradient caching (Gao et al. 2021): the encoder reads each twice, with the activations of
    one part in memory, and the loss is the same."""

    primary_metric = "contrastive_loss"
    is_separable = False

    def __post_init__(self) -> None:
        super().__post_init__()
        has_prompts = bool(self.query_prompt or self.passage_prompt)
        if self.reads_text and (self.criterion == "cosent" or self.negatives or has_prompts):
            raise UserError(
                f"objective.positives {self.positives} has single texts; leave out objective.criterion, negatives and "
                "prompts."
            )
        if self.positives == "dropout" and self.query_length:
            raise UserError("objective.positives dropout reads a text twice; leave out objective.query_length.")
        if self.criterion == "cosent" and (self.negatives or self.symmetric):
            raise UserError("objective.criterion cosent compares pairs; leave out objective.negatives and symmetric.")

    @property
    def reads_text(self) -> bool:
        """Whether it reads text without labels, and no rows of texts."""
        return self.positives != "rows"

    @property
    def row_group(self) -> int:
        """Rows that each device has a multiple of: one for each chunk."""
        return self.chunks

    @property
    def min_rows(self) -> int:
        """Least rows of a batch: a row without hard negatives is compared with others."""
        return 1 if self.negatives else 2

    @property
    def num_texts(self) -> int:
        """Texts per row: the query, its positive and its hard negatives."""
        return 2 + self.negatives

    def vectors(self, length: int | None) -> Vectors:
        has_prompts = bool(self.query_prompt or self.passage_prompt)
        prompts = () if self.reads_text else (("query", self.query_prompt), ("document", self.passage_prompt))
        return Vectors(
            self.pooling, length, self.normalize, None if has_prompts else "", prompts,
            similarity="cosine" if self.normalize or self.widths else "dot", widths=self.widths,
        )

    def with_pretrained_model(self, source: PretrainedModel) -> Self:
        """Return a copy with the pretrained model, and its pooling, score and prompts where the preset has defaults."""
        model, found = source.objective.model.text_model, {}
        if vectors := source.settings.vectors:
            found = {"pooling": vectors.pooling, "normalize": vectors.normalize or vectors.similarity in ("", "cosine")}
            names = {} if self.reads_text else {"query_prompt": "query", "passage_prompt": "document"}
            found |= {field: vectors.prompt_of(role) for field, role in names.items()}
        found = {name: value for name, value in found.items() if getattr(self, name) == getattr(type(self), name)}
        return dataclasses.replace(self, model=with_options(model, self.model), **found)

    def select_params(self, source: PretrainedModel) -> Params:
        return source.objective.model.text_params(source.params)

    def check(self, vocabulary: Vocabulary, length: int) -> None:
        model = self.model
        if model.max_length:
            require_positions(length, model.max_length)
        for role in model.template.needs:
            vocabulary.require(role, purpose="this model")
        if self.pooling == "cls" and model.summary_token == "mean":
            raise UserError(f"a {type(model).__name__} has no summary token; choose --objective.pooling mean.")
        if 0 < self.query_length < 8:
            raise UserError(f"objective.query_length {self.query_length} leaves no room for a query; use 8 or more.")
        if too_wide := [width for width in self.widths if not 0 < width < model.width]:
            raise UserError(f"objective.widths has {too_wide[0]}; it must be in [1, {model.width - 1}] here.")
        has_dropout = max(getattr(model, "dropout", 0.0), getattr(model, "attention_dropout", 0.0)) > 0
        if self.positives == "dropout" and not has_dropout:
            raise UserError(
                "objective.positives dropout draws dropout twice, and the model has none; set "
                "--objective.model.dropout 0.1."
            )
        if self.reads_text and model.template.single != "cls $A sep":
            name = type(model).__name__
            raise UserError(f"objective.positives {self.positives} reads no rows of a {name}; take pairs.")

    def with_labels_of(self, source: Any, data: Any) -> Self:
        if isinstance(rows, LabelledSource) == self.reads_text:
            raise UserError("objective.positives dropout and cloze read text; rows are for contrastive_tiny.")
        if not self.reads_text and not rows.records["train"]:
            raise UserError("--data.source is empty; give a file of rows to train on.")
        if self.negatives and not _most_negatives(rows):
            raise UserError(f"no row has hard negatives in {', '.join(data.negative_fields) or 'any column'}; name "
                            "their columns with --data.negative-fields, or set --objective.negatives 0.")
        if not self.reads_text and data.score_field and self.criterion != "cosent":
            raise UserError("--data.score-field is for --objective.criterion cosent; give both, or neither.")
        if not self.reads_text and self.min_rows > 1:
            train, names = rows.records["train"], ("query", "positive") if self.criterion == "info-nce" else ()
            if min([len(train), *(len({row.values[name] for row in train}) for name in names)]) < 2:
                raise UserError(f"{data.source} has one pair, or pairs of one text, and so no negatives; give more "
                                "pairs, or hard negatives with --objective.negatives.")
        if self.positives == "cloze" and getattr(data, "sentences", False):
            raise UserError("objective.positives cloze takes sentences out of passages; set --data.sentences False.")
        return self

    def num_examples(self, rows: Any, length: int) -> int:
        is_labelled = isinstance(rows, LabelledSource)
        return len(rows.records["train"]) if is_labelled else super().num_examples(rows, length)

    def init(self, key: jax.Array) -> Params:
        # No vector reads ModernBERT's layers between hidden states and heads, and weight decay would change them.
        return {name: leaf for name, leaf in self.model.init_task(key).items() if name != "head"}

    def row_format(self, length: int) -> RowFormat:
        return RowFormat("document", length - 2) if self.reads_text else RowFormat(self, length)

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

    def remarks(self, rows: Any, length: int) -> list[str]:
        if not isinstance(rows, LabelledSource):
            return []
        most, lines = _most_negatives(rows), rows.cut_remarks(self, length)
        examples = rows.examples("train", self, length) if self.query_length else []
        if cut := int(np.sum([np.sum(each.arrays["attention_mask"][0]) >= self.query_length for each in examples])):
            lines.append(f"{cut:,} queries reach --objective.query-length {self.query_length}; longer are cut there")
        if several := sum(len(_positives(record)) > 1 for record in rows.records["train"]):
            lines.append(f"{several:,} rows have several positives, of which each step draws one (of the first "
                         f"{MOST_POSITIVES})")
        if self.criterion == "info-nce" and most != self.negatives:
            lines.append(f"Rows have up to {most} hard negatives; --objective.negatives is {self.negatives}")
        return lines

    def corrupt(self, key: jax.Array, batch: Any) -> Example:
        """Return the texts of each row: a labelled row, text twice, or a sentence and the rest.

        Returns:
            `input_ids`, `attention_mask` int32 [batch, texts, length], and `row` int32 [batch], -1 for rows of padding;
            of labelled rows also `token_type_ids`, and `score` float32 [batch].
        """
        if not isinstance(batch, TokenBatch):
            return self._draw_positives(key, batch)
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

    def _draw_positives(self, key: jax.Array, batch: Example) -> Example:
        """Return the batch with one positive per row, drawn uniformly."""
        most = batch["input_ids"].shape[1] - self.num_texts + 1
        if most == 1:
            return batch
        counts = jnp.sum(jnp.any(batch["attention_mask"][:, 1 : 1 + most] > 0, axis=-1), axis=1)
        drawn = 1 + jax.random.randint(key, counts.shape, 0, jnp.maximum(counts, 1))[:, None, None]
        return batch | {
            name: jnp.concatenate([x[:, :1], jnp.take_along_axis(x, drawn, axis=1), x[:, 1 + most :]], axis=1)
            for name, x in batch.items() if name in self.padding}

    def loss(self, params: Params, example: Example, key: jax.Array, train: bool) -> dict[str, Term]:
        vectors = self.encode_texts(params, example, key if train else None)
        weights = jnp.asarray(example["row"] >= 0, jnp.float32)
        if self.criterion == "cosent":
            scores = [jnp.sum(each[:, 0] * each[:, 1], axis=-1) for each in self._of_widths(vectors)]
            return self._score_terms(scores, example["score"], weights)
        excluded = excluded_passages(example)

        @jax.checkpoint  # the scores of one width are in memory at a time
        def losses(vectors: Float[Array, "batch texts width"]) -> Float[Array, " batch"]:
            return info_nce(vectors[:, 0], vectors[:, 1:], excluded, self.temperature, self.symmetric)

        total = sum(map(losses, self._of_widths(vectors)))
        vectors = jax.lax.stop_gradient(vectors)
        return {"contrastive_loss": Term.of(total, weights, 1.0)} | in_batch_metrics(unit(vectors), excluded, weights)

    def encode_texts(
        self, params: Params, example: Example, key: jax.Array | None
    ) -> Float[Array, "batch texts width"]:
        """Return the vector of each text, float32, before normalization; a key turns dropout on."""
        inputs = Inputs.of(example)
        if not self.query_length:
            return self._in_chunks(params, inputs, key)
        keys = (None, None) if key is None else jax.random.split(key)
        query = jax.tree.map(lambda x: x[:, :1, : self.query_length], inputs)
        parts = (query, jax.tree.map(lambda x: x[:, 1:], inputs))
        return jnp.concatenate([self._in_chunks(params, *part) for part in zip(parts, keys, strict=True)], axis=1)

    def _in_chunks(self, params: Params, inputs: Inputs, key: jax.Array | None) -> Float[Array, "batch texts width"]:
        """Return the vectors of texts of one width, which are read in chunks."""
        def encode(inputs: Inputs, key: jax.Array | None) -> Array:
            flat = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), inputs)
            flat = self.model.complete_inputs(flat, self.vocabulary)
            vectors = text_vectors(self.model, params, flat, self.pooling, key)
            return vectors.reshape(*inputs.ids.shape[:2], -1)

        if self.chunks == 1:
            return encode(inputs, key)

        def chunk(part: tuple[Inputs, Array]) -> Array:
            inputs, index = part
            return encode(jax.tree.map(constrain, inputs), None if key is None else jax.random.fold_in(key, index))

        # Row i belongs to chunk i % chunks, as to microbatches, so that each device divides its own rows.
        parts = jax.tree.map(lambda x: x.reshape(-1, self.chunks, *x.shape[1:]).swapaxes(0, 1), inputs)
        vectors = jax.lax.map(jax.checkpoint(chunk, prevent_cse=False), (parts, jnp.arange(self.chunks)))
        return constrain(vectors.swapaxes(0, 1).reshape(-1, *vectors.shape[2:]))

    def _of_widths(self, vectors: Float[Array, "batch texts width"]) -> list[Float[Array, "batch texts some"]]:
        """Return the prefixes of vectors that are scored, the whole ones last."""
        parts = [vectors[..., :width] for width in (*self.widths, vectors.shape[-1])]
        return [unit(part) for part in parts] if self.normalize or self.widths else parts

    def _score_terms(
        self, scores: Sequence[Float[Array, " batch"]], labels: Float[Array, " batch"], weights: Float[Array, " batch"]
    ) -> dict[str, Term]:
        """Return the CoSENT loss of each width's scores, and the share of pairs that whole vectors order correctly."""
        is_higher = (labels[:, None] > labels) & (weights[:, None] * weights > 0)
        total = sum(cosent(one / self.temperature, is_higher) for one in scores)
        is_right = scores[-1][:, None] > scores[-1]
        return {
            "contrastive_loss": Term.of(total, jnp.ones(()), 1.0),
            "order_accuracy": Term.of(is_right, is_higher.astype(jnp.float32)),
        }

    def flops(self, length: int) -> float:
        query = min(self.query_length or length, length)
        return self.model.forward_flops(query) + (self.num_texts - 1) * self.model.forward_flops(length)

    def describe(self, batch: Any, example: Example, row: int) -> list[Line]:
        """Return the texts of a row, and the passages of other rows that are not its negatives."""
        lines = [Line(f"score {example['score'][row]:g}", [], [])] if "score" in example else []
        names = ("query", "positive", *itertools.repeat("negative", self.negatives))
        for name, ids, mask in zip(names, example["input_ids"][row], example["attention_mask"][row], strict=True):
            shown = ids[mask > 0].tolist()
            lines.append(Line(name, shown, ["special" if self.vocabulary.special[i] else "" for i in shown]))
        own = np.arange(len(example["row"])) == row
        is_text = np.any(example["attention_mask"][:, 1:] > 0, axis=-1) & (example["row"] >= 0)[:, None]
        found = np.flatnonzero(np.any(np.asarray(excluded_passages(example))[row] & is_text, axis=-1) & ~own)
        same = [f"not negatives of this query: passages of rows {', '.join(map(str, found))}"] if len(found) else []
        return lines + [Line(title, [], []) for title in same if self.criterion == "info-nce"]


def _most_negatives(rows: LabelledSource) -> int:
    """Return the largest number of hard negatives of a training row."""
    return max(len(record.values["negatives"]) for record in rows.records["train"])


def _positives(record: Record) -> list[str]:
    return record.values.get("positives", [record.values["positive"]])[:MOST_POSITIVES]


def unit(x: Float[Array, "*shape width"]) -> Float[Array, "*shape width"]:
    """Scale vectors to Euclidean length 1; zeros stay zeros."""
    return x * jax.lax.rsqrt(jnp.maximum(jnp.sum(x * x, axis=-1, keepdims=True), 1e-24))


def text_codes(ids: Int[Array, "*rows length"], mask: Int[Array, "*rows length"]) -> UInt32[Array, "*rows"]:
    """Return a hash of each text's ids: equal texts have equal ones at any padding, two others in one of 2³² cases."""
    factors = jnp.asarray(np.cumprod(np.full(ids.shape[-1], 0x01000193, np.uint32), dtype=np.uint32))
    x = (ids.astype(jnp.uint32) + 1) * jnp.uint32(0x9E3779B1)
    return jnp.sum((x ^ (x >> 15)) * factors * (mask > 0), axis=-1, dtype=jnp.uint32)


def excluded_passages(example: Example) -> Bool[Array, "batch batch passages"]:
    """Return the mask of the passages that are left out of each query's softmax, which its own positive never is.

    They are those with the text of its positive, the positives of queries with its text, those of rows of padding, and
    those that a row lacks. Rows of padding have no negatives at all.
    """
    mask, is_row = jnp.asarray(example["attention_mask"]), jnp.asarray(example["row"]) >= 0
    codes = text_codes(jnp.asarray(example["input_ids"]), mask)
    is_text = jnp.any(mask[:, 1:] > 0, axis=-1)
    excluded = (codes[:, 1, None, None] == codes[:, 1:]) | ~is_text | ~(is_row[:, None] & is_row)[..., None]
    is_positive = jnp.arange(excluded.shape[-1]) == 0
    excluded |= (codes[:, :1] == codes[:, 0])[..., None] & is_positive
    return excluded & ~(jnp.eye(len(codes), dtype=bool)[..., None] & is_positive)


def info_nce(
    queries: Float[Array, "batch width"], passages: Float[Array, "batch passages width"],
    excluded: Bool[Array, "batch batch passages"], temperature: float, symmetric: bool = False,
) -> Float[Array, " batch"]:
    """Return the loss of each query: -log softmax of its positive's score, passage 0 of its row, over all passages.

    Args:
        queries: Vectors of the queries, float32.
        passages: Vectors of each row's positive and hard negatives, float32.
        excluded: See `excluded_passages`.
        temperature: Divisor of the scores.
        symmetric: Average it with the loss of the positive, over all queries.
    """
    scores = constrain(jnp.einsum("id,jnd->ijn", queries, passages, precision=PRECISION)) / temperature
    own = jnp.sum(queries * passages[:, 0], axis=-1) / temperature
    scores = jnp.where(excluded, -jnp.inf, scores)
    losses = jax.nn.logsumexp(scores, axis=(1, 2)) - own
    return (losses + jax.nn.logsumexp(scores[..., 0], axis=0) - own) / 2 if symmetric else losses


def cosent(scores: Float[Array, " batch"], is_higher: Bool[Array, "batch batch"]) -> Float[Array, ""]:
    """Return log(1 + Σ exp(s_j - s_i)) over the pairs where row i is to score higher than row j."""
    gaps = jnp.where(is_higher, scores - scores[:, None], -jnp.inf)
    most = jax.lax.stop_gradient(jnp.maximum(jnp.max(gaps), 0.0))
    return most + jnp.log(jnp.exp(-most) + jnp.sum(jnp.exp(gaps - most)))


def in_batch_metrics(
    vectors: Float[Array, "batch texts width"], excluded: Bool[Array, "batch batch passages"],
    weights: Float[Array, " batch"],
) -> dict[str, Term]:
    """Return metrics of unit vectors.

    Returns:
        `accuracy`, the share of queries whose positive has a higher cosine than every other passage of the batch, and
        the mean cosines of positives and of negatives.
    """
    cosines = constrain(jnp.einsum("id,jnd->ijn", vectors[:, 0], vectors[:, 1:], precision=PRECISION))
    positive = jnp.eye(len(vectors), dtype=bool)[..., None] & (jnp.arange(cosines.shape[-1]) == 0)
    is_negative = ~(excluded | positive)
    own = jnp.sum(jnp.where(positive, cosines, 0.0), axis=(1, 2))
    return {
        "accuracy": Term.of(own > jnp.max(jnp.where(is_negative, cosines, -jnp.inf), axis=(1, 2)), weights),
        "positive_cosine": Term.of(own, weights),
        "negative_cosine": Term.of(cosines, is_negative.astype(jnp.float32)),
    }
