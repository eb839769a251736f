"""Extractive question answering (SQuAD 1.1 and 2.0, CoQA): where in a passage the answer begins and ends."""

from __future__ import annotations

import dataclasses
import functools
import json
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.data.labelled import Arrays, Example, LabelledData, Record
from jaxlm.data.readers import open_text, text_of
from jaxlm.errors import UserError
from jaxlm.fields import field
from jaxlm.models.base import Inputs, last_token
from jaxlm.models.layers.dropout import dropout
from jaxlm.objectives.base import Line, Term, Terms
from jaxlm.objectives.losses import cross_entropy
from jaxlm.tasks import metrics
from jaxlm.tasks.base import Answer, Task, apply_head
from jaxlm.tasks.rows import input_arrays, input_padding, synthetic_inputs
from jaxlm.tokenizers.template import Template
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import Params

KINDS = ("span", "yes", "no", "unknown")
"""What an answer is: yes and no only in CoQA; unknown: no answer here."""
BEST = 20
"""Starts and ends of a window that are tried together, as in BERT's run_squad.py."""


@dataclasses.dataclass(frozen=True)
class AnswerRows(LabelledData):
    """Questions about passages, from a JSON file of SQuAD's or CoQA's form."""

    length: int = 384
    """Sequence length of the model, special symbols included; longer passages are read in windows."""
    form: Literal["squad", "coqa"] = "squad"
    """The form of the file."""
    history: int = 2
    """Earlier turns that are put in front of a question (CoQA): question and answer, or only the question where the
    file has no answers."""

    def read(self, path: str) -> Iterator[Record]:
        with open_text(path) as stream:
            try:
                data = json.load(stream)["data"]
                yield from (_squad(data, path) if self.form == "squad" else _coqa(data, path, self.history))
            except (KeyError, IndexError, AttributeError, TypeError, ValueError, RecursionError) as error:
                if isinstance(error, UnicodeDecodeError):
                    raise
                what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
                raise UserError(f"{path} is no file of {self.form}'s form: {what}.") from error


def _squad(data: list[dict[str, Any]], path: str) -> Iterator[Record]:
    for article in data:
        for paragraph in article["paragraphs"]:
            for question in paragraph["qas"]:
                place = f"{path}, question {question['id']}"
                passage = text_of(paragraph["context"], place, "context")
                given = question.get("answers")  # none in a file to predict
                answers = [(text_of(answer["text"], place, "text"), answer["answer_start"]) for answer in given or []]
                for text, start in answers:
                    _check_span(passage, text, start, place)
                values = {
                    "question": text_of(question["question"], place, "question"), "passage": passage,
                    "answers": None if given is None else [text for text, _ in answers],
                    "start": answers[0][1] if answers else -1, "text": answers[0][0] if answers else "",
                    "kind": "span" if answers else "unknown",
                }
                yield Record(question["id"], place, values, (passage,))


def _check_span(passage: str, text: str, start: int, place: str) -> None:
    if not isinstance(start, int) or passage[max(start, 0) : start + len(text)] != text:
        raise UserError(
            f"{place}: the answer {text[:60]!r} does not stand at character {start} of its passage; mend its "
            "answer_start or remove the question."
        )


def _coqa(data: list[dict[str, Any]], path: str, history: int) -> Iterator[Record]:
    for story in data:
        questions, given = story["questions"], story.get("answers")
        given = [None] * len(questions) if given is None else given  # none in a file to predict
        others = list((story.get("additional_answers") or {}).values())
        turns: list[str] = []
        for number, (question, answer) in enumerate(zip(questions, given, strict=True)):
            place = f"{path}, story {story['id']}, turn {question['turn_id']}"
            passage = text_of(story["story"], place, "story")
            turn = text_of(question["input_text"], place, "input_text")
            asked = " ".join([*(turns[-history:] if history else []), turn])
            values = {
                "question": asked, "passage": passage, "answers": None, "start": -1, "text": "", "kind": "unknown",
            }
            turns.append(turn)
            if answer is not None:
                golds = [answer, *(other[number] for other in others)]
                values["answers"] = [text_of(gold["input_text"], place, "input_text") for gold in golds]
                turns[-1] += " " + values["answers"][0]
                values |= _coqa_answer(answer, passage, place)
            yield Record(f"{story['id']}:{question['turn_id']}", place, values, (passage,))


def _coqa_answer(answer: dict[str, Any], passage: str, place: str) -> dict[str, Any]:
    """kind: what the answer is; start, text: where it, or the evidence for it, stands in the passage."""
    text, evidence = (text_of(answer[name], place, name) for name in ("input_text", "span_text"))
    start = answer["span_start"]
    plain = metrics.normalize_answer(text)
    kind = plain if plain in ("yes", "no", "unknown") else "span" if start >= 0 else "unknown"
    if kind == "span":
        _check_span(passage, evidence, start, place)
    within = evidence.lower().find(text.lower()) if kind == "span" else -1
    if within >= 0:  # the answer itself, rather than the sentence it was taken from
        start, evidence = start + within, evidence[within : within + len(text)]
    return {"start": start, "text": evidence, "kind": kind}


class Window(NamedTuple):
    """What the host has to know of an example to read an answer from it.

    first: place in the row of the window's first token of the passage. null: place that means "no answer here".
    offsets: int32 [tokens, 2], where the window's tokens stand in the passage, in characters. best: bool [tokens],
    whether a token has more context in this window than in the others.
    """

    first: int
    null: int
    offsets: np.ndarray
    best: np.ndarray


@dataclasses.dataclass(frozen=True)
class AnswerEncoder:
    """A question and a window of its passage inside a template; see `jaxlm.data.labelled.RowEncoder`. Arrays:
    input_ids, token_type_ids, attention_mask int32 [length]; start, end int32 [], the answer's first and last token,
    both at the place of "no answer" where the window has none; kind int32 [].

    null_first: whether that place is the first token, or the last symbol. stride: from window to window. keeps_end:
    whether of a question longer than max_question the end is kept."""

    template: Template
    null_first: bool
    vocabulary: Vocabulary
    stride: int
    max_question: int
    keeps_end: bool

    def encode(self, records: Sequence[Record], tokenizer: Tokenizer, length: int) -> list[Example]:
        passages = list(dict.fromkeys(row.values["passage"] for row in records))
        encoded = dict(zip(passages, tokenizer.encode_with_offsets(passages), strict=True))
        questions = tokenizer.encode_arrays([row.values["question"] for row in records])
        examples = []
        for number, (row, question) in enumerate(zip(records, questions, strict=True)):
            # Of a conversation the newest turn stands last.
            question = question[-self.max_question :] if self.keeps_end else question[: self.max_question]
            room = length - len(question) - self.template.num_symbols(True)
            if room < 16:
                raise UserError(
                    f"{row.place}: data.length {length} leaves {max(room, 0)} tokens for the passage beside a question "
                    f"of {len(question)}; raise it or lower objective.max_question."
                )
            examples += self._windows(number, row, question, *encoded[row.values["passage"]], room)
        return examples

    def _windows(
        self, number: int, row: Record, question: np.ndarray, ids: np.ndarray, offsets: np.ndarray, room: int
    ) -> Iterator[Example]:
        spans = _spans(len(ids), room, min(self.stride, room))
        context = np.stack([_context(len(ids), *span) for span in spans])
        is_best = context.argmax(axis=0)
        asked = row.values["kind"]
        answer = _tokens_of(offsets, row.values["start"], len(row.values["text"])) if row.values["text"] else None
        for place, (start, end) in enumerate(spans):
            made = self.template.build(self.vocabulary, question, ids[start:end])
            null = 0 if self.null_first else int(np.flatnonzero(made.part == 0)[-1])
            first = int(np.argmax(made.part == 2))
            target, kind = (null, null), "unknown"
            if answer and start <= answer[0] and answer[1] < end:  # for yes and no it is the evidence
                kind = asked
                if asked == "span":
                    target = (answer[0] - start + first, answer[1] - start + first)
            arrays = {"start": np.int32(target[0]), "end": np.int32(target[1]), "kind": np.int32(KINDS.index(kind))}
            window = Window(first, null, offsets[start:end], is_best[start:end] == place)
            yield Example(number, input_arrays(made) | arrays, window)

    def fill(self, vocabulary: Vocabulary) -> dict[str, int]:
        return input_padding(vocabulary)

    def synthetic(self, rows: int, length: int, vocabulary: Vocabulary) -> Arrays:
        zeros = np.zeros(rows, np.int32)
        return synthetic_inputs((rows, length), vocabulary) | {"start": zeros, "end": zeros, "kind": zeros}


def _spans(count: int, room: int, stride: int) -> list[tuple[int, int]]:
    """The windows of at most `room` of `count` tokens, each `stride` after the one before, up to the last token."""
    starts = range(0, max(1, count - room + stride), stride)
    return [(start, min(start + room, count)) for start in starts]


def _context(count: int, start: int, end: int) -> np.ndarray:
    """How much context each of `count` tokens has in a window (run_squad.py, `_check_is_max_context`); -1 outside."""
    place = np.arange(count)
    score = np.minimum(place - start, end - 1 - place) + 0.01 * (end - start)
    return np.where((place >= start) & (place < end), score, -1.0)


def _tokens_of(offsets: np.ndarray, start: int, count: int) -> tuple[int, int] | None:
    """First and last token of `count` characters from `start`; None where they are in no token."""
    inside = np.flatnonzero((offsets[:, 1] > start) & (offsets[:, 0] < start + count))
    return (int(inside[0]), int(inside[-1])) if len(inside) else None


@dataclasses.dataclass(frozen=True)
class Answers(Task):
    """loss = (cross-entropy of the start + that of the end) / 2, over all tokens of a window; with `kinds` also that of
    the kind of answer, read from the token that stands for the text."""

    no_answer: bool = False
    """Whether a passage may hold no answer (SQuAD 2.0)."""
    kinds: bool = field(False, weights=True)
    """Tell also whether the answer is yes, no or unknown (CoQA)."""
    window_stride: int = field(128, range="[1, inf)")
    """Tokens from one window of a long passage to the next."""
    max_question: int = field(64, range="[1, inf)")
    """Longest question, in tokens."""
    max_answer: int = field(30, range="[1, inf)")
    """Longest answer, in tokens."""

    name = "answers"
    pools = False
    longest_text = 48

    @property
    def template(self) -> Template:
        return self.reading.answer_template or self.reading.template

    @property
    def encoder(self) -> AnswerEncoder:
        assert self.vocabulary is not None, "bind the objective to a vocabulary first"
        null_first = self.model.summary_token == "first"
        sizes = (self.window_stride, self.max_question)
        return AnswerEncoder(self.template, null_first, self.vocabulary, *sizes, keeps_end=self.kinds)

    @property
    def outputs(self) -> int:
        return 2

    def init(self, key: jax.Array) -> Params:
        params = super().init(key)
        if self.kinds:
            params["kind_classifier"] = self._dense(jax.random.fold_in(key, 1), len(KINDS), True)
        return params

    def loss(self, params: Params, example: Arrays, key: jax.Array, train: bool) -> Terms:
        logits, weights = self._logits(params, example, key if train else None), self.weights(example)
        sides = [cross_entropy(logits[side], example[side]) for side in ("start", "end")]
        hit = (jnp.argmax(logits["start"], -1) == example["start"]) & (jnp.argmax(logits["end"], -1) == example["end"])
        terms = {"task_loss": Term.of((sides[0] + sides[1]) / 2, weights, 1.0), "accuracy": Term.of(hit, weights)}
        if self.kinds:
            terms["kind_loss"] = Term.of(cross_entropy(logits["kind"], example["kind"]), weights, 1.0)
        return terms

    def _logits(self, params: Params, example: Arrays, key: jax.Array | None) -> dict[str, jax.Array]:
        """start, end: float32 [batch, length], at padding as good as none; kind: float32 [batch, 4]."""
        keys = (None, None) if key is None else jax.random.split(key)
        hidden = self.hidden(params, Inputs.of(example), keys[0])
        hidden = dropout(hidden, self.classifier_dropout, keys[1])
        logits = jnp.where(example["attention_mask"][..., None] > 0, self.classify(params, hidden), -1e9)
        found = {"start": logits[..., 0], "end": logits[..., 1]}
        if self.kinds:
            first = self.model.summary_token == "first"
            x = hidden[:, 0] if first else last_token(hidden, example["attention_mask"])
            found["kind"] = apply_head(params["kind_classifier"], x)
        return found

    def predict(self, params: Params, example: Arrays) -> Arrays:
        return self._logits(params, example, None)

    def describe(self, batch: Arrays, example: Arrays, row: int) -> list[Line]:
        (line,) = super().describe(batch, example, row)
        start, end = int(example["start"][row]), int(example["end"][row])
        marks = ["target" if start <= i <= end else mark for i, mark in enumerate(line.marks)]
        kind = KINDS[int(example["kind"][row])]
        found = line.ids[start : end + 1]
        title = "answer" if kind == "span" else kind
        return [line._replace(marks=marks), Line(title, found, ["target"] * len(found))]

    def answers(
        self, records: Sequence[Record], examples: Sequence[Example], outputs: Sequence[Arrays]
    ) -> list[Answer]:
        windows: list[list[int]] = [[] for _ in records]
        for number, example in enumerate(examples):
            windows[example.record].append(number)
        return [
            self._answer(record.values["passage"], [(examples[i].notes, outputs[i]) for i in own])
            for record, own in zip(records, windows, strict=True)
        ]

    def _answer(self, passage: str, windows: list[tuple[Window, Arrays]]) -> Answer:
        """The best span of all windows; scores are sums of a start's and an end's logit. `null` is the score of no
        answer, the lowest of the windows', minus that of the best span (run_squad.py)."""
        best, text = -1e9, ""
        for window, output in windows:
            place = slice(window.first, window.first + len(window.offsets))
            score, start, end = best_span(output["start"][place], output["end"][place], window.best, self.max_answer)
            if score > best:
                best, text = score, passage[window.offsets[start, 0] : window.offsets[end, 1]].strip()
        null = min(float(output["start"][w.null] + output["end"][w.null]) for w, output in windows) - best
        answer = "" if self.no_answer and null > 0 else text
        if self.kinds:
            # Each window votes for a kind by how sure it is that the answer is not elsewhere.
            kind = np.max([output["kind"][: len(KINDS) - 1] for _, output in windows], axis=0)
            unknown = min(float(output["kind"][3]) for _, output in windows)
            answer = {0: text, 1: "yes", 2: "no", 3: "unknown"}[int(np.argmax([*kind, unknown]))]
        return Answer(answer, {"best": text, "null": null})

    def as_text(self, record: Record) -> tuple[str, str]:
        """As T5 was fine-tuned; of a passage that is too long the end is not read."""
        values, golds = record.values, self.gold(record)
        answer = "" if golds is None else golds[0] if golds else "unanswerable"
        return f"question: {values['question']} context: {values['passage']}", answer

    def from_text(self, record: Record, text: str) -> Any:
        return "" if text == "unanswerable" and not self.kinds else text

    def gold(self, record: Record) -> Any:
        return record.values["answers"]

    def score(self, records: Sequence[Record], answers: Sequence[Answer]) -> dict[str, float]:
        golds, texts = [self.gold(row) for row in records], [a.prediction for a in answers]
        has_answer = [bool(gold) for gold in golds]
        measures = {"exact_match": metrics.exact_match, "f1": metrics.token_f1}
        if self.kinds:
            measures = {name: functools.partial(left_out, measure) for name, measure in measures.items()}
        else:
            golds = [[text for text in gold if metrics.normalize_answer(text)] for gold in golds]
        scores = {name: [m(t, g) for t, g in zip(texts, golds, strict=True)] for name, m in measures.items()}
        found = {name: _mean(values) for name, values in scores.items()}
        if self.kinds or not self.no_answer:
            return found
        for name, values in scores.items():
            for part, wanted in (("has_answer", True), ("no_answer", False)):
                if wanted in has_answer:
                    own = [value for value, has in zip(values, has_answer, strict=True) if has == wanted]
                    found[f"{part}_{name}"] = _mean(own)
            if all("null" in a.scores for a in answers):  # a written answer has no score
                best = [measures[name](a.scores["best"], gold) for a, gold in zip(answers, golds, strict=True)]
                tuned = best_threshold([a.scores["null"] for a in answers], best, has_answer)
                found |= {f"best_{name}": tuned[0], f"best_{name}_threshold": tuned[1]}
        return found


def best_span(
    starts: np.ndarray, ends: np.ndarray, is_best: np.ndarray, longest: int
) -> tuple[float, int, int]:
    """(score, start, end) of the best span of at most `longest` tokens among the likeliest starts and ends, whose start
    has its most context in this window."""
    found = (-np.inf, 0, 0)
    for start in np.argsort(-starts)[:BEST]:
        for end in np.argsort(-ends)[:BEST]:
            score = float(starts[start] + ends[end])
            if is_best[start] and start <= end < start + longest and score > found[0]:
                found = (score, int(start), int(end))
    return found


def best_threshold(null: Sequence[float], scores: Sequence[float], has_answer: Sequence[bool]) -> tuple[float, float]:
    """(the best mean score, the threshold for it): answers whose `null` is above it are taken back, which is right
    where there is none (SQuAD 2.0's script). scores: of the answers where they are not taken back."""
    order = np.argsort(null, kind="stable")
    current = best = float(sum(not has for has in has_answer))  # all answers taken back
    threshold = min(null, default=0.0) - 1.0
    for place in order:
        current += scores[place] if has_answer[place] else -1.0
        if current > best:
            best, threshold = current, null[place]
    return best / max(1, len(null)), float(threshold)


def left_out(measure: Any, prediction: str, golds: Sequence[str]) -> float:
    """The mean, over i, of the measure of the prediction against all gold answers but the i-th (CoQA's script)."""
    if len(golds) < 2:
        return measure(prediction, golds)
    return statistics.fmean(measure(prediction, [*golds[:i], *golds[i + 1 :]]) for i in range(len(golds)))


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0
