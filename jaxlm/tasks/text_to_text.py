"""Text to text (Raffel et al. 2019; McCann et al. 2018): summaries, translations, questions without a passage, and
every other task with its rows written as texts; for encoder-decoders and decoders, which answer by writing."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.data.labelled import Arrays, Example, LabelledData, LabelledSource, Record
from jaxlm.data.readers import LABELS, text_of, texts_of
from jaxlm.errors import UserError
from jaxlm.inference.generate import generate
from jaxlm.models.base import Inputs
from jaxlm.objectives.base import Line, PretrainedModel, Term, Terms
from jaxlm.objectives.chunked_loss import chunked_cross_entropy
from jaxlm.tasks import metrics
from jaxlm.tasks.base import Answer, Task
from jaxlm.tasks.tables import read_table
from jaxlm.tokenizers.template import Template
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import Params

Metric = Literal["exact_match", "rouge", "bleu"]


@dataclasses.dataclass(frozen=True)
class PairRows(LabelledData):
    """A text and what is to be written for it, from TSV, CSV, JSON lines or `tfds:NAME`. Columns are named; a number
    is the place of a column, from 1, in a file without a line of names."""

    length: int = 512
    """Tokens of the text that is read; for a decoder, of text and answer together. Longer texts are cut."""
    source_field: str = "source"
    """Column of the text; of JSON, a list of texts is joined by spaces."""
    target_field: str = "target"
    """Column of the answer; of JSON, a list has several right ones, the first of which is learnt. Empty for a file
    whose answers are to be predicted."""
    id_field: str = ""
    """Column of the row's id; empty: the number of the row."""

    def read(self, path: str) -> Iterator[Record]:
        columns = [self.source_field, *filter(None, (self.target_field, self.id_field))]
        for number, (place, row) in enumerate(read_table(path, columns)):
            source, targets = " ".join(texts_of(row[self.source_field], place, self.source_field)), None
            if self.target_field and row[self.target_field] is not None:
                targets = texts_of(row[self.target_field], place, self.target_field, LABELS)
                if not targets:
                    raise UserError(f"{place}: {self.target_field!r} is an empty list; mend or remove the line.")
            name = text_of(row[self.id_field], place, self.id_field) if self.id_field else str(number)
            yield Record(name, place, {"source": source, "targets": targets}, (source, *(targets or ())))


@dataclasses.dataclass(frozen=True)
class PairEncoder:
    """Prompts and answers; see `jaxlm.data.labelled.RowEncoder`. notes: the prompt's ids, int32 [tokens].

    Arrays for an encoder-decoder: input_ids, attention_mask int32 [length]; targets int32 and weights float32
    [max_target]. For a decoder, which reads the prompt and what it has written in one row: input_ids, attention_mask
    int32 and weights float32 [length], 1 where the next token is of the answer.

    task: bound; equal ones share what was encoded.
    """

    task: TextToText

    def encode(self, records: Sequence[Record], tokenizer: Tokenizer, length: int) -> list[Example]:
        task, is_decoder = self.task, self.task.is_decoder
        pairs = [task.texts(row) for row in records]
        prompts = tokenizer.encode_arrays([prompt for prompt, _ in pairs])
        targets = tokenizer.encode_arrays([target for _, target in pairs])
        end = np.array([task.vocabulary.eos], np.int32)
        between = np.array(tokenizer.encode(task.separator), np.int32) if is_decoder else end
        room = length - len(between) - (task.max_target if is_decoder else 0)
        if room < 8:
            raise UserError(
                f"data.length {length} leaves {max(room, 0)} tokens for the text beside {task.max_target} of the "
                "answer; raise it or lower objective.max_target."
            )
        make = self._one_row if is_decoder else self._two_rows
        examples = []
        for number, (prompt, target) in enumerate(zip(prompts, targets, strict=True)):
            prompt = np.concatenate([prompt[:room], between])
            target = np.concatenate([target[: task.max_target - 1], end])
            examples.append(Example(number, make(prompt, target), prompt))
        return examples

    def _two_rows(self, prompt: np.ndarray, target: np.ndarray) -> Arrays:
        rest = self.task.max_target - len(target)
        return {
            "input_ids": prompt, "attention_mask": np.ones_like(prompt),
            "targets": np.pad(target, (0, rest), constant_values=self.task.vocabulary.pad).astype(np.int32),
            "weights": np.pad(np.ones(len(target), np.float32), (0, rest)),
        }

    def _one_row(self, prompt: np.ndarray, target: np.ndarray) -> Arrays:
        ids = np.concatenate([prompt, target]).astype(np.int32)
        place = np.arange(len(ids))
        asked = (place >= len(prompt) - 1) & (place < len(ids) - 1)
        return {"input_ids": ids, "attention_mask": np.ones_like(ids), "weights": asked.astype(np.float32)}

    def fill(self, vocabulary: Vocabulary) -> dict[str, int]:
        ragged = {"input_ids": max(vocabulary.pad, 0), "attention_mask": 0}
        return ragged | {"weights": 0} if self.task.is_decoder else ragged

    def synthetic(self, rows: int, length: int, vocabulary: Vocabulary) -> Arrays:
        def ids(count: int) -> np.ndarray:
            return np.random.default_rng(0).integers(0, vocabulary.size, (rows, count), np.int32)

        batch = {"row": np.arange(rows, dtype=np.int32), "input_ids": ids(length)}
        batch["attention_mask"] = np.ones_like(batch["input_ids"])
        if self.task.is_decoder:
            return batch | {"weights": np.ones((rows, length), np.float32)}
        count = self.task.max_target
        return batch | {"targets": ids(count), "weights": np.ones((rows, count), np.float32)}


@dataclasses.dataclass(frozen=True)
class TextToText(Task):
    """loss = mean of -log p(token of the answer | the text, those before it)."""

    kind: Task | None = None
    """The task whose rows are written as texts; None: rows are pairs of texts already."""
    prefix: str = ""
    """What stands in front of each text ("summarize: ")."""
    separator: str = " =>"
    """What stands between a text and its answer, for a decoder."""
    max_target: int = 64
    """Longest answer, in tokens."""
    metric: Metric = "exact_match"
    """How pairs of texts are scored; other kinds have their own metrics."""

    name = "text_to_text"
    answer_kind = "text"

    @property
    def is_decoder(self) -> bool:
        """Whether text and answer stand in one row."""
        return not self.model.has_encoder

    @property
    def template(self) -> Template:
        """Nothing stands around a text; writing needs an end."""
        return Template(needs=("eos", "pad"))

    @property
    def text_template(self) -> Template:
        return self.model.template

    @property
    def outputs(self) -> int:
        return self.model.vocab_size if self.model.writes_answers else 0

    @property
    def encoder(self) -> PairEncoder:
        assert self.vocabulary is not None, "bind the objective to a vocabulary first"
        return PairEncoder(self)

    def texts(self, record: Record) -> tuple[str, str]:
        """(the text to read, the answer to write, "" where the data has none) of a record."""
        if self.kind is None:
            return self.prefix + record.values["source"], (self.gold(record) or [""])[0]
        prompt, target = self.kind.as_text(record)
        return self.prefix + prompt, target

    def with_pretrained_model(self, source: PretrainedModel) -> Self:
        model = source.objective.model
        if not model.writes_answers:
            raise UserError(f"{type(model).__name__} writes no text; this task needs a T5 or a decoder such as GPT-2.")
        return dataclasses.replace(self, model=model.with_execution(attention="auto"))

    def bind(self, vocabulary: Vocabulary, length: int, statistics: Any = None) -> Self:
        if given := [name for name in ("both_orders", "lm_coefficient", "teacher") if getattr(self.kind, name, None)]:
            raise UserError(
                f"{given[0]} is for a classifier, and {type(self.model).__name__} writes its answers here; leave the "
                "flag out, or take a preset without it."
            )
        return super().bind(vocabulary, length, statistics)

    def with_labels(self, records: Sequence[Record], names: Sequence[str] = ()) -> Self:
        return dataclasses.replace(self, kind=self.kind.with_labels(records, names)) if self.kind else self

    def init(self, key: jax.Array) -> Params:
        return self.model.init(key)

    def loss(self, params: Params, example: Arrays, key: jax.Array, train: bool) -> Terms:
        model, weights = self.model, example["weights"] * self.weights(example)[:, None]
        if self.is_decoder:
            hidden = model.hidden_states(params, Inputs.of(example), key=key if train else None)[:, :-1]
            labels, weights = example["input_ids"][:, 1:], weights[:, :-1]
        else:
            keys = jax.random.split(key) if train else (None, None)
            labels = example["targets"]
            memory = model.hidden_states(params, Inputs.of(example), key=keys[0])
            shifted = jnp.pad(labels[:, :-1], ((0, 0), (1, 0)), constant_values=self.vocabulary.pad)
            hidden = model.decoder_states(params, shifted, memory, example["attention_mask"], key=keys[1])
        table, bias = model.output_matrix(params)
        losses = chunked_cross_entropy(model.token_features(params, hidden), table, labels, weights, bias=bias)
        return {
            "task_loss": Term(losses.total, jnp.sum(weights), 1.0),
            "accuracy": Term.of(losses.correct, weights),
        }

    def run(self, params: Params, source: LabelledSource, length: int, batch_size: int) -> list[Arrays]:
        """The answers' ids, by greedy decoding."""
        examples = source.examples("held_out", self.encoder, length)
        order = np.argsort([len(example.notes) for example in examples], kind="stable")
        found: list[Arrays] = [{} for _ in examples]
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            prompts = [examples[i].notes.tolist() for i in chosen]
            answers = generate(self, params, prompts, max_new_tokens=self.max_target)
            for i, ids in zip(chosen, answers, strict=True):
                text = source.tokenizer.decode(ids)
                found[i] = {"text": np.array(text.strip())}
        return found

    def flops(self, length: int) -> float:
        return self.model.forward_flops(length, length if self.is_decoder else self.max_target)

    def describe(self, batch: Arrays, example: Arrays, row: int) -> list[Line]:
        ids, real = (np.asarray(example[name][row]) for name in ("input_ids", "attention_mask"))
        weights = np.asarray(example["weights"][row]) > 0
        labels = ids[1:][weights[:-1]] if self.is_decoder else np.asarray(example["targets"][row])[weights]
        shown = ids[real > 0][: -len(labels)] if self.is_decoder else ids[real > 0]
        special = self.vocabulary.special
        return [
            Line("text", shown.tolist(), ["special" if special[i] else "" for i in shown]),
            Line("answer", labels.tolist(), ["target"] * len(labels)),
        ]

    def answers(
        self, records: Sequence[Record], examples: Sequence[Example], outputs: Sequence[Arrays]
    ) -> list[Answer]:
        texts = [str(output["text"]) for output in outputs]
        if self.kind is None:
            return [Answer(text, {}) for text in texts]
        read = self.kind.from_text
        return [Answer(read(record, text), {"text": text}) for record, text in zip(records, texts, strict=True)]

    def gold(self, record: Record) -> Any:
        return record.values["targets"] if self.kind is None else self.kind.gold(record)

    def require_packages(self) -> None:
        metrics.require_packages([self.metric] if self.kind is None else [])

    def score(self, records: Sequence[Record], answers: Sequence[Answer]) -> dict[str, float]:
        if self.kind is not None:
            return self.kind.score(records, answers)
        texts, golds = [answer.prediction for answer in answers], [self.gold(row) for row in records]
        if self.metric == "rouge":
            return metrics.rouge(texts, golds)
        if self.metric == "bleu":
            return {"bleu": metrics.bleu(texts, golds)}
        pairs = list(zip(texts, golds, strict=True))
        return {
            "exact_match": statistics.fmean(metrics.exact_match(*pair) for pair in pairs),
            "f1": statistics.fmean(metrics.token_f1(*pair) for pair in pairs),
        }
