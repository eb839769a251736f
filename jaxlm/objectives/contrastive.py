"""Contrastive learning of text vectors: the InfoNCE loss over the texts of a batch, for pairs and for text alone."""

from __future__ import annotations

import dataclasses
import itertools
import string
from collections.abc import Callable
from typing import Any, ClassVar, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxlm.errors import UserError
from jaxlm.fields import field
from jaxlm.models.base import Inputs, Model, text_vectors
from jaxlm.models.bert import Bert
from jaxlm.objectives.base import Example, Line, Objective, Term, require_positions, with_options
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.parallel.activations import constrain
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import Params, Pooling, Vectors

PRECISION = jax.lax.Precision.HIGHEST
"""Of the products of vectors: TPUs multiply float32 in bfloat16 by default, and a small temperature amplifies the
error."""
LATE_FIELDS = ("interaction", "token_width", "query_length", "expand_queries", "skiplist_words")


@dataclasses.dataclass(frozen=True)
class InfoNCE(Objective):
    """Train vectors of texts, so that texts that belong together score higher than others.

    Loss: the mean over queries of -log softmax of the positive's score / temperature, over the positives and hard
    negatives of all queries of the batch (van den Oord et al. 2018; MultipleNegativesRankingLoss). A passage with the
    text of one of the row's positives, or the positive in a row of the same query, is no negative.

    The batch is that of all devices. A microbatch has fewer negatives, and so another loss; `chunks` saves the same
    memory. `corrupt` returns `input_ids`, `attention_mask` int32 [batch, texts, length], the query and the positive
    first, and `row` int32 [batch], -1 for rows of padding.
    """

    model: Model = field(Bert(), weights=True)
    """The encoder; `--init-from` brings it, of any family."""
    interaction: Literal["single", "late"] = field("single", weights=True)
    """One vector per text, or one per token: the score is then the sum, over the tokens of the query, of the largest
    product with a token of the passage (ColBERT, Khattab and Zaharia 2020)."""
    temperature: float = field(0.0, range="[0, inf)")
    """Divisor of the scores, 1 / scale in sentence-transformers; 0: 0.05, or 1 for late interaction, whose scores are
    sums. Dot products need 1 or more."""
    symmetric: bool = False
    """Average with the loss of the positive, over all queries, for two texts of the same kind."""
    pooling: Pooling = field("mean", weights=True)
    """Vector of a text: that of its summary token, the mean of all tokens, or the last token."""
    normalize: bool = field(True, weights=True)
    """Scale vectors to unit length, so that the score of two is their cosine; otherwise their dot product."""
    query_length: int = field(0, range="[0, inf)")
    """Longest query in tokens, special tokens included; 0: data.length, as for passages."""
    token_width: int = field(128, weights=True, range="[1, inf)")
    """Width of the vectors of late interaction, a linear projection of the hidden states."""
    expand_queries: bool = field(False, weights=True)
    """Fill queries of late interaction up to query_length with mask tokens, which are read and scored like others."""
    skiplist_words: tuple[str, ...] = field(tuple(string.punctuation), weights=True)
    """Tokens, as the vocabulary spells them, that have no vector in a passage (late interaction)."""
    widths: tuple[int, ...] = field((), weights=True)
    """Numbers of leading components that also serve as vectors (Matryoshka, Kusupati et al. 2022): the loss is the sum
    of the losses of these prefixes and of whole vectors, by their cosines also without `normalize`, as in the
    MatryoshkaLoss of sentence-transformers."""
    chunks: int = field(1, resumable=True, range="[1, inf)")
    """Parts of a batch for gradient caching (Gao et al. 2021): the encoder reads each twice, with the activations of
    one part in memory, and the loss is the same but for the draws of dropout. The scores of late interaction are
    computed in the same parts."""

    primary_metric = "contrastive_loss"
    private_params = ("token_projection",)
    is_separable = False
    min_rows = 2
    num_texts: ClassVar[int] = 2
    """Texts per row: the query, its positive and its hard negatives."""

    @property
    def is_late(self) -> bool:
        """Whether a text has a vector per token."""
        return self.interaction == "late"

    @property
    def divisor(self) -> float:
        """What the scores are divided by."""
        return self.temperature or (1.0 if self.is_late else 0.05)

    def remarks(self, source: Any, length: int) -> list[str]:
        is_product = not (self.is_late or self.normalize or self.widths)
        advice = "The scores are dot products, divided by 0.05; --objective.temperature 1 keeps them as they are."
        return super().remarks(source, length) + [advice] * (is_product and not self.temperature)

    @property
    def row_group(self) -> int:
        """Rows that each device has a multiple of: one for each chunk."""
        return self.chunks

    def vector_settings(self, length: int | None) -> Vectors:
        similarity = "maxsim" if self.is_late else "cosine" if self.normalize or self.widths else "dot"
        return Vectors(self.pooling, length, self.normalize, "", similarity=similarity, widths=self.widths)

    def with_pretrained_model(self, source: PretrainedModel) -> Self:
        """Return a copy with the pretrained model, and its settings of vectors where the preset has defaults."""
        model, vectors = source.objective.model.text_model, source.settings.vectors
        found = self.settings_like(vectors) if vectors else {}
        if vectors and vectors.similarity == "maxsim":
            found |= {name: getattr(source.objective, name) for name in LATE_FIELDS}
        found = {name: value for name, value in found.items() if getattr(self, name) == getattr(type(self), name)}
        return dataclasses.replace(self, model=with_options(model, self.model), **found)

    def settings_like(self, vectors: Vectors) -> dict[str, Any]:
        """Return the values of fields by which texts get the vectors of these settings."""
        normalize = vectors.normalize or vectors.similarity in ("", "cosine")
        return {"pooling": vectors.pooling, "normalize": normalize}

    def select_params(self, source: PretrainedModel) -> Params:
        return source.objective.model.text_params(source.params)

    def check(self, vocabulary: Vocabulary, length: int) -> None:
        model = self.model
        if model.max_length:
            require_positions(length, model.max_length)
        for role in model.template.needs:
            vocabulary.require(role, purpose="this model")
        if self.pooling == "cls" and model.vector_token == "mean":
            raise UserError(f"a {type(model).__name__} has no summary token; choose --objective.pooling mean.")
        if self.is_late and (self.widths or not self.normalize):
            raise UserError("objective.interaction late has unit vectors; leave out objective.widths and normalize.")
        if self.expand_queries and not (self.is_late and 0 < self.query_length <= length):
            raise UserError("objective.expand_queries needs interaction late, and query_length up to data.length.")
        if self.expand_queries:
            vocabulary.require("mask", purpose="objective.expand_queries")
        if 0 < self.query_length < 8:
            raise UserError(f"objective.query_length {self.query_length} leaves no room for a query; use 8 or more.")
        if too_wide := [width for width in self.widths if not 0 < width < model.width]:
            raise UserError(f"objective.widths has {too_wide[0]}; it must be in [1, {model.width - 1}] here.")

    def init(self, key: jax.Array) -> Params:
        # No vector reads ModernBERT's layers between hidden states and heads, and weight decay would change them.
        model_key, projection_key = jax.random.split(key) if self.is_late else (key, key)
        params = {name: leaf for name, leaf in self.model.init_task(model_key).items() if name != "head"}
        if self.is_late:
            shape = (self.model.width, self.token_width)
            params["token_projection"] = {"kernel": jax.nn.initializers.lecun_normal()(projection_key, shape)}
        return params

    def loss(self, params: Params, example: Example, key: jax.Array, train: bool) -> dict[str, Term]:
        vectors = self.encode_texts(params, example, key if train else None)
        weights = jnp.asarray(example["row"] >= 0, jnp.float32)
        excluded = excluded_passages(example)
        if self.is_late:
            scores = self._scores(vectors)
            total = info_nce(scores, excluded, self.divisor, self.symmetric)
            cosines = scores / jnp.maximum(jnp.sum(jnp.any(vectors[:, :1] != 0, axis=-1), axis=-1, keepdims=True), 1)
        else:
            @jax.checkpoint  # the scores of one width are in memory at a time
            def losses(vectors: Float[Array, "batch texts width"]) -> Float[Array, " batch"]:
                return info_nce(self._scores(vectors), excluded, self.divisor, self.symmetric)

            total, cosines = sum(map(losses, self.of_widths(vectors))), self._scores(unit(vectors))
        metrics = in_batch_metrics(jax.lax.stop_gradient(cosines), excluded, weights)
        return {"contrastive_loss": Term.of(total, weights, 1.0)} | metrics

    def encode_texts(
        self, params: Params, example: Example, key: jax.Array | None
    ) -> Float[Array, "batch texts *tokens width"]:
        """Return each text's vector, float32, before normalization, or its tokens' vectors; a key turns dropout on."""
        inputs = Inputs.of(example)
        if not self.query_length and not self.is_late:
            return self._in_chunks(params, inputs, key)
        keys = (None, None) if key is None else jax.random.split(key)
        query = jax.tree.map(lambda x: x[:, :1, : self.query_length or None], inputs)
        parts = (query, jax.tree.map(lambda x: x[:, 1:], inputs))
        found = [self._in_chunks(params, *part) for part in zip(parts, keys, (True, False), strict=True)]
        if self.is_late:
            most = max(x.shape[2] for x in found)
            found = [jnp.pad(x, ((0, 0), (0, 0), (0, most - x.shape[2]), (0, 0))) for x in found]
        return jnp.concatenate(found, axis=1)

    def _in_chunks(
        self, params: Params, inputs: Inputs, key: jax.Array | None, is_query: bool = False
    ) -> Float[Array, "batch texts *tokens width"]:
        """Return the vectors of texts of one width, which are read in chunks."""
        def encode(inputs: Inputs, index: Array | int) -> Array:
            flat = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), inputs)
            own_key = key if key is None or self.chunks == 1 else jax.random.fold_in(key, index)
            if self.is_late:
                vectors = self.token_vectors(params, flat, is_query, own_key)
            else:
                flat = self.model.complete_inputs(flat, self.vocabulary)
                vectors = text_vectors(self.model, params, flat, self.pooling, own_key)
            return vectors.reshape(*inputs.ids.shape[:2], *vectors.shape[1:])

        return self._map_chunks(encode, inputs)

    def _map_chunks(self, function: Callable[[Any, Array | int], Array], rows: Any) -> Array:
        """Return `function(rows, chunk)` of the rows of each chunk, whose activations are not kept."""
        if self.chunks == 1:
            return function(rows, 0)
        chunk = jax.checkpoint(lambda part: function(jax.tree.map(constrain, part[0]), part[1]), prevent_cse=False)
        # Row i belongs to chunk i % chunks, as to microbatches, so that each device divides its own rows.
        parts = jax.tree.map(lambda x: x.reshape(-1, self.chunks, *x.shape[1:]).swapaxes(0, 1), rows)
        found = jax.lax.map(chunk, (parts, jnp.arange(self.chunks)))
        return constrain(found.swapaxes(0, 1).reshape(-1, *found.shape[2:]))

    def token_vectors(
        self, params: Params, inputs: Inputs, is_query: bool, key: jax.Array | None = None
    ) -> Float[Array, "batch tokens width"]:
        """Return the unit vectors of late interaction, float32; zeros for padding and for words of the skip list."""
        if self.expand_queries and is_query:
            missing = self.query_length - inputs.ids.shape[1]
            inputs = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, missing))), inputs)
            ids = jnp.where(inputs.mask > 0, inputs.ids, self.vocabulary.mask)
            inputs = inputs._replace(ids=ids, mask=jnp.ones_like(inputs.mask))
        is_scored = inputs.mask > 0
        if not is_query:
            is_scored &= ~jnp.isin(inputs.ids, np.array(self.skipped_ids, np.int32))
        completed = self.model.complete_inputs(inputs, self.vocabulary)
        hidden = self.model.hidden_states(params, completed, key=key).astype(jnp.float32)
        vectors = jnp.dot(hidden, params["token_projection"]["kernel"], precision=PRECISION)
        return jnp.where(is_scored[..., None], unit(vectors), 0.0)

    @property
    def skipped_ids(self) -> list[int]:
        """Ids of the words of the skip list that the vocabulary has."""
        words = frozenset(self.skiplist_words)
        return [number for number, piece in enumerate(self.vocabulary.pieces) if piece in words]

    def _scores(self, vectors: Float[Array, "batch texts *tokens width"]) -> Float[Array, "batch batch passages"]:
        """Return the score of each query, text 0 of its row, and each passage."""
        passages = vectors[:, 1:].reshape(-1, *vectors.shape[2:])
        queries, score = vectors[:, 0], lambda queries, _: constrain(text_scores(queries, passages))
        found = self._map_chunks(score, queries[:, : self.query_length or None]) if self.is_late else score(queries, 0)
        return found.reshape(len(vectors), len(vectors), -1)

    def of_widths(self, vectors: Float[Array, "batch texts width"]) -> list[Float[Array, "batch texts some"]]:
        """Return the prefixes of vectors that are scored, the whole ones last."""
        parts = [vectors[..., :width] for width in (*self.widths, vectors.shape[-1])]
        return [unit(part) for part in parts] if self.normalize or self.widths else parts

    def flops(self, length: int) -> float:
        query, projection = min(self.query_length or length, length), 2 * self.model.width * self.token_width
        return sum(count * (self.model.forward_flops(size) + self.is_late * size * projection)
                   for count, size in ((1, query), (self.num_texts - 1, length)))

    def describe(self, batch: Any, example: Example, row: int) -> list[Line]:
        """Return the texts of a row, and the passages of other rows that are not its negatives."""
        lines = [Line(f"score {example['score'][row]:g}", [], [])] if "score" in example else []
        names = ("query", "positive", *itertools.repeat("negative", self.num_texts - 2))
        for name, ids, mask in zip(names, example["input_ids"][row], example["attention_mask"][row], strict=True):
            shown = ids[mask > 0].tolist()
            lines.append(Line(name, shown, ["special" if self.vocabulary.special[i] else "" for i in shown]))
        if "score" in example:
            return lines
        own = np.arange(len(example["row"])) == row
        is_text = np.any(example["attention_mask"][:, 1:] > 0, axis=-1) & (example["row"] >= 0)[:, None]
        found = np.flatnonzero(np.any(np.asarray(excluded_passages(example))[row] & is_text, axis=-1) & ~own)
        title = f"not negatives of this query: passages of rows {', '.join(map(str, found))}"
        return lines + [Line(title, [], [])] * bool(len(found))


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

    They are those with the text of a positive of its row, the positives of queries with its text, those of rows of
    padding, and those that a row lacks. Rows of padding have no negatives at all. `positives` uint32 [batch, positives]
    in the example has the codes of a row's positives, where it has more than the one that is read.
    """
    mask, is_row = jnp.asarray(example["attention_mask"]), jnp.asarray(example["row"]) >= 0
    codes = text_codes(jnp.asarray(example["input_ids"]), mask)
    is_text = jnp.any(mask[:, 1:] > 0, axis=-1)
    own_codes = jnp.asarray(example.get("positives", codes[:, 1:2]))
    excluded = jnp.any(own_codes[:, None, None] == codes[:, 1:, None], axis=-1)
    excluded |= ~is_text | ~(is_row[:, None] & is_row)[..., None]
    is_positive = jnp.arange(excluded.shape[-1]) == 0
    excluded |= (codes[:, :1] == codes[:, 0])[..., None] & is_positive
    return excluded & ~(jnp.eye(len(codes), dtype=bool)[..., None] & is_positive)


def text_scores(
    queries: Float[Array, "queries *tokens width"], passages: Float[Array, "passages *words width"]
) -> Float[Array, "queries passages"]:
    """Return the product of each query and each passage, or of their tokens' vectors the score of late interaction.

    These have unit length, or are zeros where there is no token.
    """
    if queries.ndim == 2:
        return jnp.einsum("qd,pd->qp", queries, passages, precision=PRECISION)
    cosines = jnp.einsum("qtd,pwd->qptw", queries, passages, precision=PRECISION)
    cosines = jnp.where(jnp.any(passages != 0, axis=-1)[:, None], cosines, -2.0)  # below every cosine
    return jnp.sum(jnp.max(cosines, axis=-1), axis=-1)


def info_nce(
    scores: Float[Array, "batch batch passages"], excluded: Bool[Array, "batch batch passages"], temperature: float,
    symmetric: bool = False,
) -> Float[Array, " batch"]:
    """Return the loss of each query: -log softmax of its positive's score / temperature, over all passages.

    Passage 0 of a row is the positive, the others are hard negatives; see `excluded_passages`. A `symmetric` loss is
    the mean with that of each positive over all queries.
    """
    scores = scores / temperature
    own = jnp.sum(jnp.where(jnp.eye(len(scores), dtype=bool), scores[..., 0], 0.0), axis=1)
    scores = jnp.where(excluded, -jnp.inf, scores)
    losses = jax.nn.logsumexp(scores, axis=(1, 2)) - own
    return (losses + jax.nn.logsumexp(scores[..., 0], axis=0) - own) / 2 if symmetric else losses


def in_batch_metrics(
    cosines: Float[Array, "batch batch passages"], excluded: Bool[Array, "batch batch passages"],
    weights: Float[Array, " batch"],
) -> dict[str, Term]:
    """Return metrics of cosines, in late interaction of their means over the tokens of a query.

    Returns:
        `accuracy`, the share of the queries with negatives whose positive has a higher cosine than all of these, and
        the mean cosines of positives and of negatives.
    """
    positive = jnp.eye(len(cosines), dtype=bool)[..., None] & (jnp.arange(cosines.shape[-1]) == 0)
    is_negative = ~(excluded | positive)
    own = jnp.sum(jnp.where(positive, cosines, 0.0), axis=(1, 2))
    is_right = own > jnp.max(jnp.where(is_negative, cosines, -jnp.inf), axis=(1, 2))
    return {
        "accuracy": Term.of(is_right, weights * jnp.any(is_negative, axis=(1, 2))),
        "positive_cosine": Term.of(own, weights),
        "negative_cosine": Term.of(cosines, is_negative.astype(jnp.float32)),
    }
