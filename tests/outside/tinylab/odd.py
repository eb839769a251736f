"""A task from scratch: which word of a list does not belong. The classifier gives each token one logit."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from jaxlm.data.labelled import EncodedExample
from jaxlm.errors import UserError
from jaxlm.objectives.base import Term
from jaxlm.objectives.losses import cross_entropy
from jaxlm.tasks import metrics
from jaxlm.tasks.base import Answer, Task, text_arrays
from jaxlm.tasks.tables import TableData


@dataclasses.dataclass(frozen=True)
class WordRows(TableData):
    """Rows such as {"words": ["red", "ten", "blue"], "odd": 1}; null for an unknown answer."""

    label_flag = "odd"

    def columns(self):
        return ["words", "odd"]

    def record(self, row):
        words, odd = row.texts("words"), row.label("odd")
        if odd is not None and not (odd.isdecimal() and int(odd) < len(words)):
            raise UserError(f"{row.place}: odd is {odd}; it must be the number of a word, from 0.")
        return {"words": words, "label": None if odd is None else int(odd)}, (" ".join(words),)


@dataclasses.dataclass(frozen=True)
class OddWord(Task):
    """loss = cross-entropy of the odd word among the words of a row, by the logits of their first tokens.

    `word` int32 [length] has the number of a word at its first token, -1 elsewhere; `label` that of the odd one.
    """

    name = "odd_word"
    use_pooling = False
    num_logits = 1

    @property
    def padding(self):
        return super().padding | {"word": -1}

    def encode(self, records, tokenizer, length):
        examples = []
        for number, record in enumerate(records):
            words = tokenizer.encode_arrays(record.values["words"])
            first = np.concatenate([[at] + [-1] * (len(ids) - 1) for at, ids in enumerate(words)])
            room = length - self.template.num_symbols(False)
            row = self.template.build(self.vocabulary, np.concatenate(words)[:room])
            word = np.full(len(row.input_ids), -1, np.int32)
            word[row.part == 1] = first[: np.sum(row.part == 1)]
            label = -1 if (gold := self.gold(record)) is None else gold
            examples.append(EncodedExample(number, text_arrays(row) | {"word": word, "label": np.int32(label)}))
        return examples

    def synthetic(self, rows, length):
        own = {"word": np.tile(np.arange(length, dtype=np.int32), (rows, 1)), "label": np.zeros(rows, np.int32)}
        return super().synthetic(rows, length) | own

    def logits(self, params, example, key):
        logits = self.classify(params, self.token_states(params, example, key))[..., 0]
        return jnp.where(example["word"] >= 0, logits, -1e9)

    def loss(self, params, example, key, train):
        logits = self.logits(params, example, key if train else None)
        is_odd = (example["word"] >= 0) & (example["word"] == example["label"][:, None])
        weights = self.weights(example) * jnp.any(is_odd, -1)  # 0 where the odd word is beyond the length
        target = jnp.argmax(is_odd, -1)
        return {"task_loss": Term.of(cross_entropy(logits, target), weights, 1.0),
                "accuracy": Term.of(jnp.argmax(logits, -1) == target, weights)}

    def predict(self, params, example):
        return {"logits": self.logits(params, example, None)}

    def answer(self, record, parts):
        ((example, output),) = parts
        scores = output["logits"][: len(example.arrays["word"])][example.arrays["word"] >= 0]
        return Answer(int(scores.argmax()), {"scores": scores.tolist()})

    def score(self, golds, answers):
        return {"accuracy": metrics.accuracy([answer.prediction for answer in answers], golds)}
