"""ERNIE of Tsinghua (Zhang et al. 2019), a BERT that also reads the entities which its text mentions.

It is not Baidu's model of that name, which Transformers has.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar, NoReturn

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxlm.errors import UserError
from jaxlm.models.base import Inputs
from jaxlm.models.encoder import Encoder
from jaxlm.models.layers.activations import ACTIVATIONS
from jaxlm.models.layers.config import StackConfig, check_heads, kernel_init, transformer_sizes
from jaxlm.models.layers.dense import Dense
from jaxlm.models.layers.dropout import dropout
from jaxlm.models.layers.multi_head import MultiHeadAttention, Visibility
from jaxlm.models.layers.norm import Norm
from jaxlm.models.layers.stack import (
    at_positions,
    call,
    init_stack,
    layer_keys,
    pad_positions,
    rematerialized,
    run_layers,
    run_stack,
    split_layers,
    stack_flops,
    unstack,
)
from jaxlm.parallel.activations import constrain
from jaxlm.types import Params

Streams = tuple[jax.Array, jax.Array]
"""Hidden states of the tokens, [batch, length, hidden], and of the entities, [batch, length, entity_hidden]."""


@dataclasses.dataclass(frozen=True)
class Ernie(Encoder):
    """ERNIE encoder. The defaults are the published ones.

    The first `num_text_layers` layers are BERT's (the T-encoder, section 3.2). The others (the K-encoder, section 3.3)
    have a second, narrow stream with the entity of the mention that begins at each token, see `fused_layer`.

    Parameters: those of `Encoder`, whose layers are the token side of all layers, so that a BERT's fit; and the entity
    side of the K-encoder: `entity_encoder/first/{mlp,mlp_norm}` of its first layer, which has no attention over
    entities, and `entity_encoder/layers/…` (stacked) of the others. The last layer's `mlp/wo` and `mlp_norm` of that
    side make an output that nothing reads. They get no gradient, and only weight decay changes them; the official code
    has them too, and keeps them out of the optimizer.
    """

    num_text_layers: int = 5
    """Number of layers that read only tokens."""
    entity_hidden_size: int = 100
    """Width of the entity stream, which is that of the entity vectors."""
    entity_num_heads: int = 4
    """Number of attention heads over entities; must divide entity_hidden_size."""

    published_sizes: ClassVar = {"base": transformer_sizes(12, 768)}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_heads(self.entity_hidden_size, self.entity_num_heads, "entity_")
        if self.num_text_layers > self.num_layers - 2:
            raise UserError(
                f"objective.model.num_text_layers {self.num_text_layers} leaves fewer than two of the "
                f"{self.num_layers} layers to entities; lower it."
            )

    @property
    def entity_width(self) -> int:
        """Width of the entity vectors."""
        return self.entity_hidden_size

    @property
    def entity_stack(self) -> StackConfig:
        """Configuration of the entity side of the layers with attention over entities."""
        return dataclasses.replace(
            self.stack, hidden_size=self.entity_hidden_size, num_heads=self.entity_num_heads,
            head_dim=self.entity_hidden_size // self.entity_num_heads,
            num_layers=self.num_layers - self.num_text_layers - 1,
        )

    def init(self, key: jax.Array) -> Params:
        key, key_entities = jax.random.split(key)
        stack = self.entity_stack
        layers = init_stack(dataclasses.replace(stack, num_layers=stack.num_layers + 1), key_entities)["layers"]
        first, layers = split_layers(layers, 1, stack.num_layers)
        first = {name: unstack(first)[0][name] for name in ("mlp", "mlp_norm")}
        return super().init(key) | {"entity_encoder": {"first": first, "layers": layers}}

    def _run(
        self, params: Params, inputs: Inputs, key: jax.Array | None, positions: jax.Array | None = None
    ) -> tuple[jax.Array, None]:
        keys = (None,) * 4 if key is None else jax.random.split(key, 4)
        stack, count = self.stack, self.entity_stack.num_layers
        x, shared = self._embed(params, inputs, keys[0])
        text, first, others = split_layers(params["encoder"]["layers"], self.num_text_layers, 1, count)
        text_stack = dataclasses.replace(stack, num_layers=self.num_text_layers)
        x, _ = run_stack(text_stack, {"layers": text}, x, shared, key=keys[1])

        vectors, mask = self._entities(inputs)
        layer = functools.partial(fused_layer, stack, self.entity_stack, shared.visible, mask)
        entities = params["entity_encoder"]
        first_params = unstack(first)[0], entities["first"]
        state, _ = rematerialized(layer, stack.remat)(first_params, (x, vectors), keys[2])
        layers, at_last = [layer] * count, positions is not None and self.last_layer_at_positions
        if at_last:
            layers[-1] = functools.partial(layer, positions=pad_positions(positions))
        (x, _), _ = run_layers(
            layers, (others, entities["layers"]), state, layer_keys(keys[3], count), remat=stack.remat,
            loop=stack.loop_layers,
        )
        if positions is not None:
            x = x[:, : positions.shape[1]] if at_last else at_positions(x, positions)
        return x, None

    def _entities(
        self, inputs: Inputs
    ) -> tuple[Float[Array, "batch length entity_hidden"], Bool[Array, "batch length"]]:
        """Return the entity vectors, zeros where there is no entity, and the mask of entities.

        The first token counts as an entity with the vector zero, as in the official code, so that a row without any has
        something to attend to.
        """
        shape = inputs.ids.shape
        if inputs.entities is None:
            mask, vectors = jnp.zeros(shape, bool), jnp.zeros((*shape, self.entity_hidden_size), self.dtype)
        else:
            mask = inputs.entities >= 0
            vectors = jnp.where(mask[..., None], inputs.entity_vectors, 0.0).astype(self.dtype)
        return constrain(vectors), mask.at[:, 0].set(True)

    def layer_states(self, *_: Any, **__: Any) -> NoReturn:
        """Raise UserError: the states of all layers are for distillation, which has no entities."""
        raise UserError("an Ernie cannot teach its hidden layers; choose a BERT as objective.teacher.")

    def forward_flops(self, length: int, predicted: int = 0) -> float:
        first = 4 * length * self.entity_hidden_size * self.intermediate_size
        return super().forward_flops(length, predicted) + stack_flops(self.entity_stack, length) + first


def fused_layer(
    stack: StackConfig, entity_stack: StackConfig, visible: Visibility, mask: Bool[Array, "batch length"],
    params: tuple[Params, Params], state: Streams, key: jax.Array | None, positions: jax.Array | None = None,
) -> tuple[Streams, None]:
    """Run a layer of the K-encoder (section 3.3, equations 2 and 3).

    Tokens w and entities e are normalized sums, w ← LN(w + attention(w)) and e ← mask · LN(e + attention(e)). Then both
    are fused into h = GELU(W_t w + b_t + W_e e + b_e), and w ← LN(w + W_o h + b_o), e ← LN(e + W_oe h + b_oe).

    This is the official code. The paper has the activation around both results instead of a residual sum and LN; and at
    tokens without an entity it leaves out W_e e + b_e, where here e is 0 and b_e acts.

    Args:
        stack: Configuration of the tokens' layers.
        entity_stack: Configuration of the entities' layers.
        visible: Masks of attention over tokens.
        mask: Mask of entities.
        params: Parameters of the token side and of the entity side. Without "attention" on the entity side, as in the
            first layer, e ← mask · e.
        state: Hidden states of tokens and of entities.
        key: Dropout key; None turns dropout off.
        positions: The only positions to compute and return; attention is over all tokens.
    """
    keys = (None,) * 6 if key is None else jax.random.split(key, 6)

    def add_norm(c: StackConfig, params: Params, residual: jax.Array, y: jax.Array, key: jax.Array | None) -> jax.Array:
        return constrain(call(Norm(c.norm, c.norm_eps, c.dtype), params, residual + dropout(y, c.dropout, key)))

    def attend(c: StackConfig, params: Params, x: jax.Array, visible: Visibility, keys: Any) -> jax.Array:
        query, source = (x, None) if positions is None else (at_positions(x, positions), x)
        attention = functools.partial(call, MultiHeadAttention(c), params["attention"], key=keys[0])
        y, _ = attention(query, source, visibility=visible, deterministic=keys[0] is None)
        return add_norm(c, params["attention_norm"], query, y, keys[1])

    def dense(c: StackConfig, features: int, params: Params, x: jax.Array) -> jax.Array:
        return call(Dense(features, c.use_bias, c.dtype, kernel_init(c)), params, x)

    (tokens, entities), (w, e) = params, state
    w = attend(stack, tokens, w, visible, keys[:2])
    if "attention" in entities:
        e = attend(entity_stack, entities, e, Visibility(mask=mask[:, None, None, :]), keys[2:4])
    if positions is not None:
        mask = jnp.take_along_axis(mask, positions, axis=1)
    e = jnp.where(mask[..., None], e, 0.0)
    sums = (dense(stack, stack.intermediate_size, side["mlp"]["wi"], x) for side, x in ((tokens, w), (entities, e)))
    fused = ACTIVATIONS[stack.activation](sum(sums))
    w = add_norm(stack, tokens["mlp_norm"], w, dense(stack, stack.hidden_size, tokens["mlp"]["wo"], fused), keys[4])
    e_out = dense(entity_stack, entity_stack.hidden_size, entities["mlp"]["wo"], fused)
    return (w, add_norm(entity_stack, entities["mlp_norm"], e, e_out, keys[5])), None
