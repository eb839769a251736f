"""Prompt files: a task in context, without training, as a small JSON or TOML file."""

from __future__ import annotations

import dataclasses
import json
import string
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from jaxlm.data.parts import Reader
from jaxlm.data.readers import Columns, texts_of
from jaxlm.data.rows import kind_of
from jaxlm.errors import UserError
from jaxlm.fields import check_ranges, check_types, field
from jaxlm.paths import in_bucket, reading
from jaxlm.tasks.tables import TableRow, read_table

METRICS = {"choice": ("accuracy", "f1", "matthews"), "generate": ("exact_match", "f1", "rouge", "bleu")}
"""Choices of `metrics` by kind; the first is the default. Other kinds have metrics of their own only."""


@dataclasses.dataclass(frozen=True)
class PromptTask:
    """A prompt file.

    A template is text with {column}s of the data: "{question}", or "{answers[0]}" and "{a.b}" if a row of JSON lines
    holds lists and objects. A list of texts is joined by spaces; {{ and }} are braces.
    """

    kind: Literal["choice", "generate", "last-word", "perplexity", "pseudo-likelihood"]
    """choice: the likeliest of several continuations; generate: a free answer; last-word: the last word of a text, as
    in LAMBADA; perplexity: of whole texts; pseudo-likelihood: of whole texts by a masked model."""
    data: str
    """Rows: .tsv, .csv or .jsonl, perhaps compressed, beside the prompt file, or `tfds:NAME`. Kinds for whole texts
    (last-word, perplexity, pseudo-likelihood) also read .txt, whose documents are the column {text}."""
    prompt: str = "{text}"
    """Template of what the model reads; for last-word, perplexity and pseudo-likelihood the whole text."""
    task: str = ""
    """Name in results; by default that of the file."""
    choices: tuple[str, ...] | str = ()
    """Templates of the continuations, or the name of a column that holds a list of texts (kind choice)."""
    answer: str = ""
    """Column of the right answer: a choice by its label or number from 0, else by its text; the text to generate,
    or a list of such texts."""
    labels: tuple[str, ...] = ()
    """Values of `answer` in the order of `choices`; by default their numbers."""
    delimiter: str = " "
    """Text between a prompt and its continuation."""
    shots: int = field(0, range="[0, inf)")
    """Number of solved examples before each prompt."""
    shots_data: str = ""
    """Rows to draw them from; by default the other rows of `data`."""
    separator: str = "\n\n"
    """Text between examples."""
    seed: int = field(0, range="[0, inf)")
    """Seed of the draw, which is a function of the seed and the row's number."""
    normalise: Literal["none", "tokens", "characters", "bytes", "unconditional"] = "none"
    """Unit per which log-likelihoods of choices are compared; none: as they are; unconditional: less the log-likelihood
    after `unconditional_prompt` (Brown et al. 2020, section 2.4)."""
    unconditional_prompt: str = ""
    """Prompt that says nothing of the question ("Answer:" in GPT-3); empty: the beginning of a text."""
    stop: tuple[str, ...] = ("\n",)
    """Texts that end a free answer."""
    max_new_tokens: int = field(32, range="[1, inf)")
    """Maximum number of tokens of a free answer."""
    beams: int = field(1, range="[1, inf)")
    """Number of beams for free answers; 1 means greedy decoding. GPT-3 used 4."""
    length_penalty: float = 1.0
    """Beams are ranked by log-probability / length ** length_penalty. GPT-3's and T5's 0.6 is the exponent of
    (5 + length) / 6, which favours long answers less."""
    metrics: tuple[str, ...] = ()
    """choice: accuracy, f1, matthews; generate: exact_match, f1, rouge, bleu; by default the first."""
    stride: int = field(0, range="[0, inf)")
    """Tokens by which the window over a long text moves (kind perplexity); 0: half of the model's length."""
    sentinel: bool | None = None
    """Whether an encoder-decoder continues `prompt <extra_id_0>`, as after pretraining on spans, or answers the prompt;
    by default the first for our own runs of that pretraining."""

    @property
    def templates(self) -> tuple[str, ...]:
        """Templates of the choices; none if a column holds them."""
        return () if isinstance(self.choices, str) else self.choices

    @property
    def columns(self) -> list[str]:
        """Columns to read."""
        names = [name for template in (self.prompt, *self.templates) for name in _columns(template)]
        names += [self.choices] if isinstance(self.choices, str) else []
        return list(dict.fromkeys([*names, *filter(None, [self.answer])]))

    def validate(self) -> None:
        """Raise UserError for a field of a wrong type or out of range, or for fields that do not go together."""
        check_types(self)
        check_ranges(self, "")
        kind, known = self.kind, METRICS.get(self.kind, ())
        unknown = [name for name in self.metrics if name not in known]
        mistakes = {
            "kind choice needs the field choices.": kind == "choice" and not self.choices,
            f"kind {kind} needs the field answer, the column of the right answer.": known and not self.answer,
            f"there are {len(self.labels)} labels for {len(self.templates)} choices.":
                self.labels and len(self.labels) != len(self.templates),
            f"kind {kind} has no shots.": self.shots and kind in ("perplexity", "pseudo-likelihood"),
            f"metrics names {unknown}; kind {kind} has {', '.join(known) or 'its own only'}.": unknown,
        }
        for message, is_wrong in mistakes.items():
            if is_wrong:
                raise UserError(message)
        for template in (self.prompt, *self.templates):
            try:
                _columns(template)
            except ValueError as error:
                raise UserError(
                    f"the template {template!r} cannot be read ({error}); braces that are text are doubled."
                ) from error


@dataclasses.dataclass(frozen=True)
class PromptRow:
    """A row as the model reads it."""

    place: str
    """File and line, for messages."""
    id: int
    """Number of the row."""
    prompt: str
    """Prompt after its shots."""
    choices: tuple[str, ...] = ()
    """Continuations of the prompt (kind choice)."""
    labels: tuple[str, ...] = ()
    """Name of each choice."""
    gold: int = -1
    """Number of the right choice."""
    answers: tuple[str, ...] = ()
    """Right answers (kind generate)."""


def read_task(path: str) -> PromptTask:
    """Read a prompt file; raise UserError, with file and field, for a mistake in it."""
    with reading(path):
        text = Path(path).read_text(encoding="utf-8")
        facts = tomllib.loads(text) if path.endswith(".toml") else json.loads(text)
    known = [item.name for item in dataclasses.fields(PromptTask)]
    if not isinstance(facts, dict) or not {"kind", "data"} <= facts.keys() <= set(known):
        wrong = sorted(facts.keys() - set(known)) if isinstance(facts, dict) else []
        what = f"there is no field {wrong[0]!r}" if wrong else "it must be an object with the fields kind and data"
        raise UserError(f"{path}: {what}; the fields of a prompt file are {', '.join(known)}.")
    task = PromptTask(**{name: tuple(value) if isinstance(value, list) else value for name, value in facts.items()})
    try:
        task.validate()
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    folder, names = Path(path).parent, {name: getattr(task, name) for name in ("data", "shots_data")}
    files = {name: str(folder / file) for name, file in names.items()
             if file and not in_bucket(file) and kind_of(file) not in ("tfds", "hf")}
    return dataclasses.replace(task, **files, task=task.task or Path(path).stem)


def read_examples(task: PromptTask, limit: int = 0) -> list[PromptRow]:
    """Return the rows of a task, each with its shots.

    A `limit` of 0 reads all rows.
    """
    rows = list(_rows(task, task.data))
    pool = list(_rows(task, task.shots_data)) if task.shots_data else rows
    if not rows:
        raise UserError(f"{task.data} has no rows.")
    has_own_rows = task.shots_data in ("", task.data)  # a row is never a shot of its own
    if task.shots > len(pool) - has_own_rows:
        raise UserError(f"{task.shots_data or task.data} has {len(pool)} rows, too few for {task.shots} shots.")
    found = []
    for number, row in enumerate(rows[: limit or None]):
        example = _example(task, number, row)
        if task.shots:
            rng = np.random.default_rng([task.seed, number])
            drawn = rng.choice(len(pool) - has_own_rows, task.shots, replace=False)
            drawn += (drawn >= number) & has_own_rows
            shots = [_solved(task, _example(task, int(i), pool[i])) for i in drawn]
            example = dataclasses.replace(example, prompt=task.separator.join([*shots, example.prompt]))
        found.append(example)
    return found


def _rows(task: PromptTask, path: str) -> Iterator[TableRow]:
    if kind_of(path) != "text" or task.kind in METRICS:
        for row in read_table(path, Columns(task.columns, "Choose columns in the prompt file")):
            if isinstance(row, UserError):
                raise row
            yield row
        return
    document, number = "", 0
    for piece in Reader().read(path):
        document += piece.text
        if piece.last:
            number += 1
            yield TableRow(f"{path}, document {number}", {"text": document})
            document = ""


def _solved(task: PromptTask, example: PromptRow) -> str:
    """Return an example with its right answer."""
    if task.kind == "last-word":
        return example.prompt
    answer = example.choices[example.gold] if task.kind == "choice" else task.delimiter + example.answers[0]
    return example.prompt + answer


def _example(task: PromptTask, number: int, row: TableRow) -> PromptRow:
    example = PromptRow(row.place, number, fill(task.prompt, row))
    if task.kind == "generate":
        answers = tuple(row.labels(task.answer))
        if not answers:
            raise UserError(f"{row.place}: {task.answer} holds no answer.")
        return dataclasses.replace(example, answers=answers)
    if task.kind != "choice":
        return example
    if isinstance(task.choices, str):
        if not isinstance(row.values[task.choices], list) or not row.values[task.choices]:
            raise UserError(f"{row.place}: {task.choices} is no list; the column of the choices must hold one.")
        texts = row.texts(task.choices)
    else:
        texts = [fill(template, row) for template in task.choices]
    value = row.label(task.answer) or ""
    names = task.labels or tuple(map(str, range(len(texts))))
    stripped = [text.strip() for text in texts]
    options = names if value in names else stripped
    if value.strip() not in options:
        raise UserError(f"{row.place}: the answer {value!r} is none of the labels {', '.join(names)}, and no choice.")
    kept = [i for i, text in enumerate(stripped) if text]  # an empty text has no tokens to score
    gold = options.index(value.strip())
    if len(kept) < 2 or gold not in kept:
        raise UserError(f"{row.place}: fewer than two choices have a text, or the right one has none; fix the row.")
    choices = tuple(task.delimiter + texts[i] for i in kept)
    return dataclasses.replace(
        example, choices=choices, labels=tuple(names[i] for i in kept), gold=kept.index(gold)
    )


def _columns(template: str) -> list[str]:
    """Return the columns of a template; raise ValueError if its braces are not paired."""
    return [name.partition("[")[0] for _, name, _, _ in string.Formatter().parse(template) if name is not None]


def fill(template: str, row: TableRow) -> str:
    """Return a template with the values of a row."""
    parts = []
    for literal, name, _, _ in string.Formatter().parse(template):
        parts.append(literal)
        if name is None:
            continue
        column, *keys = name.split("[")
        try:
            value = row.values[column]
            for key in keys:
                value = value[int(key[:-1]) if isinstance(value, list) else key[:-1]]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise UserError(f"{row.place}: there is no {{{name}}} (of {', '.join(map(repr, row.values))}).") from error
        parts.append(" ".join(texts_of("" if value is None else value, row.place, name)))
    return "".join(parts)
