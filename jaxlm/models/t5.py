"""T5 1.0 (Raffel et al. 2019) and 1.1: an encoder-decoder with relative position buckets, RMSNorm and no biases."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, NamedTuple, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxlm.errors import UserError
from jaxlm.fields import field
from jaxlm.models.encoder import stack_flops
from jaxlm.models.layers.config import Activation, Computation, StackConfig, check_sizes
from jaxlm.models.layers.dropout import dropout, module_key
from jaxlm.models.layers.embeddings import Table, logits
from jaxlm.models.layers.multi_head import Visibility, empty_cache
from jaxlm.models.layers.stack import LayerInputs, Stack
from jaxlm.tokenizers.template import Template
from jaxlm.tokenizers.vocabulary import Vocabulary

Params = dict[str, Any]

VOCAB_MULTIPLE = 128
"""The embedding's rows are rounded up to a multiple of this, as in the published models."""

PUBLISHED = {
    "small": (512, 8, 64, 2048, 6), "base": (768, 12, 64, 3072, 12), "large": (1024, 16, 64, 4096, 24),
    "3b": (1024, 32, 128, 16384, 24), "11b": (1024, 128, 128, 65536, 24),
    "1.1-small": (512, 6, 64, 1024, 8), "1.1-base": (768, 12, 64, 2048, 12), "1.1-large": (1024, 16, 64, 2816, 24),
    "1.1-xl": (2048, 32, 64, 5120, 24), "1.1-xxl": (4096, 64, 64, 10240, 24),
}
"""Size → width, heads, width of a head, width of the feed-forward layer, layers of each stack."""


class DecodeState(NamedTuple):
    """What generation carries from token to token: keys and values of both attentions of each layer, where the prompt
    is real (int32 [batch, length]), and the position of the next token (int32 scalar)."""

    caches: Any
    mask: Array
    index: Array


@dataclasses.dataclass(frozen=True)
class T5(Computation):
    """A T5 encoder-decoder as a value. The defaults are t5-base (1.0).

    Parameters: `shared`, `encoder/layers/i/…`, `encoder/final_norm`, `encoder_bias`, the same of the decoder, and
    `lm_head` where it is not the embedding.
    """

    vocab_size: int = 32128
    """Rows of the embedding; a run sets it from its tokenizer, rounded up to a multiple of 128."""
    hidden_size: int = 768
    """Width of the residual stream (d_model)."""
    num_layers: int = 12
    """Layers of the encoder, and of the decoder unless num_decoder_layers says otherwise."""
    num_decoder_layers: int | None = None
    """Layers of the decoder; as many as the encoder has when not given."""
    num_heads: int = 12
    """Attention heads of head_dim each; their product need not be hidden_size."""
    head_dim: int = 64
    """Width of one head (d_kv)."""
    intermediate_size: int = 3072
    """Width of the feed-forward layer (d_ff)."""
    activation: Activation = "relu"
    """relu in 1.0, gated-gelu (tanh approximation) in 1.1."""
    tied_head: bool = True
    """Use the embedding as output matrix too (1.0); 1.1 has a matrix of its own."""
    scaled_head: bool = True
    """Multiply the decoder's output by hidden_size^-1/2 before the output matrix, as 1.0 does."""
    relative_buckets: int = 32
    """Buckets of relative distance; each stack has one table of buckets by heads, shared by its layers."""
    relative_max_distance: int = 128
    """Distance from which all keys share a bucket."""
    dropout: float = field(0.1, recipe=True)
    """Dropout after the embeddings, inside the feed-forward layers, on each sublayer and on each stack's output."""
    attention_dropout: float = field(0.1, recipe=True)
    """Dropout on attention probabilities; above 0 it rules out fused attention kernels while training.
    Transformers has one rate for both, so an export says `dropout`."""
    norm_eps: float = 1e-6
    """Epsilon of RMSNorm."""

    template: ClassVar[Template] = Template(single="$A eos", pair="$A eos $B eos", needs=("pad", "eos"))
    """What stands around a text."""

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.scaled_head and not self.tied_head:  # Transformers' T5 has no such model
            raise UserError(
                "objective.model.scaled_head goes with tied_head only (T5 1.0 has both, 1.1 neither); set it to False."
            )
        if self.relative_buckets < 4 or self.relative_buckets % 4:
            raise UserError(
                f"objective.model.relative_buckets is {self.relative_buckets}; it must be a multiple of 4 (half for "
                "each direction, half of those for exact distances)."
            )
        if self.relative_max_distance <= self.relative_buckets // 2:
            raise UserError(
                f"objective.model.relative_max_distance is {self.relative_max_distance}; it must be above half of "
                f"relative_buckets, {self.relative_buckets // 2}."
            )

    @classmethod
    def published(cls, size: str, **changes: Any) -> Self:
        """A published size by name: small, base, large, 3b, 11b; 1.1-small, 1.1-base, 1.1-large, 1.1-xl, 1.1-xxl."""
        hidden, heads, head_dim, intermediate, layers = PUBLISHED[size]
        shape = dict(
            hidden_size=hidden, num_heads=heads, head_dim=head_dim, intermediate_size=intermediate, num_layers=layers
        )
        if size.startswith("1.1-"):  # pretrained without dropout
            shape |= dict(activation="gated-gelu", tied_head=False, scaled_head=False)
            shape |= dict(dropout=0.0, attention_dropout=0.0)
        return cls(**(shape | changes))

    @property
    def decoder_layers(self) -> int:
        """Number of layers of the decoder."""
        return self.num_layers if self.num_decoder_layers is None else self.num_decoder_layers

    @property
    def encoder_stack(self) -> StackConfig:
        """The configuration of the encoder's layers."""
        return StackConfig(
            hidden_size=self.hidden_size, num_layers=self.num_layers, num_heads=self.num_heads,
            head_dim=self.head_dim, intermediate_size=self.intermediate_size, activation=self.activation,
            norm="rms", norm_placement="pre", norm_eps=self.norm_eps, final_norm=True, use_bias=False,
            scale_attention=False, dropout=self.dropout, attention_dropout=self.attention_dropout,
            intermediate_dropout=self.dropout, init="fan_in", **self.computation,
        )

    @property
    def decoder_stack(self) -> StackConfig:
        """The configuration of the decoder's layers."""
        return dataclasses.replace(
            self.encoder_stack, num_layers=self.decoder_layers, causal=True, cross_attention=True
        )

    def bind(self, vocabulary: Vocabulary) -> Self:
        """A copy with as many rows of embedding as the vocabulary needs, rounded up."""
        return dataclasses.replace(self, vocab_size=vocabulary.rows(self.vocab_size, VOCAB_MULTIPLE))

    def init(self, key: jax.Array) -> Params:
        """Fresh parameters, float32: embedding N(0, 1), matrices N(0, 1/fan_in), the query's divided by √head_dim."""
        ids = jnp.zeros((1, 2), jnp.int32)
        return T5Module(self).init({"params": key}, ids, ids)["params"]

    def encode(
        self,
        params: Params,
        input_ids: Int[Array, "batch length"],
        attention_mask: Int[Array, "batch length"] | Bool[Array, "batch length"] | None = None,
        dropout_key: jax.Array | None = None,
    ) -> Float[Array, "batch length hidden"]:
        """The encoder's output. attention_mask is 1 at tokens and 0 at padding, which stands at the end of a row; a
        dropout_key turns dropout on."""
        return self._apply("encode", params, dropout_key, input_ids, attention_mask)

    def decode_hidden(
        self,
        params: Params,
        decoder_input_ids: Int[Array, "batch targets"],
        memory: Float[Array, "batch length hidden"],
        memory_mask: Int[Array, "batch length"] | Bool[Array, "batch length"] | None = None,
        dropout_key: jax.Array | None = None,
    ) -> Float[Array, "batch targets hidden"]:
        """The decoder's output for targets shifted right, over the encoder's output `memory`. Padding stands at the
        end."""
        return self._apply("decode", params, dropout_key, decoder_input_ids, memory, memory_mask)

    def _apply(self, method: str, params: Params, dropout_key: jax.Array | None, *inputs: Any) -> jax.Array:
        rngs = None if dropout_key is None else {"dropout": dropout_key}
        return T5Module(self).apply({"params": params}, *inputs, dropout_key is None, rngs=rngs, method=method)

    def token_features(self, params: Params, hidden: Float[Array, "*batch hidden"]) -> Float[Array, "*batch hidden"]:
        """What the output matrix is multiplied with: the decoder's output, scaled down where that matrix is the
        embedding, which has unit variance."""
        return hidden * jnp.asarray(self.hidden_size**-0.5, hidden.dtype) if self.scaled_head else hidden

    def output_matrix(self, params: Params) -> tuple[Float[Array, "vocab hidden"], None]:
        """(matrix, no bias) that turn `token_features` into vocabulary logits."""
        return params["shared"]["embedding"] if self.tied_head else params["lm_head"]["kernel"].T, None

    def predict_tokens(
        self, params: Params, hidden: Float[Array, "*batch hidden"]
    ) -> Float[Array, "*batch vocab"]:
        """Vocabulary logits in float32 of the decoder's output."""
        return logits(self.token_features(params, hidden), *self.output_matrix(params))

    def prefill(
        self, params: Params, prompts: Int[Array, "batch length"], mask: Bool[Array, "batch length"], new_tokens: int,
        start: int,
    ) -> tuple[Float[Array, "batch vocab"], DecodeState]:
        """Encodes the prompts and reads the symbol `start` of the decoder: logits for the first new token, and a state
        with room for `new_tokens`."""
        rows, length = prompts.shape
        prompts, mask = to_left_edge(prompts, mask)
        memory = self.encode(params, prompts, mask)
        caches = empty_cache(self.decoder_stack, rows, new_tokens, length)
        first = jnp.full((rows, 1), start, jnp.int32)
        return self._decode(params, first, DecodeState(caches, mask, jnp.int32(0)), memory)

    def decode(
        self, params: Params, tokens: Int[Array, " batch"], state: DecodeState
    ) -> tuple[Float[Array, "batch vocab"], DecodeState]:
        """Appends one token to each row: logits for the next one, and the state after it."""
        return self._decode(params, tokens[:, None], state, None)

    def _decode(self, params, ids, state, memory):
        # The first step is given `memory`, and fills the caches of cross-attention; later steps only read those.
        hidden, caches = T5Module(self).apply(
            {"params": params}, ids, state.caches, state.index, memory, state.mask, method="decode_step"
        )
        return self.predict_tokens(params, hidden[:, 0]), DecodeState(caches, state.mask, state.index + 1)

    def flops(self, inputs: int, targets: int) -> float:
        """FLOPs of one sequence's forward pass: matrix products and full attention; a multiply-add counts as 2."""
        layers = stack_flops(self.encoder_stack, inputs) + stack_flops(self.decoder_stack, targets, inputs)
        return layers + 2.0 * targets * self.hidden_size * self.vocab_size


def to_left_edge(
    prompts: Int[Array, "batch length"], mask: Bool[Array, "batch length"]
) -> tuple[Int[Array, "batch length"], Int[Array, "batch length"]]:
    """(Rows padded on the left as the encoder expects them, padded on the right; their mask, int32.) Its positions are
    relative, so nothing else changes."""
    places = (jnp.arange(prompts.shape[1]) - jnp.sum(mask, axis=1, keepdims=True)) % prompts.shape[1]
    return tuple(jnp.take_along_axis(x, places, axis=1) for x in (prompts, mask.astype(jnp.int32)))


def relative_buckets(
    distance: Int[np.ndarray, "*shape"], bidirectional: bool, buckets: int = 32, max_distance: int = 128
) -> Int[np.ndarray, "*shape"]:
    """Bucket of `distance` = key position - query position (T5, section 2.1): small distances have one each, larger
    ones share them on a logarithmic scale up to max_distance.

    Bidirectional gives half of the buckets to keys on the right; otherwise all of those are in bucket 0.
    """
    if bidirectional:
        buckets //= 2
        offset, distance = buckets * (distance > 0), np.abs(distance)
    else:
        offset, distance = 0, np.maximum(-distance, 0)
    exact = buckets // 2
    share = np.log(np.maximum(distance, 1) / exact) / math.log(max_distance / exact)
    # The small constant keeps a distance exactly on a boundary on its upper side, however the logarithm rounds.
    far = np.minimum(exact + np.floor(share * (buckets - exact) + 1e-9), buckets - 1)
    return (offset + np.where(distance < exact, distance, far)).astype(np.int32)


class RelativeBias(nn.Module):
    """One table [buckets, heads] that biases attention scores by distance, shared by the layers of a stack."""

    model: T5
    bidirectional: bool

    def setup(self) -> None:
        c = self.model
        init = nn.initializers.normal(c.hidden_size**-0.5)
        self.embedding = self.param("embedding", init, (c.relative_buckets, c.num_heads), jnp.float32)

    def buckets(self, distance: np.ndarray) -> np.ndarray:
        c = self.model
        return relative_buckets(distance, self.bidirectional, c.relative_buckets, c.relative_max_distance)

    def __call__(self, queries: int, keys: int) -> Float[Array, "1 heads queries keys"]:
        """Looked up by a product, since a gather of queries x keys entries has a slow scatter for its gradient."""
        distance = np.arange(keys) - np.arange(queries)[:, None]
        one_hot = jax.nn.one_hot(self.buckets(distance), self.model.relative_buckets)
        # Exact products: the rounding that TPUs apply to float32 by default would change the table's values.
        return jnp.einsum("qkb,bh->hqk", one_hot, self.embedding, precision="highest")[None]

    def at(self, index: Int[Array, ""], slots: int) -> Float[Array, "1 heads 1 slots"]:
        """The bias of one query at position `index` over cache slots 0..slots-1."""
        by_distance = jnp.asarray(self.buckets(-np.arange(slots)))
        buckets = by_distance[jnp.clip(index - jnp.arange(slots), 0, slots - 1)]
        return self.embedding[buckets].T[None, :, None, :]


class T5Module(nn.Module):
    """Embedding, two stacks with their bias tables, and the head, under the names that checkpoints use."""

    model: T5

    def setup(self) -> None:
        m = self.model
        self.shared = Table(m.vocab_size, m.hidden_size, nn.initializers.normal(1.0), m.dtype)
        self.encoder_bias = RelativeBias(m, bidirectional=True)
        self.decoder_bias = RelativeBias(m, bidirectional=False)
        self.encoder = Stack(m.encoder_stack)
        self.decoder = Stack(m.decoder_stack)
        if not m.tied_head:
            self.lm_head = OutputMatrix(m.hidden_size, m.vocab_size)

    def _dropout(self, x, deterministic):
        return dropout(x, self.model.dropout, module_key(self, self.model.dropout, deterministic))

    def encode(self, input_ids, attention_mask, deterministic=True):
        length = input_ids.shape[1]
        x = self._dropout(self.shared(input_ids), deterministic)
        visible = Visibility(key_segments=_int(attention_mask), bias=self.encoder_bias(length, length))
        x, _ = self.encoder(x, LayerInputs(visible), deterministic=deterministic)
        return self._dropout(x, deterministic)

    def decode(self, decoder_input_ids, memory, memory_mask, deterministic=True):
        length = decoder_input_ids.shape[1]
        x = self._dropout(self.shared(decoder_input_ids), deterministic)
        inputs = LayerInputs(
            visible=Visibility(bias=self.decoder_bias(length, length)), memory=memory,
            memory_visible=Visibility(key_segments=_int(memory_mask)),
        )
        x, _ = self.decoder(x, inputs, deterministic=deterministic)
        return self._dropout(x, deterministic)

    def decode_step(self, ids, caches, index, memory, memory_mask):
        slots = caches[0]["self"]["key"].shape[1]
        filled = (jnp.arange(slots) <= index)[None, None, None, :]
        inputs = LayerInputs(
            visible=Visibility(mask=filled, bias=self.decoder_bias.at(index, slots)), memory=memory,
            memory_visible=Visibility(key_segments=_int(memory_mask)), index=index,
        )
        return self.decoder(self.shared(ids), inputs, caches=caches)

    def __call__(self, input_ids, decoder_input_ids):
        hidden = self.decode(decoder_input_ids, self.encode(input_ids, None), None)
        return hidden if self.model.tied_head else self.lm_head(hidden)


class OutputMatrix(nn.Module):
    """An output layer without bias."""

    width: int
    vocab_size: int

    @nn.compact
    def __call__(self, hidden):
        init = nn.initializers.variance_scaling(1.0, "fan_in", "normal")
        return hidden @ self.param("kernel", init, (self.width, self.vocab_size), jnp.float32)


def _int(mask: jax.Array | None) -> jax.Array | None:
    return None if mask is None else mask.astype(jnp.int32)
