"""The bidirectional encoder of BERT and of the models after it, which differ from it in a few independent choices."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxlm.fields import field
from jaxlm.models.layers.activations import ACTIVATIONS
from jaxlm.models.layers.config import (
    Computation,
    PlainActivation,
    StackConfig,
    check_heads,
    check_sizes,
    kernel_init,
)
from jaxlm.models.layers.embeddings import Embeddings, logits
from jaxlm.models.layers.multi_head import Visibility
from jaxlm.models.layers.norm import Norm
from jaxlm.models.layers.stack import LayerInputs, Stack
from jaxlm.tokenizers.template import Template
from jaxlm.tokenizers.vocabulary import Vocabulary

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Encoder(Computation):
    """An encoder as a value: its sizes, and methods that are pure functions of parameters. The defaults are those of
    bert-base-uncased.

    Parameters: `embeddings/{word,position,token_type,norm}`, `projection` where the embeddings have a width of their
    own, `encoder/layers/i/…`, `mlm_head/{dense,norm,bias}`, and `pooler` where an objective has asked for one.
    """

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
    """Segment types; 0 for a model without them."""
    activation: PlainActivation = "gelu"
    """gelu is the exact (erf) form, gelu_new the tanh approximation."""
    dropout: float = field(0.1, recipe=True)
    """Dropout after the embeddings, the attention output and the feed-forward output."""
    attention_dropout: float = field(0.1, recipe=True)
    """Dropout on attention probabilities; above 0 it rules out fused attention kernels while training."""
    norm_eps: float = 1e-12
    """Epsilon of LayerNorm."""
    init_std: float = 0.02
    """Standard deviation of the truncated normal that weights are initialized from."""
    last_layer_at_positions: bool = field(True, resumable=True)
    """Compute the last layer only at the positions whose hidden states are used."""

    template: ClassVar[Template] = Template(
        single="cls $A sep", pair="cls $A sep $B:1 sep:1", inputs=("input_ids", "token_type_ids", "attention_mask"),
        needs=("pad", "cls", "sep", "mask"),
    )
    """What stands around a text."""

    def __post_init__(self) -> None:
        check_sizes(self)
        check_heads(self.hidden_size, self.num_heads)

    # Choices that a family makes for all its sizes; subclasses override them, by a property or by a field.

    @property
    def embedding_width(self) -> int:
        """Width of the embeddings."""
        return self.hidden_size

    @property
    def has_projection(self) -> bool:
        """Whether a dense layer follows the embeddings; it has to where their width differs from hidden_size."""
        return self.embedding_width != self.hidden_size

    @property
    def first_position(self) -> int:
        """Row of the position table that the first token uses."""
        return 0

    @property
    def groups(self) -> int | None:
        """Number of different layers, if consecutive ones share parameters."""
        return None

    @property
    def head_activation(self) -> PlainActivation:
        """Activation of the masked-LM head."""
        return self.activation

    @property
    def stack(self) -> StackConfig:
        """The configuration of the layers."""
        return StackConfig(
            hidden_size=self.hidden_size, num_layers=self.num_layers, num_heads=self.num_heads,
            head_dim=self.hidden_size // self.num_heads, intermediate_size=self.intermediate_size,
            activation=self.activation, norm_eps=self.norm_eps, dropout=self.dropout,
            attention_dropout=self.attention_dropout, init_std=self.init_std, num_groups=self.groups,
            last_layer_at_positions=self.last_layer_at_positions, **self.computation,
        )

    def bind(self, vocabulary: Vocabulary) -> Self:
        """A copy with as many rows of embedding as the vocabulary needs."""
        return dataclasses.replace(self, vocab_size=vocabulary.rows(self.vocab_size))

    def init(self, key: jax.Array) -> Params:
        """Fresh parameters, float32, without a pooler."""
        ids = jnp.zeros((1, 2), jnp.int32)
        return EncoderModule(self).init({"params": key}, ids, method="everything")["params"]

    def init_pooler(self, key: jax.Array) -> Params:
        """Fresh parameters of the pooler, for an objective to put at "pooler"."""
        return self._pooler.init(key, jnp.zeros((1, self.hidden_size)))["params"]

    def encode(
        self,
        params: Params,
        input_ids: Int[Array, "batch length"],
        token_type_ids: Int[Array, "batch length"] | None = None,
        attention_mask: Int[Array, "batch length"] | Bool[Array, "batch length"] | None = None,
        dropout_key: jax.Array | None = None,
        positions: Int[Array, "batch few"] | None = None,
    ) -> Float[Array, "batch length_or_few hidden"]:
        """Last hidden states, of all tokens or only at `positions`. attention_mask is 1 at tokens and 0 at padding,
        which stands at the end of a row; a dropout_key turns dropout on."""
        return self._encode(params, input_ids, token_type_ids, attention_mask, dropout_key, positions)[0]

    def encode_all(
        self,
        params: Params,
        input_ids: Int[Array, "batch length"],
        token_type_ids: Int[Array, "batch length"] | None = None,
        attention_mask: Int[Array, "batch length"] | Bool[Array, "batch length"] | None = None,
        dropout_key: jax.Array | None = None,
    ) -> tuple[list[Float[Array, "batch length hidden"]], list[Float[Array, "batch heads length length"]]]:
        """(the hidden states that enter each layer, and the last ones; the attention scores of each layer before masks
        and softmax): num_layers + 1 and num_layers arrays."""
        last, layers = self._encode(params, input_ids, token_type_ids, attention_mask, dropout_key, None, collect=True)
        return [*(layer.hidden for layer in layers), last], [layer.scores for layer in layers]

    def _encode(self, params, input_ids, token_type_ids, attention_mask, dropout_key, positions, collect=False):
        rngs = None if dropout_key is None else {"dropout": dropout_key}
        return EncoderModule(self).apply(
            {"params": params}, input_ids, token_type_ids, attention_mask, dropout_key is None, positions, collect,
            rngs=rngs, method="encode",
        )

    def pool(self, params: Params, hidden: Float[Array, "batch length hidden"]) -> Float[Array, "batch hidden"]:
        """tanh(W h + b) of the first token's hidden state h."""
        return jnp.tanh(self._pooler.apply({"params": params["pooler"]}, hidden[:, 0]))

    def token_features(
        self, params: Params, hidden: Float[Array, "batch few hidden"]
    ) -> Float[Array, "batch few embedding"]:
        """What the masked-LM head multiplies with `output_matrix`."""
        return EncoderModule(self).apply({"params": params}, hidden, method="features")

    def output_matrix(self, params: Params) -> tuple[Float[Array, "vocab embedding"], Float[Array, " vocab"]]:
        """(matrix, bias) that turn `token_features` into vocabulary logits: the word embedding, and the head's bias."""
        return params["embeddings"]["word"]["embedding"], params["mlm_head"]["bias"]

    def predict_tokens(
        self, params: Params, hidden: Float[Array, "batch few hidden"]
    ) -> Float[Array, "batch few vocab"]:
        """Vocabulary logits in float32 for the given hidden states."""
        return logits(self.token_features(params, hidden), *self.output_matrix(params))

    def flops(self, length: int, predicted: int) -> float:
        """FLOPs of one sequence's forward pass with `predicted` positions in the masked-LM head: matrix products and
        attention, every layer at every position; a multiply-add counts as 2."""
        e, h = self.embedding_width, self.hidden_size
        projection = 2 * length * e * h if self.has_projection else 0
        head = predicted * (2 * h * e + 2 * e * self.vocab_size)
        return float(projection + stack_flops(self.stack, length) + head)

    @property
    def _pooler(self) -> nn.Dense:
        return nn.Dense(self.hidden_size, dtype=self.dtype, kernel_init=kernel_init(self.stack))


def stack_flops(stack: StackConfig, length: int, memory: int = 0) -> float:
    """FLOPs of one sequence's forward pass through a stack; with cross-attention over `memory` positions."""
    h, inner = stack.hidden_size, stack.num_heads * stack.head_dim
    matrices = 3 if stack.activation.startswith("gated") else 2
    seen = length if stack.band is None else (length + min(length, stack.band)) / 2  # every second layer has the band
    layer = length * (8 * h * inner + 2 * matrices * h * stack.intermediate_size + 4 * seen * inner)
    if stack.cross_attention:
        layer += 4 * length * h * inner + 4 * memory * h * inner + 4 * length * memory * inner
    return float(stack.num_layers * layer)


class MaskedLMHead(nn.Module):
    """dense, activation, LayerNorm; then the word embedding transposed, plus a bias of the vocabulary's size."""

    model: Encoder

    def setup(self) -> None:
        m = self.model
        self.dense = nn.Dense(m.embedding_width, dtype=m.dtype, kernel_init=kernel_init(m.stack))
        self.norm = Norm("layer", m.norm_eps, m.dtype)
        self.bias = self.param("bias", nn.initializers.zeros, (m.vocab_size,), jnp.float32)

    def __call__(self, hidden: jax.Array) -> jax.Array:
        return self.norm(ACTIVATIONS[self.model.head_activation](self.dense(hidden)))


class EncoderModule(nn.Module):
    """Embeddings, layers and masked-LM head under the names that checkpoints use."""

    model: Encoder

    def setup(self) -> None:
        m = self.model
        init = kernel_init(m.stack)
        self.embeddings = Embeddings(
            m.vocab_size, m.embedding_width, m.max_positions + m.first_position, m.type_vocab_size, m.norm_eps,
            m.dropout, init, init, m.dtype,
        )
        if m.has_projection:
            self.projection = nn.Dense(m.hidden_size, dtype=m.dtype, kernel_init=init)
        self.encoder = Stack(m.stack)
        self.mlm_head = MaskedLMHead(m)

    def encode(
        self, input_ids, token_type_ids=None, attention_mask=None, deterministic=True, positions=None, collect=False
    ):
        m = self.model
        places = m.first_position + jnp.arange(input_ids.shape[1])[None, :]
        x = self.embeddings(input_ids, places, token_type_ids, deterministic)
        if m.has_projection:
            x = self.projection(x)
        segments = None if attention_mask is None else attention_mask.astype(jnp.int32)
        inputs = LayerInputs(visible=Visibility(key_segments=segments))
        return self.encoder(x, inputs, positions=positions, collect=collect, deterministic=deterministic)

    def features(self, hidden):
        return self.mlm_head(hidden)

    def everything(self, input_ids):
        return self.features(self.encode(input_ids)[0])
