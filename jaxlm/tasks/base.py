"""The contract of a task: an objective over labelled rows, whose answers can be written down and scored."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxlm.data.base import RowFormat
from jaxlm.data.labelled import Arrays, Example, LabelledSource, Record, RowEncoder
from jaxlm.errors import UserError
from jaxlm.fields import field
from jaxlm.models.base import FineTuning, Inputs, Model, last_token
from jaxlm.models.layers.activations import ACTIVATIONS
from jaxlm.models.layers.dropout import dropout
from jaxlm.models.layers.embeddings import logits
from jaxlm.objectives.base import Line, Objective, PretrainedModel, Term, Terms, require_positions
from jaxlm.objectives.chunked_loss import chunked_cross_entropy
from jaxlm.tokenizers.template import Template
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import Params

INIT_STD = 0.02
"""Standard deviation of the truncated normal that heads are initialized from (Devlin et al. 2018, appendix A.2)."""


class Answer(NamedTuple):
    """What a model answers to a record: the prediction, a JSON value, and its scores."""

    prediction: Any
    scores: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Task(Objective):
    """A pretrained model with a head for a task, over labelled rows.

    Parameters: the model's own without the heads of pretraining, `pooler` where the family has a dense layer in front
    of a classifier of texts, `classifier`. A batch is a dict of arrays, made by `encoder`, and goes to the loss as it
    is.
    """

    model: Model = field(Model(), weights=True)
    """The pretrained model; `--init-from` brings it."""
    labels: tuple[str, ...] = field((), weights=True)
    """Names of the classes in the order of their numbers; empty: those of the training rows, sorted."""
    classifier_dropout: float = 0.1
    """Dropout in front of the classifier."""

    primary_metric = "task_loss"
    name: ClassVar[str]
    """What `jaxlm evaluate` calls the task."""
    longest_text: ClassVar[int] = 16
    """Tokens of the longest answer that is written out, for a model that writes."""
    pools: ClassVar[bool] = True
    """Whether the head reads one vector for each text, rather than the hidden state of each token."""

    @property
    def encoder(self) -> RowEncoder:
        """How records become arrays."""
        raise NotImplementedError

    def row_format(self, length: int) -> RowFormat:
        return RowFormat(self.encoder, length)

    @property
    def reading(self) -> FineTuning:
        """How the task reads its model."""
        if self.model.fine_tuning is None:
            raise UserError(f"{type(self.model).__name__} cannot be fine-tuned for this task; choose another model.")
        return self.model.fine_tuning

    @property
    def template(self) -> Template:
        """Special symbols around the texts."""
        return self.reading.template

    @property
    def text_template(self) -> Template:
        return self.template

    @property
    def symbols(self) -> tuple[str, ...]:
        return self.template.symbols

    @property
    def outputs(self) -> int:
        """Logits of the classifier."""
        return len(self.labels)

    def with_pretrained_model(self, source: PretrainedModel) -> Self:
        """Return a copy with the pretrained model, its training options included.

        Raises:
            UserError: the model cannot do the task.
        """
        # The kernel was chosen for the machine that trained.
        model = source.objective.model.text_model.with_execution(attention="auto")
        task = dataclasses.replace(self, model=model)
        assert task.reading
        return task

    def with_labels(self, records: Sequence[Record], names: Sequence[str] = ()) -> Self:
        """A copy with the labels of the training rows, where none are given. names: labels to put first, in this
        order; those that are not among them follow, sorted."""
        return self

    def bind(self, vocabulary: Vocabulary, length: int, statistics: Any = None) -> Self:
        if not self.outputs:
            raise UserError(
                "this task has no labels, or no model that can do it; pass --init-from RUN_OR_HF_DIR with "
                "--data.source FILE, or give a fine-tuned run."
            )
        if positions := self.model.max_length:
            require_positions(length, positions)
        for role in self.template.needs:
            vocabulary.require(role, purpose="this model")
        return super().bind(vocabulary, length, statistics)

    def init(self, key: jax.Array) -> Params:
        key_model, key_pooler, key_classifier = jax.random.split(key, 3)
        params = self.model.init_task(key_model)
        if self.pools and self.reading.activation:
            params["pooler"] = self._dense(key_pooler, self.model.width, True)
        params["classifier"] = self._dense(key_classifier, self.outputs, self.reading.use_bias or not self.pools)
        return params

    def _dense(self, key: jax.Array, outputs: int, bias: bool) -> Params:
        shape = (self.model.width, outputs)
        kernel = {"kernel": INIT_STD * jax.random.truncated_normal(key, -2.0, 2.0, shape)}
        return kernel | {"bias": jnp.zeros(outputs)} if bias else kernel

    def from_pretrained(self, source: PretrainedModel) -> Params:
        """Return the parameters of `source` that training begins with: those of the model (see `Model.text_params`),
        and its classifier if it was fine-tuned for the same task and labels."""
        theirs = source.objective
        given = theirs.model.text_params(source.params)
        same = isinstance(theirs, Task) and (theirs.name, theirs.labels) == (self.name, self.labels)
        return given if same else {name: leaf for name, leaf in given.items() if name != "classifier"}

    def corrupt(self, key: jax.Array, batch: Arrays) -> Arrays:
        return batch

    def weights(self, example: Arrays) -> Float[Array, " batch"]:
        """1 for each example, 0 for rows that fill up a batch."""
        return (example["row"] >= 0).astype(jnp.float32)

    def pooled(self, params: Params, inputs: Inputs, key: jax.Array | None) -> Float[Array, "batch hidden"]:
        """Return the vector of each text that the classifier reads; a key turns dropout on."""
        keys = (None, None) if key is None else jax.random.split(key)
        x = self.model.summary(params, self.model.complete_inputs(inputs, self.vocabulary), key=keys[0])
        return self.before_classifier(params, x, keys[1])

    def hidden(self, params: Params, inputs: Inputs, key: jax.Array | None) -> Float[Array, "batch length hidden"]:
        """Return the last hidden states; a key turns the model's dropout on."""
        return self.model.hidden_states(params, self.model.complete_inputs(inputs, self.vocabulary), key=key)

    def before_classifier(self, params: Params, x: Float[Array, "*batch hidden"], key: jax.Array | None) -> Array:
        """The dense layer in front of the classifier, where the family has one, and dropout."""
        if name := self.reading.activation:
            act = jnp.tanh if name == "tanh" else ACTIVATIONS[name]
            x = act(apply_dense(params["pooler"], x))
        return dropout(x, self.classifier_dropout, key)

    def classify(self, params: Params, x: Float[Array, "*batch hidden"]) -> Float[Array, "*batch outputs"]:
        """Logits in float32."""
        return apply_head(params["classifier"], x)

    def token_logits(self, params: Params, example: Arrays, key: jax.Array | None) -> Array:
        """Return the classifier's logits at each token, float32 [batch, length, outputs]."""
        keys = (None, None) if key is None else jax.random.split(key)
        hidden = self.hidden(params, Inputs.of(example), keys[0])
        return self.classify(params, dropout(hidden, self.classifier_dropout, keys[1]))

    def flops(self, length: int) -> float:
        width = self.model.width
        pooler = 2 * width * width if self.pools and self.reading.activation else 0
        return self.model.forward_flops(length) + pooler + 2 * width * self.outputs

    def describe(self, batch: Arrays, example: Arrays, row: int) -> list[Line]:
        lines = []
        ids, mask = (np.asarray(example[name][row]) for name in ("input_ids", "attention_mask"))
        for own, real in zip(np.atleast_2d(ids), np.atleast_2d(mask), strict=True):
            shown = own[real > 0].tolist()
            lines.append(Line("input", shown, ["special" if self.vocabulary.special[i] else "" for i in shown]))
        return lines

    def run(self, params: Params, source: LabelledSource, length: int, batch_size: int) -> list[Arrays]:
        """What `predict` gives for each held-out example, without batch dimension."""
        step = jax.jit(self.predict)
        batches = source.batches("held_out", batch_size, self.row_format(length), 0)
        found: dict[int, Arrays] = {}
        for batch in batches.evaluation(batch_size, batches.num_rows):
            outputs = jax.device_get(step(params, batch))
            for place in np.flatnonzero(batch["row"] >= 0):
                found[int(batch["row"][place])] = {name: array[place] for name, array in outputs.items()}
        return [found[number] for number in range(len(found))]

    def predict(self, params: Params, example: Arrays) -> Arrays:
        """Return the model's outputs for each row of a batch, from which `answers` are read."""
        raise NotImplementedError

    def as_text(self, record: Record) -> tuple[str, str]:
        """(what is asked, the answer) as texts, for a model that writes."""
        raise NotImplementedError

    def from_text(self, record: Record, text: str) -> Any:
        """The prediction that a written answer stands for."""
        raise NotImplementedError

    def answers(
        self, records: Sequence[Record], examples: Sequence[Example], outputs: Sequence[Arrays]
    ) -> list[Answer]:
        """One answer for each record, from what `predict` gave for its examples: outputs[i] are those of examples[i],
        without batch dimension."""
        raise NotImplementedError

    def gold(self, record: Record) -> Any:
        """The right answer, in the form of a prediction; None where the data has none."""
        raise NotImplementedError

    def without_unseen_label(self, record: Record) -> Record:
        """The record itself, or without its label where that is none of `labels`: no array can hold it."""
        return record

    def require_packages(self) -> None:
        """UserError where a package is missing that `score` needs."""

    def score(self, records: Sequence[Record], answers: Sequence[Answer]) -> dict[str, float]:
        """The task's metrics, by name."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class PooledTask(Task):
    """A task whose classifier reads one vector for each text: loss = the task's own + lm_coefficient · that of
    predicting each next token of the texts (Radford et al. 2018, equation 5)."""

    lm_coefficient: float = field(0.0, range="[0, inf)")
    """Weight of the language-model loss, for decoders; GPT-1 was fine-tuned with 0.5."""

    def bind(self, vocabulary: Vocabulary, length: int, statistics: Any = None) -> Self:
        if self.lm_coefficient and not self.model.is_causal:
            raise UserError(f"objective.lm_coefficient is for decoders; set it to 0 for a {type(self.model).__name__}.")
        return super().bind(vocabulary, length, statistics)

    def flat_inputs(self, example: Arrays) -> Inputs:
        """The texts of a batch, those of a row (both orders of a pair, all choices) one after another."""
        return Inputs(*(
            example[name].reshape(-1, example[name].shape[-1])
            for name in ("input_ids", "token_type_ids", "attention_mask")
        ))

    def pooled_with_lm(
        self, params: Params, example: Arrays, key: jax.Array, train: bool
    ) -> tuple[Float[Array, "texts hidden"], Terms]:
        """(the vector of each text, as `pooled` gives it; terms, which in training have the language-model loss where
        lm_coefficient is above 0: the mean over each text's tokens, then over all texts of all rows)."""
        inputs = self.flat_inputs(example)
        if not (self.lm_coefficient and train):
            return self.pooled(params, inputs, key if train else None), {}
        keys = jax.random.split(key)
        hidden, mask = self.hidden(params, inputs, keys[0]), inputs.mask
        x = self.before_classifier(params, last_token(hidden, mask), keys[1])
        weights = jnp.repeat(self.weights(example), mask.shape[0] // example["row"].shape[0])
        asked = mask[:, 1:].astype(jnp.float32)
        asked = asked / jnp.maximum(jnp.sum(asked, axis=1, keepdims=True), 1.0)
        table, bias = self.model.output_matrix(params)
        features = self.model.token_features(params, hidden[:, :-1])
        losses = chunked_cross_entropy(
            features, table, inputs.ids[:, 1:], asked * weights[:, None], bias=bias
        )
        return x, {"lm_loss": Term(losses.total, jnp.sum(weights), self.lm_coefficient)}

    def flops(self, length: int) -> float:
        # The language model's loss has vocabulary logits.
        lm_flops = 2 * length * self.model.width * self.model.vocab_size if self.lm_coefficient else 0
        return super().flops(length) + lm_flops


def apply_head(head: Params, x: Float[Array, "*batch hidden"]) -> Float[Array, "*batch outputs"]:
    """x W + b in float32, also where x is of a narrower type, in which near logits would be equal."""
    return logits(x, head["kernel"].T, head.get("bias"))


def apply_dense(dense: Params, x: jax.Array) -> jax.Array:
    """x W + b, in the type of x."""
    y = x @ dense["kernel"].astype(x.dtype)
    return y + dense["bias"].astype(x.dtype) if "bias" in dense else y
