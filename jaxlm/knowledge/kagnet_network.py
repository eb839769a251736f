"""KagNet (Lin et al. 2019): scores a statement by the paths between its concepts in a knowledge graph.

Where paper and code differ, this is the code: a graph convolution sums the vectors of the neighbours, without the
node's own vector (in the paper it has a weight of its own beside the mean of the neighbours).
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxlm.fields import check_ranges, field
from jaxlm.models.layers.dropout import dropout
from jaxlm.models.layers.kernel_tools import HIDDEN
from jaxlm.types import Params, SchemaGraph


class Scores(NamedTuple):
    """Score of a statement, and the attention that it was made with."""

    logit: Float[Array, "*batch"]
    """Score before the sigmoid."""
    path_attention: Float[Array, "*batch paths"]
    """Weight of each path among those of its pair."""
    pair_attention: Float[Array, "*batch pairs"]
    """Weight of each pair; 1 for the first, and without meaning, if there is none."""


@dataclasses.dataclass(frozen=True)
class KagNetwork:
    """Graph convolution, path encoder and hierarchical attention of KagNet.

    Parameters: `concept/embedding` and `relation/embedding`, whose row 0 stands for none; `graph_0`, `graph_1`, the
    convolution; `lstm/input` and `lstm/recurrent` (gates: input, forget, candidate, output); `pair_0`, `pair_1`, the
    encoder of pairs; `path_query`, `pair_query`; `score`. 696,374 besides the tables, for statements of width 1024.
    """

    num_concepts: int = 0
    """Concepts of the graph; set when training begins."""
    num_relations: int = 0
    """Relations of the graph without inverses; set when training begins."""
    concept_size: int = field(100, range="[1, inf)")
    """Width of the vectors of concepts and of relations."""
    graph_sizes: tuple[int, int] = (50, 25)
    """Widths of the two graph convolutions."""
    path_size: int = field(128, range="[1, inf)")
    """Width of the LSTM over the steps of a path."""
    pair_size: int = field(128, range="[1, inf)")
    """Width of the vector of a pair; the layer below has twice as many units."""
    published_padding: bool = False
    """Read a path's vector after its padding, as the published code does, instead of after its last concept."""
    dropout: float = field(0.0, range="[0, 1)")
    """Dropout rate in the encoder of pairs."""

    def __post_init__(self) -> None:
        check_ranges(self, "objective.network.")

    def init(self, key: jax.Array, statement_size: int) -> Params:
        """Return fresh parameters, float32, with the published distributions.

        Dense layers: Xavier normal kernels, standard normal biases. LSTM: orthogonal matrices, standard normal biases.
        Graph convolutions: uniform in ±1/√inputs. Tables: uniform in ±√(6 / width), with zeros in row 0.
        """
        keys = iter(jax.random.split(key, 24))
        width, hidden = self.concept_size + self.graph_sizes[1], 4 * self.path_size
        sizes = {
            "pair_0": (2 * width + statement_size, 2 * self.pair_size), "pair_1": (2 * self.pair_size, self.pair_size),
            "path_query": (self.pair_size, self.path_size), "pair_query": (statement_size, self.pair_size),
            "score": (self.pair_size + self.path_size + statement_size, 1),
        }
        lstm = {"input": (width + self.concept_size, hidden), "recurrent": (self.path_size, hidden)}
        convolutions = {"graph_0": (self.concept_size, self.graph_sizes[0]), "graph_1": self.graph_sizes}

        def normal_bias(kernel: nn.initializers.Initializer, shape: tuple[int, int]) -> Params:
            return {"kernel": kernel(next(keys), shape), "bias": jax.random.normal(next(keys), shape[1:])}

        def uniform(limit: float, *shape: int) -> Float[Array, "..."]:
            return jax.random.uniform(next(keys), shape, minval=-limit, maxval=limit)

        def table(rows: int) -> Params:
            rows_of = uniform(math.sqrt(6 / self.concept_size), rows, self.concept_size)
            return {"embedding": jnp.pad(rows_of, ((1, 0), (0, 0)))}

        return {
            "concept": table(self.num_concepts), "relation": table(2 * self.num_relations),
            "lstm": {name: normal_bias(nn.initializers.orthogonal(), shape) for name, shape in lstm.items()},
        } | {name: normal_bias(nn.initializers.xavier_normal(), shape) for name, shape in sizes.items()} | {
            name: {"kernel": uniform(shape[0] ** -0.5, *shape), "bias": uniform(shape[0] ** -0.5, shape[1])}
            for name, shape in convolutions.items()
        }

    def __call__(
        self, params: Params, graph: SchemaGraph, statement: Float[Array, "batch width"], key: jax.Array | None = None
    ) -> Scores:
        """Return the scores of statements."""
        keys = None if key is None else jax.random.split(key, len(statement))
        axes = (None, 0, 0, None if keys is None else 0)
        return jax.vmap(self._score, in_axes=axes)(params, graph, statement.astype(jnp.float32), keys)

    def flops(self, graph: SchemaGraph, statement_size: int) -> float:
        """Return the FLOPs of one statement's forward pass, as matrix products of the padded arrays."""
        (nodes,), (paths, steps), pairs = graph.concepts.shape[-1:], graph.path_nodes.shape[-2:], graph.pairs.shape[-2]
        c, (g0, g1), p, h = self.concept_size, self.graph_sizes, self.pair_size, self.path_size
        convolutions = nodes * (nodes * (c + g0) + c * g0 + g0 * g1)
        encoder = pairs * ((2 * (c + g1) + statement_size) * 2 * p + 2 * p * p + p * h)
        return 2.0 * (convolutions + encoder + paths * steps * 4 * h * (2 * c + g1 + h) + statement_size * p)

    def _score(
        self, params: Params, graph: SchemaGraph, statement: Float[Array, " width"], key: jax.Array | None
    ) -> Scores:
        """Return the score of one statement."""
        nodes = self._nodes(params, graph)
        pairs, num_pairs = self._pairs(params, graph, nodes, statement, key), graph.pairs.shape[0]
        paths = self._paths(params, graph, nodes)  # [paths, hidden]

        # α: softmax over the paths of each pair of (W1 T) · path.
        is_of_pair = jax.nn.one_hot(graph.path_pairs, num_pairs)  # [paths, pairs], zero rows for padding
        logits = jnp.einsum("kh,ph->kp", paths, _dense(params["path_query"], pairs))
        alpha = is_of_pair * jax.nn.softmax(jnp.where(is_of_pair > 0, logits, HIDDEN), axis=0)
        related = jnp.einsum("kp,kh->ph", alpha, paths)

        # β: softmax over the pairs of (W2 s) · T. A statement without pairs has one of zeros.
        is_pair = graph.pairs[:, 0] >= 0
        is_pair = is_pair.at[0].set(is_pair[0] | ~jnp.any(is_pair))
        beta = jax.nn.softmax(jnp.where(is_pair, pairs @ _dense(params["pair_query"], statement), HIDDEN))
        summary = beta @ jnp.concatenate([pairs, related], axis=-1)
        logit = _dense(params["score"], jnp.concatenate([summary, statement]))[0]
        return Scores(logit, jnp.sum(alpha, axis=1), beta)

    def _nodes(self, params: Params, graph: SchemaGraph) -> Float[Array, "nodes features"]:
        """Return [table vector; graph convolution] of each node, zero at padding."""
        is_node = (graph.concepts >= 0)[:, None]
        table = params["concept"]["embedding"][graph.concepts + 1] * is_node
        ends = jax.nn.one_hot(graph.edges, len(graph.concepts))  # [edges, 2, nodes], zero rows for padding
        adjacency = jnp.einsum("en,em->nm", ends[:, 0], ends[:, 1])
        x = table
        for name in ("graph_0", "graph_1"):
            x = jax.nn.relu(_dense(params[name], (adjacency + adjacency.T) @ x)) * is_node
        return jnp.concatenate([table, x], axis=-1)

    def _pairs(
        self, params: Params, graph: SchemaGraph, nodes: Float[Array, "nodes features"],
        statement: Float[Array, " width"], key: jax.Array | None,
    ) -> Float[Array, "pairs hidden"]:
        """Return the vector T of each pair, from [question's concept; choice's concept; statement]."""
        ends = _at(nodes, graph.pairs).reshape(len(graph.pairs), -1)
        x = jnp.concatenate([ends, jnp.broadcast_to(statement, (len(ends), *statement.shape))], axis=-1)
        keys = (None, None) if key is None else jax.random.split(key)
        for name, key_layer in zip(("pair_0", "pair_1"), keys, strict=True):
            x = jax.nn.leaky_relu(dropout(_dense(params[name], x), self.dropout, key_layer))
        return x

    def _paths(
        self, params: Params, graph: SchemaGraph, nodes: Float[Array, "nodes features"]
    ) -> Float[Array, "paths hidden"]:
        """Return the vector of each path: the LSTM's output after its last concept.

        Step i reads concept i and the relation that leaves it; the last concept has the trained row 0 of the relations.
        """
        is_step = (graph.path_nodes >= 0)[..., None]
        # The product of the gates' kernel with [concept; relation], the latter once for each relation.
        kernel, bias = params["lstm"]["input"]["kernel"], params["lstm"]["input"]["bias"]
        of_concept, of_relation = jnp.split(kernel, [nodes.shape[-1]])
        gates = _at(nodes, graph.path_nodes) @ of_concept + bias
        gates += (params["relation"]["embedding"] @ of_relation)[graph.path_relations + 1]
        if self.published_padding:  # padding reads row 0 of the concepts, which training changes
            gates += ~is_step * (params["concept"]["embedding"][0] @ kernel[: self.concept_size])
            is_step = jnp.ones_like(is_step)
        cell = hidden = jnp.zeros((len(gates), self.path_size))
        for step in range(gates.shape[1]):
            into, forget, candidate, out = jnp.split(
                gates[:, step] + _dense(params["lstm"]["recurrent"], hidden), 4, axis=-1
            )
            new = jax.nn.sigmoid(forget) * cell + jax.nn.sigmoid(into) * jnp.tanh(candidate)
            cell = jnp.where(is_step[:, step], new, cell)
            hidden = jnp.where(is_step[:, step], jax.nn.sigmoid(out) * jnp.tanh(new), hidden)
        return hidden


def _dense(layer: Params, x: Float[Array, "*batch inputs"]) -> Float[Array, "*batch outputs"]:
    return x @ layer["kernel"] + layer["bias"]


def _at(nodes: Float[Array, "nodes features"], index: Int[Array, "*shape"]) -> Float[Array, "*shape features"]:
    """Return the features of nodes, zero for none."""
    return jnp.einsum("...n,nf->...f", jax.nn.one_hot(index, len(nodes)), nodes)
