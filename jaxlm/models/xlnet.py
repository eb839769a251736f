"""XLNet (Yang et al. 2019): two-stream attention with relative positions and a recurrence memory."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxlm.errors import UserError
from jaxlm.fields import field
from jaxlm.models.base import FineTuning, Inputs, UncachedState, UncachedWriter
from jaxlm.models.layers.config import StackConfig, TransformerConfig, kernel_init, transformer_sizes
from jaxlm.models.layers.dense import broadcast
from jaxlm.models.layers.dropout import dropout, module_key
from jaxlm.models.layers.embeddings import EmbeddingTable
from jaxlm.models.layers.feed_forward import FeedForward
from jaxlm.models.layers.norm import Norm
from jaxlm.models.layers.relative import Keys, Queries, RelativeAttention, sinusoids
from jaxlm.models.layers.stack import call, init_layers, layer_keys, run_layers
from jaxlm.parallel.activations import constrain
from jaxlm.tokenizers.template import Template
from jaxlm.types import Params

MASKED_RANK = 2**30
"""Rank of masked tokens: higher than every limit, so that no token attends to them."""
MEMORY_RANK = -(2**30)
"""Rank of the memory: lower than every limit, so that all tokens attend to it."""


class StreamStates(NamedTuple):
    """Hidden states of both streams."""

    content: Float[Array, "batch length hidden"]
    """Last hidden states of all tokens."""
    query: Float[Array, "batch predictions hidden"] | None
    """Last hidden states of the query stream at its positions; None without positions."""
    entered: Float[Array, "layers batch length hidden"]
    """Content stream before each layer, for a memory."""


@dataclasses.dataclass(frozen=True)
class Xlnet(TransformerConfig, UncachedWriter):
    """XLNet. The defaults are xlnet-base-cased.

    `dropout` also follows the activation of the feed-forward layers, as in the published code.

    Parameters: `word`, `query_start` (initial vector of the query stream), `layers/…` (stacked), `bias` of the output.
    """

    vocab_size: int = field(32000, vocabulary=True)
    """Vocabulary size (rows of the word embedding); a run takes it from its tokenizer."""
    init_std: float = field(0.02, range="[0, inf)")
    """Standard deviation of the normal that initializes the weights."""

    template = Template(
        single="$A sep cls:2", pair="$A sep $B:1 sep:1 cls:2", inputs=("input_ids", "token_type_ids", "attention_mask"),
        needs=("pad", "cls", "sep"), padding_side="left",
    )
    summary_token = "last"
    # Only layers have the layer decay. The paper decays learning rates; the code scales gradients, which Adam undoes.
    input_params = ()
    decay_above_layers = 0
    output_params = ("bias",)
    published_sizes: ClassVar = {"base": transformer_sizes(12, 768), "large": transformer_sizes(24, 1024)}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_size % 2:
            raise UserError(f"objective.model.hidden_size is {self.hidden_size}; relative positions need an even one.")

    @property
    def fine_tuning(self) -> FineTuning:
        # The passage is first, as in the official run_squad.py: in pretraining the second text is never the longer one.
        return FineTuning(self.template, dataclasses.replace(self.template, pair="$B sep $A:1 sep:1 cls:2"))

    @property
    def stack(self) -> StackConfig:
        """Configuration of the layers."""
        return StackConfig.of(self, intermediate_dropout=self.dropout, init="normal")

    def init(self, key: jax.Array) -> Params:
        keys, ids = jax.random.split(key, 3), jnp.zeros((1, 2), jnp.int32)
        x = jnp.zeros((1, 2, self.hidden_size), self.dtype)
        read = (x,), x, self._distances(2, 0), jnp.zeros(1, jnp.int32), (Queries(None, ids, ids),), Keys(ids, ids)
        layer = XlnetLayer(self.stack)
        return {
            "word": self._table.init(keys[0], ids)["params"],
            "query_start": kernel_init(self.stack)(keys[1], (self.hidden_size,), jnp.float32),
            "layers": init_layers(lambda key: layer.init(key, *read)["params"], keys[2], self.num_layers),
            "bias": jnp.zeros(self.vocab_size, jnp.float32),
        }

    def initial_memory(self, rows: int, length: int) -> Float[Array, "rows layers length hidden"] | None:
        """Return zero memories of all layers, or None for length 0. They are not masked, as in the official code."""
        return jnp.zeros((rows, self.num_layers, length, self.hidden_size), self.dtype) if length else None

    def _hidden_states(self, params: Params, inputs: Inputs, key: jax.Array | None) -> jax.Array:
        """Return the content stream, in which every token attends to all tokens but padding."""
        rank = None if inputs.mask is None else jnp.where(inputs.mask > 0, 0, MASKED_RANK)
        return self.streams(params, inputs, rank=rank, key=key).content

    def streams(
        self, params: Params, inputs: Inputs, *, rank: Int[Array, "batch length"] | None = None,
        limit: Int[Array, "batch length"] | None = None, positions: Int[Array, "batch predictions"] | None = None,
        memory: Float[Array, "batch layers memory hidden"] | None = None,
        is_backward: Int[Array, " batch"] | None = None, key: jax.Array | None = None,
    ) -> StreamStates:
        """Return both streams.

        Token i attends to the memory, to itself, and to every token j with rank[j] < limit[i]. A query at position i
        attends to the same tokens except token i (see `corruption.permutation.Order`).

        Args:
            params: The model's parameters.
            inputs: Tokens and segment types.
            rank: Rank of each token in the factorization order; by default every token attends to all tokens.
            limit: First rank that a token does not attend to.
            positions: Positions of the query stream; None for the content stream alone.
            memory: Hidden states of earlier text before each layer. Their segment type is 0.
            is_backward: 1 in rows whose text is reversed.
            key: Dropout key; None turns dropout off.
        """
        ids, zeros = inputs.ids, jnp.zeros_like(inputs.ids)
        types = zeros if inputs.token_types is None else inputs.token_types
        rank, limit = zeros if rank is None else rank, zeros + 1 if limit is None else limit
        is_backward = jnp.zeros(ids.shape[0], jnp.int32) if is_backward is None else is_backward
        keys = iter([None] * 6 if key is None else list(jax.random.split(key, 6)))
        length, memory_length = ids.shape[1], 0 if memory is None else memory.shape[2]
        distances = dropout(self._distances(length, memory_length), self.dropout, next(keys))
        streams = [dropout(call(self._table, params["word"], ids), self.dropout, next(keys))]
        before = ((0, 0), (memory_length, 0))
        attended = Keys(jnp.pad(types, before), jnp.pad(rank, before, constant_values=MEMORY_RANK))
        queries = [Queries(None, types, limit)]
        if positions is not None:
            start = broadcast(params["query_start"], (*positions.shape, self.hidden_size), self.dtype)
            streams.append(dropout(start, self.dropout, next(keys)))
            queries.append(Queries(positions, *(jnp.take_along_axis(x, positions, axis=1) for x in (types, limit))))
        block = XlnetLayer(self.stack, key is None)
        memory = None if memory is None else memory.swapaxes(0, 1)

        def layer(params: Params, streams: tuple[jax.Array, ...], xs: Any) -> tuple[tuple[jax.Array, ...], jax.Array]:
            key, memory = xs
            source = streams[0] if memory is None else jnp.concatenate([memory, streams[0]], axis=1)
            return call(
                block, params, streams, source, distances, is_backward, tuple(queries), attended, key=key
            ), streams[0]

        streams, entered = run_layers(
            [layer] * self.num_layers, params["layers"], tuple(constrain(x) for x in streams),
            (layer_keys(next(keys), self.num_layers), memory), remat=self.remat, loop=self.loop_layers,
        )
        content, *query = (dropout(x, self.dropout, next(keys)) for x in streams)
        return StreamStates(content, query[0] if query else None, entered)

    def next_logits(self, params: Params, state: UncachedState) -> Float[Array, "batch vocab"]:
        rank = jnp.where(state.filled, 0, MASKED_RANK)
        # After the last new token there is no slot left; those logits are not used.
        positions = jnp.full((state.tokens.shape[0], 1), jnp.minimum(state.index, state.tokens.shape[1] - 1))
        query = self.streams(params, Inputs(state.tokens), rank=rank, positions=positions).query
        return self.predict_tokens(params, query[:, 0])

    def output_matrix(self, params: Params) -> tuple[Float[Array, "vocab hidden"], Float[Array, " vocab"]]:
        """Return the word embedding and the output bias."""
        return params["word"]["embedding"], params["bias"]

    def forward_flops(self, length: int, predicted: int = 0, memory: int = 0) -> float:
        """Return the FLOPs of both streams, with `predicted` positions in the query stream and `memory` tokens.

        The projections of the distances, which all rows share, are not counted.
        """
        h, tokens, keys = self.hidden_size, length + predicted, length + memory
        matrices = tokens * (4 * h * h + 4 * h * self.intermediate_size) + keys * 4 * h * h
        attention = tokens * (4 * keys + 2 * (keys + length)) * h
        return float(self.num_layers * (matrices + attention) + 2 * predicted * h * self.vocab_size)

    @property
    def _table(self) -> EmbeddingTable:
        return EmbeddingTable(self.vocab_size, self.hidden_size, kernel_init(self.stack), self.dtype)

    def _distances(self, length: int, memory: int) -> jax.Array:
        return jnp.asarray(sinusoids(length, memory, self.hidden_size), self.dtype)


class XlnetLayer(nn.Module):
    """Layer that runs both streams with the same parameters."""

    config: StackConfig
    deterministic: bool = True

    @nn.compact
    def __call__(self, streams, source, distances, is_backward, queries, keys):
        c = self.config
        attention = RelativeAttention(c, self.deterministic, name="attention")
        feed_forward = (c.feed_forward or FeedForward)(c, name="mlp")
        norms = [Norm(c.norm, c.norm_eps, c.dtype, name=f"{name}_norm") for name in ("attention", "mlp")]

        def residual(x: jax.Array, y: jax.Array, norm: nn.Module) -> jax.Array:
            return constrain(norm(x + dropout(y, c.dropout, module_key(self, c.dropout, self.deterministic))))

        shared = attention.shared(source, distances)

        def stream(x: jax.Array, queries: Queries) -> jax.Array:
            x = residual(x, attention(x, shared, is_backward, queries, keys), norms[0])
            return residual(x, feed_forward(x, self.deterministic), norms[1])

        return tuple(stream(*pair) for pair in zip(streams, queries, strict=True))
