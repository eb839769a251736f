"""XLNet (Yang et al. 2019): a post-norm encoder of two streams with relative positions and a memory of earlier text."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxlm.errors import UserError
from jaxlm.fields import field
from jaxlm.models.layers.config import (
    Computation,
    PlainActivation,
    StackConfig,
    check_heads,
    check_sizes,
    kernel_init,
)
from jaxlm.models.layers.dropout import dropout, module_key
from jaxlm.models.layers.embeddings import Table, logits
from jaxlm.models.layers.feed_forward import FeedForward
from jaxlm.models.layers.norm import Norm
from jaxlm.models.layers.relative import Queries, RelativeAttention, sinusoids
from jaxlm.models.layers.stack import init_layers, run_layers
from jaxlm.parallel.activations import constrain
from jaxlm.tokenizers.template import Template
from jaxlm.tokenizers.vocabulary import Vocabulary

Params = dict[str, Any]
PUBLISHED = {"base": (12, 768), "large": (24, 1024)}
"""Size → layers, width."""
UNKNOWN = 2**30
"""`known` of what no token may see."""


class Streams(NamedTuple):
    """What `encode` returns.

    content: the last hidden states of all tokens. query: those at `positions`, which know only what came before them in
    the order; None without positions. inputs: the content that entered each layer, for a memory.
    """

    content: Float[Array, "batch length hidden"]
    query: Float[Array, "batch predictions hidden"] | None
    inputs: tuple[Float[Array, "batch length hidden"], ...]


@dataclasses.dataclass(frozen=True)
class Xlnet(Computation):
    """An XLNet as a value. The defaults are xlnet-base-cased.

    Parameters: `word`, `query_start` (what the query stream begins with), `layers/i/…`, `bias` of the output.
    """

    vocab_size: int = 32000
    """Rows of the word embedding, which is also the output matrix; a run sets it from its tokenizer."""
    hidden_size: int = 768
    """Width of both streams."""
    num_layers: int = 12
    """Transformer layers."""
    num_heads: int = 12
    """Attention heads; must divide hidden_size."""
    intermediate_size: int = 3072
    """Width of the feed-forward layer."""
    activation: PlainActivation = "gelu"
    """gelu is the exact (erf) form, gelu_new the tanh approximation of the official code."""
    dropout: float = field(0.1, recipe=True)
    """Dropout after the embeddings, on the distances, after attention, twice in the feed-forward layer, at the end."""
    attention_dropout: float = field(0.1, recipe=True)
    """Dropout on attention probabilities."""
    norm_eps: float = 1e-12
    """Epsilon of LayerNorm."""
    init_std: float = 0.02
    """Standard deviation of the normal that weights are initialized from."""

    template: ClassVar[Template] = Template(
        single="$A sep cls:2", pair="$A sep $B:1 sep:1 cls:2", inputs=("input_ids", "token_type_ids", "attention_mask"),
        needs=("pad", "cls", "sep"), padding_side="left",
    )
    """What stands around a text."""

    def __post_init__(self) -> None:
        check_sizes(self)
        check_heads(self.hidden_size, self.num_heads)
        if self.hidden_size % 2:
            raise UserError(f"objective.model.hidden_size is {self.hidden_size}; relative positions need an even one.")

    @classmethod
    def published(cls, size: str, **changes: Any) -> Self:
        """A published size by name: base or large."""
        layers, hidden = PUBLISHED[size]
        shape = dict(num_layers=layers, hidden_size=hidden, num_heads=hidden // 64, intermediate_size=4 * hidden)
        return cls(**(shape | changes))

    @property
    def stack(self) -> StackConfig:
        """The configuration of the layers."""
        return StackConfig(
            hidden_size=self.hidden_size, num_layers=self.num_layers, num_heads=self.num_heads,
            head_dim=self.hidden_size // self.num_heads, intermediate_size=self.intermediate_size,
            activation=self.activation, norm_eps=self.norm_eps, dropout=self.dropout,
            attention_dropout=self.attention_dropout, intermediate_dropout=self.dropout, init="normal",
            init_std=self.init_std, **self.computation,
        )

    def bind(self, vocabulary: Vocabulary) -> Self:
        """A copy with as many rows of embedding as the vocabulary needs."""
        return dataclasses.replace(self, vocab_size=vocabulary.rows(self.vocab_size))

    def init(self, key: jax.Array) -> Params:
        """Fresh parameters, float32."""
        ids = jnp.zeros((1, 2), jnp.int32)
        return XlnetModule(self).init({"params": key}, ids, ids, ids, ids, ids, (), None)["params"]

    def empty_memory(self, rows: int, length: int) -> tuple[Float[Array, "rows length hidden"], ...]:
        """Zeros for each layer, which attention does see, as in the official code."""
        shape = (rows, length, self.hidden_size)
        return tuple(jnp.zeros(shape, self.dtype) for _ in range(self.num_layers if length else 0))

    def encode(
        self,
        params: Params,
        input_ids: Int[Array, "batch length"],
        token_type_ids: Int[Array, "batch length"] | None = None,
        known: Int[Array, "batch length"] | None = None,
        sees: Int[Array, "batch length"] | None = None,
        positions: Int[Array, "batch predictions"] | None = None,
        memory: tuple[Float[Array, "batch memory hidden"], ...] = (),
        is_backward: Int[Array, " batch"] | None = None,
        dropout_key: jax.Array | None = None,
    ) -> Streams:
        """Both streams. A token at i sees the memory, itself, and the token at j where known[j] < sees[i] (see
        corruption.permutation.Order); a query at i all that but itself. By default everything is known to all.

        positions: where the query stream asks; without them there is only the content stream. memory: of each layer,
        of segment 0. is_backward: 1 in rows whose text is reversed. A dropout_key turns dropout on.
        """
        zeros = jnp.zeros_like(input_ids)
        rngs = None if dropout_key is None else {"dropout": dropout_key}
        return XlnetModule(self, dropout_key is None).apply(
            {"params": params}, input_ids, zeros if token_type_ids is None else token_type_ids,
            zeros if known is None else known, zeros + 1 if sees is None else sees, positions, memory, is_backward,
            rngs=rngs,
        )

    def token_features(self, params: Params, hidden: Float[Array, "*batch hidden"]) -> Float[Array, "*batch hidden"]:
        """What the output matrix is multiplied with: the hidden states."""
        return hidden

    def output_matrix(self, params: Params) -> tuple[Float[Array, "vocab hidden"], Float[Array, " vocab"]]:
        """(matrix, bias) that turn `token_features` into vocabulary logits: the word embedding, and a bias."""
        return params["word"]["embedding"], params["bias"]

    def predict_tokens(self, params: Params, hidden: Float[Array, "*batch hidden"]) -> Float[Array, "*batch vocab"]:
        """Vocabulary logits in float32."""
        return logits(hidden, *self.output_matrix(params))

    def flops(self, length: int, predicted: int, memory: int) -> float:
        """FLOPs of one sequence's forward pass: both streams, keys and values of the memory, distances and head; matrix
        products and full attention only, a multiply-add counts as 2."""
        h, tokens, keys = self.hidden_size, length + predicted, length + memory
        distances = keys + length
        matrices = tokens * (4 * h * h + 4 * h * self.intermediate_size) + keys * 4 * h * h + 2 * distances * 2 * h * h
        attention = tokens * (4 * keys + 2 * distances) * h
        return float(self.num_layers * (matrices + attention) + 2 * predicted * h * self.vocab_size)


class XlnetLayer(nn.Module):
    """One layer, through which both streams pass with the same parameters."""

    config: StackConfig
    deterministic: bool = True

    @nn.compact
    def __call__(self, streams, source, distances, is_backward, queries):
        c = self.config
        attention, feed_forward = RelativeAttention(c, self.deterministic, name="attention"), FeedForward(c, name="mlp")
        norms = [Norm(c.norm, c.norm_eps, c.dtype, name=f"{name}_norm") for name in ("attention", "mlp")]

        def residual(x: jax.Array, y: jax.Array, norm: nn.Module) -> jax.Array:
            return constrain(norm(x + dropout(y, c.dropout, module_key(self, c.dropout, self.deterministic))))

        def one(x: jax.Array, own: Queries) -> jax.Array:
            x = residual(x, attention(x, source, distances, is_backward, own), norms[0])
            return residual(x, feed_forward(x, self.deterministic), norms[1])

        return tuple(one(x, own) for x, own in zip(streams, queries, strict=True))


class XlnetModule(nn.Module):
    """Embedding, the query stream's first vector, the layers, and the output's bias."""

    model: Xlnet
    deterministic: bool = True

    @nn.compact
    def __call__(self, input_ids, token_type_ids, known, sees, positions, memory, is_backward):
        m, c = self.model, self.model.stack
        table = Table(m.vocab_size, m.hidden_size, kernel_init(c), m.dtype, name="word")
        start = self.param("query_start", kernel_init(c), (m.hidden_size,), jnp.float32).astype(m.dtype)
        if self.is_initializing():  # it is read by `output_matrix` alone, and a fine-tuned model has none
            self.param("bias", nn.initializers.zeros, (m.vocab_size,), jnp.float32)

        def drop(x: jax.Array) -> jax.Array:
            return dropout(x, m.dropout, module_key(self, m.dropout, self.deterministic))

        rows, length = input_ids.shape
        held = memory[0].shape[1] if memory else 0
        distances = drop(jnp.asarray(sinusoids(length, held, m.hidden_size), m.dtype))
        is_backward = jnp.zeros(rows, jnp.int32) if is_backward is None else is_backward
        everywhere = jnp.broadcast_to(jnp.arange(length), (rows, length))
        streams, queries = [drop(table(input_ids))], [_queries(everywhere, token_type_ids, known, sees, held, True)]
        if positions is not None:
            streams.append(drop(jnp.broadcast_to(start, (*positions.shape, m.hidden_size))))
            queries.append(_queries(positions, token_type_ids, known, sees, held, False))
        streams = tuple(constrain(x) for x in streams)

        def layer(params, streams, own):
            key, earlier = own
            source = streams[0] if earlier is None else jnp.concatenate([earlier, streams[0]], axis=1)
            block = XlnetLayer(c, key is None, parent=None)
            rngs = None if key is None else {"dropout": key}
            after = block.apply({"params": params}, streams, source, distances, is_backward, queries, rngs=rngs)
            return after, streams[0]

        if self.is_initializing():
            def init(key):
                block = XlnetLayer(c, parent=None)
                return block.init(key, streams, streams[0], distances, is_backward, queries)["params"]

            self.param("layers", lambda key: {str(i): x for i, x in enumerate(init_layers(init, key, m.num_layers))})
            return Streams(streams[0], None, ())  # nobody reads what the layers would compute
        params = self.variables["params"]["layers"]
        keys = [None] * m.num_layers
        if not self.deterministic:
            keys = list(jax.random.split(self.make_rng("dropout"), m.num_layers))
        streams, inputs = run_layers(
            layer, [params[str(i)] for i in range(m.num_layers)], streams,
            list(zip(keys, memory or [None] * m.num_layers, strict=True)), remat=m.remat, loop=m.loop_layers,
        )
        return Streams(drop(streams[0]), drop(streams[1]) if positions is not None else None, tuple(inputs))


def _queries(positions, types, known, sees, held: int, is_content: bool) -> Queries:
    """What the queries at `positions` may see: all of a memory of `held` tokens; of the row what is known to them, the
    content itself too."""
    length = known.shape[1]
    visible = known[:, None, :] < jnp.take_along_axis(sees, positions, axis=1)[:, :, None]
    if is_content:
        visible |= jnp.eye(length, dtype=bool)
    other = jnp.pad(types, ((0, 0), (held, 0)))[:, None, :] != jnp.take_along_axis(types, positions, axis=1)[:, :, None]
    visible = jnp.pad(visible, ((0, 0), (0, 0), (held, 0)), constant_values=True)
    return Queries(None if is_content else positions, other, visible)
