"""The contract between an objective and everything that trains, plans, shows or measures it.

Every method but `corrupt` and `loss` has a default; one that means "not offered" is None or empty.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Self

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from jaxlm.data.base import RowFormat
from jaxlm.errors import UserError
from jaxlm.fields import check_ranges, field, marks_of, settings
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.tokenizers.template import Template
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.trees import extend_vocabulary, merge_params
from jaxlm.types import Params, Vectors

Batch = Any
"""Rows of the data: a `jaxlm.types.TokenBatch` of text, or the arrays of labelled rows."""
Constants = Any
"""A pytree of arrays that a loss reads and that are neither trained nor saved, such as a teacher's parameters."""
Example = dict[str, Array | np.ndarray]
"""Arrays with the batch as first dimension, except for `Objective.shared_arrays`; `describe` gets numpy arrays."""
Memory = Any
"""State that a model carries from a batch of a stream to the next: a pytree of arrays, rows first."""


class Term(NamedTuple):
    """A term of the loss, or a metric: a sum over its targets and their number.

    The loss of a batch is Σ coefficient · total / weight over its terms, with the weights of the whole batch, for any
    number of devices and microbatches.

    Attributes:
        total: float32 scalar.
        weight: float32 scalar.
        coefficient: 0 for a metric.
    """

    total: Array
    weight: Array
    coefficient: float = 0.0

    @classmethod
    def of(cls, values: Any, weights: Any, coefficient: float = 0.0) -> Term:
        """Return the term Σ weights · values, with weight Σ weights."""
        total = jax.numpy.sum(values * weights).astype(jax.numpy.float32)
        return cls(total, jax.numpy.sum(weights).astype(jax.numpy.float32), coefficient)


Terms = dict[str, Term]
MAX_UNKNOWN = 0.001
"""Largest share of [UNK] in a text for `Objective.bits_per_byte`: a model need not spell what [UNK] stands for."""


def total_loss(terms: Terms, weights: Mapping[str, Array] | None = None) -> Float[Array, ""]:
    """Return Σ coefficient · total / weight. A term without targets adds nothing.

    The terms of a microbatch need the `weights` of the whole batch.
    """
    weights = {name: term.weight for name, term in terms.items()} if weights is None else weights
    parts = [
        term.coefficient * term.total / jax.numpy.where(weights[name] > 0, jax.lax.stop_gradient(weights[name]), 1.0)
        for name, term in terms.items() if term.coefficient
    ]
    return sum(parts, start=jax.numpy.zeros((), jax.numpy.float32))


class Line(NamedTuple):
    """A line of `jaxlm show`.

    Attributes:
        title: Text before the tokens.
        ids: Token ids.
        marks: How to draw each token: "" (plain), "special", "masked", "random", "kept", "target", "span" or "padding".
    """

    title: str
    ids: list[int]
    marks: list[str]


def with_options(model: Any, source: Any) -> Any:
    """Return `model` with the training options of `source`: dropout, dtype, remat, kernels."""
    marks = {item.name: marks_of(item) for item in dataclasses.fields(model)}
    names = [name for name, own in marks.items() if own & {"recipe", "resumable"} and "kept" not in own]
    return dataclasses.replace(model, **{name: getattr(source, name) for name in names if hasattr(source, name)})


@dataclasses.dataclass(frozen=True)
class Objective:
    """Base class of objectives as a preset has them: how a batch becomes an example, and the loss on it.

    A subclass is a frozen dataclass whose fields are a `model` (see `jaxlm.models.base`) and rates. It implements
    `corrupt` and `loss`, and often `row_format` and `check`. `init`, `corrupt` and `loss` are pure and jittable with
    static shapes. Only a `Bound` one, which `bind` makes, has what examples and their loss are made with.
    """

    command: ClassVar[Literal["pretrain", "finetune"]] = "pretrain"
    """The command of `jaxlm` that trains it."""
    name: ClassVar[str] = ""
    """Name of a task in the results of `jaxlm evaluate`; empty for pretraining."""
    symbols: ClassVar[tuple[str, ...]] = ()
    """Special tokens that the tokenizer needs beyond those of every trained tokenizer."""
    row_group: ClassVar[int] = 1
    """Number of consecutive rows that belong together: they stay on one device, and in one microbatch."""
    min_rows: ClassVar[int] = 1
    """Least number of rows of a batch that has a loss."""
    shared_arrays: ClassVar[tuple[str, ...]] = ()
    """Arrays of an example that belong to the whole batch and not to its rows: every microbatch gets them whole."""
    constants_field: ClassVar[str] = "teacher"
    """Field with the folder that the constants are read from."""
    primary_metric: ClassVar[str] = "loss"
    """The term shown where there is room for one."""
    private_params: ClassVar[tuple[str, ...]] = ()
    """Names of parameters such as heads for training only. An export omits them, and those that base classes name,
    where the table of the Transformers class has no such parameters."""
    frozen_params: ClassVar[tuple[str, ...]] = ()
    """Patterns of names of parameters that are not trained, as `OptimizerConfig.freeze`."""
    is_separable: ClassVar[bool] = True
    """Whether the loss of a batch is that of its microbatches added up. An objective that compares the rows of a batch
    with each other has a field `chunks` instead, the number of parts that its model reads one after another."""
    token_losses: ClassVar[tuple[str, ...]] = ()
    """Terms that are mean losses of predicting tokens of the text, comparable with its unigram entropy."""
    shows_predictions: ClassVar[bool] = False
    """Whether `describe` also reads the outputs of `predict`, which `jaxlm show` adds for a trained run."""
    scores_rows: ClassVar[bool] = False
    """Whether `score_rows` has metrics: the labelled rows of a task have right answers."""
    answer_kind: ClassVar[Literal["masks", "text", ""]] = ""
    """Supported generation mode of the trained model: tokens at masks (`jaxlm fill-mask`), text (`jaxlm generate`), or
    none. The model has the methods: `token_logits`, or those of `jaxlm.models.base.Writer`."""
    is_causal: ClassVar[bool | None] = None
    """Whether the model must attend to earlier tokens only or, False, to all; a pretrained model is changed into such
    a one (`Model.in_direction`). None for either."""
    predicts_next = False  # not annotated, as `Model.is_causal`
    """Whether a masked token is predicted by the hidden state before it."""
    denoises: ClassVar[bool] = False
    """Whether the trained model also fills masks in steps, each of which sees the tokens of the steps before, so that
    `jaxlm generate` continues texts with it. The `answer_kind` is "masks"."""

    def __post_init__(self) -> None:
        check_ranges(self, "objective.")

    def vector_settings(self, length: int | None) -> Vectors | None:
        """Return the settings of the text vectors that are trained, for texts of `length` tokens; None if none are."""
        return None

    def needs_text_form(self, model: Any, as_text: bool) -> bool:
        """Return whether the pretrained model, if any, learns it as `TextToText`; `as_text` is the user's wish."""
        if as_text:
            raise UserError("--as-text is only for tasks; choose a preset in configs/tasks, or leave it out.")
        return False

    def with_pretrained_model(self, source: PretrainedModel) -> Self:
        """Return a copy with the pretrained model.

        The architecture is that of `source`; training options (dropout, dtype, remat, kernels) stay as they are.

        Raises:
            UserError: The model is of another family.
        """
        model, pretrained = self.model, source.objective.model
        if type(model) is not type(pretrained):
            raise UserError(
                f"--init-from {source.path} holds a {type(pretrained).__name__}, but the configuration trains a "
                f"{type(model).__name__}; choose a preset of the same family."
            )
        return dataclasses.replace(self, model=with_options(pretrained, model))

    def for_phase(self, objective: Objective) -> Objective:
        """Return the objective of a phase of this one's run: on this model, or it in the other direction, and bound.

        Raises:
            UserError: It is a task, has a teacher or a model of its own, or this model has no such direction.
        """
        if self.command != "pretrain" or objective.command != "pretrain" or getattr(objective, "teacher", ""):
            raise UserError("its objective is a task or has a teacher, which is for a run of its own with --init-from.")
        if objective.denoises and not self.denoises:
            raise UserError(f"{type(objective).__name__} prepares the head before a run's first step; begin another "
                            "run with --init-from.")
        if objective.model != type(objective)().model:
            raise UserError(f"{type(objective).__name__} has the model of the run; leave its model out, and set "
                            "objective.model.… among the fields of the phase.")
        is_causal = self.model.is_causal if objective.is_causal is None else objective.is_causal
        if (model := self.model.in_direction(is_causal)) is None:
            raise UserError(f"{type(objective).__name__} needs {'causal' if is_causal else 'bidirectional'} attention, "
                            f"which a {type(self.model).__name__} does not have.")
        kind = next(setting.type for setting in settings(objective) if setting.name == "model")
        if not isinstance(model, kind):
            raise UserError(f"{type(objective).__name__} needs a {kind.__name__}, and the run has a "
                            f"{type(model).__name__}.")
        objective = dataclasses.replace(objective, model=model)
        if not isinstance(self, Bound):
            return objective
        return objective.bind_unchecked(self.vocabulary, self.statistics, load=self.load)

    def check(self, vocabulary: Vocabulary, length: int) -> None:
        """Raise UserError if the vocabulary lacks a special token, or the length (`--data.length`) does not suit."""

    def require_direction(self) -> None:
        """Raise UserError unless the model has causal or bidirectional attention, as the objective needs."""
        if self.is_causal not in (None, self.model.is_causal):
            raise UserError(f"objective.model.is_causal is {self.model.is_causal}; {type(self).__name__} needs "
                            f"{self.is_causal} (a model of --init-from is changed).")

    def row_format(self, length: int) -> RowFormat:
        """Return how the host cuts the data into rows, for sequences of `length` tokens (`--data.length`)."""
        return RowFormat("document", length)

    def with_labels_of(self, source: Any, data: Any) -> Self:
        """Return a copy with the labels of the opened data, if it is a task.

        Raises:
            UserError: Training cannot use the data, or learn anything from it.
        """
        return self

    def load_constants(self, vocabulary: Vocabulary, load: Callable[[str], PretrainedModel]) -> Constants:
        """Return the arrays that the loss reads and that are neither trained nor saved; () for none.

        `load` opens a run folder or a Transformers folder.
        """
        return ()

    def constant_shapes(self, vocabulary: Vocabulary, load: Callable[[str], PretrainedModel]) -> Constants:
        """Return the shapes of the arrays of `load_constants`, for a plan."""
        arrays = self.load_constants(vocabulary, load)
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arrays)

    def bind(
        self, vocabulary: Vocabulary, length: int, statistics: Any = None, constants: Constants = (),
        load: Callable[[str], PretrainedModel] | None = None,
    ) -> Bound:
        """Return the objective bound to a vocabulary and to data, with the model of that vocabulary.

        Args:
            vocabulary: Facts about the tokenizer.
            length: Maximum sequence length.
            statistics: Statistics of the data (`jaxlm.data.base.Statistics`); None without data, as in plans and for a
                loaded run.
            constants: The arrays of `load_constants`, or their shapes; () where no loss is computed.
            load: Opens a run folder or a Transformers folder, for rows that are made with another model.

        Raises:
            UserError: See `check`; or the constants do not suit the objective.
        """
        self.check(vocabulary, length)
        sized = dataclasses.replace(self, model=self.model.for_vocabulary(vocabulary))
        return sized.bind_unchecked(vocabulary, statistics, constants, load)

    def bind_unchecked(
        self, vocabulary: Vocabulary, statistics: Any = None, constants: Constants = (),
        load: Callable[[str], PretrainedModel] | None = None,
    ) -> Bound:
        """Return the bound objective of an imported model, which may lack what only training needs."""
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(class_of(self))}
        return _bound_class(class_of(self))(
            **values, vocabulary=vocabulary, statistics=statistics, constants=constants, load=load
        )

    def init(self, key: jax.Array) -> Params:
        """Return fresh parameters, float32, as a nested dict."""
        return self.model.init(key)

    def initial_memory(self, rows: int) -> Memory:
        """Return the recurrence memory at the beginning of a stream, a row per sequence; () for a stateless model."""
        return ()

    def select_params(self, source: PretrainedModel) -> Params:
        """Return the parameters of a pretrained model for `merge_pretrained`; by default all."""
        return source.params

    def merge_pretrained(self, params: Params, source: PretrainedModel | None) -> Params:
        """Return the parameters of step 0: the fresh ones, replaced by pretrained ones where there are any.

        Args:
            params: Fresh parameters.
            source: A pretrained model, whose parameters replace those of the same name; embeddings and output layers
                keep the fresh values of new tokens.
        """
        return params if source is None else merge_params(params, extend_vocabulary(source.params, params))

    def remarks(self, source: Any, length: int) -> list[str]:
        """Return lines about the opened data for the user, as rows of `length` tokens."""
        return []

    def num_examples(self, source: Any, length: int) -> int:
        """Return the number of examples of an epoch, here the rows of `length` tokens."""
        return source.batches("train", 2, self.row_format(length), 0).num_rows  # two, since some streams need pairs

    def corrupt(self, key: jax.Array, batch: Batch) -> Example:
        """Return the model's inputs and targets. Rows of padding get weight 0 in the loss."""
        raise NotImplementedError

    def loss(self, params: Params, example: Example, key: jax.Array, train: bool) -> Terms:
        """Return the terms of the loss, and metrics; names such as "loss" are training's own (`RESERVED_TERMS`).

        Args:
            params: Parameters, as `init` makes them.
            example: The inputs and targets of `corrupt`. All randomness but dropout is in them, so that the loss of a
                row does not depend on its microbatch.
            key: Dropout key.
            train: Whether dropout is on.
        """
        raise NotImplementedError

    def stream_loss(
        self, params: Params, example: Example, memory: Memory, key: jax.Array, train: bool
    ) -> tuple[Terms, Memory]:
        """Return the terms, as `loss` does, and the memory for the next batch. No gradient flows through the memory.

        An objective whose row r of a batch continues row r of the batch before implements it in place of `loss`.
        """
        return self.loss(params, example, key, train), ()

    def predicting(self, positions: Int[Array, "batch masks"]) -> Int[Array, "batch masks"]:
        """Return the positions whose hidden states predict the masked tokens at `positions`; 0 has none before it."""
        return jax.numpy.maximum(positions - self.predicts_next, 0)

    def flops(self, length: int) -> float | None:
        """Return the FLOPs of one sequence's forward pass through what is trained; None if they are not counted.

        Matrix products and full attention only, heads at predicted positions only; a multiply-add counts as 2.
        """
        return None

    def constants_flops(self, length: int) -> float:
        """Return the FLOPs of one sequence's forward pass through a teacher."""
        return 0.0

    def step_flops(self, length: int, rows: int) -> float:
        """Return the FLOPs of a training step: 3 × forward of what is trained, 1 × of a teacher; 0 if not counted."""
        forward = self.flops(length)
        return 0.0 if forward is None else rows * (3.0 * forward + self.constants_flops(length))

    def describe(self, batch: Batch, example: Example, row: int) -> list[Line] | None:
        """Return row `row` before and after corruption, from numpy arrays, for `jaxlm show`; None for none."""
        return None

    def score_rows(self, params: Params, source: Any, length: int, batch_size: int) -> dict[str, float]:
        """Return metrics of all held-out rows of a source that are no means of terms; none for pretraining."""
        return {}

    def prompt_tokens(self, tokens: Sequence[int]) -> list[int]:
        """Return the prompt of a sample: the text with every sixth token masked, or its first half."""
        if self.answer_kind == "masks":
            return [self.vocabulary.mask if place % 6 == 4 else token for place, token in enumerate(tokens)]
        return list(tokens[: (len(tokens) + 1) // 2])

    def bits_per_byte(self, nats: Array, labels: Array, weights: Array) -> Terms:
        """Return the metric `bits_per_byte` of predicted text, which is comparable between vocabularies.

        It is nats / (ln 2 · UTF-8 bytes of the targets). The bytes of the ids are scaled so that those of the whole
        held-out split are those of its text, which a tokenizer may have changed, as by dropping spaces.

        Args:
            nats: Sum of the targets' -log p, given the text before them, or a bound on it.
            labels: Ids, int32 [...]; special tokens, such as the end of a document, have no bytes.
            weights: 1 at targets, else 0 [...].

        Returns:
            No metric for data without held-out text, or where more than `MAX_UNKNOWN` of its tokens are [UNK].
        """
        counts, num_bytes = getattr(self.statistics, "held_out_counts", None), self.vocabulary.num_bytes
        if counts is None or num_bytes is None or not (total := counts @ num_bytes):
            return {}
        if self.vocabulary.unk >= 0 and counts[self.vocabulary.unk] > MAX_UNKNOWN * counts.sum():
            return {}
        table = jax.numpy.asarray(num_bytes * (self.statistics.held_out_bytes / total), jax.numpy.float32)
        return {"bits_per_byte": Term(nats / math.log(2), jax.numpy.sum(table[labels] * weights))}

    def real_tokens(self, example: Example, batch: Batch) -> Array | np.ndarray:
        """Return the mask of non-padding tokens, for the metric `real_tokens`."""
        mask = example.get("attention_mask")
        return (batch.segment_ids if mask is None else mask) > 0

    @property
    def text_template(self) -> Template:
        """Template of texts for `jaxlm embed`."""
        return self.model.text_model.template.for_vocabulary(self.vocabulary)


@dataclasses.dataclass(frozen=True)
class Bound(Objective):
    """An objective with a vocabulary and what the data tells, of which there are examples and a loss.

    `Objective.bind` makes it. Its class is that of the objective and this one, so that methods find the fields of both.
    """

    _: dataclasses.KW_ONLY
    vocabulary: Vocabulary = field(bound=True)
    """Facts about the tokenizer."""
    statistics: Any = field(bound=True)
    """Statistics of the data (`jaxlm.data.base.Statistics`); None without data, as in plans and for a loaded run."""
    constants: Constants = field(bound=True, compare=False)
    """The arrays of `load_constants` on the host, or their shapes; in a step, its argument."""
    load: Callable[[str], PretrainedModel] | None = field(bound=True, compare=False)
    """Opens a run folder or a Transformers folder; None where no rows are made with another model."""

    def with_constants(self, constants: Constants) -> Self:
        """Return a copy for a compiled step, to which the constants are an argument."""
        return dataclasses.replace(self, constants=constants)


@functools.cache
def _bound_class(kind: type[Objective]) -> type[Bound]:
    """Return the class of the bound objectives of a kind: its own methods, and the fields of `Bound`."""
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return dataclasses.dataclass(frozen=True)(type(kind.__name__, (kind, Bound), names))


def class_of(config: Any) -> type:
    """Return the class of a configuration; of a bound objective, that of the objective as configured."""
    return type(config).__bases__[0] if isinstance(config, Bound) else type(config)


def require_shares(objective: Objective, first: str, second: str) -> None:
    """Raise UserError if two shares of the same tokens, fields of an objective, are more than the whole."""
    a, b = getattr(objective, first), getattr(objective, second)
    if a + b > 1.0:
        raise UserError(f"objective.{first} {a} and {second} {b} must sum to at most 1.")


def require_positions(length: int, max_positions: int) -> None:
    """Raise UserError for a sequence longer than the model's learned positions."""
    if length > max_positions:
        raise UserError(
            f"data.length {length} is more than the model's {max_positions} positions; lower it, or give the model "
            "more of them."
        )


def require_masking(vocabulary: Vocabulary, length: int, max_positions: int, purpose: str) -> None:
    """Raise UserError if `[CLS] text [SEP]` with masks cannot be built or does not fit the model."""
    vocabulary.require("mask", "cls", "sep", "pad", purpose=purpose)
    require_positions(length, max_positions)
    if length < 8:
        raise UserError(f"data.length {length} leaves no room for text between the special symbols; use 8 or more.")
