"""Decoding with a key/value cache, for causal models whose prompt and text are one sequence."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxlm.fields import field
from jaxlm.models.base import FineTuning, Model, Writer
from jaxlm.models.layers.config import StackConfig
from jaxlm.models.layers.multi_head import Visibility, empty_cache
from jaxlm.models.layers.stack import SharedInputs, call, run_stack
from jaxlm.tokenizers.template import Template
from jaxlm.types import Params

ENCODER_TEMPLATE = Template(
    single="cls $A sep", pair="cls $A sep $B sep", needs=("pad", "cls", "sep", "mask"), is_default=True
)
"""Special symbols around the texts of an encoder with a decoder's layers."""


class DecoderState(NamedTuple):
    """Decoding state of a decoder."""

    caches: Any
    """Key/value caches of all layers, of static shape."""
    filled: Bool[Array, "batch slots"]
    """Which slots hold tokens."""
    position: Int[Array, " batch"]
    """Position of the next token."""
    index: Int[Array, ""]
    """Slot of the next token."""


class CachedWriter(Writer):
    """Decoder with a key/value cache; a family gives it `stack`, and `_embeddings` or `_run_tokens`."""

    template = Template(needs=("eos",))
    is_causal = True
    summary_token = "last"

    @property
    def fine_tuning(self) -> FineTuning:
        pair, answer = Template(pair="$A eos $B", needs=("eos",)), Template(pair="$A eos $B eos")
        return FineTuning(pair, answer, activation=None, use_bias=False)

    def _run_tokens(
        self, params: Params, ids: Int[Array, "batch length"], positions: Int[Array, "#batch length"],
        shared: SharedInputs, *, key: jax.Array | None = None, caches: Any = None,
    ) -> tuple[Float[Array, "batch length hidden"], Any]:
        """Return the last hidden states, and the updated caches if there are any; see `run_stack`."""
        x = call(self._embeddings, params["embeddings"], ids, positions)
        return run_stack(self.stack, params["encoder"], x, shared, key=key, caches=caches)

    def visible_slots(
        self, params: Params, filled: Bool[Array, "batch slots"], queries: Int[Array, " queries"]
    ) -> Visibility:
        """Return the mask of the cached keys, and the bias on them if any, for the queries in some slots.

        Prompts are padded on the left. A single query is in the last filled slot.
        """
        mask = filled[:, None, None, :]
        if len(queries) > 1:
            mask &= queries[:, None] >= jnp.arange(filled.shape[1])[None, :]
        return Visibility(mask=mask)

    def prefill(
        self, params: Params, prompts: Int[Array, "batch length"], mask: Bool[Array, "batch length"], new_tokens: int,
        start: int = 0,
    ) -> tuple[Float[Array, "batch vocab"], DecoderState]:
        batch, length = prompts.shape
        slots = length + new_tokens
        filled = jnp.pad(mask, ((0, 0), (0, new_tokens)))
        positions = jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0)
        visible = self.visible_slots(params, filled, jnp.arange(length))
        hidden, caches = self._run_tokens(
            params, prompts, positions, SharedInputs(visible, index=jnp.int32(0)),
            caches=empty_cache(self.stack, batch, slots),
        )
        state = DecoderState(caches, filled, positions[:, -1] + 1, jnp.int32(length))
        return self.predict_tokens(params, hidden[:, -1]), state

    def decode(
        self, params: Params, tokens: Int[Array, " batch"], state: DecoderState
    ) -> tuple[Float[Array, "batch vocab"], DecoderState]:
        filled = state.filled.at[:, state.index].set(True)
        visible = self.visible_slots(params, filled, state.index[None])
        hidden, caches = self._run_tokens(
            params, tokens[:, None], state.position[:, None], SharedInputs(visible, index=state.index),
            caches=state.caches,
        )
        state = DecoderState(caches, filled, state.position + 1, state.index + 1)
        return self.predict_tokens(params, hidden[:, 0]), state


@dataclasses.dataclass(frozen=True)
class EitherDirection(CachedWriter):
    """Decoder that is an encoder if its attention is bidirectional. Its tasks read the last token in both cases."""

    is_causal: bool = field(True, weights=True)
    """Whether a token attends only to itself and to earlier tokens; masked language modelling needs False."""

    @property
    def template(self) -> Template:
        return CachedWriter.template if self.is_causal else ENCODER_TEMPLATE

    @property
    def fine_tuning(self) -> FineTuning:
        encoder = FineTuning(self.template, activation=None, use_bias=False)
        return super().fine_tuning if self.is_causal else encoder

    @property
    def stack(self) -> StackConfig:
        """Configuration of the layers."""
        return dataclasses.replace(super().stack, causal=self.is_causal)

    def in_direction(self, is_causal: bool) -> Model:
        return dataclasses.replace(self, is_causal=is_causal)
