"""Reformer (Kitaev et al. 2020): a reversible decoder with local and LSH attention, for long sequences."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxlm.errors import UserError
from jaxlm.fields import field
from jaxlm.models.base import AtEnd, Inputs, UncachedState, UncachedWriter, document_positions, last_token, to_left_edge
from jaxlm.models.layers.chunked import ChunkedConfig, LocalAttention, LshAttention, RowLayout
from jaxlm.models.layers.config import PlainActivation, TransformerConfig, check_sizes, kernel_init
from jaxlm.models.layers.dropout import dropout, module_key
from jaxlm.models.layers.embeddings import EmbeddingTable
from jaxlm.models.layers.feed_forward import FeedForward
from jaxlm.models.layers.norm import Norm
from jaxlm.models.layers.stack import at_positions, call, init_layers, run_layers
from jaxlm.parallel.activations import constrain
from jaxlm.types import Params

AttentionType = Literal["local", "lsh"]
MAX_BUCKETS = 2**15 - 1
"""Largest number of buckets, whose numbers are int16."""


@dataclasses.dataclass(frozen=True)
class Reformer(TransformerConfig, UncachedWriter):
    """Reformer. The defaults have the sizes of google/reformer-enwik8.

    Parameters: `word`, `position_row`, `position_column`; `layers/k/{attention_norm,attention,mlp_norm,mlp}` for
    attention type k, stacked over its repeats; `final_norm` (of both streams, concatenated), `lm_head`.
    """

    vocab_size: int = field(258, vocabulary=True)
    """Vocabulary size (rows of the word embedding and the output); a run takes it from its tokenizer."""
    hidden_size: int = 1024
    """Width of each of the two streams."""
    attention_types: tuple[AttentionType, ...] = ("local", "local", "lsh", "local")
    """Attention of the layers, repeated in this order: local (own and previous chunk) or lsh (the same,
    of tokens sorted by bucket)."""
    num_heads: int = 8
    """Number of attention heads."""
    head_dim: int = 128
    """Width of an attention head."""
    intermediate_size: int = 4096
    """Width of the feed-forward layers."""
    axial_shape: tuple[int, int] = (128, 512)
    """Rows and columns of the position grid; their product is the maximum sequence length."""
    axial_widths: tuple[int, int] = (256, 768)
    """Widths of the row and column embeddings, whose concatenation embeds a position; their sum is hidden_size."""
    local_chunk_size: int = 128
    """Chunk size of local attention, in tokens."""
    lsh_chunk_size: int = 256
    """Chunk size of LSH attention, in tokens."""
    num_hashes: int = field(2, recipe=True, range="[1, inf)")
    """Number of hashing rounds."""
    buckets: tuple[int, ...] = field((512,), recipe=True)
    """Even factors of the number of buckets; the paper has 2 · length / lsh_chunk_size buckets."""
    hash_seed: int = field(0, recipe=True, range="[0, 4294967296)")
    """Seed of the hash rotations in evaluation and generation."""
    new_hashes: bool = field(True, recipe=True)
    """Sample new hash rotations at each training step, instead of using hash_seed."""
    activation: PlainActivation = "relu"
    """Activation of the feed-forward layers."""
    dropout: float = field(0.2, recipe=True, range="[0, 1)")
    """Dropout rate of embeddings, of columns of the position grid, of sublayers and of the output."""
    attention_dropout: float = field(0.2, recipe=True, range="[0, 1)")
    """Dropout rate of local attention probabilities."""
    lsh_attention_dropout: float = field(0.2, recipe=True, range="[0, 1)")
    """Dropout rate of LSH attention probabilities."""
    init_std: float = 0.02
    """Standard deviation of the normal that initializes matrices and the word embedding."""
    position_init_std: float = 1.0
    """The same for the row and column embeddings."""
    loop_layers: bool = field(True, resumable=True)
    """Compile the layers as one loop, which takes less memory: unrolled, the backward pass of some layers runs late."""

    summary_token = "last"
    is_causal = True
    input_params = ("word", "position_row", "position_column")
    output_params = ("lm_head",)
    fine_tuning = None

    def __post_init__(self) -> None:
        check_sizes(self)
        total = math.prod(self.buckets)
        if not self.buckets or min(self.buckets) < 2 or any(n % 2 for n in self.buckets) or total > MAX_BUCKETS:
            raise UserError(
                f"objective.model.buckets is {self.buckets}; give even numbers whose product is at most {MAX_BUCKETS}."
            )
        if not self.attention_types or self.num_layers % len(self.attention_types):
            raise UserError(
                f"objective.model.num_layers is {self.num_layers}, which {len(self.attention_types)} attention_types "
                "do not divide."
            )
        if min(self.axial_shape) < 1 or min(self.axial_widths) < 1 or sum(self.axial_widths) != self.hidden_size:
            raise UserError(
                f"objective.model.axial_widths {self.axial_widths} must add up to hidden_size {self.hidden_size}, and "
                "all numbers of axial_widths and axial_shape must be at least 1."
            )
        if self.remat != "none":
            raise UserError("objective.model.remat must be none: a reversible model always recomputes its layers.")

    @property
    def max_positions(self) -> int:
        """Maximum sequence length."""
        return math.prod(self.axial_shape)

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        """Chunk sizes of the attention types."""
        sizes = {"local": self.local_chunk_size, "lsh": self.lsh_chunk_size}
        return tuple(sizes[name] for name in self.attention_types)

    @property
    def length_multiple(self) -> int:
        """The length of training rows is a multiple of this."""
        return math.lcm(*self.chunk_sizes)

    @property
    def stack(self) -> ChunkedConfig:
        """Configuration of the layers."""
        return ChunkedConfig.of(self, intermediate_dropout=self.dropout, causal=True, init="normal")

    def init(self, key: jax.Array) -> Params:
        keys, ids = jax.random.split(key, 4), jnp.zeros((1, 1), jnp.int32)
        x, joined = jnp.zeros((1, 1, self.hidden_size)), jnp.zeros((1, 2 * self.hidden_size))
        layers = {}
        for i, key_layers in enumerate(jax.random.split(keys[0], len(self.attention_types))):
            block = ReversibleBlock(self.stack, self.attention_types[i])
            layers[str(i)] = init_layers(
                lambda key, block=block: block.init(key, x, RowLayout(ids))["params"], key_layers, self._repeats
            )
        return {
            **{name: table.init(key, ids)["params"]
               for (name, table), key in zip(self._tables.items(), jax.random.split(keys[1], 3), strict=True)},
            "layers": layers,
            "final_norm": self._final_norm.init(keys[2], joined)["params"],
            "lm_head": nn.Dense(self.vocab_size, kernel_init=kernel_init(self.stack)).init(keys[3], joined)["params"],
        }

    def _hidden_states(self, params: Params, inputs: Inputs, key: jax.Array | None) -> jax.Array:
        """Return both streams, concatenated."""
        length = inputs.ids.shape[1]
        documents = jnp.ones_like(inputs.ids) if inputs.segments is None else inputs.segments
        # Pad rows to whole chunks.
        missing = -length % self.length_multiple if length > min(self.chunk_sizes) else 0
        ids, documents = (jnp.pad(x, ((0, 0), (0, missing))) for x in (inputs.ids, documents))
        live = inputs.lengths if key is None else None  # training keeps the kernel, which knows no lengths
        if live is not None:
            live = -(-live // self.length_multiple) * self.length_multiple // self.lsh_chunk_size
        return self._run(params, ids, RowLayout(documents, live), key)[:, :length]

    def _run(self, params: Params, ids: jax.Array, rows: RowLayout, key: jax.Array | None = None) -> jax.Array:
        keys = (None,) * 3 if key is None else jax.random.split(key, 3)
        positions = jnp.minimum(document_positions(rows.segments), self.max_positions - 1)
        x = self._embed(params, ids, positions, keys[0]).astype(jnp.float32)
        types = self.attention_types
        couplings = tuple(ReversibleBlock(self.stack, kind, key is None).coupling for kind in types)
        # Stacked random keys of each coupling's two functions.
        names = [] if key is None else ["dropout", "hashes"] if self.new_hashes else ["dropout"]
        rngs = {name: jax.random.split(jax.random.fold_in(keys[1], i), (len(types), 2, self._repeats))
                for i, name in enumerate(names)}
        per_layer = tuple(
            tuple({name: rng[i, j] for name, rng in rngs.items()} for j in range(2)) for i in range(len(types))
        )
        layers = tuple(params["layers"][str(i)] for i in range(len(types)))
        state = run_reversible(couplings, self._repeats, self.loop_layers, layers, (x, x), per_layer, rows)
        y = call(self._final_norm, params["final_norm"], jnp.concatenate(state, axis=-1))
        return dropout(y, self.dropout, keys[2])

    def _embed(self, params: Params, ids: jax.Array, positions: jax.Array, key: jax.Array | None) -> jax.Array:
        """Return word plus position embeddings; dropout of positions drops whole columns of the grid."""
        keys = (None, None) if key is None else jax.random.split(key)
        grid = {"position_row": positions // self.axial_shape[1], "position_column": positions % self.axial_shape[1]}
        tables = self._tables
        word = call(tables["word"], params["word"], ids)
        position = jnp.concatenate([call(tables[name], params[name], index) for name, index in grid.items()], axis=-1)
        columns = dropout(jnp.ones((ids.shape[0], self.axial_shape[1]), self.dtype), self.dropout, keys[0])
        column = jnp.take_along_axis(columns, grid["position_column"], axis=1)[..., None]
        return dropout(word, self.dropout, keys[1]) + position * column

    @property
    def _repeats(self) -> int:
        """Number of repeats of the attention types."""
        return self.num_layers // len(self.attention_types)

    @property
    def _tables(self) -> dict[str, EmbeddingTable]:
        (rows, columns), widths = self.axial_shape, self.axial_widths
        init = nn.initializers.normal(self.position_init_std)
        return {
            "word": EmbeddingTable(self.vocab_size, self.hidden_size, kernel_init(self.stack), self.dtype),
            "position_row": EmbeddingTable(rows, widths[0], init, self.dtype),
            "position_column": EmbeddingTable(columns, widths[1], init, self.dtype),
        }

    @property
    def _final_norm(self) -> Norm:
        return Norm("layer", self.norm_eps, self.dtype)

    def output_matrix(self, params: Params) -> tuple[Float[Array, "vocab features"], Float[Array, " vocab"]]:
        """Return the output matrix, and its bias, which is not trained: Transformers 5.0 to 5.23 would not add it."""
        return params["lm_head"]["kernel"].T, jax.lax.stop_gradient(params["lm_head"]["bias"])

    def next_logits(self, params: Params, state: UncachedState) -> Float[Array, "batch vocab"]:
        """Return the logits after the last token of each row, as if the row ended there."""
        hidden, mask = self._at_left_edge(params, state.tokens, state.filled)
        return self.predict_tokens(params, last_token(hidden, mask))

    def target_features(
        self, params: Params, prompts: Int[Array, "batch length"], mask: Bool[Array, "batch length"],
        targets: Int[Array, "batch targets"], target_mask: Bool[Array, "batch targets"], start: int = 0,
    ) -> Float[Array, "batch targets features"]:
        """Return the features that predict each target, as if the row had no padding; see `Writer.target_features`."""
        ids = jnp.concatenate([prompts, targets[:, :-1]], axis=1)
        hidden, _ = self._at_left_edge(params, ids, jnp.concatenate([mask, target_mask[:, 1:]], axis=1))
        positions = jnp.sum(mask, axis=1, keepdims=True) - 1 + jnp.arange(targets.shape[1])
        return at_positions(hidden, jnp.maximum(positions, 0))

    def _at_left_edge(
        self, params: Params, ids: Int[Array, "batch length"], mask: Bool[Array, "batch length"]
    ) -> tuple[Float[Array, "batch length width"], Int[Array, "batch length"]]:
        """Return the hidden states of rows that begin with padding, moved to where chunks begin, and their mask."""
        ids, mask = to_left_edge(ids, mask)
        return self._hidden_states(params, Inputs(ids * mask, mask=mask, padding=AtEnd()), None), mask

    def forward_flops(self, length: int, predicted: int = 0) -> float:
        """Return the FLOPs of one sequence's forward pass, with hashing and chunked attention."""
        h, width = self.hidden_size, self.num_heads * self.head_dim
        keys = min(length, 2 * self.local_chunk_size)
        costs = {"local": 4 * h * width + 2 * keys * width, "lsh": 3 * h * width + 2 * length * width}
        if length > self.lsh_chunk_size:
            costs["lsh"] = width * (3 * h + self.num_hashes * (4 * self.lsh_chunk_size + sum(self.buckets) // 2))
        attention = sum(costs[name] for name in self.attention_types) / len(self.attention_types)
        layer = attention + 2 * h * self.intermediate_size
        return 2.0 * (length * self.num_layers * layer + predicted * 2 * h * self.vocab_size)


class Coupling(NamedTuple):
    """Reversible layer (Gomez et al. 2017): y1 = x1 + first(x2), y2 = x2 + second(y1)."""

    first: Callable[[Any, jax.Array, Any, Any, Any], tuple[jax.Array, Any]]
    """(params, x2, layer inputs, shared inputs, residuals) -> (change, residuals).

    The residuals are None in the forward pass. The backward pass gets those of the forward pass, because a recomputed
    x2 is rounded differently and could change discrete choices, such as the bucket of a vector.
    """
    second: Callable[[Any, jax.Array, Any, Any], jax.Array]
    """(params, y1, layer inputs, shared inputs) -> change."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def run_reversible(
    layers: tuple[Coupling, ...], repeats: int, loop: bool, params: tuple[Any, ...],
    state: tuple[jax.Array, jax.Array], per_layer: tuple[Any, ...], shared: Any,
) -> tuple[jax.Array, jax.Array]:
    """Run a sequence of couplings `repeats` times over two streams.

    The backward pass computes each layer's inputs from its outputs, so that memory does not grow with depth, except for
    the residuals of `Coupling.first` (Kitaev et al. 2020, section 3).

    Args:
        layers: The couplings.
        repeats: Number of repeats.
        loop: As in `run_layers`.
        params: For each coupling, the stacked parameters of its repeats.
        state: The two streams.
        per_layer: For each coupling, the stacked inputs of its repeats. They have no gradients.
        shared: Inputs of all layers. They have no gradients.
    """
    return reversible_forward(layers, repeats, loop, params, state, per_layer, shared)[0]


def reversible_forward(layers, repeats, loop, params, state, per_layer, shared):
    """Return the streams after the layers, and the residuals of the backward pass."""
    def forward(params, state, per_layer):
        residuals = []
        for layer, layer_params, layer_inputs in zip(layers, params, per_layer, strict=True):
            x1, x2 = state
            change, residual = layer.first(layer_params, x2, layer_inputs, shared, None)
            y1 = constrain(x1 + change)
            state = y1, constrain(x2 + layer.second(layer_params, y1, layer_inputs, shared))
            residuals.append(residual)
        return state, tuple(residuals)

    state, residuals = run_layers([forward] * repeats, params, state, per_layer, loop=loop)
    return state, (params, state, per_layer, shared, residuals)


def _reversible_backward(layers, repeats, loop, saved, gradient):
    params, state, per_layer, shared, residuals = saved

    def backward_layer(layer, params, carry, layer_inputs, residuals):
        (y1, y2), (dy1, dy2) = carry
        change, vjp = jax.vjp(lambda params, y: layer.second(params, y, layer_inputs, shared), params, y1)
        d_second, dy = vjp(dy2)
        x2, dy1 = constrain(y2 - change), dy1 + dy
        change, vjp = jax.vjp(lambda params, x: layer.first(params, x, layer_inputs, shared, residuals)[0], params, x2)
        d_first, dx = vjp(dy1)
        carry = (constrain(y1 - change), x2), (dy1, dy2 + dx)
        # The barrier runs one layer after the other; otherwise all layers' inputs would be held for their gradients.
        return jax.lax.optimization_barrier((carry, jax.tree.map(jnp.add, d_first, d_second)))

    def backward(params, carry, xs):
        gradients = []
        for layer, layer_params, *layer_xs in reversed(list(zip(layers, params, *xs, strict=True))):
            carry, d_params = backward_layer(layer, layer_params, carry, *layer_xs)
            gradients.insert(0, d_params)
        return carry, tuple(gradients)

    flip = functools.partial(jax.tree.map, lambda leaf: jnp.flip(leaf, 0))
    (_, gradient), d_params = run_layers(
        [backward] * repeats, flip(params), (state, gradient), flip((per_layer, residuals)), loop=loop
    )
    return flip(d_params), gradient, None, None


run_reversible.defvjp(reversible_forward, _reversible_backward)


class ReversibleBlock(nn.Module):
    """Attention and feed-forward functions of a reversible layer, each with a norm before it."""

    config: ChunkedConfig
    kind: AttentionType
    deterministic: bool = True

    def setup(self) -> None:
        c = self.config
        self.attention_norm, self.mlp_norm = (Norm("layer", c.norm_eps, c.dtype) for _ in range(2))
        self.attention = {"local": LocalAttention, "lsh": LshAttention}[self.kind](c, self.deterministic)
        self.mlp = FeedForward(c)

    def attend(self, x: jax.Array, rows: RowLayout, buckets: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        """Return the change by attention, and the buckets of LSH attention."""
        y, buckets = self.attention(self.attention_norm(x), rows, buckets)
        return self._drop(y), buckets

    def feed_forward(self, x: jax.Array) -> jax.Array:
        """Return the change by the feed-forward layer."""
        return self._drop(self.mlp(self.mlp_norm(x), self.deterministic))

    def _drop(self, y: jax.Array) -> jax.Array:
        # The streams stay in float32, because the backward pass cannot recover what rounding removes.
        y = dropout(y, self.config.dropout, module_key(self, self.config.dropout, self.deterministic))
        return y.astype(jnp.float32)

    def __call__(self, x: jax.Array, rows: RowLayout) -> jax.Array:
        return self.feed_forward(self.attend(x, rows, None)[0])

    @property
    def coupling(self) -> Coupling:
        """This layer for `run_reversible`. Its layer inputs are the random keys of both functions, by name."""
        def attend(params: Any, x: jax.Array, keys: Any, rows: RowLayout, buckets: jax.Array | None) -> Any:
            return self.apply({"params": params}, x, rows, buckets, rngs=keys[0], method="attend")

        def feed_forward(params: Any, x: jax.Array, keys: Any, rows: RowLayout) -> jax.Array:
            return self.apply({"params": params}, x, rngs=keys[1], method="feed_forward")

        return Coupling(attend, feed_forward)
