"""T5 1.0 (Raffel et al. 2019) and 1.1: an encoder-decoder with relative position buckets, RMSNorm and no biases."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxlm.errors import UserError
from jaxlm.fields import field
from jaxlm.models.base import Inputs, Writer, to_left_edge
from jaxlm.models.layers.config import PlainActivation, StackConfig, TransformerConfig, check_sizes
from jaxlm.models.layers.dropout import dropout
from jaxlm.models.layers.embeddings import EmbeddingTable
from jaxlm.models.layers.multi_head import Visibility, empty_cache
from jaxlm.models.layers.stack import SharedInputs, call, init_stack, run_stack, stack_flops
from jaxlm.tokenizers.template import Template
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import Params


def _sizes(width: int, heads: int, head_dim: int, feed_forward: int, layers: int) -> dict[str, Any]:
    """Return the fields of a published size."""
    return dict(
        hidden_size=width, num_heads=heads, head_dim=head_dim, intermediate_size=feed_forward, num_layers=layers
    )


# T5 1.1 was pretrained without dropout.
_V1_1 = dict(activation="gated-gelu", tied_head=False, scaled_head=False, dropout=0.0, attention_dropout=0.0)


class EncoderDecoderState(NamedTuple):
    """Decoding state of an encoder-decoder."""

    caches: Any
    """Key/value caches of self-attention and cross-attention in all layers."""
    mask: Int[Array, "batch length"]
    """1 at tokens of the prompts."""
    index: Int[Array, ""]
    """Position of the next token."""


@dataclasses.dataclass(frozen=True)
class T5(TransformerConfig, Writer):
    """T5 encoder-decoder. The defaults are t5-base (1.0).

    Parameters: `shared`, `encoder/layers/…` (stacked), `encoder/final_norm`, `encoder_bias`, the same of the decoder,
    and `lm_head` if the output matrix is not the embedding.
    """

    vocab_size: int = field(32128, vocabulary=True)
    """Vocabulary size (rows of the embedding); a run takes it from its tokenizer, rounded up to a multiple of 128."""
    num_decoder_layers: int | None = None
    """Number of layers of the decoder; none means as many as the encoder."""
    head_dim: int = 64
    """Width of an attention head (d_kv); num_heads · head_dim need not be hidden_size."""
    activation: Literal[PlainActivation, "gated-gelu"] = "relu"
    """Activation of the feed-forward layers: relu in 1.0, gated-gelu (tanh approximation) in 1.1."""
    tied_head: bool = True
    """Use the embedding as the output matrix (1.0); 1.1 has a separate matrix."""
    scaled_head: bool = True
    """Multiply the decoder's output by hidden_size^-1/2 before the output matrix, as 1.0 does."""
    relative_buckets: int = 32
    """Number of buckets of relative distances; all layers of a stack share one table of buckets by heads."""
    relative_max_distance: int = 128
    """Distance from which all keys share a bucket."""
    dropout: float = field(0.1, recipe=True, range="[0, 1)")
    """Dropout rate of the embeddings, inside the feed-forward layers, of each sublayer and of each stack's output."""
    attention_dropout: float = field(0.1, recipe=True, range="[0, 1)")
    """Dropout rate of attention probabilities. Above 0, only the TPU's kernel for short rows in bfloat16 is fused.
    Transformers has one rate for both, so an export has that of `dropout`."""
    norm_eps: float = field(1e-6, range="(0, inf)")
    """Epsilon of the norms."""
    start_id: int | None = None
    """Id of the token that the decoder begins with; none means the padding symbol."""

    template = Template(single="$A eos", pair="$A eos $B eos", needs=("pad", "eos"))
    summary_token = "mean"
    has_encoder = True
    fine_tuning = None
    input_params = ("shared",)
    output_params = ("lm_head",)
    vocab_multiple = 128
    published_sizes: ClassVar = {
        "small": _sizes(512, 8, 64, 2048, 6), "base": _sizes(768, 12, 64, 3072, 12),
        "large": _sizes(1024, 16, 64, 4096, 24), "3b": _sizes(1024, 32, 128, 16384, 24),
        "11b": _sizes(1024, 128, 128, 65536, 24),
        "1.1-small": _sizes(512, 6, 64, 1024, 8) | _V1_1, "1.1-base": _sizes(768, 12, 64, 2048, 12) | _V1_1,
        "1.1-large": _sizes(1024, 16, 64, 2816, 24) | _V1_1, "1.1-xl": _sizes(2048, 32, 64, 5120, 24) | _V1_1,
        "1.1-xxl": _sizes(4096, 64, 64, 10240, 24) | _V1_1,
    }

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

    @property
    def decoder_layers(self) -> int:
        """Number of layers of the decoder."""
        return self.num_layers if self.num_decoder_layers is None else self.num_decoder_layers

    @property
    def encoder_stack(self) -> StackConfig:
        """Configuration of the encoder's layers."""
        return StackConfig.of(
            self, norm="rms", norm_placement="pre", final_norm=True, use_bias=False, score_width=1,
            intermediate_dropout=self.dropout, init="fan_in",
        )

    @property
    def decoder_stack(self) -> StackConfig:
        """Configuration of the decoder's layers."""
        return dataclasses.replace(
            self.encoder_stack, num_layers=self.decoder_layers, causal=True, cross_attention=True
        )

    def init(self, key: jax.Array) -> Params:
        """Return fresh parameters, float32: embedding N(0, 1), matrices N(0, 1/fan_in), query also / √head_dim."""
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

    def _hidden_states(self, params: Params, inputs: Inputs, key: jax.Array | None) -> jax.Array:
        """Return the encoder's output."""
        bias = self.position_bias("encoder", params, inputs.ids.shape[1])
        visible = Visibility(key_segments=_int(inputs.mask), lengths=inputs.lengths, bias=bias)
        return self._run("encoder", params, inputs.ids, SharedInputs(visible), key=key)[0]

    def decoder_states(
        self, params: Params, decoder_ids: Int[Array, "batch targets"],
        memory: Float[Array, "batch length hidden"],
        memory_mask: Int[Array, "batch length"] | Bool[Array, "batch length"] | None = None, *,
        memory_lengths: Int[Array, " batch"] | None = None, key: jax.Array | None = None,
    ) -> Float[Array, "batch targets hidden"]:
        """Return the decoder's output.

        Args:
            params: The model's parameters.
            decoder_ids: Targets shifted right, after `decoder_start`, with padding at the end.
            memory: The encoder's output.
            memory_mask: 1 at the encoder's tokens, 0 at padding.
            memory_lengths: Number of tokens of each row (see `Inputs.lengths`).
            key: Dropout key; None turns dropout off.
        """
        bias = self.position_bias("decoder", params, decoder_ids.shape[1])
        visible = Visibility(key_segments=_int(memory_mask), lengths=memory_lengths)
        shared = SharedInputs(Visibility(bias=bias), memory, visible)
        return self._run("decoder", params, decoder_ids, shared, key=key)[0]

    def decoder_start(self, vocabulary: Vocabulary) -> int:
        return super().decoder_start(vocabulary) if self.start_id is None else self.start_id

    def token_features(self, params: Params, hidden: Float[Array, "*batch hidden"]) -> Float[Array, "*batch hidden"]:
        """Return the decoder's output, scaled by hidden_size^-1/2 if `scaled_head`."""
        return hidden * jnp.asarray(self.hidden_size**-0.5, hidden.dtype) if self.scaled_head else hidden

    def output_matrix(self, params: Params) -> tuple[Float[Array, "vocab hidden"], None]:
        return params["shared"]["embedding"] if self.tied_head else params["lm_head"]["kernel"].T, None

    def prefill(
        self, params: Params, prompts: Int[Array, "batch length"], mask: Bool[Array, "batch length"], new_tokens: int,
        start: int = 0,
    ) -> tuple[Float[Array, "batch vocab"], EncoderDecoderState]:
        """Encode the prompts, and decode the symbol `start`."""
        rows, length = prompts.shape
        prompts, mask = to_left_edge(prompts, mask)
        memory = self.hidden_states(params, Inputs(prompts, mask=mask))
        caches = empty_cache(self.decoder_stack, rows, new_tokens, length)
        first = jnp.full((rows, 1), start, jnp.int32)
        return self._decode(params, first, EncoderDecoderState(caches, mask, jnp.int32(0)), memory)

    def decode(
        self, params: Params, tokens: Int[Array, " batch"], state: EncoderDecoderState
    ) -> tuple[Float[Array, "batch vocab"], EncoderDecoderState]:
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
        self, params: Params, ids: jax.Array, state: EncoderDecoderState, memory: jax.Array | None
    ) -> tuple[jax.Array, EncoderDecoderState]:
        # The first step gets `memory` and fills the caches of cross-attention, which later steps read.
        slots = state.caches[0]["self"]["key"].shape[1]
        filled = (jnp.arange(slots) <= state.index)[None, None, None, :]
        bias = self.position_bias_at(params, state.index, slots)
        shared = SharedInputs(
            Visibility(mask=filled, bias=bias), memory, Visibility(key_segments=_int(state.mask)), state.index
        )
        hidden, caches = self._run("decoder", params, ids, shared, caches=state.caches)
        return self.predict_tokens(params, hidden[:, 0]), EncoderDecoderState(caches, state.mask, state.index + 1)

    def forward_flops(self, length: int, predicted: int = 0) -> float:
        """Return the FLOPs of the encoder and, with `predicted` targets, of the decoder and its output layer."""
        flops = stack_flops(self.encoder_stack, length)
        if predicted:
            flops += stack_flops(self.decoder_stack, predicted, length)
        return flops + 2.0 * predicted * self.hidden_size * self.vocab_size

    def _run(
        self, name: str, params: Params, ids: jax.Array, shared: SharedInputs, *, key: jax.Array | None = None,
        caches: Any = None,
    ) -> tuple[jax.Array, Any]:
        config = self.encoder_stack if name == "encoder" else self.decoder_stack
        keys = (None,) * 3 if key is None else jax.random.split(key, 3)
        x = dropout(call(self._table, params["shared"], ids), self.dropout, keys[0])
        x, caches = run_stack(config, params[name], x, shared, key=keys[1], caches=caches)
        return dropout(x, self.dropout, keys[2]), caches

    @property
    def _table(self) -> EmbeddingTable:
        return EmbeddingTable(self.vocab_size, self.hidden_size, nn.initializers.normal(1.0), self.dtype)

    def _init_bias(self, key: jax.Array) -> Params:
        shape = (self.relative_buckets, self.num_heads)
        return {"embedding": nn.initializers.normal(self.hidden_size**-0.5)(key, shape, jnp.float32)}

    def position_bias(self, stack: str, params: Params, length: int) -> Float[Array, "1 heads length length"]:
        """Return the attention bias of a stack, whose layers share one table of buckets by heads."""
        distance = np.arange(length) - np.arange(length)[:, None]
        # A product, because the gradient of gathering length x length entries is a slow scatter. Its highest precision
        # keeps TPUs from rounding the table's values.
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


def relative_buckets(
    distance: Int[np.ndarray, "*shape"], bidirectional: bool, buckets: int = 32, max_distance: int = 128
) -> Int[np.ndarray, "*shape"]:
    """Return the bucket of `distance` = key position - query position (Raffel et al. 2019, section 2.1).

    Small distances have one bucket each; larger ones share buckets on a logarithmic scale up to `max_distance`.

    Half of the buckets are for keys to the right if `bidirectional`; otherwise all of those have bucket 0.
    """
    if bidirectional:
        buckets //= 2
        offset, distance = buckets * (distance > 0), np.abs(distance)
    else:
        offset, distance = 0, np.maximum(-distance, 0)
    exact = buckets // 2
    fraction = np.log(np.maximum(distance, 1) / exact) / math.log(max_distance / exact)
    # The small constant keeps a distance on a boundary in the upper bucket, however the logarithm rounds.
    far = np.minimum(exact + np.floor(fraction * (buckets - exact) + 1e-9), buckets - 1)
    return (offset + np.where(distance < exact, distance, far)).astype(np.int32)


def _int(mask: jax.Array | None) -> jax.Array | None:
    return None if mask is None else mask.astype(jnp.int32)
