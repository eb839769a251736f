"""The contract between a model family and everything that trains, fine-tunes, exports or asks it.

A model is a value: a frozen dataclass of sizes whose methods are pure functions of parameters. Callers never name a
family; what a family has beyond this contract (a query stream, a recurrence memory, the states of all layers) are
methods of its own, which its own objective calls.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxlm.errors import UserError
from jaxlm.models.layers.config import PlainActivation
from jaxlm.models.layers.embeddings import logits
from jaxlm.tokenizers.template import Template
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import Params


class Inputs(NamedTuple):
    """What a model reads. A family ignores what it has no use for.

    mask: 1 at tokens, 0 at padding, which stands at the end of a row; None for rows without padding.
    token_types: segment types; None for zeros.
    documents: number of the document of each token in a packed row, 0 at padding. Causal models attend within a
        document and restart its positions; given None they take `mask`, which is a row of documents 1 and 0.
    characters: characters of each token, for models that spell their words.
    """

    ids: Int[Array, "batch length"]
    token_types: Int[Array, "batch length"] | None = None
    mask: Int[Array, "batch length"] | Bool[Array, "batch length"] | None = None
    documents: Int[Array, "batch length"] | None = None
    characters: Int[Array, "batch length characters"] | None = None

    @classmethod
    def of(cls, example: Mapping[str, Any]) -> Inputs:
        """Return the arrays of an example: `input_ids`, `token_type_ids`, `attention_mask` and `characters`."""
        return cls(
            example["input_ids"], example.get("token_type_ids"), example.get("attention_mask"),
            characters=example.get("characters"),
        )


class FineTuning(NamedTuple):
    """How a task reads a model, as the model's paper and its Transformers classes have it.

    template: special symbols around a task's texts. answer_template: the same for answers in passages, where `template`
    ends without a symbol that can stand for "no answer". activation: of the dense layer between the summary and the
    classifier; None without such a layer. use_bias: whether the classifier of texts has a bias.
    """

    template: Template
    answer_template: Template | None = None
    activation: PlainActivation | Literal["tanh"] | None = "tanh"
    use_bias: bool = True


@dataclasses.dataclass(frozen=True)
class Model:
    """A model that reads text. Families are frozen dataclasses with the sizes as fields.

    An instance of this class itself stands for a model that is yet to be chosen.
    """

    template: ClassVar[Template] = Template()
    """Special symbols around one and two texts."""
    is_causal: ClassVar[bool] = False
    """Whether the hidden state of a token depends only on the tokens before it and on itself."""
    summary_token: ClassVar[Literal["first", "last", "mean"]] = "first"
    """The token whose hidden state stands for a text, or the mean of all tokens."""
    length_multiple: ClassVar[int] = 1
    """Training rows have a multiple of this many tokens."""
    input_params: ClassVar[tuple[str, ...]] = ("embeddings", "projection")
    """Names of the parameters below the first layer, whose learning rate layer decay scales the most."""
    output_params: ClassVar[tuple[str, ...]] = ("mlm_head",)
    """Names of the parameters that only predict tokens."""
    vocab_multiple: ClassVar[int] = 1
    """The rows of the embedding are rounded up to a multiple of this."""

    @property
    def width(self) -> int:
        """Width of the hidden states."""
        return self.hidden_size

    @property
    def max_length(self) -> int | None:
        """The longest sequence that the model reads; None without a limit."""
        return getattr(self, "max_positions", None)

    @property
    def fine_tuning(self) -> FineTuning | None:
        """How a task reads the model; None for a model that no task can read."""
        return FineTuning(self.template)

    @property
    def text_model(self) -> Model:
        """The model that tasks, vectors and teachers use: this one, or the part of it that reads text."""
        return self

    def text_params(self, params: Params) -> Params:
        """Return the parameters of `text_model`."""
        return params

    @property
    def writes_answers(self) -> bool:
        """Whether the model can write the answer to a task as text."""
        return False

    def complete_inputs(self, inputs: Inputs, vocabulary: Vocabulary) -> Inputs:
        """Return `inputs` with what else the model reads of each token."""
        return inputs

    def init_task(self, key: jax.Array) -> Params:
        """Return the fresh parameters that a task starts from: without output layers, with what only tasks train."""
        return {name: leaf for name, leaf in self.init(key).items() if name not in self.output_params}

    @property
    def execution(self) -> dict[str, Any]:
        """The fields that say how attention layers are computed; empty for a model without such layers."""
        return {}

    def with_execution(self, **changes: Any) -> Self:
        """Return a copy with other values of the `execution` fields; unknown ones are ignored."""
        return dataclasses.replace(self, **{name: changes[name] for name in self.execution if name in changes})

    def for_vocabulary(self, vocabulary: Vocabulary) -> Self:
        """Return a copy with as many rows of embedding as the vocabulary needs."""
        return dataclasses.replace(self, vocab_size=vocabulary.rows(self.vocab_size, self.vocab_multiple))

    def init(self, key: jax.Array) -> Params:
        """Return fresh parameters, float32, as a nested dict."""
        raise NotImplementedError

    def hidden_states(
        self, params: Params, inputs: Inputs, *, key: jax.Array | None = None,
        at: Int[Array, "batch selected"] | None = None,
    ) -> Float[Array, "batch length_or_selected width"]:
        """Return the last hidden states.

        Args:
            params: The model's parameters.
            inputs: Tokens, and what belongs to them.
            key: Dropout key; None turns dropout off.
            at: Positions whose hidden states are wanted; None for all.
        """
        raise NotImplementedError

    def summary(self, params: Params, inputs: Inputs, *, key: jax.Array | None = None) -> Float[Array, "batch width"]:
        """Return one vector per text: the hidden state of its first or last token, or the mean of all tokens."""
        rows = inputs.ids.shape[0]
        if self.summary_token == "first":
            return self.hidden_states(params, inputs, key=key, at=jnp.zeros((rows, 1), jnp.int32))[:, 0]
        mask = jnp.ones_like(inputs.ids) if inputs.mask is None else inputs.mask
        lengths = jnp.sum(mask, axis=1)
        if self.summary_token == "last":
            last = jnp.maximum(lengths - 1, 0)[:, None]
            return self.hidden_states(params, inputs, key=key, at=last)[:, 0]
        hidden = self.hidden_states(params, inputs, key=key)
        return jnp.einsum("blh,bl->bh", hidden, mask.astype(hidden.dtype)) / jnp.maximum(lengths, 1)[:, None]

    def forward_flops(self, length: int, predicted: int = 0) -> float:
        """Return the FLOPs of one sequence's forward pass, with `predicted` positions in the output layer.

        Matrix products and full attention, every layer at every position; a multiply-add counts as 2.
        """
        raise NotImplementedError


class TokenPredictor(Model):
    """A model that predicts tokens of its vocabulary."""

    def token_features(self, params: Params, hidden: Float[Array, "*batch width"]) -> Float[Array, "*batch features"]:
        """Return the vectors that the output matrix multiplies; by default the hidden states themselves."""
        return hidden

    def output_matrix(self, params: Params) -> tuple[Float[Array, "vocab features"], Float[Array, " vocab"] | None]:
        """Return (matrix, bias or None), which turn `token_features` into vocabulary logits."""
        raise NotImplementedError

    def predict_tokens(self, params: Params, hidden: Float[Array, "*batch width"]) -> Float[Array, "*batch vocab"]:
        """Return vocabulary logits in float32."""
        return logits(self.token_features(params, hidden), *self.output_matrix(params))

    def token_logits(
        self, params: Params, inputs: Inputs, at: Int[Array, "batch selected"]
    ) -> Float[Array, "batch selected vocab"]:
        """Return the vocabulary logits of masked tokens, float32, without dropout."""
        return self.predict_tokens(params, self.hidden_states(params, inputs, at=at))


class Writer(TokenPredictor):
    """A model that writes text token by token."""

    has_encoder: ClassVar[bool] = False
    """Whether an encoder reads the prompt, and the text that is written begins anew."""

    @property
    def writes_answers(self) -> bool:
        return self.has_encoder or self.is_causal

    def prefill(
        self, params: Params, prompts: Int[Array, "batch length"], mask: Bool[Array, "batch length"], new_tokens: int,
        start: int = 0,
    ) -> tuple[Float[Array, "batch vocab"], Any]:
        """Read prompts.

        Args:
            params: The model's parameters.
            prompts: Token ids, padded on the left.
            mask: False at padding.
            new_tokens: Number of tokens that the state has room for.
            start: Token that the decoder of an encoder-decoder begins with.

        Returns:
            Logits of the first new token, float32, and the state.
        """
        raise NotImplementedError

    def decode(
        self, params: Params, tokens: Int[Array, " batch"], state: Any
    ) -> tuple[Float[Array, "batch vocab"], Any]:
        """Append one token to each row; return the logits of the next one and the new state, of the same shapes."""
        raise NotImplementedError

    def target_features(
        self, params: Params, prompts: Int[Array, "batch length"], mask: Bool[Array, "batch length"],
        targets: Int[Array, "batch targets"], target_mask: Bool[Array, "batch targets"], start: int = 0,
    ) -> Float[Array, "batch targets features"]:
        """Return the `token_features` that predict each target, given its prompt and the targets before it.

        Args:
            params: The model's parameters.
            prompts: Token ids, padded on the left.
            mask: False at the padding of prompts.
            targets: Token ids, padded on the right.
            target_mask: False at the padding of targets.
            start: Token that the decoder of an encoder-decoder begins with.

        Raises:
            UserError: The model reads text in both directions.
        """
        if not self.is_causal:
            raise UserError(
                f"a {type(self).__name__} scores no continuations; use a causal or an encoder-decoder model."
            )
        # The model never reads the last target of a row, for which there may be no position.
        ids = jnp.concatenate([prompts, targets[:, :-1]], axis=1)
        is_text = jnp.concatenate([mask, target_mask[:, 1:]], axis=1)
        hidden = self.hidden_states(params, Inputs(ids, mask=is_text))
        return self.token_features(params, hidden[:, prompts.shape[1] - 1 :])


def last_token(
    hidden: Float[Array, "batch length width"], mask: Int[Array, "batch length"]
) -> Float[Array, "batch width"]:
    """Return the hidden state of the last token of each row."""
    position = jnp.maximum(jnp.sum(mask, axis=-1) - 1, 0)
    return jnp.take_along_axis(hidden, position[:, None, None], axis=1)[:, 0]
