"""Contract of the model families.

A model is a frozen dataclass of sizes; its methods are pure functions of parameters. Callers do not depend on the
family. Further features of a family (query stream, recurrence memory, hidden states of all layers) are its own methods,
which only its own objective calls.
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
from jaxlm.models.layers.stack import at_positions
from jaxlm.tokenizers.template import Template
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import Params, Pooling


class AtEnd(NamedTuple):
    """Marker: all padding is at the end of its row. It is static: a pytree without leaves."""


class Inputs(NamedTuple):
    """Inputs of a model. Each family ignores the fields that it does not use."""

    ids: Int[Array, "batch length"]
    """Token ids."""
    token_types: Int[Array, "batch length"] | None = None
    """Segment types; None for zeros."""
    mask: Int[Array, "batch length"] | Bool[Array, "batch length"] | None = None
    """1 at tokens, 0 at padding; None for rows without padding. A model does not know the id of padding, and without a
    mask reads it as text; `Model.complete_inputs` makes the mask. Where the padding is not at the end of a row, an
    encoder's positions count it, as in Transformers; RoBERTa's do not."""
    documents: Int[Array, "batch length"] | None = None
    """Document number of each token in a packed row, 0 at padding; None: each row is one document, masked by `mask`.

    GPT, Reformer and encoders attend within a document, and count positions from its start. Documents are numbered in
    any way; neighbours differ, and padding is at the end of a row.
    """
    padding: AtEnd | None = None
    """AtEnd() where the caller knows that padding stands at the end of every row: some kernels of attention are faster
    with lengths than with a mask. None: it may stand anywhere."""
    characters: Int[Array, "batch length characters"] | None = None
    """Characters of each token, for models with character inputs."""
    entities: Int[Array, "batch length"] | None = None
    """Entity of the mention that begins at each token, -1 for none; None for text without entities."""
    entity_vectors: Float[Array, "batch length entity_width"] | None = None
    """Vector of each of these entities; undefined where no entity is marked."""

    @classmethod
    def of(cls, example: Mapping[str, Any]) -> Inputs:
        """Return the inputs that an example has under their names there, such as `input_ids`; padding is at the end."""
        return cls(
            example["input_ids"], example.get("token_type_ids"), example.get("attention_mask"),
            example.get("documents"), AtEnd(), example.get("characters"), example.get("entities"),
        )

    @property
    def lengths(self) -> Int[Array, " batch"] | None:
        """Number of tokens of each row; None without padding, or where it may stand anywhere."""
        is_known = self.mask is not None and self.padding is not None
        return jnp.sum(self.mask, axis=1, dtype=jnp.int32) if is_known else None

    @property
    def segments(self) -> Int[Array, "batch length"] | None:
        """Number of each token's document, 1 in rows of one document, 0 at padding; None without padding."""
        segments = self.mask if self.documents is None else self.documents
        return None if segments is None else segments.astype(jnp.int32)


class FineTuning(NamedTuple):
    """Input format and classifier of a task, from the model's paper and its Transformers classes."""

    template: Template
    """Special symbols around a task's texts."""
    answer_template: Template | None = None
    """Template of a question ($A) and its passage ($B), if it is another one: it has a symbol for "no answer"."""
    activation: PlainActivation | Literal["tanh"] | None = "tanh"
    """Activation of the dense layer between the summary and the classifier; None without such a layer."""
    has_input_dropout: bool = False
    """Whether there is dropout before that dense layer, too."""
    use_bias: bool = True
    """Whether the classifier of texts has a bias."""
    has_transform: bool = False
    """Whether classifiers, also of tokens, read the model's `token_features` instead of hidden states."""
    pools_late: bool = False
    """Whether the dense layer before the classifier reads each token, and the mean is that of its outputs."""


@dataclasses.dataclass(frozen=True)
class Model:
    """Model that reads text. Families are frozen dataclasses with the sizes as fields.

    An instance of this class itself is a placeholder until a pretrained model is chosen.
    """

    template: ClassVar[Template] = Template()
    """Special symbols around one and two texts."""
    is_causal = False  # unannotated: a ClassVar would fix the position of a subclass's field of this name
    """Whether a token attends only to itself and to earlier tokens."""
    summary_token: ClassVar[Literal["first", "last", "mean"]] = "first"
    """Token whose hidden state represents a text, or the mean of all tokens."""
    length_multiple: ClassVar[int] = 1
    """The length of training rows is a multiple of this."""
    input_params: ClassVar[tuple[str, ...]] = ("embeddings", "projection")
    """Names of the parameters below the first layer that get the smallest learning rate under layer decay."""
    decay_above_layers: ClassVar[int] = 2
    """Power of the layer decay at the last layer; heads have the power 0. ELECTRA's fine-tuning has 2, XLNet's 0."""
    output_params: ClassVar[tuple[str, ...]] = ("mlm_head",)
    """Names of the parameters that only serve to predict tokens."""
    sharding_rules: ClassVar[tuple[tuple[str, tuple[Any, ...]], ...]] = ()
    """Rules for parameters of the model's own, in the form of `jaxlm.parallel.rules.RULES`, before which they come."""
    vocab_multiple: ClassVar[int] = 1
    """The number of rows of the word embedding is rounded up to a multiple of this."""

    has_encoder: ClassVar[bool] = False
    """Whether an encoder reads the prompt and a decoder generates the text."""
    writes_answers: ClassVar[bool] = False
    """Whether the model can write the answer to a task as text."""
    entity_width: ClassVar[int] = 0
    """Width of the entity vectors that the model reads beside tokens; 0 for a model that reads none."""
    execution: ClassVar[Mapping[str, Any]] = {}
    """The values of the `ExecutionConfig` fields; empty for a model without attention layers."""

    plan_depths: ClassVar[tuple[int, int]] = (2, 4)
    """Numbers of layers from which `jaxlm plan --extrapolate` extrapolates: even, since GPT-3's layers alternate."""

    published_sizes: ClassVar[Mapping[str, dict[str, Any]]] = {}
    """Fields of the published models, by the name of the size."""

    @classmethod
    def published(cls, size: str, **changes: Any) -> Self:
        """Return the published model of a size (see `published_sizes`), with `changes` to its fields."""
        return cls(**(cls.published_sizes[size] | changes))

    @property
    def width(self) -> int:
        """Width of the hidden states."""
        return self.hidden_size

    @property
    def max_length(self) -> int | None:
        """Maximum sequence length; None without a limit."""
        return getattr(self, "max_positions", None)

    @property
    def fine_tuning(self) -> FineTuning | None:
        """Input format and classifier of tasks; None if the model has no classifier for tasks."""
        return FineTuning(self.template)

    @property
    def text_model(self) -> Model:
        """The model that tasks and text vectors use: this model, or its part that reads text."""
        return self

    def text_params(self, params: Params) -> Params:
        """Return the parameters of `text_model`."""
        return params

    def complete_inputs(self, inputs: Inputs, vocabulary: Vocabulary) -> Inputs:
        """Return `inputs` with the model's further inputs, such as characters, and with the mask of the padding.

        Inputs with neither a mask nor documents get a mask of the tokens that are not the padding of `vocabulary`,
        unless the end token is also the padding.
        """
        has_mask = inputs.mask is not None or inputs.documents is not None
        if has_mask or vocabulary.pad in (-1, vocabulary.eos):
            return inputs
        return inputs._replace(mask=(inputs.ids != vocabulary.pad).astype(jnp.int32))

    def init_task(self, key: jax.Array) -> Params:
        """Return fresh parameters for fine-tuning: no output layers, plus any that only tasks train (ELMo's mix)."""
        return {name: leaf for name, leaf in self.init(key).items() if name not in self.output_params}

    def with_execution(self, **changes: Any) -> Self:
        """Return a copy with other values of the `execution` fields; the model ignores fields that it lacks."""
        return dataclasses.replace(self, **{name: changes[name] for name in self.execution if name in changes})

    def as_type(self, kind: type[Model]) -> Model:
        """Return a model of another class with the fields that both have; its parameters have the same names."""
        names = {item.name for item in dataclasses.fields(kind)}
        return kind(**{f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name in names})

    def in_direction(self, is_causal: bool) -> Model | None:
        """Return a model of the same parameters with causal or with bidirectional attention; None if there is none."""
        return self if self.is_causal == is_causal else None

    def for_vocabulary(self, vocabulary: Vocabulary) -> Self:
        """Return a copy with the vocabulary size of `vocabulary`."""
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
            inputs: Tokens, and the other inputs of each token.
            key: Dropout key; None turns dropout off.
            at: Positions to return; None for all.
        """
        x = self._hidden_states(params, inputs, key)
        return x if at is None else at_positions(x, at)

    def _hidden_states(self, params: Params, inputs: Inputs, key: jax.Array | None) -> jax.Array:
        """Return the last hidden states of all tokens."""
        raise NotImplementedError

    @property
    def vector_token(self) -> Literal["first", "last", "mean"]:
        """Token of pooling "cls": the summary token; [CLS] for a model whose classifier alone averages the tokens."""
        has_cls = self.summary_token == "mean" and self.template.single.startswith("cls")
        return "first" if has_cls else self.summary_token

    def summary(
        self, params: Params, inputs: Inputs, *, key: jax.Array | None = None, pad: int = -1,
        hidden: Float[Array, "batch length width"] | None = None,
    ) -> Float[Array, "batch width"]:
        """Return one vector per text: the hidden state of its first or last token, or the mean of all tokens.

        The last token is the last one but `pad`, as in Transformers, where that may be the end symbol of the text too.
        `hidden` are the last hidden states, if they are known.
        """
        mask = jnp.ones_like(inputs.ids) if inputs.mask is None else inputs.mask
        if self.summary_token == "mean":
            return mean_of_tokens(self.hidden_states(params, inputs, key=key) if hidden is None else hidden, mask)
        at = last_place(mask * (inputs.ids != pad))
        at = jnp.zeros_like(at) if self.summary_token == "first" else at
        states = self.hidden_states(params, inputs, key=key, at=at) if hidden is None else at_positions(hidden, at)
        return states[:, 0]

    def forward_flops(self, length: int, predicted: int = 0) -> float:
        """Return the FLOPs of one sequence's forward pass, with `predicted` positions in the output layer.

        They count matrix products and full attention, of every layer at every position; a multiply-add counts as 2.
        """
        raise NotImplementedError


class TokenPredictor(Model):
    """Model that predicts tokens."""

    def token_features(self, params: Params, hidden: Float[Array, "*batch width"]) -> Float[Array, "*batch features"]:
        """Return the inputs of the output matrix; by default the hidden states."""
        return hidden

    def output_matrix(self, params: Params) -> tuple[Float[Array, "vocab features"], Float[Array, " vocab"] | None]:
        """Return the matrix and the bias (or None) that map `token_features` to vocabulary logits."""
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
    """Model that generates text token by token."""

    @property
    def writes_answers(self) -> bool:
        """Whether the model can write the answer to a task as text."""
        return self.has_encoder or self.is_causal

    def decoder_start(self, vocabulary: Vocabulary) -> int:
        """Return the token that the decoder of an encoder-decoder begins with."""
        return max(vocabulary.pad, 0)

    def prefill(
        self, params: Params, prompts: Int[Array, "batch length"], mask: Bool[Array, "batch length"], new_tokens: int,
        start: int = 0,
    ) -> tuple[Float[Array, "batch vocab"], Any]:
        """Process prompts.

        Args:
            params: The model's parameters.
            prompts: Token ids, padded on the left.
            mask: False at padding.
            new_tokens: Maximum number of tokens to generate.
            start: First decoder token of an encoder-decoder.

        Returns:
            The float32 logits of the first new token, and the decoding state.
        """
        raise NotImplementedError

    def decode(
        self, params: Params, tokens: Int[Array, " batch"], state: Any
    ) -> tuple[Float[Array, "batch vocab"], Any]:
        """Append one token to each row; return the logits of the next token and the new state of the same shapes."""
        raise NotImplementedError

    def target_features(
        self, params: Params, prompts: Int[Array, "batch length"], mask: Bool[Array, "batch length"],
        targets: Int[Array, "batch targets"], target_mask: Bool[Array, "batch targets"], start: int = 0,
    ) -> Float[Array, "batch targets features"]:
        """Return the `token_features` that predict each target, given its prompt and the targets before it.

        Prompts are padded on the left, targets on the right; the masks are False at padding. `start` is the token that
        the decoder of an encoder-decoder begins with.

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


class UncachedState(NamedTuple):
    """Decoding state of a model without key/value caches."""

    tokens: Int[Array, "batch slots"]
    filled: Bool[Array, "batch slots"]
    """Which slots hold tokens: the prompts, padded on the left, and the new tokens."""
    index: Int[Array, ""]
    """Slot of the next token."""


class UncachedWriter(Writer):
    """Writer that computes all tokens again for each new one, because the new one changes them."""

    def prefill(
        self, params: Params, prompts: Int[Array, "batch length"], mask: Bool[Array, "batch length"], new_tokens: int,
        start: int = 0,
    ) -> tuple[Float[Array, "batch vocab"], UncachedState]:
        room = ((0, 0), (0, new_tokens))
        state = UncachedState(jnp.pad(prompts, room), jnp.pad(mask, room), jnp.int32(prompts.shape[1]))
        return self.next_logits(params, state), state

    def decode(
        self, params: Params, tokens: Int[Array, " batch"], state: UncachedState
    ) -> tuple[Float[Array, "batch vocab"], UncachedState]:
        state = UncachedState(
            state.tokens.at[:, state.index].set(tokens), state.filled.at[:, state.index].set(True), state.index + 1
        )
        return self.next_logits(params, state), state

    def next_logits(self, params: Params, state: UncachedState) -> Float[Array, "batch vocab"]:
        """Return the logits of the next token, float32."""
        raise NotImplementedError


def document_positions(segments: Int[Array, "batch length"]) -> Int[Array, "batch length"]:
    """Return the position of each token in its document, from 0, in packed rows."""
    p = jnp.arange(segments.shape[1])[None, :]
    begins = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
    return p - jax.lax.cummax(jnp.where(begins, p, 0), axis=1)


def to_left_edge(
    ids: Int[Array, "batch length"], mask: Bool[Array, "batch length"]
) -> tuple[Int[Array, "batch length"], Int[Array, "batch length"]]:
    """Move the padding before the tokens of each row behind them; return the rows and their mask, int32."""
    positions = (jnp.arange(ids.shape[1]) + jnp.argmax(mask, axis=1, keepdims=True)) % ids.shape[1]
    return tuple(jnp.take_along_axis(x, positions, axis=1) for x in (ids, mask.astype(jnp.int32)))


def text_vectors(
    model: Model, params: Params, inputs: Inputs, pooling: Pooling, key: jax.Array | None = None
) -> Float[Array, "batch width"]:
    """Return one float32 vector per text, pooled from its last hidden states, special tokens included.

    Padding is at the end. A text without tokens gets zeros with "mean".
    """
    lengths = jnp.sum(inputs.mask, axis=1)
    if pooling == "mean":
        hidden = model.hidden_states(params, inputs, key=key).astype(jnp.float32)
        weights = inputs.mask[..., None] / jnp.maximum(lengths, 1)[:, None, None]
        return jnp.sum(hidden * weights, axis=1)
    is_first = pooling == "cls" and model.vector_token == "first"
    at = jnp.zeros_like(lengths) if is_first else jnp.maximum(lengths - 1, 0)
    return model.hidden_states(params, inputs, key=key, at=at[:, None])[:, 0].astype(jnp.float32)


def mean_of_tokens(
    hidden: Float[Array, "batch length width"], mask: Int[Array, "batch length"] | Bool[Array, "batch length"]
) -> Float[Array, "batch width"]:
    """Return the mean over the tokens of each row; zeros for a row without tokens."""
    total = jnp.einsum("blh,bl->bh", hidden, mask.astype(hidden.dtype), preferred_element_type=jnp.float32)
    return (total / jnp.maximum(jnp.sum(mask, axis=1), 1)[:, None]).astype(hidden.dtype)


def last_token(
    hidden: Float[Array, "batch length width"], mask: Int[Array, "batch length"]
) -> Float[Array, "batch width"]:
    """Return the hidden state of the last token of each row."""
    return at_positions(hidden, last_place(mask))[:, 0]


def last_place(mask: Int[Array, "batch length"]) -> Int[Array, "batch 1"]:
    """Return the place of the last token of each row; 0 for a row without tokens."""
    return jnp.max(jnp.arange(mask.shape[1]) * (mask > 0), axis=1, keepdims=True)
