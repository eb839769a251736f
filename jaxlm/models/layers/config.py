"""Configuration of Transformer layers: what a model declares, what a stack of layers reads, and the initializers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, Self

import flax.linen as nn

from jaxlm.errors import UserError
from jaxlm.fields import check_ranges, field
from jaxlm.models.layers.rotary import Rope

PlainActivation = Literal["gelu", "gelu_new", "relu", "silu"]
Activation = Literal[PlainActivation, "gated-gelu", "gated-gelu-erf", "gated-silu"]
GATED: dict[PlainActivation, Activation] = {"gelu": "gated-gelu-erf", "gelu_new": "gated-gelu", "silu": "gated-silu"}
"""Activation → the same in a gated feed-forward layer."""
RematPolicy = Literal["none", "cheap", "dots", "full"]
DType = Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True)
class HasDtype:
    """The compute type, a field of every model."""

    dtype: DType = field("float32", recipe=True)
    """Compute type; parameters and the softmax stay in float32."""


@dataclasses.dataclass(frozen=True)
class ExecutionConfig(HasDtype):
    """How attention layers are computed: fields that do not change the model."""

    remat: RematPolicy = field("none", resumable=True)
    """What the backward pass recomputes: nothing (none); activations, norms and the like (cheap); also the attention
    scores (dots); everything but the inputs of layers (full)."""
    attention: Literal["auto", "xla"] = field("auto", resumable=True)
    """Attention kernel: auto takes the device's fused kernel if it supports the arguments; xla keeps the scores in
    memory."""
    loop_layers: bool = field(False, resumable=True)
    """Compile the layers as one loop: compiles faster, but runs slower and takes more memory than unrolled layers."""

    @property
    def execution(self) -> dict[str, Any]:
        """The values of these fields."""
        return {item.name: getattr(self, item.name) for item in dataclasses.fields(ExecutionConfig)}


@dataclasses.dataclass(frozen=True)
class TransformerConfig(ExecutionConfig):
    """Fields that the Transformer families share. The defaults are those of bert-base-uncased."""

    vocab_size: int = field(30522, vocabulary=True)
    """Vocabulary size (rows of the word embedding); a run takes it from its tokenizer."""
    hidden_size: int = 768
    """Width of the residual stream."""
    num_layers: int = 12
    """Number of Transformer layers."""
    num_heads: int = 12
    """Number of attention heads; must divide hidden_size."""
    intermediate_size: int = 3072
    """Width of the feed-forward layers."""
    activation: PlainActivation = "gelu"
    """Activation of the feed-forward layers: gelu is the exact (erf) form, gelu_new the tanh approximation."""
    dropout: float = field(0.1, recipe=True, range="[0, 1)")
    """Dropout rate of the embeddings, the feed-forward output and, but in DistilBERT, the attention output."""
    attention_dropout: float = field(0.1, recipe=True, range="[0, 1)")
    """Dropout rate of attention probabilities. Above 0, only kernels of TPUs in bfloat16 are fused: that for short
    rows, and those of XLNet and DeBERTa."""
    norm_eps: float = field(1e-12, range="(0, inf)")
    """Epsilon of the norms."""

    def __post_init__(self) -> None:
        check_sizes(self)
        check_heads(self.hidden_size, self.num_heads)

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads


def transformer_sizes(layers: int, width: int, heads: int | None = None) -> dict[str, Any]:
    """Return the fields of a published size: by default heads are 64 wide; the feed-forward layers are 4 x width."""
    return dict(num_layers=layers, hidden_size=width, num_heads=heads or width // 64, intermediate_size=4 * width)


@dataclasses.dataclass(frozen=True)
class StackConfig(ExecutionConfig):
    """Configuration of a stack of layers: the sizes, and the choices in which the families differ.

    Attributes:
        num_kv_heads: Number of key/value heads, each of which serves as many consecutive query heads (Ainslie et al.
            2023); None for one a query head.
        norm_placement: Norm of the sum of a sublayer and its input, of the input, or of the input and the output.
        norm_offset: Added to the scale of RMSNorms, which is initialized at 1 - norm_offset: 1 in Gemma.
        has_query_norm: Whether an RMSNorm over each head's queries and keys precedes the rotary positions.
        has_first_norm: Whether the first layer of a pre-norm stack has a norm before its attention.
        band: Number of tokens from itself on, to either side, that a token attends to in most layers; None for full
            attention in all layers.
        band_period: Number of layers after which the kinds of layers recur, with a band.
        full_layer: Number of the layer in each period that has full attention; None if none has.
        rope: Rotary position embeddings in layers with full attention; None without them.
        band_rope: Rotary position embeddings in layers with the band.
        use_bias: Whether dense layers and LayerNorms have biases, or the names of those that have one.
        score_width: Attention scores are divided by its square root; None for head_dim. 1 in T5.
        intermediate_dropout: Dropout after the activation of the feed-forward layer.
        mlp_dropout: Dropout of the feed-forward output; None for `dropout`.
        attention_output_dropout: Dropout of the output of attention; None for `dropout`.
        residual_init_scale: Factor on the initial weights of the products that enter the residual stream.
        num_groups: Number of groups of consecutive layers that share parameters (ALBERT); None without sharing.
        last_layer_at_positions: Compute the last layer only at the positions that are predicted, if it attends to all
            tokens.
        feed_forward: Class of the feed-forward module; None: FeedForward.
    """

    _: dataclasses.KW_ONLY
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int
    intermediate_size: int
    activation: Activation = "gelu"
    norm: Literal["layer", "rms"] = "layer"
    norm_placement: Literal["post", "pre", "both"] = "post"
    norm_offset: float = 0.0
    norm_eps: float = 1e-12
    final_norm: bool = False
    has_query_norm: bool = False
    has_first_norm: bool = True
    use_bias: bool | tuple[str, ...] = True
    causal: bool = False
    band: int | None = None
    band_period: int = 2
    full_layer: int | None = 0
    rope: Rope | None = None
    band_rope: Rope | None = None
    cross_attention: bool = False
    score_width: int | None = None
    dropout: float = 0.1
    attention_dropout: float = 0.1
    intermediate_dropout: float = 0.0
    mlp_dropout: float | None = None
    attention_output_dropout: float | None = None
    init: Literal["truncated_normal", "normal", "fan_in"] = "truncated_normal"
    init_std: float = 0.02
    residual_init_scale: float = 1.0
    num_groups: int | None = None
    last_layer_at_positions: bool = True
    feed_forward: type[nn.Module] | None = None

    @classmethod
    def of(cls, model: Any, **choices: Any) -> Self:
        """Return the stack of a model: the fields that both have, and the choices of the model's family."""
        names = {item.name for item in dataclasses.fields(cls)} & {item.name for item in dataclasses.fields(model)}
        return cls(**({name: getattr(model, name) for name in names | {"head_dim"}} | choices))

    @property
    def attention_scale(self) -> float:
        """Factor on the attention scores."""
        return 1.0 / math.sqrt(self.head_dim if self.score_width is None else self.score_width)

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads."""
        return self.num_kv_heads or self.num_heads

    def has_bias(self, name: str) -> bool:
        """Return whether the dense layer of this name ("query", "wi_0") has a bias, or with "norm" the LayerNorms."""
        return self.use_bias if isinstance(self.use_bias, bool) else name in self.use_bias

    @property
    def groups(self) -> int:
        """Number of layers with parameters of their own."""
        return self.num_layers if self.num_groups is None else self.num_groups

    def group_of(self, layer: int) -> int:
        """Return the index of a layer's parameters."""
        return layer * self.groups // self.num_layers

    def of_layer(self, layer: int) -> Self:
        """Return the configuration of one layer: its band, its rotary embeddings, and its first norm."""
        changes: dict[str, Any] = {"has_first_norm": self.has_first_norm or layer > 0}
        if self.band is not None:
            changes |= {"band": None} if layer % self.band_period == self.full_layer else {"rope": self.band_rope}
        return dataclasses.replace(self, **changes)


def kernel_init(config: StackConfig, *, residual: bool = False, query: bool = False) -> nn.initializers.Initializer:
    """Return the initializer of a kernel.

    A `residual` kernel writes to the residual stream; a `query` kernel projects attention queries.
    """
    scale = config.residual_init_scale if residual else 1.0
    if config.init == "fan_in":  # T5: 1/√fan_in; the query's also carries the 1/√head_dim that its attention lacks
        scale *= 1.0 / config.head_dim if query else 1.0
        return nn.initializers.variance_scaling(scale, "fan_in", "normal")
    if config.init == "normal":
        return nn.initializers.normal(config.init_std * scale)
    # TensorFlow's truncated normal: cut at two standard deviations and not rescaled, unlike jax's default.
    return nn.initializers.truncated_normal(config.init_std * scale, lower=-2.0, upper=2.0)


def check_sizes(config: Any) -> None:
    """Raise UserError for the first field of a model that is out of range."""
    check_ranges(config, "objective.model.")
    for item in dataclasses.fields(config):
        name, value = item.name, getattr(config, item.name)
        if name.endswith(("_size", "_layers", "_heads", "_dim", "_positions", "_groups")) and type(value) is int:
            low, high = int(name != "type_vocab_size"), 1000 if name.endswith("_layers") else 2**24
            if not low <= value <= high:
                raise UserError(f"objective.model.{name} is {value}; it must be in [{low}, {high}].")


def check_gated(model: Any) -> None:
    """Raise UserError unless feed-forward layers can be gated by the activation, and heads have an even width."""
    if model.activation not in GATED:
        raise UserError(f"objective.model.activation is {model.activation}; choose {' or '.join(GATED)}.")
    if model.head_dim % 2:
        raise UserError(f"objective.model.head_dim is {model.head_dim}; rotary positions need an even width, so change "
                        "it, or num_heads or hidden_size, from which it follows.")


def check_heads(hidden_size: int, num_heads: int, prefix: str = "") -> None:
    """Raise UserError unless the number of heads divides the width."""
    if hidden_size % num_heads:
        raise UserError(
            f"objective.model.{prefix}hidden_size {hidden_size} is not divisible by {prefix}num_heads {num_heads}; "
            "change one of them."
        )
