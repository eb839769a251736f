"""Tasks whose classifier reads one vector per text: classification and multiple choice."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float

from jaxlm.data.labelled import Arrays, EncodedExample, Record
from jaxlm.errors import UserError
from jaxlm.fields import field
from jaxlm.inference.generate import pad
from jaxlm.models.base import Inputs, mean_of_tokens
from jaxlm.objectives.base import Line, Term, Terms
from jaxlm.objectives.chunked_loss import token_losses
from jaxlm.objectives.losses import cross_entropy
from jaxlm.tasks.base import Answer, Task
from jaxlm.tokenizers.template import EncodedText
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import Params


@dataclasses.dataclass(frozen=True)
class PooledTask(Task):
    """A task whose classifier reads one vector per text; by default the text has one of the classes.

    With `is_multi_label` it has any number of them: the loss is the mean binary cross-entropy over rows and labels.

    loss = the task's own + lm_coefficient · mean of -log p(token | tokens before it) (Radford et al. 2018, equation 5)

    The arrays of a row: input_ids, token_type_ids, attention_mask int32 [length], or [texts, length] for several texts
    (both orders of a pair, all choices); label int32 or float32 [], or float32 [labels] of zeros and ones.
    """

    lm_coefficient: float = field(0.0, range="[0, inf)")
    """Weight of the language-model loss, for decoders; GPT-1 was fine-tuned with 0.5."""

    is_multi_label: ClassVar[bool] = False
    """Whether a row has any number of the labels, which `gold` returns as a list."""

    def texts(self, record: Record) -> list[tuple[str, ...]]:
        """Return the texts of a row, each a single text or a pair."""
        raise NotImplementedError

    def label_names(self, record: Record) -> Sequence[str]:
        gold = self.gold(record)
        return () if gold is None else gold if self.is_multi_label else (gold,)

    def label(self, record: Record) -> np.ndarray:
        """Return the label of a row, or 1 for each of its labels; 0 if it has none."""
        numbers = [self.label_number(record, name) for name in self.label_names(record)]
        if self.is_multi_label:
            return np.isin(np.arange(len(self.labels)), numbers).astype(np.float32)
        return np.int32(numbers[0] if numbers else 0)

    def encode(self, records: Sequence[Record], tokenizer: Tokenizer, length: int) -> list[EncodedExample]:
        texts = [self.texts(record) for record in records]
        strings = list(dict.fromkeys(string for row in texts for parts in row for string in parts))
        ids = dict(zip(strings, tokenizer.encode_arrays(strings), strict=True))
        examples = []
        for number, (record, row) in enumerate(zip(records, texts, strict=True)):
            built = [self._build([ids[string] for string in parts], length) for parts in row]
            longest = max(len(text.input_ids) for text in built)
            input_ids, mask = pad([text.input_ids for text in built], longest, self.padding["input_ids"])
            segments, _ = pad([text.segments for text in built], longest)
            arrays = {"input_ids": input_ids, "token_type_ids": segments, "attention_mask": mask.astype(np.int32)}
            if self.num_texts == 1:
                arrays = {name: array[0] for name, array in arrays.items()}
            examples.append(EncodedExample(number, arrays | {"label": self.label(record)}))
        return examples

    def _build(self, parts: Sequence[np.ndarray], length: int) -> EncodedText:
        room = length - self.template.num_symbols(len(parts) == 2)
        if len(parts) == 2:
            parts = truncate_pair(*parts, room)
        return self.template.build(self.vocabulary, *(part[:room] for part in parts))

    def synthetic(self, rows: int, length: int) -> Arrays:
        label = self.label(Record("", "", {self.gold_value: None}, ()))
        return super().synthetic(rows, length) | {"label": np.stack([label] * rows)}

    def check(self, vocabulary: Vocabulary, length: int) -> None:
        if self.lm_coefficient and not self.model.is_causal:
            raise UserError(f"objective.lm_coefficient is for decoders; set it to 0 for a {type(self.model).__name__}.")
        if self.lm_coefficient and jax.eval_shape(self.model.init, jax.random.key(0)).keys() & self.model.output_params:
            raise UserError("objective.lm_coefficient needs a decoder that predicts by its embeddings; set it to 0.")
        super().check(vocabulary, length)

    def loss(self, params: Params, example: Arrays, key: jax.Array, train: bool) -> Terms:
        terms, hidden = {}, None
        if self.lm_coefficient and train:
            hidden = self.hidden(params, self.inputs(example), jax.random.split(key)[0])
            terms["lm_loss"] = self._lm_loss(params, example, hidden)
        x = self.pooled(params, example, key if train else None, hidden)
        return self.label_terms(self.row_logits(params, x), example["label"], self.weights(example)) | terms

    def label_terms(
        self, logits: Float[Array, "batch classes"], label: Array, weights: Float[Array, " batch"]
    ) -> Terms:
        """Return the loss of the labels, and metrics."""
        if self.is_multi_label:
            losses = jnp.mean(optax.sigmoid_binary_cross_entropy(logits, label), axis=-1)
            is_right = jnp.all((logits > 0) == (label > 0), axis=-1)
            return {"task_loss": Term.of(losses, weights, 1.0), "accuracy": Term.of(is_right, weights)}
        return {
            "task_loss": Term.of(cross_entropy(logits, label), weights, 1.0),
            "accuracy": Term.of(jnp.argmax(logits, axis=-1) == label, weights),
        }

    def predict(self, params: Params, example: Arrays) -> Arrays:
        return {"logits": self.row_logits(params, self.pooled(params, example, None))}

    def answer(self, record: Record, parts: Sequence[tuple[EncodedExample, Arrays]]) -> Answer:
        logits = parts[0][1]["logits"].astype(np.float64)
        if self.is_multi_label:
            prediction = [self.labels[number] for number in np.flatnonzero(self.is_predicted(logits))]
            shares = 1 / (1 + np.exp(-logits))
        else:
            prediction, shares = self.labels[logits.argmax()], np.exp(logits - logits.max())
            shares /= shares.sum()
        return Answer(prediction, {"scores": dict(zip(self.labels, shares.tolist(), strict=True))})

    def is_predicted(self, logits: Float[np.ndarray, " labels"]) -> Bool[np.ndarray, " labels"]:
        """Return which labels are predicted, if a row may have several."""
        return logits > 0

    def describe(self, batch: Arrays, example: Arrays, row: int) -> list[Line]:
        return [*super().describe(batch, example, row), Line(self.shown_label(example["label"][row]), [], [])]

    def shown_label(self, label: Any) -> str:
        """Return the label of a row as `jaxlm show` prints it."""
        if self.is_multi_label:
            return "labels " + ", ".join(self.labels[number] for number in np.flatnonzero(label))
        return f"label {self.labels[int(label)]}"

    def inputs(self, example: Arrays) -> Inputs:
        """Return the texts of a batch as the model's inputs, those of a row one after another."""
        return flat_inputs(example)

    def row_logits(self, params: Params, x: Float[Array, "batch texts hidden"]) -> Float[Array, "batch classes"]:
        """Return the logits of a row from the vectors of its texts."""
        raise NotImplementedError

    def pooled(
        self, params: Params, example: Arrays, key: jax.Array | None, hidden: Float[Array, "_ _ hidden"] | None = None
    ) -> Float[Array, "batch texts hidden"]:
        """Return the vector of each text that the classifier reads; a key turns dropout on.

        `hidden` are the last hidden states, if they are known.
        """
        keys = (None, None) if key is None else jax.random.split(key)
        inputs = self.model.complete_inputs(self.inputs(example), self.vocabulary)
        if self.fine_tuning.pools_late:
            hidden = self.model.hidden_states(params, inputs, key=keys[0]) if hidden is None else hidden
            x = mean_of_tokens(self.before_classifier(params, hidden, keys[1]), inputs.mask)
        else:
            x = self.model.summary(params, inputs, key=keys[0], pad=self.vocabulary.pad, hidden=hidden)
            x = self.before_classifier(params, x, keys[1])
        return x.reshape(len(example["row"]), -1, x.shape[-1])

    def _lm_loss(self, params: Params, example: Arrays, hidden: Float[Array, "texts length hidden"]) -> Term:
        """Return the language-model loss: the mean over each text's tokens, then over all texts of all rows."""
        inputs = self.inputs(example)
        mask, texts = inputs.mask, len(inputs.ids) // len(example["row"])
        weights = jnp.repeat(self.weights(example), texts) * jnp.any(mask > 0, axis=1)
        targets = mask[:, 1:].astype(jnp.float32)
        targets = targets / jnp.maximum(jnp.sum(targets, axis=1, keepdims=True), 1.0)
        losses = token_losses(self.model, params, hidden[:, :-1], inputs.ids[:, 1:], targets * weights[:, None])
        return Term(losses.total, jnp.sum(weights), self.lm_coefficient)

    def flops(self, length: int) -> float:
        # The language-model loss has vocabulary logits.
        lm_flops = 2 * length * self.model.width * self.model.vocab_size if self.lm_coefficient else 0
        return self.num_texts * (super().flops(length) + lm_flops)


def flat_inputs(example: Arrays) -> Inputs:
    """Return the texts of a batch, those of a row one after another."""
    return jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), Inputs.of(example))


def truncate_pair(first: np.ndarray, second: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """Truncate a pair to `room` tokens, one at a time from the longer text.

    As `longest_first` of the library tokenizers: where both are too long and `room` is odd, the longer text, of equal
    ones the second, keeps a token more.
    """
    half = room // 2 if len(first) > len(second) else room - room // 2
    second = second[: max(half, room - len(first))]
    return first[: room - len(second)], second
