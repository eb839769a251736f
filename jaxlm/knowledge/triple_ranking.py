"""Margin ranking of triples against corrupted ones (TransE, Bordes et al. 2013), and filtered link prediction."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxlm.data.base import RowFormat
from jaxlm.fields import field
from jaxlm.knowledge.graph_tokenizer import GraphSize
from jaxlm.knowledge.transe import TransE
from jaxlm.objectives.base import Example, Line, Objective, Term, Terms
from jaxlm.types import Params, TripleBatch

CHUNK = 256
"""Entities whose distances are computed at a time."""
KNOWN_CHUNK = 16
"""Known entities of each row whose distances are computed at a time."""
TIE = 1e-6
"""Relative difference of distances up to which they are equal: their last bits depend on the shapes of arrays."""


@dataclasses.dataclass(frozen=True)
class TripleRanking(Objective):
    """Margin ranking of triples.

    Loss: the mean over corrupted triples of max(0, margin + d(triple) - d(corrupted)), d the model's distance (Bordes
    et al. 2013, equation 1, which sums instead). As in the paper, a corrupted triple may be one of the graph.

    Held-out triples also give the metrics of link prediction: for each end of a triple, the rank of its entity among
    all entities by distance, without the others that are known to form a triple of the graph there ("filtered"). Equal
    distances share their mean rank. `mrr` is the mean of 1 / rank, `hits_at_k` the share of ranks up to k.
    """

    model: TransE = field(TransE(), weights=True)
    """The vectors."""
    margin: float = field(1.0, range="(0, inf)")
    """Difference of distances above which a corrupted triple has no loss."""
    negatives: int = field(1, range="[1, 65536]")
    """Number of corrupted triples for each triple."""
    corruption: Literal["uniform", "bern"] = "uniform"
    """How often a head is replaced rather than a tail: for half of the corrupted triples, or by relation (Wang et al.
    2014, section 4.2): the more often, the more tails a head has and the fewer heads a tail has."""

    primary_metric = "ranking_loss"

    def row_format(self, length: int) -> RowFormat:
        return RowFormat(GraphSize(self.model.num_entities, self.model.num_relations), length)

    def _head_share(self) -> Float[np.ndarray, " relations"]:
        """Return the probability that the head is replaced, for each relation."""
        if self.corruption == "bern" and self.statistics is not None:
            return self.statistics.head_share
        return np.full(self.model.num_relations, 0.5, np.float32)

    def corrupt(self, key: jax.Array, batch: TripleBatch) -> Example:
        """Draw the entities of corrupted triples.

        Returns:
            `triples` int32 [batch, 3]; `entities` int32 [batch, negatives] and `is_head` bool [batch, negatives], which
            end they replace; `known` int32 [batch, 2, known] of held-out triples.
        """
        triples = jnp.asarray(batch.triples)
        share = jnp.asarray(self._head_share())
        entities, is_head = replace_ends(key, triples, share, self.model.num_entities, self.negatives)
        example = {"triples": triples, "entities": entities, "is_head": is_head}
        return example if batch.known is None else example | {"known": jnp.asarray(batch.known)}

    def loss(self, params: Params, example: Example, key: jax.Array, train: bool) -> Terms:
        triples, is_head = example["triples"], example["is_head"]
        # Looked up at once, so that there is only one gradient of the size of the table.
        ids = jnp.concatenate([triples[:, ::2], example["entities"]], axis=1)
        head, tail, other = jnp.split(self.model.entities(params, ids), [1, 2], axis=1)
        relation = self.model.relations(params, triples[:, 1:2])
        query = jnp.where(is_head[..., None], tail - relation, head + relation)
        gap = self.model.distances(query, other) - self.model.distances(head + relation, tail)
        weights = jnp.broadcast_to((triples[:, :1] >= 0).astype(jnp.float32), gap.shape)
        terms = {
            "ranking_loss": Term.of(jax.nn.relu(self.margin - gap), weights, 1.0),
            "rank_accuracy": Term.of(gap > 0, weights),
        }
        if "known" not in example:
            return terms
        found = ranks(self.model, params, triples, example["known"])
        weights = jnp.any(example["known"] >= 0, axis=-1).astype(jnp.float32)
        hits = {f"hits_at_{k}": Term.of(found <= k, weights) for k in (1, 3, 10)}
        return terms | {"mrr": Term.of(1 / found, weights)} | hits | {"mean_rank": Term.of(found, weights)}

    def real_tokens(self, example: Example, batch: TripleBatch) -> Array | np.ndarray:
        return batch.triples >= 0

    def flops(self, length: int) -> float:
        """Return the additions and absolute values (or squares) of the distances; there are no matrix products."""
        return 4.0 * (1 + self.negatives) * self.model.hidden_size

    def describe(self, batch: TripleBatch, example: Example, row: int) -> list[Line]:
        """Return the triple and its corrupted triples."""
        head, relation, tail = np.asarray(batch.triples[row]).tolist()
        relation += self.model.num_entities
        lines = [Line("triple", [head, relation, tail], ["", "special", ""])]
        for entity, is_head in zip(example["entities"][row].tolist(), example["is_head"][row].tolist(), strict=True):
            ids, marks = [head, relation, entity], ["", "special", "random"]
            if is_head:
                ids, marks = [entity, relation, tail], marks[::-1]
            lines.append(Line("not", ids, marks))
        return lines


def replace_ends(
    key: jax.Array, triples: Int[Array, "batch 3"], head_share: Float[Array, " relations"], num_entities: int,
    count: int,
) -> tuple[Int[Array, "batch count"], Bool[Array, "batch count"]]:
    """Draw entities to replace one end of each triple (Bordes et al. 2013, equation 2).

    An entity never replaces itself, and all others are equally likely; the result may be a triple of the graph.

    `head_share` is the probability that the head is replaced, for each relation.

    Returns:
        The entities, and whether they replace the head.
    """
    key_end, key_entity = jax.random.split(key)
    shape = (triples.shape[0], count)
    is_head = jax.random.uniform(key_end, shape) < head_share[triples[:, 1]][:, None]
    old = jnp.where(is_head, triples[:, :1], triples[:, 2:])
    others = jax.random.randint(key_entity, shape, 0, num_entities - 1)
    return others + (others >= old), is_head


def ranks(
    model: TransE, params: Params, triples: Int[Array, "batch 3"], known: Int[Array, "batch 2 known"]
) -> Float[Array, "batch 2"]:
    """Return the filtered ranks of heads and tails, from 1.

    Entities are compared in chunks, so that no array has a row for each triple and a column for each entity.

    `known` are the entities that form a triple of the graph at each end, the triple's own included, padded with -1.
    """
    entities, relation = model.entities(params), model.relations(params, triples[:, 1])
    ends = entities[triples[:, ::2]]
    queries = jnp.stack([ends[:, 1] - relation, ends[:, 0] + relation], axis=1)
    target_distances = model.distances(queries, ends)[..., None]

    def nearer(vectors: Float[Array, "..."], is_entity: Bool[Array, "..."]) -> Float[Array, "batch 2"]:
        """Return the number of entities nearer than the triple's own, equal ones by half."""
        distances = model.distances(queries[:, :, None], vectors)
        is_tie = jnp.abs(distances - target_distances) <= TIE * target_distances
        counted = jnp.where(is_tie, 0.5, distances < target_distances)
        return jnp.sum(jnp.where(is_entity, counted, 0.0), axis=-1)

    def add_entities(total: Array, chunk: tuple[Array, Array]) -> tuple[Array, None]:
        vectors, is_entity = chunk
        return total + nearer(vectors[None, None], is_entity), None

    def add_known(total: Array, ids: Int[Array, "batch 2 chunk"]) -> tuple[Array, None]:
        return total + nearer(entities[jnp.maximum(ids, 0)], ids >= 0), None

    extra = -len(entities) % CHUNK
    chunks = jnp.pad(entities, ((0, extra), (0, 0))).reshape(-1, CHUNK, model.width)
    is_entity = (jnp.arange(len(entities) + extra) < len(entities)).reshape(-1, CHUNK)
    zero = jnp.zeros(known.shape[:2], jnp.float32)
    everywhere, _ = jax.lax.scan(add_entities, zero, (chunks, is_entity))
    known = jnp.pad(known, ((0, 0), (0, 0), (0, -known.shape[-1] % KNOWN_CHUNK)), constant_values=-1)
    ids = jnp.moveaxis(known.reshape(*known.shape[:2], -1, KNOWN_CHUNK), 2, 0)
    excluded, _ = jax.lax.scan(add_known, zero, ids)
    return 1.0 + everywhere - excluded  # the own entity is in both
