"""TransE (Bordes et al. 2013): a vector for each entity and each relation of a knowledge graph."""

from __future__ import annotations

import dataclasses
from typing import Literal, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxlm.fields import field
from jaxlm.knowledge.graph_tokenizer import GraphSize
from jaxlm.models.base import Inputs, Model
from jaxlm.models.layers.config import HasDtype, check_sizes
from jaxlm.objectives.contrastive import unit
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import Params


@dataclasses.dataclass(frozen=True)
class TransE(HasDtype, Model):
    """TransE: a triple (head, relation, tail) holds where head + relation is near tail.

    The defaults are the size of the vectors that ERNIE reads (Zhang et al. 2019, section 4.1): entities and relations
    of Wikidata, width 100. Parameters: `entity/embedding` and `relation/embedding`.

    The paper scales the stored entity vectors to length 1 before each step; here, as in OpenKE, vectors are scaled
    where they are read, and gradients flow through the scaling.
    """

    num_entities: int = field(5_040_986, vocabulary=True)
    """Number of entities; a run takes it from its tokenizer."""
    num_relations: int = field(927, vocabulary=True)
    """Number of relations; a run takes it from its tokenizer."""
    hidden_size: int = 100
    """Width of the vectors."""
    distance: Literal["l1", "l2"] = field("l1", recipe=True)
    """Norm of head + relation - tail."""
    normalize: Literal["entities", "all", "none"] = field("entities", recipe=True)
    """Vectors that are scaled to length 1: those of entities (the paper), also those of relations (OpenKE), or none."""

    summary_token = "mean"
    fine_tuning = None

    def __post_init__(self) -> None:
        check_sizes(self)

    @property
    def vocab_size(self) -> int:
        """Number of ids of the tokenizer: entities, relations and [UNK]."""
        return self.num_entities + self.num_relations + 1

    def for_vocabulary(self, vocabulary: Vocabulary) -> Self:
        """Return a copy with the size of the graph of `vocabulary`; a stand-in leaves the number of relations."""
        size = GraphSize.of(vocabulary)
        if vocabulary.is_stand_in:
            size = GraphSize(vocabulary.size - self.num_relations - 1, self.num_relations)
        return dataclasses.replace(self, num_entities=size.entities, num_relations=size.relations)

    def init(self, key: jax.Array) -> Params:
        """Return fresh parameters, float32: directions uniform in a cube, scaled to length 1."""
        def table(key: jax.Array, rows: int) -> dict[str, jax.Array]:
            return {"embedding": unit(jax.random.uniform(key, (rows, self.hidden_size), jnp.float32, -1.0, 1.0))}

        key_entity, key_relation = jax.random.split(key)
        return {"entity": table(key_entity, self.num_entities), "relation": table(key_relation, self.num_relations)}

    def entities(
        self, params: Params, ids: Int[Array, "*batch"] | slice = slice(None)
    ) -> Float[Array, "*batch width"]:
        """Return the vectors of entities, by default of all."""
        vectors = jnp.asarray(params["entity"]["embedding"])[ids]
        return vectors if self.normalize == "none" else unit(vectors)

    def relations(
        self, params: Params, ids: Int[Array, "*batch"] | slice = slice(None)
    ) -> Float[Array, "*batch width"]:
        """Return the vectors of relations, by default of all."""
        vectors = jnp.asarray(params["relation"]["embedding"])[ids]
        return unit(vectors) if self.normalize == "all" else vectors

    def distances(
        self, queries: Float[Array, "*#batch width"], entities: Float[Array, "*#batch width"]
    ) -> Float[Array, "*batch"]:
        """Return the distances of entities from where the model expects them, float32.

        The model expects a head at tail - relation, and a tail at head + relation.
        """
        difference = (queries - entities).astype(self.dtype)
        if self.distance == "l1":
            return jnp.sum(jnp.abs(difference), axis=-1, dtype=jnp.float32)
        squares = jnp.sum(jnp.square(difference), axis=-1, dtype=jnp.float32)
        return jnp.sqrt(jnp.maximum(squares, 1e-24))  # the gradient at 0 is 0

    def _hidden_states(self, params: Params, inputs: Inputs, key: jax.Array | None) -> jax.Array:
        """Return the vectors of names; that of [UNK] is zero."""
        unknown = jnp.zeros((1, self.hidden_size), jnp.float32)
        return jnp.concatenate([self.entities(params), self.relations(params), unknown])[inputs.ids]
