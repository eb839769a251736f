"""What the causal objective knows of a decoder."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

import jax
from jaxtyping import Array, Bool, Float, Int

from jaxlm.models.layers.config import Computation
from jaxlm.models.layers.embeddings import logits
from jaxlm.tokenizers.vocabulary import Vocabulary

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Decoder(Computation):
    """A causal model as a value. A family has the fields vocab_size, hidden_size …, max_positions among them, or a
    property of that name, and the methods that raise here."""

    length_multiple: ClassVar[int] = 1
    """Training rows have a multiple of so many tokens."""

    def bind(self, vocabulary: Vocabulary) -> Self:
        """A copy with as many rows of embedding as the vocabulary needs."""
        return dataclasses.replace(self, vocab_size=vocabulary.rows(self.vocab_size))

    def init(self, key: jax.Array) -> Params:
        """Fresh parameters, float32."""
        raise NotImplementedError

    def decode_hidden(
        self,
        params: Params,
        input_ids: Int[Array, "batch length"],
        segment_ids: Int[Array, "batch length"] | None = None,
        dropout_key: jax.Array | None = None,
    ) -> Float[Array, "batch length features"]:
        """Hidden states after the final norm. A token sees those before it, and itself.

        segment_ids confine attention to each document of a packed row and restart its positions. They serve for padding
        too: an attention mask of ones and zeros is a row of documents 1 and 0. A dropout_key turns dropout on.
        """
        raise NotImplementedError

    def token_features(self, params: Params, hidden: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
        """What the output matrix is multiplied with: the hidden states."""
        return hidden

    def output_matrix(self, params: Params) -> tuple[Float[Array, "vocab features"], Float[Array, " vocab"] | None]:
        """(matrix, bias) that turn `token_features` into vocabulary logits."""
        raise NotImplementedError

    def predict_tokens(self, params: Params, hidden: Float[Array, "*batch width"]) -> Float[Array, "*batch vocab"]:
        """Vocabulary logits in float32."""
        return logits(self.token_features(params, hidden), *self.output_matrix(params))

    def prefill(
        self, params: Params, prompts: Int[Array, "batch length"], mask: Bool[Array, "batch length"], new_tokens: int
    ) -> tuple[Float[Array, "batch vocab"], Any]:
        """Reads prompts padded on the left: logits for the token that follows, and a state with room for `new_tokens`
        more."""
        raise NotImplementedError

    def decode(
        self, params: Params, tokens: Int[Array, " batch"], state: Any
    ) -> tuple[Float[Array, "batch vocab"], Any]:
        """Appends one token to each row: logits for the next one, and the state after it."""
        raise NotImplementedError

    def flops(self, length: int) -> float:
        """FLOPs of one sequence's forward pass: matrix products and attention; a multiply-add counts as 2."""
        raise NotImplementedError
