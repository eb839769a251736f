"""BERT (Devlin et al. 2018): the encoder, its pooler and its two pretraining heads."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxlm.errors import UserError
from jaxlm.fields import field
from jaxlm.models.layers.dropout import dropout
from jaxlm.models.layers.stack import (
    ACTIVATIONS,
    AttentionKind,
    DType,
    Norm,
    PlainActivation,
    RematPolicy,
    Stack,
    StackConfig,
    kernel_init,
)

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class BertConfig:
    """A BERT encoder. The defaults are bert-base-uncased."""

    vocab_size: int = 30522
    """Rows of the word embedding; a run sets it from its tokenizer."""
    hidden_size: int = 768
    """Width of the residual stream."""
    num_layers: int = 12
    """Transformer layers."""
    num_heads: int = 12
    """Attention heads; must divide hidden_size."""
    intermediate_size: int = 3072
    """Width of the feed-forward layer."""
    max_positions: int = 512
    """Learned positions: the longest sequence."""
    type_vocab_size: int = 2
    """Segment types."""
    activation: PlainActivation = "gelu"
    """gelu is the exact (erf) form, gelu_new the tanh approximation."""
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
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "intermediate_size", "max_positions",
                     "type_vocab_size"):
            if getattr(self, name) < 1:
                raise UserError(f"objective.model.{name} is {getattr(self, name)}; it must be at least 1.")
        if self.hidden_size % self.num_heads:
            raise UserError(
                f"hidden_size {self.hidden_size} is not divisible by num_heads {self.num_heads}; change one of them."
            )
        for name in ("dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise UserError(f"objective.model.{name} is {getattr(self, name)}; it must be in [0, 1).")
        if not 0.0 < self.norm_eps < math.inf:
            raise UserError(f"objective.model.norm_eps is {self.norm_eps}; it must be above 0, and finite.")

    @classmethod
    def published(cls, size: str, **changes: Any) -> BertConfig:
        """A published size by name: tiny, mini, small, medium, base or large (all uncased)."""
        layers, hidden = PUBLISHED[size]
        shape = dict(num_layers=layers, hidden_size=hidden, num_heads=hidden // 64, intermediate_size=4 * hidden)
        return cls(**(shape | changes))

    @property
    def stack(self) -> StackConfig:
        return StackConfig(
            hidden_size=self.hidden_size, num_layers=self.num_layers, num_heads=self.num_heads,
            head_dim=self.hidden_size // self.num_heads, intermediate_size=self.intermediate_size,
            activation=self.activation, norm_eps=self.norm_eps, dropout=self.dropout,
            attention_dropout=self.attention_dropout, init_std=self.init_std, dtype=self.dtype, remat=self.remat,
            attention=self.attention,
        )


PUBLISHED = {"tiny": (2, 128), "mini": (4, 256), "small": (4, 512), "medium": (8, 512), "base": (12, 768),
             "large": (24, 1024)}


class Embeddings(nn.Module):
    """Word + position + segment, then LayerNorm, then dropout."""

    config: BertConfig

    def setup(self) -> None:
        c = self.config
        table = functools.partial(nn.Embed, embedding_init=kernel_init(c.stack), dtype=c.dtype)
        self.word = table(c.vocab_size, c.hidden_size)
        self.position = table(c.max_positions, c.hidden_size)
        self.token_type = table(c.type_vocab_size, c.hidden_size)
        self.norm = Norm("layer", c.norm_eps, c.dtype)

    def __call__(self, input_ids, token_type_ids, deterministic):
        positions = jnp.arange(input_ids.shape[-1])
        x = self.word(input_ids) + self.position(positions) + self.token_type(token_type_ids)
        x = self.norm(x)
        return dropout(x, self.config.dropout, None if deterministic else self.make_rng("dropout"))


class MaskedLMHead(nn.Module):
    """dense, activation, LayerNorm, then the word embedding transposed, plus a bias of the vocabulary's size."""

    config: BertConfig

    def setup(self) -> None:
        c = self.config
        self.dense = nn.Dense(c.hidden_size, dtype=c.dtype, kernel_init=kernel_init(c.stack))
        self.norm = Norm("layer", c.norm_eps, c.dtype)
        self.bias = self.param("bias", nn.initializers.zeros, (c.vocab_size,), jnp.float32)

    def features(self, hidden):
        return self.norm(ACTIVATIONS[self.config.activation](self.dense(hidden)))

    def __call__(self, hidden, embedding):
        x = self.features(hidden)
        logits = jnp.einsum("...h,vh->...v", x, embedding.astype(x.dtype), preferred_element_type=jnp.float32)
        return logits + self.bias


class Bert(nn.Module):
    """Embeddings, stack, pooler and heads under the names that checkpoints and exports use."""

    config: BertConfig
    next_sentence: bool = True

    def setup(self) -> None:
        c = self.config
        self.embeddings = Embeddings(c)
        self.encoder = Stack(c.stack)
        self.mlm_head = MaskedLMHead(c)
        if self.next_sentence:
            dense = functools.partial(nn.Dense, dtype=c.dtype, kernel_init=kernel_init(c.stack))
            self.pooler = dense(c.hidden_size)
            self.nsp_head = dense(2)

    def encode(self, input_ids, token_type_ids, attention_mask, deterministic=True, positions=None):
        x = self.embeddings(input_ids, token_type_ids, deterministic)
        mask = None if attention_mask is None else attention_mask[:, None, None, :].astype(bool)
        return self.encoder(x, mask=mask, positions=positions, deterministic=deterministic)[0]

    def pool(self, hidden):
        return jnp.tanh(self.pooler(hidden[:, 0]))

    def predict_tokens(self, hidden):
        return self.mlm_head(hidden, self.embeddings.word.embedding)

    def token_features(self, hidden):
        return self.mlm_head.features(hidden)

    def predict_next_sentence(self, hidden):
        return self.nsp_head(self.pool(hidden)).astype(jnp.float32)

    def __call__(self, input_ids, token_type_ids):
        hidden = self.encode(input_ids, token_type_ids, None)
        return self.predict_tokens(hidden), self.predict_next_sentence(hidden) if self.next_sentence else None


def init(config: BertConfig, key: jax.Array, next_sentence: bool = True) -> Params:
    """Fresh parameters, float32; without `next_sentence` there is no pooler and no next-sentence head."""
    ids = jnp.zeros((1, 2), jnp.int32)
    return Bert(config, next_sentence).init({"params": key}, ids, ids)["params"]


def encode(
    config: BertConfig,
    params: Params,
    input_ids: Int[Array, "batch length"],
    token_type_ids: Int[Array, "batch length"] | None = None,
    attention_mask: Int[Array, "batch length"] | Bool[Array, "batch length"] | None = None,
    dropout_key: jax.Array | None = None,
    positions: Int[Array, "batch positions"] | None = None,
) -> Float[Array, "batch length_or_positions hidden"]:
    """Last hidden states, of all tokens or only at `positions`. attention_mask is 1 at tokens and 0 at padding; a
    dropout_key turns dropout on."""
    if token_type_ids is None:
        token_type_ids = jnp.zeros_like(input_ids)
    rngs = None if dropout_key is None else {"dropout": dropout_key}
    return Bert(config).apply(
        {"params": params}, input_ids, token_type_ids, attention_mask, dropout_key is None, positions, rngs=rngs,
        method="encode",
    )


def pool(
    config: BertConfig, params: Params, hidden: Float[Array, "batch length hidden"]
) -> Float[Array, "batch hidden"]:
    """tanh(W h_[CLS] + b)."""
    return Bert(config).apply({"params": params}, hidden, method="pool")


def predict_tokens(
    config: BertConfig, params: Params, hidden: Float[Array, "batch predictions hidden"]
) -> Float[Array, "batch predictions vocab"]:
    """Vocabulary logits in float32 for the given hidden states: gather the predicted positions first."""
    return Bert(config).apply({"params": params}, hidden, method="predict_tokens")


def token_features(
    config: BertConfig, params: Params, hidden: Float[Array, "batch predictions hidden"]
) -> Float[Array, "batch predictions hidden"]:
    """What the masked-LM head multiplies with `output_matrix`: for losses that never hold all logits."""
    return Bert(config).apply({"params": params}, hidden, method="token_features")


def output_matrix(params: Params) -> tuple[Float[Array, "vocab hidden"], Float[Array, " vocab"]]:
    """(matrix, bias) that turn `token_features` into vocabulary logits: the word embedding, and the head's bias."""
    return params["embeddings"]["word"]["embedding"], params["mlm_head"]["bias"]


def predict_next_sentence(
    config: BertConfig, params: Params, hidden: Float[Array, "batch length hidden"]
) -> Float[Array, "batch 2"]:
    """Logits of (0 = is next, 1 = random)."""
    return Bert(config).apply({"params": params}, hidden, method="predict_next_sentence")
