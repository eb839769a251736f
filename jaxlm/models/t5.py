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
from jaxlm.models.base import Inputs, Writer
from jaxlm.models.layers.config import Activation, ExecutionConfig, StackConfig, check_sizes
from jaxlm.models.layers.dropout import dropout
from jaxlm.models.layers.embeddings import Table
from jaxlm.models.layers.multi_head import Visibility, empty_cache
from jaxlm.models.layers.stack import LayerInputs, at_positions, call, init_stack, run_stack, stack_flops
from jaxlm.tokenizers.template import Template
from jaxlm.types import Params

PUBLISHED = {
    "small": (512, 8, 64, 2048, 6), "base": (768, 12, 64, 3072, 12), "large": (1024, 16, 64, 4096, 24),
    "3b": (1024, 32, 128, 16384, 24), "11b": (1024, 128, 128, 65536, 24),
    "1.1-small": (512, 6, 64, 1024, 8), "1.1-base": (768, 12, 64, 2048, 12), "1.1-large": (1024, 16, 64, 2816, 24),
    "1.1-xl": (2048, 32, 64, 5120, 24), "1.1-xxl": (4096, 64, 64, 10240, 24),
}
"""Size → width, heads, width of a head, width of the feed-forward layer, layers of each stack."""


class DecodeState(NamedTuple):
    """State of generation: keys and values of both attentions of all layers, mask of the prompt (int32 [batch,
    length]), and the position of the next token (int32 scalar)."""

    caches: Any
    mask: Array
    index: Array


@dataclasses.dataclass(frozen=True)
class T5(ExecutionConfig, Writer):
    """A T5 encoder-decoder as a value. The defaults are t5-base (1.0).

    Parameters: `shared`, `encoder/layers/…` (stacked), `encoder/final_norm`, `encoder_bias`, the same of the decoder,
    and `lm_head` where it is not the embedding.
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
    """Special symbols around one and two texts."""
    summary_token = "mean"
    has_encoder = True
    fine_tuning = None
    input_params = ("shared",)
    output_params = ("lm_head",)
    vocab_multiple = 128
    """Published models round the rows of the embedding up to a multiple of this."""

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
            intermediate_dropout=self.dropout, init="fan_in", **self.execution,
        )

    @property
    def decoder_stack(self) -> StackConfig:
        """The configuration of the decoder's layers."""
        return dataclasses.replace(
            self.encoder_stack, num_layers=self.decoder_layers, causal=True, cross_attention=True
        )

    def init(self, key: jax.Array) -> Params:
        """Return fresh parameters, float32: embedding N(0, 1), matrices N(0, 1/fan_in), the query's divided by
        √head_dim."""
        keys, ids = jax.random.split(key, 6), jnp.zeros((1, 2), jnp.int32)
        params = {
            "shared": self._table.init(keys[0], ids)["params"],
            "encoder": init_stack(self.encoder_stack, keys[1]),
            "encoder_bias": self._init_bias(keys[2]),
            "decoder": init_stack(self.decoder_stack, keys[3]),
            "decoder_bias": self._init_bias(keys[4]),
        }
        if not self.tied_head:
            kernel = nn.initializers.variance_scaling(1.0, "fan_in", "normal")
            params["lm_head"] = {"kernel": kernel(keys[5], (self.hidden_size, self.vocab_size), jnp.float32)}
        return params

    def hidden_states(
        self, params: Params, inputs: Inputs, *, key: jax.Array | None = None,
        at: Int[Array, "batch selected"] | None = None,
    ) -> Float[Array, "batch length_or_selected hidden"]:
        """Return the encoder's output."""
        bias = self.position_bias("encoder", params, inputs.ids.shape[1])
        visible = Visibility(key_segments=_int(inputs.mask), bias=bias)
        x, _ = self._run("encoder", params, inputs.ids, LayerInputs(visible), key=key)
        return x if at is None else at_positions(x, at)

    def decoder_states(
        self, params: Params, decoder_ids: Int[Array, "batch targets"],
        memory: Float[Array, "batch length hidden"],
        memory_mask: Int[Array, "batch length"] | Bool[Array, "batch length"] | None = None, *,
        key: jax.Array | None = None,
    ) -> Float[Array, "batch targets hidden"]:
        """Return the decoder's output.

        Args:
            params: The model's parameters.
            decoder_ids: Targets shifted right; padding stands at the end.
            memory: The encoder's output.
            memory_mask: 1 at the encoder's tokens, 0 at padding.
            key: Dropout key; None turns dropout off.
        """
        bias = self.position_bias("decoder", params, decoder_ids.shape[1])
        inputs = LayerInputs(Visibility(bias=bias), memory, Visibility(key_segments=_int(memory_mask)))
        return self._run("decoder", params, decoder_ids, inputs, key=key)[0]

    def token_features(self, params: Params, hidden: Float[Array, "*batch hidden"]) -> Float[Array, "*batch hidden"]:
        """Return the decoder's output, scaled down where the output matrix is the embedding, of unit variance."""
        return hidden * jnp.asarray(self.hidden_size**-0.5, hidden.dtype) if self.scaled_head else hidden

    def output_matrix(self, params: Params) -> tuple[Float[Array, "vocab hidden"], None]:
        return params["shared"]["embedding"] if self.tied_head else params["lm_head"]["kernel"].T, None

    def prefill(
        self, params: Params, prompts: Int[Array, "batch length"], mask: Bool[Array, "batch length"], new_tokens: int,
        start: int = 0,
    ) -> tuple[Float[Array, "batch vocab"], DecodeState]:
        """Encode the prompts and read the decoder's symbol `start`."""
        rows, length = prompts.shape
        prompts, mask = to_left_edge(prompts, mask)
        memory = self.hidden_states(params, Inputs(prompts, mask=mask))
        caches = empty_cache(self.decoder_stack, rows, new_tokens, length)
        first = jnp.full((rows, 1), start, jnp.int32)
        return self._decode(params, first, DecodeState(caches, mask, jnp.int32(0)), memory)

    def decode(
        self, params: Params, tokens: Int[Array, " batch"], state: DecodeState
    ) -> tuple[Float[Array, "batch vocab"], DecodeState]:
        return self._decode(params, tokens[:, None], state, None)

    def target_features(
        self, params: Params, prompts: Int[Array, "batch length"], mask: Bool[Array, "batch length"],
        targets: Int[Array, "batch targets"], target_mask: Bool[Array, "batch targets"], start: int = 0,
    ) -> Float[Array, "batch targets hidden"]:
        prompts, mask = to_left_edge(prompts, mask)
        memory = self.hidden_states(params, Inputs(prompts, mask=mask))
        shifted = jnp.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=start)
        return self.token_features(params, self.decoder_states(params, shifted, memory, mask))

    def _decode(
        self, params: Params, ids: jax.Array, state: DecodeState, memory: jax.Array | None
    ) -> tuple[jax.Array, DecodeState]:
        # The first step gets `memory`, and fills the caches of cross-attention; later steps only read those.
        slots = state.caches[0]["self"]["key"].shape[1]
        filled = (jnp.arange(slots) <= state.index)[None, None, None, :]
        bias = self.position_bias_at(params, state.index, slots)
        inputs = LayerInputs(
            Visibility(mask=filled, bias=bias), memory, Visibility(key_segments=_int(state.mask)), state.index
        )
        hidden, caches = self._run("decoder", params, ids, inputs, caches=state.caches)
        return self.predict_tokens(params, hidden[:, 0]), DecodeState(caches, state.mask, state.index + 1)

    def forward_flops(self, length: int, predicted: int = 0) -> float:
        """Return the FLOPs of the encoder, and with `predicted` targets those of the decoder and its output layer."""
        flops = stack_flops(self.encoder_stack, length)
        if predicted:
            flops += stack_flops(self.decoder_stack, predicted, length)
        return flops + 2.0 * predicted * self.hidden_size * self.vocab_size

    def _run(
        self, name: str, params: Params, ids: jax.Array, inputs: LayerInputs, *, key: jax.Array | None = None,
        caches: Any = None,
    ) -> tuple[jax.Array, Any]:
        config = self.encoder_stack if name == "encoder" else self.decoder_stack
        keys = (None,) * 3 if key is None else jax.random.split(key, 3)
        x = dropout(call(self._table, params["shared"], ids), self.dropout, keys[0])
        x, caches = run_stack(config, params[name], x, inputs, key=keys[1], caches=caches)
        return dropout(x, self.dropout, keys[2]), caches

    @property
    def _table(self) -> Table:
        return Table(self.vocab_size, self.hidden_size, nn.initializers.normal(1.0), self.dtype)

    def _init_bias(self, key: jax.Array) -> Params:
        shape = (self.relative_buckets, self.num_heads)
        return {"embedding": nn.initializers.normal(self.hidden_size**-0.5)(key, shape, jnp.float32)}

    def position_bias(self, stack: str, params: Params, length: int) -> Float[Array, "1 heads length length"]:
        """Return the attention bias of a stack, whose layers share one table of buckets by heads."""
        distance = np.arange(length) - np.arange(length)[:, None]
        # A product, since a gather of length x length entries has a slow scatter for its gradient. It is exact: the
        # rounding that TPUs apply to float32 by default would change the table's values.
        one_hot = jax.nn.one_hot(self._buckets(stack, distance), self.relative_buckets)
        table = params[f"{stack}_bias"]["embedding"]
        return jnp.einsum("qkb,bh->hqk", one_hot, table, precision="highest")[None]

    def position_bias_at(self, params: Params, index: Int[Array, ""], slots: int) -> Float[Array, "1 heads 1 slots"]:
        """Return the decoder's bias of the query at position `index` over cache slots."""
        by_distance = jnp.asarray(self._buckets("decoder", -np.arange(slots)))
        buckets = by_distance[jnp.clip(index - jnp.arange(slots), 0, slots - 1)]
        return params["decoder_bias"]["embedding"][buckets].T[None, :, None, :]

    def _buckets(self, stack: str, distance: np.ndarray) -> np.ndarray:
        return relative_buckets(distance, stack == "encoder", self.relative_buckets, self.relative_max_distance)


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


def _int(mask: jax.Array | None) -> jax.Array | None:
    return None if mask is None else mask.astype(jnp.int32)
