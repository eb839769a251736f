"""Text to text (Raffel et al. 2019; McCann et al. 2018) for encoder-decoders and decoders, which write the answer.

Summaries, translations and questions without a passage have pairs of texts as rows; rows of every other task are
formatted as texts.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.data.labelled import Arrays, EncodedExample, LabelledData, LabelledSource, Record
from jaxlm.errors import UserError
from jaxlm.fields import field
from jaxlm.inference.generate import generate
from jaxlm.inference.score import text_prefix
from jaxlm.models.base import Inputs
from jaxlm.objectives.base import Line, Term, Terms
from jaxlm.objectives.chunked_loss import token_losses
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.tasks import metrics
from jaxlm.tasks.base import Answer, Task
from jaxlm.tasks.classification import Classification
from jaxlm.tasks.multiple_choice import MultipleChoice
from jaxlm.tasks.remarks import row_remarks
from jaxlm.tasks.tables import TableData, TableRow
from jaxlm.tokenizers.template import Template
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import Params

Metric = Literal["exact_match", "rouge", "bleu"]


@dataclasses.dataclass(frozen=True)
class PairRows(TableData):
    """Rows of a text and the answer to write; see `TableData`."""

    length: int = field(512, range="[8, inf)")
    """Maximum number of tokens of the text, and for a decoder of text and answer together; longer texts are
    truncated."""
    source_field: str = "source"
    """Column of the text; of JSON, a list of texts is joined by spaces."""
    target_field: str = "target"
    """Column of the answer; of JSON, a list has several right answers, of which the first is learnt. Empty for a file
    whose answers are to be predicted."""

    def columns(self) -> list[str]:
        return [self.source_field, *filter(None, [self.target_field])]

    def record(self, row: TableRow) -> tuple[dict[str, Any], tuple[str, ...]]:
        source, targets = " ".join(row.texts(self.source_field)), None
        target = row.values[self.target_field] if self.target_field else None
        if target is not None and str(target).strip():  # as for labels, an empty cell is no answer
            targets = row.labels(self.target_field)
            if not targets:
                raise UserError(f"{row.place}: {self.target_field!r} is an empty list; fix or remove the line.")
        return {"source": source, "targets": targets}, (source, *(targets or ()))


@dataclasses.dataclass(frozen=True)
class TextToText(Task):
    """loss = mean of -log p(token of the answer | the text, tokens of the answer before it).

    The arrays of a row for an encoder-decoder: input_ids, attention_mask int32 [length]; targets int32 and weights
    float32 [max_target]. For a decoder, which reads text and answer in one row: input_ids, attention_mask int32 and
    weights float32 [length], 1 where the next token is of the answer. Notes: ids of the prompt, int32 [tokens].
    """

    kind: Task | None = None
    """Task whose rows are formatted as texts; None: rows are pairs of texts."""
    prefix: str = ""
    """Text before each text ("summarize: ")."""
    separator: str = " =>"
    """Text between a text and its answer, for a decoder."""
    max_target: int = field(64, range="[1, inf)")
    """Maximum length of an answer in tokens."""
    beams: int = field(1, resumable=True, range="[1, 256]")
    """Number of beams of answers; 1 means greedy decoding. T5 used 4 for summaries and translations."""
    length_penalty: float = field(1.0, resumable=True, range="(-inf, inf)")
    """Beams are ranked by log-probability / length ** length_penalty."""
    metric: Metric = "exact_match"
    """Metric of pairs of texts; other rows have the metrics of their task."""

    name = "text_to_text"
    answer_kind = "text"
    gold_value = "targets"

    @property
    def is_decoder(self) -> bool:
        """Whether text and answer are in one row."""
        return not self.model.has_encoder

    def template_for(self, vocabulary: Vocabulary | None) -> Template:
        # No special tokens surround a text; writing needs an end token.
        return Template(needs=("eos", "pad"))

    @property
    def text_template(self) -> Template:
        return self.model.template.for_vocabulary(self.vocabulary)

    @property
    def num_logits(self) -> int:
        return self.model.vocab_size if self.model.writes_answers else 0

    def needs_text_form(self, model: Any, as_text: bool) -> bool:
        return False

    def with_pretrained_model(self, source: PretrainedModel) -> Self:
        model = source.objective.model
        if not model.writes_answers:
            raise UserError(f"{type(model).__name__} writes no text; this task needs a T5 or a decoder such as GPT-2.")
        return dataclasses.replace(self, model=model.with_execution(attention="auto"))

    def with_labels_of(self, source: LabelledSource, data: LabelledData) -> Self:
        if self.kind is None:
            return super().with_labels_of(source, data)
        found = dataclasses.replace(self, kind=self.kind.with_labels_of(source, data))
        divided = [text for text in found.label_texts if ", " in text]
        if divided and found.kind.is_multi_label:
            raise UserError(f"{data.source}: answers have commas between labels, and {divided[0]!r:.50} has one "
                            "inside; give it a word with --objective.kind.label-words LABEL=WORD.")
        return found

    def remarks(self, source: LabelledSource, length: int) -> list[str]:
        examples = source.examples("train", self, length)
        num_full = sum(np.sum(one.arrays["weights"] > 0) >= self.max_target for one in examples)
        line = f"{num_full:,} of {len(examples):,} answers reach --objective.max-target {self.max_target} and end there"
        lines = row_remarks(self.kind or self, source) + source.cut_remarks(self, length) + [line] * bool(num_full)
        return lines + self.gold_remarks(source.records["train"])

    def gold_remarks(self, records: Sequence[Record]) -> list[str]:
        lines = self.kind.gold_remarks(records) if self.kind else ()
        return [line.replace("--objective.", "--objective.kind.") for line in lines]

    def check(self, vocabulary: Vocabulary, length: int) -> None:
        for name in ("both_orders", "lm_coefficient", "teacher", "threshold", "null_threshold"):
            if getattr(self.kind, name, None):
                raise UserError(
                    f"{name} is for a classifier, and {type(self.model).__name__} writes its answers here; leave the "
                    "flag out, or take a preset without it."
                )
        super().check(vocabulary, length)

    def init(self, key: jax.Array) -> Params:
        return self.model.init(key)

    def texts(self, record: Record) -> tuple[str, str]:
        """Return prompt and answer; the answer is "" if the data has none."""
        prompt, target = self.kind.as_text(record) if self.kind else self.as_text(record)
        return self.prefix + prompt, target

    def prompt_form(self, rows: Mapping[str, Any]) -> tuple[str, str]:
        """Return the prompt with the names of a row's values in braces, and the answers of a classifier, for a reader.

        The prompt is "" if it depends on more than texts. `rows` are fields of the format of rows.
        """
        kind, is_classifier = self.kind, isinstance(self.kind, Classification)
        asked = {"text_pair": is_classifier and "{text_pair}" in kind.prompt,
                 "question": not isinstance(kind, MultipleChoice)}
        optional = [name for name, is_asked in asked.items() if is_asked or rows.get(f"{name}_field")]
        values = {"question": ""} | {name: f"{{{name}}}" for name in ("source", "text", "passage", *optional)}
        values |= {"choices": ["{choice}", "…"], "words": ["{words}"]}
        values |= dict.fromkeys(("label", "answers", "targets", "tags"))
        try:
            prompt = self.texts(Record("", "", values, ()))[0] + self.separator * self.is_decoder
        except Exception:  # rows of another kind, as in tasks of one's own; no export fails by its card
            prompt = ""
        # The passage of a question has spaces around its punctuation.
        return re.sub(r"\{ (\w+) \}", r"{\1}", prompt), ", ".join(self.label_texts)

    @property
    def label_texts(self) -> list[str]:
        """The answers of a classifier, in the order of its labels."""
        if not isinstance(self.kind, Classification):
            return []
        words = dict(word.split("=", 1) for word in self.kind.label_words)
        return [words.get(label, label) for label in self.kind.labels]

    def as_text(self, record: Record) -> tuple[str, str]:
        return record.values["source"], (record.values["targets"] or [""])[0]

    @property
    def padding(self) -> dict[str, int]:
        return super().padding | ({"weights": 0} if self.is_decoder else {})

    def encode(self, records: Sequence[Record], tokenizer: Tokenizer, length: int) -> list[EncodedExample]:
        pairs = [self.texts(record) for record in records]
        asked = [source + self.separator * self.is_decoder for source, _ in [*pairs, ("a", "")]]
        *prompts, whole, alone = tokenizer.encode_arrays([*asked, "a"])
        targets = tokenizer.encode_arrays([target for _, target in pairs])
        end = np.array([self.vocabulary.eos], np.int32)
        # As in running text: some vocabularies put another space before a text that stands alone.
        between = whole[len(alone) :] if self.is_decoder else end
        begin = np.array(text_prefix(self), np.int32)
        room = length - len(begin) - len(between) - (self.max_target if self.is_decoder else 0)
        if room < 8:
            raise UserError(
                f"data.length {length} leaves {max(room, 0)} tokens for the text beside {self.max_target} of the "
                "answer; raise it or lower objective.max_target."
            )
        examples = []
        for number, (prompt, target) in enumerate(zip(prompts, targets, strict=True)):
            is_whole = self.is_decoder and len(prompt) <= room + len(between)
            prompt = np.concatenate([begin, prompt] if is_whole else [begin, prompt[:room], between])
            target = np.concatenate([target[: self.max_target - 1], end])
            weights, rest = np.ones(len(target), np.float32), self.max_target - len(target)
            if self.is_decoder:
                arrays = {"input_ids": np.concatenate([prompt, target]),
                          "weights": np.pad(weights, (len(prompt), 1))[1:]}  # at the tokens before the answer's
            else:
                arrays = {"input_ids": prompt, "weights": np.pad(weights, (0, rest)),
                          "targets": np.pad(target, (0, rest), constant_values=self.vocabulary.pad)}
            arrays["attention_mask"] = np.ones_like(arrays["input_ids"])
            examples.append(EncodedExample(number, arrays, prompt))
        return examples

    def synthetic(self, rows: int, length: int) -> Arrays:
        batch = super().synthetic(rows, length)
        del batch["token_type_ids"]
        if self.is_decoder:
            return batch | {"weights": np.ones((rows, length), np.float32)}
        targets = super().synthetic(rows, self.max_target)["input_ids"]
        return batch | {"targets": targets, "weights": np.ones(targets.shape, np.float32)}

    def loss(self, params: Params, example: Arrays, key: jax.Array, train: bool) -> Terms:
        model, weights = self.model, example["weights"] * self.weights(example)[:, None]
        if self.is_decoder:
            hidden = model.hidden_states(params, Inputs.of(example), key=key if train else None)[:, :-1]
            labels, weights = example["input_ids"][:, 1:], weights[:, :-1]
        else:
            keys = jax.random.split(key) if train else (None, None)
            labels = example["targets"]
            inputs = Inputs.of(example)
            memory = model.hidden_states(params, inputs, key=keys[0])
            shifted = jnp.pad(labels[:, :-1], ((0, 0), (1, 0)), constant_values=model.decoder_start(self.vocabulary))
            hidden = model.decoder_states(
                params, shifted, memory, inputs.mask, memory_lengths=inputs.lengths, key=keys[1]
            )
        losses = token_losses(model, params, hidden, labels, weights)
        return {
            "task_loss": Term(losses.total, jnp.sum(weights), 1.0),
            "token_accuracy": Term.of(losses.correct, weights),
        }

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

    def run(self, params: Params, source: LabelledSource, length: int, batch_size: int) -> list[Arrays]:
        """Return the text of each held-out example."""
        examples = source.examples("held_out", self, length)
        order = np.argsort([len(example.notes) for example in examples], kind="stable")
        records, spelled = source.records["held_out"], source.tokenizer.spelled
        found: list[Arrays] = [{} for _ in examples]
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            prompts = [examples[i].notes.tolist() for i in chosen]
            answers = generate(
                self, params, prompts, max_new_tokens=self.max_target, beams=self.beams,
                length_penalty=self.length_penalty,
            )
            for i, ids in zip(chosen, answers, strict=True):
                # The vocabulary may have no form of a label or answer as it stands: NFKC takes Thai ำ apart.
                record = records[examples[i].record]
                golds = [*self.label_texts, self.texts(record)[1], *(record.values.get("targets") or ())]
                for gold in record.values.get("answers") or ():  # of a question, each as the model would write it
                    golds.append(self.texts(record._replace(values=record.values | {"answers": [gold]}))[1])
                known = {spelled(gold): gold for gold in golds} | {gold: gold for gold in golds}
                text = source.tokenizer.decode(ids).strip()
                if getattr(self.kind, "is_multi_label", False) and text not in known:
                    text = ", ".join(known.get(part, part) for part in text.split(", "))
                forms = [form for form, gold in known.items() if form != gold]
                found[i] = {"text": np.array(known.get(text, text)), "forms": np.array(forms, str)}
        return found

    def answer(self, record: Record, parts: Sequence[tuple[EncodedExample, Arrays]]) -> Answer:
        text, forms = str(parts[0][1]["text"]), parts[0][1]["forms"].tolist()
        if self.kind:
            return Answer(self.kind.from_text(record, text), {"text": text})
        return Answer(text, {"gold_as_spelled": forms} if forms else {})

    def gold(self, record: Record) -> Any:
        return self.kind.gold(record) if self.kind else super().gold(record)

    def row_figures(self, gold: Any, answer: Answer) -> dict[str, float]:
        return self.kind.row_figures(gold, answer) if self.kind else {}

    def details(self, golds: Sequence[Any], answers: Sequence[Answer]) -> dict[str, Any]:
        return self.kind.details(golds, answers) if self.kind else {}

    def require_packages(self) -> None:
        metrics.require_packages([] if self.kind else [self.metric])

    def score(self, golds: Sequence[Any], answers: Sequence[Answer]) -> dict[str, float]:
        if self.kind is not None:
            return self.kind.score(golds, answers)
        texts = [answer.prediction for answer in answers]
        spelled = (answer.scores.get("gold_as_spelled", ()) for answer in answers)
        golds = [[*gold, *forms] for gold, forms in zip(golds, spelled, strict=True)]
        names = ("exact_match", "f1") if self.metric == "exact_match" else (self.metric,)
        return metrics.text_metrics(names, texts, golds)
