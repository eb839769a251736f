"""DeBERTa v2 and v3 (He et al. 2020, He et al. 2021): disentangled attention, and replaced-token detection with it."""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxlm.fields import field
from jaxlm.models.base import FineTuning, Inputs
from jaxlm.models.electra import NetworkPair
from jaxlm.models.encoder import Encoder
from jaxlm.models.heads import Head, TwoLayerHead
from jaxlm.models.layers.config import StackConfig, kernel_init, transformer_sizes
from jaxlm.models.layers.dense import broadcast
from jaxlm.models.layers.disentangled import RelativeTable
from jaxlm.models.layers.embeddings import Embeddings, EmbeddingTable, add_positions
from jaxlm.models.layers.norm import Norm
from jaxlm.models.layers.stack import (
    Block,
    SharedInputs,
    at_positions,
    call,
    rematerialized,
    run_stack,
    split_layers,
    unstack,
)
from jaxlm.types import Params

SIZES = {"xsmall": (12, 384), "small": (6, 768), "base": (12, 768), "large": (24, 1024)}
"""Size of DeBERTa v3 → number of layers, width."""


@dataclasses.dataclass(frozen=True)
class Deberta(Encoder):
    """DeBERTa v2 or v3: an encoder without positions at its input, with disentangled attention.

    Attention scores are the sum of content to content, content to position and position to content, over
    √(3 · head_dim). Projections of positions are those of tokens. As in the code, both terms of positions take the
    vector of the same distance; the paper takes that of j - i in the last term. Dropout of these vectors is per
    distance, not per bucket. Hidden states of padding are not set to zero, since no token attends to them. On a TPU a
    kernel computes rows of up to 1,024 tokens, a multiple of 128, in bfloat16; otherwise scores are in memory. The
    convolution of v2-xlarge is not supported.

    Parameters: those of `Encoder` without positions, `relative/{embedding,norm}`, and `position` for the mask decoder.
    """

    vocab_size: int = field(128100, vocabulary=True)
    """Vocabulary size (rows of the word embedding); a run takes it from its tokenizer."""
    type_vocab_size: int = 0
    """Number of segment types; 0 for none."""
    norm_eps: float = field(1e-7, range="(0, inf)")
    """Epsilon of the norms."""
    position_buckets: int = field(256, range="[2, inf)")
    """Number of buckets of relative positions to either side: half of them for single distances, the others for
    distances of logarithmic width up to max_positions."""
    mask_decoder: bool = False
    """Predict tokens by the enhanced mask decoder (He et al. 2020, section 3.2), which knows absolute positions. The
    last layer runs twice on the hidden states below it, with queries that begin as these states plus positions."""

    input_params = ("embeddings", "relative")
    output_params = ("mlm_head", "position")
    published_sizes: ClassVar = {size: transformer_sizes(*shape) for size, shape in SIZES.items()}

    @property
    def stack(self) -> StackConfig:
        return StackConfig.of(self, score_width=3 * self.head_dim)

    @property
    def fine_tuning(self) -> FineTuning:
        return FineTuning(self.template, activation="gelu")

    def init(self, key: jax.Array) -> Params:
        keys = jax.random.split(key, 3)
        params = super().init(keys[0]) | {"relative": self._relative.init(keys[1], 1)["params"]}
        if self.mask_decoder:
            params["position"] = self._position.init(keys[2], jnp.zeros(1, jnp.int32))["params"]
        return params

    def hidden_states(
        self, params: Params, inputs: Inputs, *, key: jax.Array | None = None,
        at: Int[Array, "batch selected"] | None = None,
    ) -> Float[Array, "batch length_or_selected hidden"]:
        if not self.mask_decoder or "position" not in params:  # which tasks lack
            return super().hidden_states(params, inputs, key=key, at=at)
        keys = [None] * 4 if key is None else jax.random.split(key, 4)
        x, shared = self._embed(params, inputs, keys[0])
        below, last = split_layers(params["encoder"]["layers"], self.num_layers - 1, 1)
        stack = dataclasses.replace(self.stack, num_layers=self.num_layers - 1)
        if stack.num_layers:  # a small generator may have one layer
            x, _ = run_stack(stack, {"layers": below}, x, shared, key=keys[1])
        query = add_positions(x, call(self._position, params["position"], self._positions(inputs)))
        query = query if at is None else at_positions(query, at)
        layer = rematerialized(functools.partial(call, Block(self.stack, key is None)), self.remat)
        for layer_key in keys[2:]:
            query, _ = layer(unstack(last)[0], x, shared, positions=at, query=query, key=layer_key)
        return query

    def _embed(self, params: Params, inputs: Inputs, key: jax.Array | None) -> tuple[jax.Array, SharedInputs]:
        x, shared = super()._embed(params, inputs, key)
        return x, shared._replace(distances=call(self._relative, params["relative"], x.shape[1]))

    def forward_flops(self, length: int, predicted: int = 0) -> float:
        """Return the FLOPs of one sequence's forward pass.

        The products with positions count once for each bucket. Those of the table with the projections, which all rows
        share, and the second pass of the mask decoder are not counted.
        """
        positions = 8 * self.num_layers * length * min(self.position_buckets, length) * self.hidden_size
        return super().forward_flops(length, predicted) + positions

    @property
    def _embeddings(self) -> Embeddings:
        return super()._embeddings.clone(num_positions=0)

    @property
    def _relative(self) -> RelativeTable:
        return RelativeTable(self.stack, self.position_buckets, self.max_positions)

    @property
    def _position(self) -> EmbeddingTable:
        return EmbeddingTable(self.max_positions, self.hidden_size, kernel_init(self.stack), jnp.float32)


class ReplacedHead(Head):
    """Head of DeBERTa v3's discriminator, which sees the first token beside each. Parameters: `norm`, `classifier`."""

    @nn.compact
    def __call__(self, x: Float[Array, "*batch length hidden"]) -> Float[Array, "*batch length features"]:
        s = self.stack
        x = Norm("layer", s.norm_eps, s.dtype, name="norm")(x + broadcast(x[..., :1, :], x.shape, x.dtype))
        return TwoLayerHead(s, self.features, name="classifier")(x)


@dataclasses.dataclass(frozen=True)
class DebertaV3(NetworkPair):
    """DeBERTa v3's generator and discriminator of the same width. The defaults are deberta-v3-base.

    The discriminator's word embedding is stop_gradient(E_G) + E_Δ, with the generator's E_G, and E_Δ = 0 at the start
    (gradient-disentangled embedding sharing, He et al. 2021, section 3.3). No other parameters are shared, so that each
    loss trains its own network. The generator predicts by the enhanced mask decoder. The code shares the positions of
    that decoder in the same way, but its discriminator never reads them; here it has none.

    Parameters: `generator/…`, `discriminator/…` as of `Deberta`, with E_Δ at `discriminator/embeddings/word`, and
    `rtd_head/…`.
    """

    vocab_size: int = field(128100, vocabulary=True)
    """Vocabulary size (rows of the word embedding); a run takes it from its tokenizer."""
    norm_eps: float = field(1e-7, range="(0, inf)")
    """Epsilon of the norms."""
    position_buckets: int = field(256, range="[2, inf)")
    """Number of buckets of relative positions to either side (see `Deberta`)."""
    generator_num_layers: int = 6
    """Number of layers of the generator, half of the discriminator's in the published models."""

    type_vocab_size: ClassVar[int] = 0
    input_params = Deberta.input_params
    published_sizes: ClassVar = {
        size: transformer_sizes(layers, width) | dict(generator_num_layers=layers // 2)
        for size, (layers, width) in SIZES.items()
    }

    @property
    def discriminator(self) -> Deberta:
        return self.as_type(Deberta)

    @property
    def generator(self) -> Deberta:
        return dataclasses.replace(self.discriminator, num_layers=self.generator_num_layers, mask_decoder=True)

    @property
    def replaced_head(self) -> ReplacedHead:
        return ReplacedHead(self.discriminator.stack, 1)

    def init(self, key: jax.Array) -> Params:
        params = super().init(key)
        word = params["discriminator"]["embeddings"]["word"]
        params["discriminator"]["embeddings"]["word"] = jax.tree.map(jnp.zeros_like, word)
        return params

    def discriminator_params(self, params: Params) -> Params:
        own, shared = params["discriminator"], params["generator"]["embeddings"]["word"]
        word = jax.tree.map(jnp.add, jax.lax.stop_gradient(shared), own["embeddings"]["word"])
        return own | {"embeddings": own["embeddings"] | {"word": word}}
