"""Bidirectional encoder of BERT and the models after it, which differ in a few independent choices."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxlm.fields import field
from jaxlm.models.base import Inputs, TokenPredictor, document_positions
from jaxlm.models.heads import TransformHead
from jaxlm.models.layers.config import PlainActivation, StackConfig, TransformerConfig, kernel_init
from jaxlm.models.layers.dense import Dense
from jaxlm.models.layers.embeddings import Embeddings
from jaxlm.models.layers.multi_head import Visibility
from jaxlm.models.layers.stack import SharedInputs, call, init_stack, run_stack, stack_flops
from jaxlm.tokenizers.template import Template
from jaxlm.types import Params


@dataclasses.dataclass(frozen=True)
class Encoder(TransformerConfig, TokenPredictor):
    """Bidirectional encoder. The defaults are bert-base-uncased.

    Parameters: `embeddings/{word,position,token_type,norm}`, `projection` if the embeddings have their own width,
    `encoder/layers/…` (stacked), `mlm_head/{dense,norm,bias}`, and `pooler` if an objective adds one.
    """

    max_positions: int = 512
    """Maximum sequence length (rows of the position embedding)."""
    type_vocab_size: int = 2
    """Number of segment types; 0 for none."""
    init_std: float = field(0.02, range="[0, inf)")
    """Standard deviation of the truncated normal that initializes the weights."""
    last_layer_at_positions: bool = field(True, resumable=True)
    """Compute the last layer only at the positions whose hidden states are used."""

    template = Template(
        single="cls $A sep", pair="cls $A sep $B:1 sep:1", inputs=("input_ids", "token_type_ids", "attention_mask"),
        needs=("pad", "cls", "sep", "mask"),
    )

    # Choices of a family for all its sizes, which subclasses override by a property, an attribute or a field.

    first_position: ClassVar[int] = 0
    """Row of the position embedding for the first token."""

    @property
    def embedding_width(self) -> int:
        """Width of the embeddings."""
        return self.hidden_size

    @property
    def has_projection(self) -> bool:
        """Whether a dense layer maps the embeddings to hidden_size, as it must if their width differs."""
        return self.embedding_width != self.hidden_size

    @property
    def head_activation(self) -> PlainActivation:
        """Activation of the masked-LM head."""
        return self.activation

    @property
    def stack(self) -> StackConfig:
        """Configuration of the layers."""
        return StackConfig.of(self)

    def init(self, key: jax.Array) -> Params:
        """Return fresh parameters, float32, without a pooler."""
        keys, ids = jax.random.split(key, 4), jnp.zeros((1, 2), jnp.int32)
        params = {
            "embeddings": self._embeddings.init(keys[0], ids, ids)["params"],
            "encoder": init_stack(self.stack, keys[1]),
            "mlm_head": self._mlm_head.init_params(keys[2]) | {"bias": jnp.zeros(self.vocab_size)},
        }
        if self.has_projection:
            params["projection"] = self._dense.init(keys[3], jnp.zeros((1, self.embedding_width)))["params"]
        return params

    def init_pooler(self, key: jax.Array) -> Params:
        """Return fresh parameters of the pooler, which an objective keeps at "pooler"."""
        return self._dense.init(key, jnp.zeros((1, self.hidden_size)))["params"]

    def hidden_states(
        self, params: Params, inputs: Inputs, *, key: jax.Array | None = None,
        at: Int[Array, "batch selected"] | None = None,
    ) -> Float[Array, "batch length_or_selected hidden"]:
        return self._run(params, inputs, key, positions=at)[0]

    def layer_states(
        self, params: Params, inputs: Inputs, *, key: jax.Array | None = None
    ) -> tuple[Float[Array, "states batch length hidden"], Float[Array, "layers batch heads length length"]]:
        """Return the hidden states of all layers, and their attention scores before masks and softmax.

        The first hidden states are the embeddings, the last ones those of the last layer.
        """
        last, (hidden, scores) = self._run(params, inputs, key, collect=True)
        return jnp.concatenate([hidden, last[None]]), scores

    def _run(self, params: Params, inputs: Inputs, key: jax.Array | None, **options: Any) -> tuple[jax.Array, Any]:
        keys = (None, None) if key is None else jax.random.split(key)
        x, shared = self._embed(params, inputs, keys[0])
        return run_stack(self.stack, params["encoder"], x, shared, key=keys[1], **options)

    def _embed(self, params: Params, inputs: Inputs, key: jax.Array | None) -> tuple[jax.Array, SharedInputs]:
        """Return the inputs of the first layer, and those that all layers share."""
        x = call(
            self._embeddings, params["embeddings"], inputs.ids, self._positions(inputs), inputs.token_types,
            key is None, key=key,
        )
        if self.has_projection:
            x = call(self._dense, params["projection"], x)
        # Without query segments, padding before the first token attends to tokens too, as in Transformers.
        segments, is_packed = inputs.segments, inputs.documents is not None
        return x, SharedInputs(visible=Visibility(segments if is_packed else None, segments, inputs.lengths))

    def _positions(self, inputs: Inputs) -> Int[Array, "#batch length"]:
        """Return the row of the position embedding for each token."""
        if inputs.documents is not None:
            return self.first_position + document_positions(inputs.documents)
        return self.first_position + jnp.arange(inputs.ids.shape[1])[None, :]

    def pool(self, params: Params, hidden: Float[Array, "batch length hidden"]) -> Float[Array, "batch hidden"]:
        """Return tanh(W h + b) of the first token's hidden state h."""
        return jnp.tanh(call(self._dense, params["pooler"], hidden[:, 0]))

    def token_features(
        self, params: Params, hidden: Float[Array, "*batch hidden"]
    ) -> Float[Array, "*batch embedding"]:
        """Return the hidden states after the masked-LM transform (dense, activation, norm)."""
        return call(self._mlm_head, params["mlm_head"], hidden)

    def output_matrix(self, params: Params) -> tuple[Float[Array, "vocab embedding"], Float[Array, " vocab"]]:
        """Return the word embedding and the bias of the masked-LM head."""
        return params["embeddings"]["word"]["embedding"], params["mlm_head"]["bias"]

    def forward_flops(self, length: int, predicted: int = 0) -> float:
        e, h = self.embedding_width, self.hidden_size
        projection = 2 * length * e * h if self.has_projection else 0
        head = predicted * (2 * h * e + 2 * e * self.vocab_size)
        return float(projection + stack_flops(self.stack, length) + head)

    @property
    def _embeddings(self) -> Embeddings:
        init = kernel_init(self.stack)
        return Embeddings(
            self.vocab_size, self.embedding_width, self.max_positions + self.first_position, self.type_vocab_size,
            self.norm_eps, self.dropout, init, init, self.dtype,
        )

    @property
    def _dense(self) -> Dense:
        """Dense layer to the hidden size: the pooler, or the projection of the embeddings."""
        return Dense(self.hidden_size, True, self.dtype, kernel_init(self.stack))

    @property
    def _mlm_head(self) -> TransformHead:
        stack = dataclasses.replace(self.stack, activation=self.head_activation)
        return TransformHead(stack, self.embedding_width)
