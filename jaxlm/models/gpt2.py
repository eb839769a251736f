"""GPT-2 (Radford et al. 2019): a pre-norm decoder with learned positions and tied embeddings."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxlm.fields import field
from jaxlm.models.base import Inputs, document_positions
from jaxlm.models.decoder import CachedWriter
from jaxlm.models.layers.config import PlainActivation, StackConfig, TransformerConfig, transformer_sizes
from jaxlm.models.layers.embeddings import Embeddings
from jaxlm.models.layers.multi_head import Visibility
from jaxlm.models.layers.stack import SharedInputs, call, init_stack, run_stack, stack_flops
from jaxlm.types import Params


@dataclasses.dataclass(frozen=True)
class Gpt2(TransformerConfig, CachedWriter):
    """GPT-2 decoder. The defaults are the 124M model (first announced as 117M).

    Parameters: `embeddings/{word,position}`, `decoder/layers/…` (stacked), `decoder/final_norm`.
    """

    vocab_size: int = field(50257, vocabulary=True)
    """Vocabulary size (rows of the word embedding); a run takes it from its tokenizer."""
    max_positions: int = 1024
    """Maximum sequence length (rows of the position embedding)."""
    activation: PlainActivation = "gelu_new"
    """Activation of the feed-forward layers: gelu_new is the tanh approximation, gelu the exact (erf) form."""
    dropout: float = field(0.0, recipe=True, range="[0, 1)")
    """Dropout rate of the embeddings, the attention output and the feed-forward output. The released code has none."""
    attention_dropout: float = field(0.0, recipe=True, range="[0, 1)")
    """Dropout rate of attention probabilities. Above 0, only the TPU's kernel for short rows in bfloat16 is fused."""
    norm_eps: float = field(1e-5, range="(0, inf)")
    """Epsilon of the norms."""
    init_std: float = 0.02
    """Standard deviation of the normal that initializes matrices and the word embedding."""
    position_init_std: float = 0.01
    """The same for the position embedding: 0.01 in the released code, 0.02 in Transformers."""
    residual_init_scale: float | None = None
    """Factor on init_std for matrices that write to the residual stream; none means 1/sqrt(2 num_layers)."""

    output_params = ()
    published_sizes: ClassVar = {
        "small": transformer_sizes(12, 768), "medium": transformer_sizes(24, 1024),
        "large": transformer_sizes(36, 1280), "xl": transformer_sizes(48, 1600),
    }

    @property
    def stack(self) -> StackConfig:
        """Configuration of the layers."""
        scale = self.residual_init_scale
        return StackConfig.of(
            self, norm_placement="pre", final_norm=True, causal=True, init="normal",
            residual_init_scale=1.0 / math.sqrt(2 * self.num_layers) if scale is None else scale,
        )

    def init(self, key: jax.Array) -> Params:
        key_embeddings, key_stack = jax.random.split(key)
        ids = jnp.zeros((1, 2), jnp.int32)
        return {
            "embeddings": self._embeddings.init(key_embeddings, ids, ids)["params"],
            "decoder": init_stack(self.stack, key_stack),
        }

    def _hidden_states(self, params: Params, inputs: Inputs, key: jax.Array | None) -> jax.Array:
        segments = inputs.segments
        positions = jnp.arange(inputs.ids.shape[1])[None, :] if segments is None else document_positions(segments)
        shared = SharedInputs(Visibility(segments, segments))
        return self._run_tokens(params, inputs.ids, positions, shared, key=key)[0]

    def output_matrix(self, params: Params) -> tuple[Float[Array, "vocab hidden"], None]:
        """Return the word embedding, and no bias."""
        return params["embeddings"]["word"]["embedding"], None

    def forward_flops(self, length: int, predicted: int = 0) -> float:
        return stack_flops(self.stack, length) + 2.0 * predicted * self.hidden_size * self.vocab_size

    def _run_tokens(
        self, params: Params, ids: jax.Array, positions: jax.Array, shared: SharedInputs, *,
        key: jax.Array | None = None, caches: Any = None,
    ) -> tuple[jax.Array, Any]:
        keys = (None, None) if key is None else jax.random.split(key)
        x = call(self._embeddings, params["embeddings"], ids, positions, deterministic=key is None, key=keys[0])
        return run_stack(self.stack, params["decoder"], x, shared, key=keys[1], caches=caches)

    @property
    def _embeddings(self) -> Embeddings:
        normal = nn.initializers.normal
        return Embeddings(
            self.vocab_size, self.hidden_size, self.max_positions, 0, None, self.dropout, normal(self.init_std),
            normal(self.position_init_std), self.dtype,
        )
