"""GPT-2 (Radford et al. 2019): a causal, pre-norm decoder with learned positions and tied embeddings."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, NamedTuple, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxlm.fields import field
from jaxlm.models.decoder import Decoder, Params
from jaxlm.models.encoder import stack_flops
from jaxlm.models.layers.config import PlainActivation, StackConfig, check_heads, check_sizes
from jaxlm.models.layers.embeddings import Embeddings
from jaxlm.models.layers.multi_head import Visibility, empty_cache
from jaxlm.models.layers.stack import LayerInputs, Stack
from jaxlm.tokenizers.template import Template

PUBLISHED = {"small": (12, 768, 12), "medium": (24, 1024, 16), "large": (36, 1280, 20), "xl": (48, 1600, 25)}
"""Size → layers, width, heads."""


class DecodeState(NamedTuple):
    """What generation carries from token to token.

    caches: keys and values of each layer, of static shape. filled: bool [batch, slots], the slots that may be looked
    at. position: int32 [batch], the position of the next token. index: int32 scalar, the slot of the next token.
    """

    caches: Any
    filled: Array
    position: Array
    index: Array


@dataclasses.dataclass(frozen=True)
class Gpt2(Decoder):
    """A GPT-2 decoder as a value. The defaults are the 124M model (first announced as 117M).

    Parameters: `embeddings/{word,position}`, `decoder/layers/i/…`, `decoder/final_norm`.
    """

    vocab_size: int = 50257
    """Rows of the word embedding, which is also the output matrix; a run sets it from its tokenizer."""
    hidden_size: int = 768
    """Width of the residual stream."""
    num_layers: int = 12
    """Transformer layers."""
    num_heads: int = 12
    """Attention heads; must divide hidden_size."""
    intermediate_size: int = 3072
    """Width of the feed-forward layer."""
    max_positions: int = 1024
    """Learned positions: the longest sequence."""
    activation: PlainActivation = "gelu_new"
    """gelu_new is the tanh approximation that GPT-2 uses, gelu the exact (erf) form."""
    dropout: float = field(0.0, recipe=True)
    """Dropout after the embeddings, the attention output and the feed-forward output. The released code has none."""
    attention_dropout: float = field(0.0, recipe=True)
    """Dropout on attention probabilities; above 0 it rules out fused attention kernels while training."""
    norm_eps: float = 1e-5
    """Epsilon of LayerNorm."""
    init_std: float = 0.02
    """Standard deviation of the normal that matrices and word embeddings are initialized from."""
    position_init_std: float = 0.01
    """The same for the position embedding: 0.01 in the released code, 0.02 in Transformers."""
    residual_init_scale: float | None = None
    """Factor on init_std for matrices that write to the residual stream; none means 1/sqrt(2 num_layers)."""

    def __post_init__(self) -> None:
        check_sizes(self)
        check_heads(self.hidden_size, self.num_heads)

    template: ClassVar[Template] = Template(needs=("eos",))
    """What stands around a text."""

    @classmethod
    def published(cls, size: str, **changes: Any) -> Self:
        """A published size by name: small (124M), medium (355M), large (774M) or xl (1.5B)."""
        layers, hidden, heads = PUBLISHED[size]
        shape = dict(num_layers=layers, hidden_size=hidden, num_heads=heads, intermediate_size=4 * hidden)
        return cls(**(shape | changes))

    @property
    def stack(self) -> StackConfig:
        """The configuration of the layers."""
        scale = self.residual_init_scale
        return StackConfig(
            hidden_size=self.hidden_size, num_layers=self.num_layers, num_heads=self.num_heads,
            head_dim=self.hidden_size // self.num_heads, intermediate_size=self.intermediate_size,
            activation=self.activation, norm_placement="pre", norm_eps=self.norm_eps, final_norm=True, causal=True,
            dropout=self.dropout, attention_dropout=self.attention_dropout, init="normal", init_std=self.init_std,
            residual_init_scale=1.0 / math.sqrt(2 * self.num_layers) if scale is None else scale,
            **self.computation,
        )

    def init(self, key: jax.Array) -> Params:
        """Fresh parameters, float32."""
        ids = jnp.zeros((1, 2), jnp.int32)
        return Gpt2Module(self).init({"params": key}, ids, ids)["params"]

    def decode_hidden(
        self,
        params: Params,
        input_ids: Int[Array, "batch length"],
        segment_ids: Int[Array, "batch length"] | None = None,
        dropout_key: jax.Array | None = None,
    ) -> Float[Array, "batch length hidden"]:
        one_document = jnp.arange(input_ids.shape[1])[None, :]
        positions = one_document if segment_ids is None else document_positions(segment_ids)
        rngs = None if dropout_key is None else {"dropout": dropout_key}
        return Gpt2Module(self).apply(
            {"params": params}, input_ids, positions, Visibility(segment_ids, segment_ids),
            deterministic=dropout_key is None, rngs=rngs,
        )[0]

    def output_matrix(self, params: Params) -> tuple[Float[Array, "vocab hidden"], None]:
        """(matrix, no bias) that turn `token_features` into vocabulary logits: the word embedding."""
        return params["embeddings"]["word"]["embedding"], None

    def prefill(
        self, params: Params, prompts: Int[Array, "batch length"], mask: Bool[Array, "batch length"], new_tokens: int
    ) -> tuple[Float[Array, "batch vocab"], DecodeState]:
        """Reads prompts padded on the left: logits for the token that follows, and a state with room for `new_tokens`
        more."""
        batch, length = prompts.shape
        slots = length + new_tokens
        filled = jnp.pad(mask, ((0, 0), (0, new_tokens)))
        positions = jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0)
        causal = jnp.arange(length)[:, None] >= jnp.arange(slots)[None, :]
        hidden, caches = Gpt2Module(self).apply(
            {"params": params}, prompts, positions, Visibility(mask=filled[:, None, None, :] & causal),
            empty_cache(self.stack, batch, slots), jnp.int32(0),
        )
        state = DecodeState(caches, filled, positions[:, -1] + 1, jnp.int32(length))
        return self.predict_tokens(params, hidden[:, -1]), state

    def decode(
        self, params: Params, tokens: Int[Array, " batch"], state: DecodeState
    ) -> tuple[Float[Array, "batch vocab"], DecodeState]:
        """Appends one token to each row: logits for the next one, and the state after it."""
        filled = state.filled.at[:, state.index].set(True)
        hidden, caches = Gpt2Module(self).apply(
            {"params": params}, tokens[:, None], state.position[:, None], Visibility(mask=filled[:, None, None, :]),
            state.caches, state.index,
        )
        state = DecodeState(caches, filled, state.position + 1, state.index + 1)
        return self.predict_tokens(params, hidden[:, 0]), state

    def flops(self, length: int) -> float:
        """FLOPs of one sequence's forward pass: matrix products and full attention; a multiply-add counts as 2."""
        return stack_flops(self.stack, length) + 2.0 * length * self.hidden_size * self.vocab_size


def document_positions(segment_ids: Int[Array, "batch length"]) -> Int[Array, "batch length"]:
    """Positions that count from 0 in each document of a packed row."""
    p = jnp.arange(segment_ids.shape[1])[None, :]
    begins = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
    return p - jax.lax.cummax(jnp.where(begins, p, 0), axis=1)


class Gpt2Module(nn.Module):
    """Embeddings and layers under the names that checkpoints use."""

    model: Gpt2

    def setup(self) -> None:
        m = self.model
        normal = nn.initializers.normal
        self.embeddings = Embeddings(
            m.vocab_size, m.hidden_size, m.max_positions, 0, None, m.dropout, normal(m.init_std),
            normal(m.position_init_std), m.dtype,
        )
        self.decoder = Stack(m.stack)

    def __call__(self, input_ids, positions, visible=None, caches=None, index=None, deterministic=True):
        x = self.embeddings(input_ids, positions, deterministic=deterministic)
        inputs = LayerInputs(visible=visible or Visibility(), index=index)
        return self.decoder(x, inputs, caches=caches, deterministic=deterministic)
