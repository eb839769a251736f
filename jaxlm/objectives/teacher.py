"""Loading and checking of the trained encoders that distillation learns from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxlm.errors import UserError
from jaxlm.models.encoder import Encoder
from jaxlm.objectives.base import Bound, Objective
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.tokenizers.vocabulary import Vocabulary


class Mismatch(NamedTuple):
    """A difference between teacher and student.

    Attributes:
        what: The teacher's value, with the student's in brackets.
        flags: Flags by which the student fits; "" if none do.
    """

    what: str
    flags: str


def require_teacher(
    objective: Objective, vocabulary: Vocabulary, load: Callable[[str], PretrainedModel],
    mismatches: Callable[[Bound], Iterator[Mismatch]], *, predicts: bool,
) -> PretrainedModel:
    """Return the encoder at `objective.teacher` with its own parameters, those that predict tokens if it `predicts`.

    The teacher runs with the student's execution settings (dtype, kernels).

    `mismatches` yields the differences from a teacher's objective that the student cannot bear.
    """
    path, student = objective.teacher, objective.model
    if not path:
        raise UserError(
            "objective.teacher is empty; give --objective.teacher a run folder or a Transformers folder of the model "
            "to learn from; masked language modelling (such as configs/bert_tiny.py) continues a model without one."
        )
    teacher = load(path)
    if not isinstance(teacher.objective.model, Encoder):
        raise UserError(
            f"the teacher {path} is a {type(teacher.objective.model).__name__}; choose an encoder, such as a BERT."
        )
    model = teacher.objective.model
    needed = jax.eval_shape(model.init if predicts else model.init_task, jax.random.key(0))
    if missing := [name for name in needed if name not in teacher.params]:
        raise UserError(f"the teacher {path} has no {missing[0]}; choose a model with it, or train one.")
    of_text = text_mismatches(path, teacher.objective, objective, vocabulary)
    require_fit(path, [*of_text, *mismatches(teacher.objective)])
    model = model.with_execution(**student.execution)
    params = {name: teacher.params[name] for name in needed}
    return dataclasses.replace(teacher, objective=dataclasses.replace(teacher.objective, model=model), params=params)


def require_fit(path: str, mismatches: Sequence[Mismatch]) -> None:
    """Raise one UserError for all mismatches of the teacher at `path`, with the flags that resolve them."""
    if not mismatches:
        return
    flags = [mismatch.flags for mismatch in mismatches]
    advice = f"add {' '.join(flags)}, or choose another teacher" if all(flags) else "choose another teacher"
    raise UserError(
        f"the teacher {path} does not fit the student: it has {', '.join(each.what for each in mismatches)}; {advice}."
    )


def text_mismatches(path: str, teacher: Bound, student: Objective, ours: Vocabulary) -> Iterator[Mismatch]:
    """Yield the mismatches of vocabulary and positions, which must cover the student's inputs."""
    theirs = teacher.vocabulary
    is_same = ours.size == theirs.size and (
        ours.is_stand_in or (ours.symbols == theirs.symbols and np.array_equal(ours.word_start, theirs.word_start))
    )
    if not is_same:
        yield Mismatch("another vocabulary", f"--data.tokenizer {path}")
    own_length, length = (objective.model.max_length or math.inf for objective in (student, teacher))
    if length < own_length:
        yield Mismatch(f"{length} positions (the student {own_length})", f"--objective.model.max-positions {length}")


def size_mismatches(teacher: Encoder, student: Encoder, *names: str) -> Iterator[Mismatch]:
    """Yield the fields of the model that the student must share with the teacher and does not."""
    for name in names:
        ours, theirs = getattr(student, name), getattr(teacher, name)
        if ours != theirs:
            has_field = name in {field.name for field in dataclasses.fields(student)}
            flags = f"--objective.model.{name.replace('_', '-')} {theirs}" if has_field else ""
            yield Mismatch(f"{name} {theirs} (the student {ours})", flags)


def layer_mismatches(teacher: Encoder, student: Encoder, hidden_size: int) -> Iterator[Mismatch]:
    """Yield the mismatches of heads, layers and hidden size where layers learn from layers."""
    yield from size_mismatches(teacher, student, "num_heads")
    heads, width = teacher.num_heads, student.hidden_size
    if width % heads:
        width = -(-width // heads) * heads
        yield Mismatch(f"{heads} heads for a width of {student.hidden_size}", f"--objective.model.hidden-size {width}")
    if teacher.hidden_size != hidden_size:
        yield Mismatch(
            f"hidden_size {teacher.hidden_size} (objective.teacher_hidden_size is {hidden_size})",
            f"--objective.teacher-hidden-size {teacher.hidden_size}",
        )
    if teacher.num_layers % student.num_layers:
        most = min(student.num_layers, teacher.num_layers)
        divisor = max(number for number in range(1, most + 1) if not teacher.num_layers % number)
        yield Mismatch(
            f"{teacher.num_layers} layers, which do not map onto the student's {student.num_layers}",
            f"--objective.model.num-layers {divisor}",
        )
