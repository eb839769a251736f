"""The contract of a task: an objective over labelled rows, whose answers are scored and can be written to a file."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxlm.data.base import RowFormat
from jaxlm.data.labelled import ANSWERS, Arrays, EncodedExample, LabelledData, LabelledSource, Record
from jaxlm.errors import UserError
from jaxlm.fields import field
from jaxlm.models.base import FineTuning, Inputs, Model
from jaxlm.models.layers.activations import ACTIVATIONS
from jaxlm.models.layers.dense import add_bias, dense_product
from jaxlm.models.layers.dropout import dropout
from jaxlm.models.layers.embeddings import logits
from jaxlm.objectives.base import Constants, Line, Objective, require_positions
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.parallel.inference import mesh_of, run_rows, shard_params
from jaxlm.tasks.metrics import label_order
from jaxlm.tasks.remarks import require_classes, row_remarks
from jaxlm.tokenizers.template import EncodedText, Template
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import Params

NO_LABEL = -1
"""Label of tokens that have none."""
INIT_STD = 0.02
"""Standard deviation of the truncated normal that heads are initialized from (Devlin et al. 2018, appendix A.2)."""


class Answer(NamedTuple):
    """Answer of a model to a record."""

    prediction: Any
    """A JSON value."""
    scores: dict[str, Any]
    """What the prediction was made from, as JSON values by name."""


@dataclasses.dataclass(frozen=True)
class Task(Objective):
    """A pretrained model with a head for a task, over labelled rows.

    Parameters: those of the model without its pretraining heads; `pooler` if the family has a dense layer before the
    classifier of a text; `classifier`. A batch is a dict of arrays, made by `encode`, and is the example of the loss.
    A bound task is the `jaxlm.data.labelled.RowEncoder` of its rows.
    """

    model: Model = field(Model(), weights=True)
    """The pretrained model; `--init-from` brings it."""
    labels: tuple[str, ...] = field((), weights=True)
    """Names of the classes in the order of their numbers; empty: those of the training rows, numbers by their value
    and then texts."""
    classifier_dropout: float = field(0.1, range="[0, 1)")
    """Dropout rate before the classifier."""

    command = "finetune"
    scores_rows = True
    primary_metric = "task_loss"
    longest_text: ClassVar[int] = 16
    """Tokens of the longest answer that a model writes as text."""
    use_pooling: ClassVar[bool] = True
    """Whether the head reads one vector per text rather than the hidden state of each token."""
    use_input_dropout: ClassVar[bool] = True
    """Whether the task has the family's dropout before the dense layer."""
    num_texts: ClassVar[int] = 1
    """Texts per row, for FLOPs and synthetic rows."""
    gold_value: ClassVar[str] = "label"
    """Name of the right answer among the values of a record: one of `jaxlm.data.labelled.ANSWERS`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gold_value not in ANSWERS:
            raise UserError(
                f"{type(self).__name__}.gold_value is {self.gold_value!r}; choose one of {', '.join(ANSWERS)}."
            )

    @property
    def padding(self) -> dict[str, int]:
        """Padding value of each array whose last axis is tokens."""
        others = {"token_type_ids": 0, "attention_mask": 0, "labels": NO_LABEL}
        return {"input_ids": max(self.vocabulary.pad, 0)} | others

    def encode(self, records: Sequence[Record], tokenizer: Tokenizer, length: int) -> list[EncodedExample]:
        """Return the examples of records; see `jaxlm.data.labelled.RowEncoder`."""
        raise NotImplementedError

    def synthetic(self, rows: int, length: int) -> Arrays:
        """Return a batch of full rows of random ids."""
        shape = (rows, length) if self.num_texts == 1 else (rows, self.num_texts, length)
        ids = np.random.default_rng(0).integers(0, self.vocabulary.size, shape, np.int32)
        return {"row": np.arange(rows, dtype=np.int32), "input_ids": ids, "token_type_ids": np.zeros_like(ids),
                "attention_mask": np.ones_like(ids)}

    def row_format(self, length: int) -> RowFormat:
        return RowFormat(self, length)

    @property
    def fine_tuning(self) -> FineTuning:
        """How the family is fine-tuned; raises UserError if it cannot be."""
        if self.model.fine_tuning is None:
            raise UserError(f"{type(self.model).__name__} cannot be fine-tuned for this task; choose another model.")
        return self.model.fine_tuning

    @property
    def template(self) -> Template:
        """Special tokens around the texts of a bound task."""
        return self.template_for(self.vocabulary)

    def template_for(self, vocabulary: Vocabulary | None) -> Template:
        """Return the special tokens around the texts; of a tokenizer's own ones, if `vocabulary` is given."""
        return self.fine_tuning.template.for_vocabulary(vocabulary)

    @property
    def text_template(self) -> Template:
        return self.template

    @property
    def symbols(self) -> tuple[str, ...]:
        return self.template_for(None).symbols

    @property
    def num_logits(self) -> int:
        """Number of logits of the classifier."""
        return len(self.labels)

    @property
    def has_classifier_bias(self) -> bool:
        """Whether the classifier has a bias."""
        return self.fine_tuning.use_bias or not self.use_pooling

    def needs_text_form(self, model: Any, as_text: bool) -> bool:
        return as_text or bool(model is not None and model.writes_answers and not model.fine_tuning)

    def with_pretrained_model(self, source: PretrainedModel) -> Self:
        """Return a copy with the pretrained model and its training options.

        Raises:
            UserError: The model cannot do the task.
        """
        # The attention kernel is an option of training.
        model = source.objective.model.text_model.with_execution(attention="auto")
        task = dataclasses.replace(self, model=model)
        assert task.fine_tuning
        return task

    def label_names(self, record: Record) -> Sequence[str]:
        """Return the classes that a record is labelled with; none for a task without classes."""
        return ()

    def with_labels(self, records: Sequence[Record], names: Sequence[str] = ()) -> Self:
        """Return a copy with the labels of the training rows, unless it has labels.

        Labels in `names` come first, in this order; others follow, in the order of `label_order`.
        """
        found = {label for record in records for label in self.label_names(record)}
        if not self.labels and len(found) > max(100, sum(len(self.label_names(record)) for record in records) / 2):
            raise UserError(
                f"{len(records):,} rows have {len(found):,} different labels, such as {min(found)!r:.60}; name the "
                "column that has them, as by --data.label-field, or if these are the classes, give --objective.labels."
            )
        ordered = (*(name for name in names if name in found), *sorted(found.difference(names), key=label_order))
        return dataclasses.replace(self, labels=self.labels or ordered)

    def with_labels_of(self, source: LabelledSource, data: LabelledData) -> Self:
        if not source.records["train"]:
            raise UserError("--data.source is empty; give a file of rows to train on.")
        if unlabelled := next((row for row in source.records["held_out"] if not row.is_labelled), None):
            raise UserError(f"{unlabelled.place} has no label; fill it in, or remove the row from --data.dev.")
        # Held-out rows in a file of their own have no part in the labels.
        labelled = source.records["train"] + ([] if data.dev else source.records["held_out"])
        require_classes(self, labelled, data)
        return self.with_labels(labelled, data.class_names())

    def remarks(self, source: LabelledSource, length: int) -> list[str]:
        lines = row_remarks(self, source) + source.cut_remarks(self, length)
        return lines + self.gold_remarks(source.records["train"])

    def gold_remarks(self, records: Sequence[Record]) -> list[str]:
        """Return lines about right answers that the task cannot give; none by default."""
        return []

    def num_examples(self, source: LabelledSource, length: int) -> int:
        return len(source.examples("train", self, length))

    def label_number(self, record: Record, label: str) -> int:
        """Return the number of a record's label; raise UserError unless training rows have it."""
        if label not in self.labels:
            raise UserError(
                f"{record.place}: the label {label!r:.60} is not one of the training rows' "
                f"({', '.join(self.labels):.300}); fix or remove the row, or name all labels with --objective.labels."
            )
        return self.labels.index(label)

    def without_unseen_label(self, record: Record) -> Record:
        """Return the record, without its label if that is none of `labels` and so has no number."""
        is_seen = set(self.label_names(record)) <= set(self.labels)
        return record if is_seen else record._replace(values=record.values | {self.gold_value: None})

    def check(self, vocabulary: Vocabulary, length: int) -> None:
        if positions := self.model.max_length:
            require_positions(length, positions)
        for role in self.template_for(vocabulary).needs:
            vocabulary.require(role, purpose="this model")

    def init(self, key: jax.Array) -> Params:
        if not self.num_logits:
            raise UserError(
                "this task has no labels, or no model that supports it; pass --init-from RUN_OR_HF_DIR with "
                "--data.source FILE, or give a fine-tuned run."
            )
        key_model, key_pooler, key_classifier = jax.random.split(key, 3)
        params = self.model.init_task(key_model)
        if self.use_pooling and self.fine_tuning.activation:
            params["pooler"] = self._dense(key_pooler, self.model.width, True)
        params["classifier"] = self._dense(key_classifier, self.num_logits, self.has_classifier_bias)
        return params

    def _dense(self, key: jax.Array, num_outputs: int, use_bias: bool) -> Params:
        shape = (self.model.width, num_outputs)
        kernel = {"kernel": INIT_STD * jax.random.truncated_normal(key, -2.0, 2.0, shape)}
        return kernel | {"bias": jnp.zeros(num_outputs)} if use_bias else kernel

    def select_params(self, source: PretrainedModel) -> Params:
        """Return the parameters of a pretrained model for `merge_pretrained`.

        They are those of the model (see `Model.text_params`), and the classifier of a model that was fine-tuned for
        the same task and labels.
        """
        theirs = source.objective
        params = theirs.model.text_params(source.params)
        same = theirs.name == self.name and getattr(theirs, "labels", None) == self.labels
        return params if same else {name: leaf for name, leaf in params.items() if name != "classifier"}

    def corrupt(self, key: jax.Array, batch: Arrays) -> Arrays:
        return batch

    def weights(self, example: Arrays) -> Float[Array, " batch"]:
        """Return 1 for each example, 0 for rows that fill up a batch."""
        return (example["row"] >= 0).astype(jnp.float32)

    def hidden(self, params: Params, inputs: Inputs, key: jax.Array | None) -> Float[Array, "batch length hidden"]:
        """Return the last hidden states; a key turns the model's dropout on."""
        return self.model.hidden_states(params, self.model.complete_inputs(inputs, self.vocabulary), key=key)

    def token_states(
        self, params: Params, example: Arrays, key: jax.Array | None
    ) -> Float[Array, "batch length hidden"]:
        """Return the classifier's inputs: the last hidden states or features, with dropout if there is a key."""
        keys = (None, None) if key is None else jax.random.split(key)
        x = self.hidden(params, Inputs.of(example), keys[0])
        x = self.model.token_features(params, x) if self.fine_tuning.has_transform else x
        return dropout(x, self.classifier_dropout, keys[1])

    def before_classifier(
        self, params: Params, x: Float[Array, "*batch hidden"], key: jax.Array | None
    ) -> Float[Array, "*batch hidden"]:
        """Apply the layers before the classifier that the family has, and dropout."""
        if self.fine_tuning.has_transform:
            x = self.model.token_features(params, x)
        if self.fine_tuning.has_input_dropout and self.use_input_dropout and key is not None:
            key, input_key = jax.random.split(key)
            x = dropout(x, self.classifier_dropout, input_key)
        if name := self.fine_tuning.activation:
            act = jnp.tanh if name == "tanh" else ACTIVATIONS[name]
            pooler = params["pooler"]
            x = act(add_bias(dense_product(x, pooler["kernel"].astype(x.dtype)), pooler["bias"]))
        return dropout(x, self.classifier_dropout, key)

    def classify(self, params: Params, x: Float[Array, "*batch hidden"]) -> Float[Array, "*batch outputs"]:
        """Return the logits of the classifier in float32."""
        return apply_head(params["classifier"], x)

    def flops(self, length: int) -> float:
        width = self.model.width
        pooled = length if self.fine_tuning.pools_late else 1
        pooler = 2 * width * width * pooled if self.use_pooling and self.fine_tuning.activation else 0
        if self.fine_tuning.has_transform:
            pooler = 2 * width * width * (1 if self.use_pooling else length)
        return self.model.forward_flops(length) + pooler + 2 * width * self.num_logits

    def describe(self, batch: Arrays, example: Arrays, row: int) -> list[Line]:
        lines = []
        ids, mask = (np.atleast_2d(example[name][row]) for name in ("input_ids", "attention_mask"))
        for text, real in zip(ids, mask, strict=True):
            shown = text[real > 0].tolist()
            lines.append(Line("input", shown, ["special" if self.vocabulary.special[i] else "" for i in shown]))
        return lines

    def run(self, params: Params, source: LabelledSource, length: int, batch_size: int) -> list[Arrays]:
        """Return the outputs of `predict` for each held-out example, without batch dimension."""
        # Otherwise every batch would copy them.
        constants = shard_params(self.prediction_constants(), mesh_of(params))
        batches = source.batches("held_out", batch_size, self.row_format(length), 0)
        found: dict[int, Arrays] = {}
        for batch in batches.evaluation(batch_size, batches.num_rows):
            outputs = run_rows(functools.partial(_predict, self, constants), params, batch)
            for place in np.flatnonzero(batch["row"] >= 0):
                found[int(batch["row"][place])] = {name: array[place] for name, array in outputs.items()}
        return [found[number] for number in range(len(found))]

    def answers(self, params: Params, source: LabelledSource, length: int, batch_size: int) -> list[Answer]:
        """Return the answer to each held-out record."""
        records = source.records["held_out"]
        parts: list[list[tuple[EncodedExample, Arrays]]] = [[] for _ in records]
        outputs = self.run(params, source, length, batch_size)
        for example, output in zip(source.examples("held_out", self, length), outputs, strict=True):
            parts[example.record].append((example, output))
        return [self.answer(record, answer_parts) for record, answer_parts in zip(records, parts, strict=True)]

    def score_rows(self, params: Params, source: LabelledSource, length: int, batch_size: int) -> dict[str, float]:
        golds = [self.gold(record) for record in source.records["held_out"]]
        return self.score(golds, self.answers(params, source, length, batch_size))

    def choose(self, params: Params, source: LabelledSource, length: int, batch_size: int) -> dict[str, Any]:
        """Return the values of fields that are chosen on the held-out rows after training, by name; none by default."""
        return {}

    def prediction_constants(self) -> Constants:
        """Return the arrays that `predict` reads besides the parameters; () for none."""
        return ()

    def predict(self, params: Params, example: Arrays) -> Arrays:
        """Return the outputs for each row of a batch from which `answer` makes answers."""
        raise NotImplementedError

    def answer(self, record: Record, parts: Sequence[tuple[EncodedExample, Arrays]]) -> Answer:
        """Return the answer to a record from its examples, each with the outputs of `predict` for it."""
        raise NotImplementedError

    def gold(self, record: Record) -> Any:
        """Return the right answer in the form of a prediction; None if the data has none."""
        return record.values[self.gold_value]

    def score(self, golds: Sequence[Any], answers: Sequence[Answer]) -> dict[str, float]:
        """Return the metrics of the task by name."""
        raise NotImplementedError

    def row_figures(self, gold: Any, answer: Answer) -> dict[str, float]:
        """Return metrics of one answer that mean something by themselves, for the file of predictions."""
        return {}

    def details(self, golds: Sequence[Any], answers: Sequence[Answer]) -> dict[str, Any]:
        """Return further results as JSON values by name, such as the figures of each class."""
        return {}

    def require_packages(self) -> None:
        """Raise UserError if `score` needs a package that is not installed."""

    def as_text(self, record: Record) -> tuple[str, str]:
        """Return prompt and answer as texts, for a model that writes; the answer is "" if the data has none."""
        raise NotImplementedError

    def from_text(self, record: Record, text: str) -> Any:
        """Return the prediction that a written answer stands for."""
        return text


@functools.partial(jax.jit, static_argnums=0)
def _predict(task: Task, constants: Constants, params: Params, batch: Arrays) -> Arrays:
    return task.with_constants(constants).predict(params, batch)


def apply_head(head: Params, x: Float[Array, "*batch hidden"]) -> Float[Array, "*batch outputs"]:
    """Return x W + b in float32, since close logits would be equal in a narrower type."""
    return logits(x, head["kernel"].T, head.get("bias"))


def text_arrays(row: EncodedText) -> Arrays:
    """Return the arrays of a text with its special tokens, int32 [length]."""
    return {
        "input_ids": row.input_ids, "token_type_ids": row.segments, "attention_mask": np.ones_like(row.input_ids),
    }
