"""The contract between an objective and everything that trains, plans, shows or measures it."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import jax
import numpy as np
from jaxtyping import Array, Float

from jaxlm.errors import UserError
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import TokenBatch

Params = dict[str, Any]
Example = dict[str, Array | np.ndarray]
"""Arrays that all have the batch as their first dimension; on the host, as `describe` gets them, numpy's."""

Metrics = dict[str, tuple[jax.Array, jax.Array]]
"""name -> (sum, weight), float32 scalars: they add up over devices, microbatches and steps; the mean is sum/weight."""

Packing = Literal["document", "packed", "packed-eos"]

Self = TypeVar("Self", bound="Objective")


class Line(NamedTuple):
    """One line of `jaxlm show`: a title, token ids, and for each id how to draw it: "" (plain), "special", "masked",
    "random", "kept", "target", "span" or "padding"."""

    title: str
    ids: list[int]
    marks: list[str]


class Objective(Protocol):
    """A frozen dataclass that owns its model configuration(s) and its rates.

    All of init, corrupt and loss are pure and jittable with static shapes. `vocabulary` is None in a configuration;
    `bind` returns a copy that knows the tokenizer (special ids, size), which corrupt needs.
    """

    vocabulary: Vocabulary | None

    @property
    def packing(self) -> Packing:
        """How the host cuts the token stream into rows (see jaxlm.data.batches)."""
        ...

    def bind(self: Self, vocabulary: Vocabulary, length: int) -> Self:
        """A copy for this vocabulary and sequence length. UserError when a needed symbol is missing or the length
        does not suit the model or the objective."""
        ...

    def raw_length(self, length: int) -> int:
        """Tokens of text in one row when the model's sequences have `length` (`--data.length`)."""
        ...

    def init(self, key: jax.Array) -> Params:
        """Fresh parameters, float32, a plain nested dict."""
        ...

    def corrupt(self, key: jax.Array, batch: TokenBatch) -> Example:
        """What the model sees and what is asked of it. Rows of padding only must carry no loss."""
        ...

    def loss(
        self, params: Params, example: Example, key: jax.Array, train: bool
    ) -> tuple[Float[Array, ""], Metrics]:
        """The scalar to minimise and its parts. `key` drives dropout (only when `train`) and any sampling."""
        ...

    def flops(self, length: int) -> float:
        """Floating-point operations of one sequence's forward pass: matrix products and full attention only, heads
        at predicted positions only; a multiply-add counts as 2. A training step is 3 times this."""
        ...

    def describe(self, batch: TokenBatch, example: Example, row: int) -> list[Line]:
        """Row `row` before and after corruption, for `jaxlm show`; numpy in, no device work."""
        ...


def require_positions(length: int, positions: int) -> None:
    """UserError where a sequence is longer than the model's learned positions."""
    if length > positions:
        raise UserError(
            f"data.length {length} is more than the model's {positions} positions; lower it or raise "
            "objective.model.max_positions."
        )


def require_share(name: str, value: float) -> None:
    """UserError where objective.`name` is no share of something."""
    if not 0.0 <= value <= 1.0:
        raise UserError(f"objective.{name} is {value}; it must be in [0, 1].")


def require_masking(vocabulary: Vocabulary, length: int, positions: int, purpose: str) -> None:
    """UserError where `[CLS] text [SEP]` with masks cannot be made, or is too long for the model or short of text."""
    vocabulary.require("mask", "cls", "sep", "pad", purpose=purpose)
    require_positions(length, positions)
    if length < 8:
        raise UserError(f"data.length {length} leaves no room for text between the special symbols; use 8 or more.")
