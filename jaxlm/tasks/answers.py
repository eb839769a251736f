"""Extractive question answering (SQuAD 1.1 and 2.0, CoQA): where in a passage the answer begins and ends."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import re
import statistics
import string
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.data.labelled import Arrays, EncodedExample, LabelledData, Record, row_or_error
from jaxlm.data.readers import Columns, open_text, suffix_of
from jaxlm.data.rows import read_rows
from jaxlm.errors import UserError
from jaxlm.fields import field
from jaxlm.models.base import last_token
from jaxlm.objectives.base import Line, Term, Terms
from jaxlm.objectives.losses import cross_entropy
from jaxlm.paths import TEXT, check_form, reading
from jaxlm.tasks import metrics
from jaxlm.tasks.base import Answer, Task, apply_head, text_arrays
from jaxlm.tokenizers.template import Template
from jaxlm.tokenizers.tokenizer import Tokenizer, replace_surrogates
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import Params

KINDS = ("span", "yes", "no", "unknown")
"""Kinds of answers; yes and no occur only in CoQA, and unknown means that there is no answer here."""
SPACE = r"[\t\n\f\r ]"
"""White space in regular expressions of T5's preprocessing (RE2's)."""
BEST = 20
"""Number of likeliest starts and ends of a window that are paired, as in BERT's run_squad.py."""


@dataclasses.dataclass(frozen=True)
class AnswerRows(LabelledData):
    """Questions about passages: a JSON file of SQuAD or CoQA, or SQuAD's as rows (`hf:squad`)."""

    length: int = field(384, range="[8, inf)")
    """Sequence length of the model, special tokens included; longer passages are read in windows."""
    form: Literal["squad", "coqa"] = "squad"
    """Format of the file."""
    history: int = 2
    """Earlier turns that precede a question (CoQA): question and answer, or only the question if the file has no
    answers."""

    def read(self, path: str) -> Iterator[Record | UserError]:
        with reading(path):
            if self.form == "squad" and suffix_of(path) != ".json":
                yield from _question_rows(path)
                return
            with open_text(path) as stream:
                data = json.load(stream)
            if isinstance(data, list):
                yield from _question_rows(path)
            else:
                yield from _squad(data["data"], path) if self.form == "squad" else _coqa(
                    data["data"], path, self.history)


_SQUAD = {"id": TEXT, "question": TEXT, "context": TEXT, "answers?": [{"text": TEXT, "answer_start": int}]}
_COQA = {"input_text": TEXT}
_COQA_ANSWER = _COQA | {"span_text": TEXT, "span_start": int}
"""Forms of a question of SQuAD with its passage, of a question of CoQA, and of an answer."""


def _squad(data: list[dict[str, Any]], path: str) -> Iterator[Record | UserError]:
    for article in data:
        for paragraph in article["paragraphs"]:
            for question in paragraph["qas"]:
                place = f"{path}, question {question.get('id')}"
                yield row_or_error(_squad_question, question, paragraph["context"], place)


def _question_rows(path: str) -> Iterator[Record | UserError]:
    """Read a row per question, as `datasets` and TFDS have SQuAD, with answers {"text": [], "answer_start": []}."""
    columns = Columns(["question", "context"], "Give SQuAD's .json, or rows with these columns", ["id", "answers"])
    for number, row in enumerate(read_rows(path, columns)):
        if not isinstance(row, UserError) and isinstance(answers := row[1].get("answers"), dict):
            pairs = zip(answers["text"], answers["answer_start"], strict=True)
            row[1]["answers"] = [{"text": text, "answer_start": start} for text, start in pairs]
        yield row if isinstance(row, UserError) else row_or_error(
            _squad_question, {"id": str(number)} | row[1], row[1]["context"], row[0])


def _squad_question(question: dict[str, Any], context: Any, place: str) -> Record:
    check_form(question | {"context": context}, _SQUAD, place)
    found = question.get("answers")
    texts = None if found is None else [str(answer["text"]) for answer in found]
    span = (found[0]["answer_start"], texts[0], "span") if texts else ()
    return _record(str(question["id"]), place, str(question["question"]), str(context), texts, *span)


def _coqa(data: list[dict[str, Any]], path: str, history: int) -> Iterator[Record | UserError]:
    for story in data:
        turns: list[str] = []
        for number, question in enumerate(story["questions"]):
            place = f"{path}, story {story['id']}, turn {question['turn_id']}"
            yield row_or_error(_coqa_turn, story, number, turns, history, place)


def _coqa_turn(story: dict[str, Any], number: int, turns: list[str], history: int, place: str) -> Record:
    """Return the record of a turn, and append the turn to those before it."""
    question, golds, span = story["questions"][number], None, ()
    check_form(question | {"story": story["story"]}, _COQA | {"story": TEXT}, place)
    turns.append(str(question["input_text"]))
    text = " ".join(turns[-history - 1 :])
    if story.get("answers") is not None:
        answer = story["answers"][number]
        check_form(answer, _COQA_ANSWER, place, "answers")
        others = [other[number] for other in (story.get("additional_answers") or {}).values()]
        check_form(others, [_COQA], place, "additional_answers")
        golds = [str(given["input_text"]) for given in (answer, *others)]
        turns[-1] += " " + golds[0]
        span = _coqa_span(golds[0], str(answer["span_text"]), answer["span_start"])
    return _record(f"{story['id']}:{question['turn_id']}", place, text, str(story["story"]), golds, *span)


def _coqa_span(text: str, evidence: str, start: int) -> tuple[int, str, str]:
    """Return start, text and kind of an answer; yes and no stand where their evidence does."""
    kind = metrics.normalize_answer(text)
    if kind not in KINDS[1:]:
        kind = "span" if start >= 0 else "unknown"
    # The answer itself rather than the sentence that it was taken from.
    word = re.escape(text)
    # As a whole word if it can be: "he" is no part of "The".
    for pattern in (rf"(?<!\w){word}(?!\w)", word) if kind == "span" else ():
        if within := re.search(pattern, evidence, re.IGNORECASE):
            return start + within.start(), within[0], kind
    return start, evidence, kind


def _record(
    name: str, place: str, question: str, passage: str, golds: list[str] | None, start: int = -1, text: str = "",
    kind: str = "unknown",
) -> Record:
    """Return the record of a question; `golds` is None in a file to predict, and [] if there is no answer."""
    question, passage, text = map(replace_surrogates, (question, passage, text))  # half an emoji stays one character
    golds = golds and [*map(replace_surrogates, golds)]
    if kind == "span" and (start < 0 or not passage.startswith(text, start)):
        raise UserError(
            f"{place}: the answer {text[:60]!r} does not stand at character {start} of its passage; fix its "
            "answer_start or remove the question."
        )
    # Byte-level vocabularies have tokens of white space, which are no part of a question or an answer.
    start += len(text) - len(text.lstrip())
    values = {"question": question.lstrip(), "passage": passage, "answers": golds, "start": start,
              "text": text.strip(), "kind": kind}
    return Record(name, place, values, (passage,))


class Window(NamedTuple):
    """Window of a passage, as an answer is read from it."""

    first: int
    """Position of the passage's first token in the row."""
    null: int
    """Position that means "no answer"."""
    offsets: np.ndarray
    """Characters of each token in the passage: int32 [tokens, 2]."""
    best: np.ndarray
    """Whether a token has more context in this window than in any other: bool [tokens]."""


@dataclasses.dataclass(frozen=True)
class Answers(Task):
    """loss = (cross-entropy of the start + that of the end) / 2, over all tokens of a window.

    With `kinds` there is also the cross-entropy of the kind of answer, predicted from the summary token.

    The arrays of a window: input_ids, token_type_ids, attention_mask int32 [length]; start, end int32 [], first and
    last token of the answer, or the position of "no answer" if the window has none; kind int32 [].
    """

    no_answer: bool = False
    """Whether a passage may hold no answer (SQuAD 2.0)."""
    null_threshold: float = field(0.0, resumable=True, compare=False)
    """Difference between the scores of no answer and of the best one above which there is none, such as
    `best_f1_threshold` of an evaluation on other rows."""
    kinds: bool = field(False, weights=True)
    """Predict also whether the answer is yes, no or unknown (CoQA)."""
    window_stride: int = field(128, range="[1, inf)")
    """Tokens from one window of a long passage to the next."""
    max_question: int = field(64, range="[1, inf)")
    """Maximum length of a question in tokens."""
    max_answer: int = field(30, range="[1, inf)")
    """Maximum length of an answer in tokens."""
    units: Literal["words", "characters"] = field("words", resumable=True)
    """Units of F1: words, as SQuAD's script has them, or each character of a script without spaces and the words of
    others, as MLQA's has for Chinese. Then all punctuation is ignored, and no articles."""

    name = "answers"
    use_pooling = False
    num_logits = 2
    longest_text = 48
    gold_value = "answers"
    private_params = ("kind_classifier",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.null_threshold and (self.kinds or not self.no_answer):
            raise UserError("objective.null_threshold is for SQuAD 2.0; add --objective.no-answer True, without kinds.")

    def template_for(self, vocabulary: Vocabulary | None) -> Template:
        own = self.fine_tuning.answer_template or self.fine_tuning.template
        template = own.for_vocabulary(vocabulary)
        is_last = self.model.summary_token == "last" or template.pair.startswith("$")
        if is_last and own.pair and template.pair.endswith(("$B", "$B:1")):
            # "No answer" is a symbol after the passage; the tokenizer's own template has none there.
            end = own.pair.rpartition(" ")[2]
            needs = (*template.needs, end.partition(":")[0])
            template = dataclasses.replace(template, pair=f"{template.pair} {end}", needs=needs)
        return template

    @property
    def text_template(self) -> Template:
        # Transformers' scripts give a tokenizer that pads on the left the passage as its first text.
        return super().template_for(self.vocabulary) if self.template.padding_side == "left" else self.template

    def encode(self, records: Sequence[Record], tokenizer: Tokenizer, length: int) -> list[EncodedExample]:
        passages = list(dict.fromkeys(record.values["passage"] for record in records))
        encoded = dict(zip(passages, tokenizer.encode_with_offsets(passages), strict=True))
        questions = tokenizer.encode_arrays([record.values["question"] for record in records])
        examples = []
        for number, (record, question) in enumerate(zip(records, questions, strict=True)):
            # The newest turn of a conversation is the last one.
            question = question[-self.max_question :] if self.kinds else question[: self.max_question]
            room = length - len(question) - self.template.num_symbols(True)
            if room < 16:
                raise UserError(
                    f"{record.place}: data.length {length} leaves {max(room, 0)} tokens for the passage beside a "
                    f"question of {len(question)}; raise it or lower objective.max_question."
                )
            windows = self._windows(record, question, *encoded[record.values["passage"]], room)
            examples += [EncodedExample(number, arrays, window) for arrays, window in windows]
        return examples

    def _windows(
        self, record: Record, question: np.ndarray, ids: np.ndarray, offsets: np.ndarray, room: int
    ) -> Iterator[tuple[Arrays, Window]]:
        starts = np.arange(0, max(1, len(ids) - room + min(self.window_stride, room)), min(self.window_stride, room))
        context = _context(len(ids), starts[:, None], np.minimum(starts + room, len(ids))[:, None])
        text, kind = record.values["text"], record.values["kind"]
        # Tokens that have any character of the answer, or of the evidence for yes and no.
        begin, end = record.values["start"], record.values["start"] + len(text)
        answer = np.flatnonzero((offsets[:, 1] > begin) & (offsets[:, 0] < end) & (begin < end))
        for number, start in enumerate(starts):
            tokens = slice(start, start + room)
            row = self.template.build(self.vocabulary, question, ids[tokens])
            null = 0 if self._has_first_symbol else int(np.flatnonzero(row.part == 0)[-1])
            first = int(np.argmax(row.part == 2))
            is_inside = len(answer) > 0 and start <= answer[0] and answer[-1] < start + room
            span = answer[[0, -1]] - start + first if is_inside and kind == "span" else (null, null)
            arrays = text_arrays(row) | {
                "start": np.int32(span[0]), "end": np.int32(span[1]),
                "kind": np.int32(KINDS.index(kind if is_inside else "unknown")),
            }
            yield arrays, Window(first, null, offsets[tokens], (context.argmax(axis=0) == number)[tokens])

    def synthetic(self, rows: int, length: int) -> Arrays:
        zeros = np.zeros(rows, np.int32)
        return super().synthetic(rows, length) | {"start": zeros, "end": zeros, "kind": zeros}

    def init(self, key: jax.Array) -> Params:
        key_task, key_kinds = jax.random.split(key)
        params = super().init(key_task)
        if self.kinds:
            params["kind_classifier"] = self._dense(key_kinds, len(KINDS), True)
        return params

    def loss(self, params: Params, example: Arrays, key: jax.Array, train: bool) -> Terms:
        logits, weights = self._logits(params, example, key if train else None), self.weights(example)
        losses = {name: cross_entropy(values, example[name]) for name, values in logits.items()}
        hit = (jnp.argmax(logits["start"], -1) == example["start"]) & (jnp.argmax(logits["end"], -1) == example["end"])
        terms = {"task_loss": Term.of((losses["start"] + losses["end"]) / 2, weights, 1.0),
                 "accuracy": Term.of(hit, weights)}
        return terms | ({"kind_loss": Term.of(losses["kind"], weights, 1.0)} if self.kinds else {})

    @property
    def _has_first_symbol(self) -> bool:
        """Whether "no answer" and the kind of an answer belong to the first token of a row, else to its last symbol."""
        return self.model.summary_token != "last" and not self.template.pair.startswith("$")

    def _logits(self, params: Params, example: Arrays, key: jax.Array | None) -> dict[str, jax.Array]:
        """Return the logits: start, end float32 [batch, length], very low at padding; kind float32 [batch, 4]."""
        hidden, mask = self.token_states(params, example, key), example["attention_mask"]
        logits = jnp.where(mask[..., None] > 0, self.classify(params, hidden), -1e9)
        found = {"start": logits[..., 0], "end": logits[..., 1]}
        if self.kinds:
            x = hidden[:, 0] if self._has_first_symbol else last_token(hidden, mask)
            found["kind"] = apply_head(params["kind_classifier"], x)
        return found

    def predict(self, params: Params, example: Arrays) -> Arrays:
        return self._logits(params, example, None)

    def describe(self, batch: Arrays, example: Arrays, row: int) -> list[Line]:
        (line,) = super().describe(batch, example, row)
        start, end = int(example["start"][row]), int(example["end"][row])
        marks = ["target" if start <= i <= end else mark for i, mark in enumerate(line.marks)]
        kind, found = KINDS[int(example["kind"][row])], line.ids[start : end + 1]
        title = "answer" if kind == "span" else kind
        return [line._replace(marks=marks), Line(title, found, ["target"] * len(found))]

    def answer(self, record: Record, parts: Sequence[tuple[EncodedExample, Arrays]]) -> Answer:
        """Return the best span of all windows, by the sum of a start's and an end's logit.

        The score `null` is that of no answer, the lowest of the windows', minus that of the best span (run_squad.py).
        """
        best, text = -1e9, ""
        for example, output in parts:
            window = example.notes
            place = slice(window.first, window.first + len(window.offsets))
            score, start, end = best_span(output["start"][place], output["end"][place], window.best, self.max_answer)
            if score > best:
                passage = record.values["passage"]
                stop = _end_of_marks(passage, window.offsets[end, 1])
                best, text = score, passage[window.offsets[start, 0] : stop].strip()
        nulls = [float(output["start"][example.notes.null] + output["end"][example.notes.null])
                 for example, output in parts]
        null = min(nulls) - best
        answer = "" if self.no_answer and null > self.null_threshold else text
        if self.kinds:
            # An answer is in some window if there is one; unknown holds for all windows.
            logits = np.stack([output["kind"] for _, output in parts])
            votes = [*logits[:, :-1].max(axis=0), logits[:, -1].min()]
            answer = (text, *KINDS[1:])[int(np.argmax(votes))]
        return Answer(answer, {"best": text, "null": null})

    def _measure(self, name: str, text: str, golds: Sequence[str]) -> float:
        normalize = metrics.split_characters if self.units == "characters" else metrics.normalize_answer
        measure = functools.partial(getattr(metrics, {"f1": "token_f1"}.get(name, name)), normalize=normalize)
        if self.kinds:
            return leave_one_out(measure, text, golds)
        if self.no_answer:
            return measure(text, [gold for gold in golds if normalize(gold)])
        # In the scripts of SQuAD 1.1 and MLQA two texts without words have no word in common.
        return measure(text, golds) if name == "exact_match" or normalize(text) else 0.0

    def gold_remarks(self, records: Sequence[Record]) -> list[str]:
        count = 0 if self.no_answer or self.kinds else sum(record.values["answers"] == [] for record in records)
        return [f"{count:,} questions have no answer, and every answer to them counts as wrong; for SQuAD 2.0 add "
                "--objective.no-answer True"] * bool(count)

    def row_figures(self, gold: Any, answer: Answer) -> dict[str, float]:
        return {name: self._measure(name, answer.prediction, gold) for name in ("exact_match", "f1")}

    def score(self, golds: Sequence[Any], answers: Sequence[Answer]) -> dict[str, float]:
        texts, has_answer = [answer.prediction for answer in answers], np.array([bool(gold) for gold in golds])

        def values(name: str, texts: Sequence[str]) -> np.ndarray:
            return np.array([self._measure(name, text, gold) for text, gold in zip(texts, golds, strict=True)])

        scores = {name: values(name, texts) for name in ("exact_match", "f1")}
        found = {name: float(np.mean(score)) for name, score in scores.items()}
        if self.kinds or not self.no_answer:
            return found
        for name, score in scores.items():
            for part, chosen in (("has_answer", has_answer), ("no_answer", ~has_answer)):
                if chosen.any():
                    found[f"{part}_{name}"] = float(np.mean(score[chosen]))
            if all("null" in answer.scores for answer in answers):  # a written answer has no score
                spans = [answer.scores["best"] for answer in answers]
                gains = np.where(has_answer, values(name, spans), -np.array([*map(bool, spans)], np.float64))
                tuned = best_threshold([answer.scores["null"] for answer in answers], gains, has_answer)
                found |= {f"best_{name}": tuned[0], f"best_{name}_threshold": tuned[1]}
        return found

    def as_text(self, record: Record) -> tuple[str, str]:
        """Return prompt and answer as T5 was fine-tuned, with spaces around punctuation.

        The end of a passage that is too long is not read.
        """
        values, golds = record.values, self.gold(record)
        answer = "" if golds is None else golds[0] if golds else "unanswerable"
        prompt = f"question: {_spaced(values['question'])} context: {_spaced(values['passage'])}"
        return re.sub(f"{SPACE}+", " ", prompt), _spaced(answer)

    def from_text(self, record: Record, text: str) -> str:
        """Return the place of the passage that a written answer repeats, with the passage's own spaces, or the text."""
        if text == "unanswerable" and not self.kinds:
            return ""
        pattern = ""
        for before, after in itertools.pairwise(["", *text.split()]):  # "" is in every text, so also in `punctuation`
            is_spaced = before in string.punctuation or after in string.punctuation
            pattern += f"{SPACE}{'*' if is_spaced else '+'}{re.escape(after)}"
        found = re.search(pattern, record.values["passage"])
        return found[0].strip() if found else text


def _end_of_marks(text: str, end: int) -> int:
    """Return `end`, or the end of the combining marks that follow: a composed character's offsets leave them out."""
    while end < len(text) and (unicodedata.category(text[end])[0] == "M" or "\u1160" <= text[end] <= "\u11ff"):
        end += 1
    return end


def _spaced(text: str) -> str:
    """Return a text with spaces around ASCII punctuation, and one space for several."""
    return re.sub(f"{SPACE}+", " ", re.sub(f"([{re.escape(string.punctuation)}])", r" \1 ", text))


def _context(count: int, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return how much context each of `count` tokens has in windows; -1 outside.

    It is that of run_squad.py, `_check_is_max_context`. Windows are rows: start, end int [windows, 1].
    """
    place = np.arange(count)
    score = np.minimum(place - start, end - 1 - place) + 0.01 * (end - start)
    return np.where((place >= start) & (place < end), score, -1.0)


def best_span(
    starts: np.ndarray, ends: np.ndarray, is_best: np.ndarray, longest: int
) -> tuple[float, int, int]:
    """Return score, start and end of the best span of at most `longest` tokens among the likeliest starts and ends.

    The start must have its most context in this window. The score is -inf if there is no span.
    """
    if not len(starts):  # a passage without tokens
        return -np.inf, 0, 0
    first, last = np.argsort(-starts)[:BEST, None], np.argsort(-ends)[:BEST]
    is_span = is_best[first] & (first <= last) & (last < first + longest)
    scores = np.where(is_span, starts[first] + ends[last], -np.inf)
    row, column = np.unravel_index(scores.argmax(), scores.shape)
    return float(scores[row, column]), int(first[row, 0]), int(last[column])


def best_threshold(null: Sequence[float], gains: np.ndarray, has_answer: Sequence[bool]) -> tuple[float, float]:
    """Return the best mean score, and the threshold on `null` that gives it (SQuAD 2.0's script).

    Args:
        null: Score of no answer; above the threshold an answer is withdrawn, which is right if there is none.
        gains: What an answer adds that is not withdrawn: its score, or -1 if there is none and it is not empty.
        has_answer: Whether there is an answer.
    """
    order = np.argsort(null, kind="stable")
    totals = np.cumsum([len(null) - sum(has_answer), *gains[order]])  # at first all answers are withdrawn
    best = int(totals.argmax())
    threshold = null[order[best - 1]] if best else min(null, default=0.0) - 1.0
    return float(totals[best]) / max(1, len(null)), float(threshold)


def leave_one_out(measure: Callable[..., float], prediction: str, golds: Sequence[str]) -> float:
    """Return the mean, over i, of the measure against all gold answers but the i-th (CoQA's script)."""
    if len(golds) < 2:
        return measure(prediction, golds)
    return statistics.fmean(measure(prediction, [*golds[:i], *golds[i + 1 :]]) for i in range(len(golds)))
