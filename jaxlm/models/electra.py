"""ELECTRA (Clark et al. 2020): two encoders over one embedding module, a masked-LM generator and a discriminator."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxlm.errors import UserError
from jaxlm.fields import field
from jaxlm.models.bert import BertConfig, Embeddings, MaskedLMHead
from jaxlm.models.layers.stack import (
    ACTIVATIONS,
    AttentionKind,
    DType,
    PlainActivation,
    RematPolicy,
    Stack,
    StackConfig,
    kernel_init,
)

Params = dict[str, Any]
Network = Literal["generator", "discriminator"]


@dataclasses.dataclass(frozen=True)
class ElectraConfig:
    """A discriminator and its generator. The defaults are ELECTRA-base."""

    vocab_size: int = 30522
    """Rows of the word embedding; a run sets it from its tokenizer."""
    embedding_size: int = 768
    """Width of the embeddings, which both networks share; each projects them where its own width differs."""
    hidden_size: int = 768
    """Width of the discriminator's residual stream."""
    num_layers: int = 12
    """The discriminator's layers."""
    num_heads: int = 12
    """The discriminator's attention heads; must divide hidden_size."""
    intermediate_size: int = 3072
    """Width of the discriminator's feed-forward layer."""
    generator_hidden_size: int = 256
    """Width of the generator's residual stream; a quarter to a half of the discriminator's works best."""
    generator_num_layers: int = 12
    """The generator's layers."""
    generator_num_heads: int = 4
    """The generator's attention heads; must divide generator_hidden_size."""
    generator_intermediate_size: int = 1024
    """Width of the generator's feed-forward layer."""
    share_embeddings: bool = True
    """One embedding module (words, positions, segments and their LayerNorm) for both networks, or one for each."""
    max_positions: int = 512
    """Learned positions: the longest sequence."""
    type_vocab_size: int = 2
    """Segment types."""
    activation: PlainActivation = "gelu"
    """gelu is the exact (erf) form, gelu_new the tanh approximation; the generator's head always uses gelu."""
    dropout: float = field(0.1, recipe=True)
    """Dropout after the embeddings, the attention output and the feed-forward output."""
    attention_dropout: float = field(0.1, recipe=True)
    """Dropout on attention probabilities; above 0 it rules out fused attention kernels while training."""
    norm_eps: float = 1e-12
    """Epsilon of LayerNorm."""
    init_std: float = 0.02
    """Standard deviation of the truncated normal that weights start from."""
    dtype: DType = field("float32", recipe=True)
    """Compute type; parameters and the softmax stay in float32."""
    remat: RematPolicy = field("none", resumable=True)
    """What the backward pass recomputes: none, dots (keeps matrix products), full (keeps layer inputs)."""
    attention: AttentionKind = field("auto", resumable=True)
    """Attention kernel: auto takes cuDNN's fused one on GPUs that have it, XLA's elsewhere."""

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if item.name.endswith(("_size", "_layers", "_heads", "_positions")) and value < 1:
                raise UserError(f"objective.model.{item.name} is {value}; it must be at least 1.")
            if item.name.endswith("dropout") and not 0.0 <= value < 1.0:
                raise UserError(f"objective.model.{item.name} is {value}; it must be in [0, 1).")
        if not 0.0 < self.norm_eps < math.inf:
            raise UserError(f"objective.model.norm_eps is {self.norm_eps}; it must be above 0, and finite.")
        for prefix in ("", "generator_"):
            width, heads = getattr(self, f"{prefix}hidden_size"), getattr(self, f"{prefix}num_heads")
            if width % heads:
                raise UserError(
                    f"{prefix}hidden_size {width} is not divisible by {prefix}num_heads {heads}; change one of them."
                )

    @classmethod
    def published(cls, size: str, **changes: Any) -> ElectraConfig:
        """A published size by name: small, small++ (its generator has full size), base or large (all uncased)."""
        layers, embedding, hidden, generator = PUBLISHED[size]
        shape = dict(
            embedding_size=embedding, num_layers=layers, hidden_size=hidden, num_heads=hidden // 64,
            intermediate_size=4 * hidden, generator_num_layers=layers, generator_hidden_size=generator,
            generator_num_heads=generator // 64, generator_intermediate_size=4 * generator,
        )
        return cls(**(shape | changes))

    @property
    def embeddings(self) -> BertConfig:
        """The embeddings, and the generator's head, are those of a BERT as wide as the embeddings."""
        return BertConfig(
            vocab_size=self.vocab_size, hidden_size=self.embedding_size, num_heads=1, max_positions=self.max_positions,
            type_vocab_size=self.type_vocab_size, activation="gelu", dropout=self.dropout, norm_eps=self.norm_eps,
            init_std=self.init_std, dtype=self.dtype,
        )

    def stack(self, network: Network) -> StackConfig:
        """The Transformer layers of one of the two."""
        prefix = "generator_" if network == "generator" else ""
        hidden, layers, heads, intermediate = (
            getattr(self, prefix + name) for name in ("hidden_size", "num_layers", "num_heads", "intermediate_size")
        )
        return StackConfig(
            hidden_size=hidden, num_layers=layers, num_heads=heads, head_dim=hidden // heads,
            intermediate_size=intermediate, activation=self.activation, norm_eps=self.norm_eps, dropout=self.dropout,
            attention_dropout=self.attention_dropout, init_std=self.init_std, dtype=self.dtype, remat=self.remat,
            attention=self.attention,
        )


# layers, width of the embeddings, of the discriminator, of the generator
PUBLISHED = {"small": (12, 128, 256, 64), "small++": (12, 128, 256, 256), "base": (12, 768, 768, 256),
             "large": (24, 1024, 1024, 256)}


class Encoder(nn.Module):
    """Embeddings projected to the network's width, where that differs, then its layers."""

    stack: StackConfig
    embedding_size: int

    def setup(self) -> None:
        s = self.stack
        if s.hidden_size != self.embedding_size:
            self.projection = nn.Dense(s.hidden_size, dtype=s.dtype, kernel_init=kernel_init(s))
        self.encoder = Stack(s)

    def __call__(self, x, mask, deterministic, positions=None):
        if self.stack.hidden_size != self.embedding_size:
            x = self.projection(x)
        return self.encoder(x, mask=mask, positions=positions, deterministic=deterministic)[0]


class ReplacedHead(nn.Module):
    """dense, activation, then one logit a token: is it another token than the text had?"""

    stack: StackConfig

    @nn.compact
    def __call__(self, hidden):
        s = self.stack
        x = nn.Dense(s.hidden_size, dtype=s.dtype, kernel_init=kernel_init(s), name="dense")(hidden)
        x = ACTIVATIONS[s.activation](x)
        logits = nn.Dense(1, dtype=s.dtype, kernel_init=kernel_init(s), name="score")(x)
        return logits[..., 0].astype(jnp.float32)


class Networks(nn.Module):
    """Both networks with their heads, under the names that checkpoints and exports use."""

    config: ElectraConfig

    def setup(self) -> None:
        c = self.config
        self.embeddings = Embeddings(c.embeddings)
        if not c.share_embeddings:
            self.generator_embeddings = Embeddings(c.embeddings)
        self.generator = Encoder(c.stack("generator"), c.embedding_size)
        self.mlm_head = MaskedLMHead(c.embeddings)
        self.discriminator = Encoder(c.stack("discriminator"), c.embedding_size)
        self.rtd_head = ReplacedHead(c.stack("discriminator"))

    def _embeddings(self, network):
        own = network == "generator" and not self.config.share_embeddings
        return self.generator_embeddings if own else self.embeddings

    def encode(self, network, input_ids, token_type_ids, attention_mask, deterministic=True, positions=None):
        x = self._embeddings(network)(input_ids, token_type_ids, deterministic)
        mask = None if attention_mask is None else attention_mask[:, None, None, :].astype(bool)
        encoder = self.generator if network == "generator" else self.discriminator
        return encoder(x, mask, deterministic, positions)

    def predict_tokens(self, hidden):
        return self.mlm_head(hidden, self._embeddings("generator").word.embedding)

    def token_features(self, hidden):
        return self.mlm_head.features(hidden)

    def detect_replaced(self, hidden):
        return self.rtd_head(hidden)

    def __call__(self, input_ids, token_type_ids):
        logits = self.predict_tokens(self.encode("generator", input_ids, token_type_ids, None))
        return logits, self.detect_replaced(self.encode("discriminator", input_ids, token_type_ids, None))


def init(config: ElectraConfig, key: jax.Array) -> Params:
    """Fresh parameters of both networks, float32."""
    ids = jnp.zeros((1, 2), jnp.int32)
    return Networks(config).init({"params": key}, ids, ids)["params"]


def encode(
    config: ElectraConfig,
    params: Params,
    network: Network,
    input_ids: Int[Array, "batch length"],
    token_type_ids: Int[Array, "batch length"] | None = None,
    attention_mask: Int[Array, "batch length"] | Bool[Array, "batch length"] | None = None,
    dropout_key: jax.Array | None = None,
    positions: Int[Array, "batch positions"] | None = None,
) -> Float[Array, "batch length_or_positions hidden"]:
    """One network's last hidden states, of all tokens or only at `positions`. attention_mask is 1 at tokens, 0 at
    padding; a dropout_key turns dropout on."""
    if token_type_ids is None:
        token_type_ids = jnp.zeros_like(input_ids)
    rngs = None if dropout_key is None else {"dropout": dropout_key}
    return Networks(config).apply(
        {"params": params}, network, input_ids, token_type_ids, attention_mask, dropout_key is None, positions,
        rngs=rngs, method="encode",
    )


def predict_tokens(
    config: ElectraConfig, params: Params, hidden: Float[Array, "batch predictions hidden"]
) -> Float[Array, "batch predictions vocab"]:
    """Vocabulary logits in float32 for the generator's hidden states: gather the predicted positions first."""
    return Networks(config).apply({"params": params}, hidden, method="predict_tokens")


def token_features(
    config: ElectraConfig, params: Params, hidden: Float[Array, "batch predictions hidden"]
) -> Float[Array, "batch predictions embedding"]:
    """What the generator's head multiplies with `output_matrix`: for losses that never hold all logits."""
    return Networks(config).apply({"params": params}, hidden, method="token_features")


def output_matrix(
    config: ElectraConfig, params: Params
) -> tuple[Float[Array, "vocab embedding"], Float[Array, " vocab"]]:
    """(matrix, bias) that turn `token_features` into logits: the generator's word embedding, and the head's bias."""
    embeddings = params["embeddings" if config.share_embeddings else "generator_embeddings"]
    return embeddings["word"]["embedding"], params["mlm_head"]["bias"]


def detect_replaced(
    config: ElectraConfig, params: Params, hidden: Float[Array, "batch length hidden"]
) -> Float[Array, "batch length"]:
    """A float32 logit for each of the discriminator's hidden states: above 0 it takes the token for a replacement."""
    return Networks(config).apply({"params": params}, hidden, method="detect_replaced")
