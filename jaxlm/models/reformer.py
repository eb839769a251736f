"""The Reformer (Kitaev et al. 2020): a reversible decoder whose attention is local or by hashing, for long rows."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxlm.errors import UserError
from jaxlm.fields import field
from jaxlm.models.decoder import Decoder, Params
from jaxlm.models.gpt2 import document_positions
from jaxlm.models.layers.chunked import ChunkedConfig, LocalAttention, LshAttention, Rows
from jaxlm.models.layers.config import PlainActivation, check_sizes, kernel_init
from jaxlm.models.layers.dropout import dropout, module_key
from jaxlm.models.layers.embeddings import Table
from jaxlm.models.layers.feed_forward import FeedForward
from jaxlm.models.layers.norm import Norm
from jaxlm.models.layers.stack import Coupling, init_layers, run_reversible

AttentionType = Literal["local", "lsh"]
MOST_BUCKETS = 2**15 - 1


class ReformerState(NamedTuple):
    """What generation carries: all tokens so far, int32 [batch, slots], and how many, int32 [batch]."""

    tokens: Array
    lengths: Array


@dataclasses.dataclass(frozen=True)
class Reformer(Decoder):
    """A Reformer as a value. The defaults have the sizes of google/reformer-enwik8.

    Parameters: `word`, `position_row`, `position_column`, `layers/i/{attention_norm,attention,mlp_norm,mlp}`,
    `final_norm` (of both streams, joined), `lm_head`.
    """

    vocab_size: int = 258
    """Rows of the word embedding and outputs; a run sets it from its tokenizer."""
    hidden_size: int = 1024
    """Width of each of the two streams."""
    num_layers: int = 12
    """Layers; a multiple of the attention types."""
    attention_types: tuple[AttentionType, ...] = ("local", "local", "lsh", "local")
    """Attention of the layers, each in its turn: local, to the own chunk and the one before, or lsh, by hashing."""
    num_heads: int = 8
    """Attention heads."""
    head_dim: int = 128
    """Width of each head."""
    intermediate_size: int = 4096
    """Width of the feed-forward layer."""
    axial_shape: tuple[int, int] = (128, 512)
    """Rows and columns of the grid of positions; their product is the longest sequence."""
    axial_widths: tuple[int, int] = (256, 768)
    """Widths of a row's and a column's embedding, which make a position's together; their sum is hidden_size."""
    local_chunk_size: int = 128
    """Tokens of a chunk of local attention."""
    lsh_chunk_size: int = 256
    """Tokens of a chunk of hashed attention."""
    num_hashes: int = field(2, recipe=True)
    """Rounds of hashing."""
    buckets: tuple[int, ...] = field((512,), recipe=True)
    """Even factors of the number of buckets; the paper has 2 · length / lsh_chunk_size buckets."""
    hash_seed: int = field(0, recipe=True)
    """Seed of the rotations in evaluation and generation."""
    new_hashes: bool = field(True, recipe=True)
    """Draw new rotations at each training step; else they are those of hash_seed."""
    activation: PlainActivation = "relu"
    """Activation of the feed-forward layer."""
    dropout: float = field(0.2, recipe=True)
    """Dropout of embeddings, of columns of positions, after attention, twice in the feed-forward layer, at the end."""
    attention_dropout: float = field(0.2, recipe=True)
    """Dropout on probabilities of local attention."""
    lsh_attention_dropout: float = field(0.2, recipe=True)
    """Dropout on probabilities of hashed attention."""
    norm_eps: float = 1e-12
    """Epsilon of LayerNorm."""
    init_std: float = 0.02
    """Standard deviation of the normal that matrices and word embeddings are initialized from."""
    position_init_std: float = 1.0
    """The same for the embeddings of rows and columns."""
    loop_layers: bool = field(True, resumable=True)
    """Compile the layers as one loop; written out, the compiler holds some of a layer's work until later ones."""

    def __post_init__(self) -> None:
        check_sizes(self)
        total = math.prod(self.buckets)
        if not self.buckets or min(self.buckets) < 2 or any(n % 2 for n in self.buckets) or total > MOST_BUCKETS:
            raise UserError(
                f"objective.model.buckets is {self.buckets}; give even numbers whose product is at most {MOST_BUCKETS}."
            )
        if self.num_hashes < 1 or not 0 <= self.hash_seed < 2**32:
            raise UserError("objective.model.num_hashes must be at least 1, and hash_seed lie between 0 and 2**32 - 1.")
        if not self.attention_types or self.num_layers % len(self.attention_types):
            raise UserError(
                f"objective.model.num_layers is {self.num_layers}, which {len(self.attention_types)} attention_types "
                "do not divide."
            )
        if min(self.axial_shape) < 1 or min(self.axial_widths) < 1 or sum(self.axial_widths) != self.hidden_size:
            raise UserError(
                f"objective.model.axial_widths {self.axial_widths} must add up to hidden_size {self.hidden_size}, and "
                "both they and axial_shape be at least 1."
            )
        if self.remat != "none":
            raise UserError("objective.model.remat must be none: a reversible model recomputes its layers anyway.")

    @property
    def max_positions(self) -> int:
        """The longest sequence."""
        return math.prod(self.axial_shape)

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        """Sizes of the chunks that the layers have."""
        sizes = {"local": self.local_chunk_size, "lsh": self.lsh_chunk_size}
        return tuple(sizes[name] for name in self.attention_types)

    @property
    def length_multiple(self) -> int:
        """Training rows have a multiple of so many tokens."""
        return math.lcm(*self.chunk_sizes)

    @property
    def stack(self) -> ChunkedConfig:
        """The configuration of the layers."""
        names = (
            "hidden_size", "num_layers", "num_heads", "head_dim", "intermediate_size", "activation", "norm_eps",
            "dropout", "attention_dropout", "local_chunk_size", "lsh_chunk_size", "num_hashes", "buckets",
            "lsh_attention_dropout", "hash_seed", "init_std",
        )
        return ChunkedConfig(
            **{name: getattr(self, name) for name in names}, intermediate_dropout=self.dropout, causal=True,
            init="normal", **self.computation,
        )

    def init(self, key: jax.Array) -> Params:
        ids = jnp.zeros((1, 1), jnp.int32)
        return ReformerModule(self).init({"params": key}, ids, ids, Rows(ids))["params"]

    def decode_hidden(
        self, params: Params, input_ids: Int[Array, "batch length"],
        segment_ids: Int[Array, "batch length"] | None = None, dropout_key: jax.Array | None = None,
    ) -> Float[Array, "batch length features"]:
        """See Decoder; features are both streams, joined. Rows that chunks do not divide are padded."""
        length = input_ids.shape[1]
        segment_ids = jnp.ones_like(input_ids) if segment_ids is None else segment_ids
        missing = -length % self.length_multiple if length > min(self.chunk_sizes) else 0
        input_ids, segment_ids = (jnp.pad(x, ((0, 0), (0, missing))) for x in (input_ids, segment_ids))
        return self._hidden(params, input_ids, Rows(segment_ids), dropout_key)[:, :length]

    def _hidden(self, params: Params, input_ids: jax.Array, rows: Rows, dropout_key: jax.Array | None = None):
        rngs = {}
        if dropout_key is not None:
            rngs = {"dropout": dropout_key} | ({"hashes": dropout_key} if self.new_hashes else {})
        positions = jnp.minimum(document_positions(rows.segments), self.max_positions - 1)
        return ReformerModule(self, dropout_key is None).apply(
            {"params": params}, input_ids, positions, rows, rngs=rngs
        )

    def output_matrix(self, params: Params) -> tuple[Float[Array, "vocab features"], Float[Array, " vocab"]]:
        """The bias is never trained: Transformers 5 has it, but does not add it. It is what an older file holds, or 0.
        """
        return params["lm_head"]["kernel"].T, jax.lax.stop_gradient(params["lm_head"]["bias"])

    def prefill(
        self, params: Params, prompts: Int[Array, "batch length"], mask: Bool[Array, "batch length"], new_tokens: int
    ) -> tuple[Float[Array, "batch vocab"], ReformerState]:
        """See Decoder. There is no cache: a new token may fall into any bucket, and all is computed anew."""
        length, lengths = prompts.shape[1], jnp.sum(mask, axis=1, dtype=jnp.int32)
        slots = -(-(length + new_tokens) // self.length_multiple) * self.length_multiple
        from_left = jnp.arange(slots)[None] + length - lengths[:, None]
        tokens = jnp.take_along_axis(prompts, jnp.minimum(from_left, length - 1), axis=1)
        state = ReformerState(tokens, lengths)
        return self._last_logits(params, state), state

    def decode(
        self, params: Params, tokens: Int[Array, " batch"], state: ReformerState
    ) -> tuple[Float[Array, "batch vocab"], ReformerState]:
        rows = jnp.arange(tokens.shape[0])
        state = ReformerState(state.tokens.at[rows, state.lengths].set(tokens), state.lengths + 1)
        return self._last_logits(params, state), state

    def _last_logits(self, params: Params, state: ReformerState) -> Float[Array, "batch vocab"]:
        """Logits after the last token of each row, as if the row ended there."""
        lengths = state.lengths[:, None]
        segments = (jnp.arange(state.tokens.shape[1]) < lengths).astype(jnp.int32)
        live = -(-state.lengths // self.length_multiple) * self.length_multiple // self.lsh_chunk_size
        hidden = self._hidden(params, state.tokens * segments, Rows(segments, live))
        return self.predict_tokens(params, jnp.take_along_axis(hidden, lengths[..., None] - 1, axis=1)[:, 0])

    def flops(self, length: int) -> float:
        """FLOPs of one sequence's forward pass: matrix products, hashing, and attention to what a query is compared
        with; a multiply-add counts as 2."""
        h, width = self.hidden_size, self.num_heads * self.head_dim
        keys = min(length, 2 * self.local_chunk_size)
        costs = {"local": 4 * h * width + 2 * keys * width, "lsh": 3 * h * width + 2 * length * width}
        if length > self.lsh_chunk_size:
            costs["lsh"] = width * (3 * h + self.num_hashes * (4 * self.lsh_chunk_size + sum(self.buckets) // 2))
        attention = sum(costs[name] for name in self.attention_types) / len(self.attention_types)
        layer = attention + 2 * h * self.intermediate_size
        return 2.0 * length * (self.num_layers * layer + 2 * h * self.vocab_size)


class ReversibleBlock(nn.Module):
    """The two functions of a layer, each behind a norm: attention, and the feed-forward layer."""

    config: ChunkedConfig
    kind: AttentionType
    deterministic: bool = True

    def setup(self) -> None:
        c = self.config
        self.attention_norm, self.mlp_norm = (Norm("layer", c.norm_eps, c.dtype) for _ in range(2))
        self.attention = {"local": LocalAttention, "lsh": LshAttention}[self.kind](c, self.deterministic)
        self.mlp = FeedForward(c)

    def attend(self, x: jax.Array, rows: Rows, buckets: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        y, buckets = self.attention(self.attention_norm(x), rows, buckets)
        return self._drop(y), buckets

    def feed_forward(self, x: jax.Array) -> jax.Array:
        return self._drop(self.mlp(self.mlp_norm(x), self.deterministic))

    def _drop(self, y: jax.Array) -> jax.Array:
        # The streams stay in float32: what rounding takes from them could not be had back.
        y = dropout(y, self.config.dropout, module_key(self, self.config.dropout, self.deterministic))
        return y.astype(jnp.float32)

    def __call__(self, x: jax.Array, rows: Rows) -> jax.Array:
        return self.feed_forward(self.attend(x, rows, None)[0])

    @property
    def coupling(self) -> Coupling:
        """This layer for `run_reversible`: its own inputs are a dict of keys for each function, those shared the rows.
        """
        def attend(params: Any, x: jax.Array, keys: Any, rows: Rows, buckets: jax.Array | None) -> Any:
            return self.apply({"params": params}, x, rows, buckets, rngs=keys[0], method="attend")

        def feed_forward(params: Any, x: jax.Array, keys: Any, rows: Rows) -> jax.Array:
            return self.apply({"params": params}, x, rngs=keys[1], method="feed_forward")

        return Coupling(attend, feed_forward)


class ReformerModule(nn.Module):
    """Embeddings, layers and output under the names that checkpoints use."""

    model: Reformer
    deterministic: bool = True

    @nn.compact
    def __call__(self, input_ids, positions, rows):
        m, c = self.model, self.model.stack
        self._head()
        blocks = [ReversibleBlock(c, kind, self.deterministic, parent=None) for kind in m.attention_types]
        x = self._embed(input_ids, positions).astype(jnp.float32)
        params = self._layer_params(blocks, x, rows)
        # Two dictionaries of keys a layer, one for each of its functions.
        names = [name for name in ("dropout", "hashes") if self.has_rng(name)]
        keys = {name: jax.random.split(self.make_rng(name), (m.num_layers, 2)) for name in names}
        inputs = [[{name: keys[name][i, j] for name in names} for j in range(2)] for i in range(m.num_layers)]
        state = (x, x)
        if not self.is_initializing():
            state = run_reversible(
                [block.coupling for block in blocks], params, state, inputs, rows, loop=m.loop_layers
            )
        y = Norm("layer", m.norm_eps, m.dtype, name="final_norm")(jnp.concatenate(state, axis=-1))
        return dropout(y, m.dropout, module_key(self, m.dropout, self.deterministic))

    def _embed(self, input_ids: jax.Array, positions: jax.Array) -> jax.Array:
        """Word and position; of positions dropout takes whole columns of the grid."""
        m = self.model
        word = Table(m.vocab_size, m.hidden_size, kernel_init(m.stack), m.dtype, name="word")(input_ids)
        grid = (positions // m.axial_shape[1], positions % m.axial_shape[1])
        init = nn.initializers.normal(m.position_init_std)
        position = jnp.concatenate([
            Table(size, width, init, m.dtype, name=f"position_{name}")(place)
            for name, size, width, place in zip(("row", "column"), m.axial_shape, m.axial_widths, grid, strict=True)
        ], axis=-1)
        keys = [module_key(self, m.dropout, self.deterministic) for _ in range(2)]
        columns = dropout(jnp.ones((input_ids.shape[0], m.axial_shape[1]), m.dtype), m.dropout, keys[0])
        return dropout(word, m.dropout, keys[1]) + position * jnp.take_along_axis(columns, grid[1], axis=1)[..., None]

    def _head(self) -> None:
        m = self.model
        head = nn.Dense(m.vocab_size, name="lm_head", kernel_init=kernel_init(m.stack))
        if self.is_initializing():
            head(jnp.zeros((1, 2 * m.hidden_size)))

    def _layer_params(self, blocks: list[ReversibleBlock], x: jax.Array, rows: Rows) -> list[Any]:
        """The parameters of each layer, from the top."""
        count = self.model.num_layers
        if self.is_initializing():
            def init_all(key: jax.Array) -> Any:
                kinds = [
                    init_layers(lambda key, block=block: block.init(key, x, rows)["params"], own, count // len(blocks))
                    for block, own in zip(blocks, jax.random.split(key, len(blocks)), strict=True)
                ]
                return {str(i): kinds[i % len(blocks)][i // len(blocks)] for i in range(count)}

            self.param("layers", init_all)
        layers = self.variables["params"]["layers"]
        return [layers[str(i)] for i in range(count)]
