"""Distillation of an encoder's layers into a smaller encoder (TinyBERT's general distillation, Jiao et al. 2020)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxlm.data.base import RowFormat
from jaxlm.fields import field
from jaxlm.models.base import Inputs
from jaxlm.models.bert import Bert
from jaxlm.models.encoder import Encoder
from jaxlm.models.heads import LinearHead
from jaxlm.models.layers.stack import call, stack_flops
from jaxlm.objectives.base import Example, Line, Objective, Term, Terms
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.objectives.teacher import Mismatch, layer_mismatches, require_teacher
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import Params, TokenBatch


@dataclasses.dataclass(frozen=True)
class LayerDistillation(Objective):
    """Train each layer of a student to reproduce a layer of its teacher.

    Loss: the sum over the layers of the mean squared errors of attention scores before the softmax, and of hidden
    states (the embeddings included) after one linear projection to the teacher's width. Means are over non-padding
    tokens.

    A teacher with b times as many layers is cut into groups of b: student layer i learns the attention scores of the
    last layer of group i, and the hidden states after it. Text is masked and paired as in BERT, but no token is
    predicted, so the student has no masked-LM head. The projection is used in training only. (The paper has two
    projections, one for the embeddings; the released code has one, as here.)
    """

    model: Encoder = field(Bert(num_layers=4, hidden_size=312, intermediate_size=1200), weights=True)
    """The student, with as many attention heads as the teacher."""
    teacher: str = field("", resumable=True)
    """Run folder, Transformers folder or `hf:ORG/NAME[@REVISION]` of an encoder with the student's tokenizer."""
    teacher_hidden_size: int = field(768, weights=True)
    """Hidden size of the teacher."""

    primary_metric = "hidden_loss"
    private_params = ("projection", "projection_to_teacher")

    @property
    def masked_lm(self) -> MaskedLM:
        """Masked-LM objective that makes pairs and masks of the text."""
        return MaskedLM(model=self.model)

    @property
    def projection(self) -> LinearHead:
        """Linear projection from the student's hidden size to the teacher's."""
        return LinearHead(self.model.stack, self.teacher_hidden_size)

    @property
    def projection_name(self) -> str:
        """Key of the projection among the parameters."""
        return "projection_to_teacher" if self.model.has_projection else "projection"  # an ALBERT has one of its own

    def check(self, vocabulary: Vocabulary, length: int) -> None:
        self.masked_lm.check(vocabulary, length)

    def row_format(self, length: int) -> RowFormat:
        return self.masked_lm.row_format(length)

    def load_constants(self, vocabulary: Vocabulary, load: Callable[[str], PretrainedModel]) -> PretrainedModel:
        return require_teacher(self, vocabulary, load, self._mismatches, predicts=False)

    def _mismatches(self, teacher: Objective) -> Iterator[Mismatch]:
        yield from layer_mismatches(teacher.model, self.model, self.teacher_hidden_size)
        if teacher.model.type_vocab_size < 2:
            yield Mismatch(f"{teacher.model.type_vocab_size} segment types instead of 2", "")

    def init(self, key: jax.Array) -> Params:
        key_model, key_projection = jax.random.split(key)
        params = self.model.init(key_model)
        del params["mlm_head"]
        return params | {self.projection_name: self.projection.init_params(key_projection)}

    def corrupt(self, key: jax.Array, batch: TokenBatch) -> Example:
        """Corrupt as MaskedLM does; `describe` shows the masked tokens, and the loss ignores them."""
        return self.masked_lm.bind_unchecked(self.vocabulary).corrupt(key, batch)

    def loss(self, params: Params, example: Example, key: jax.Array, train: bool) -> Terms:
        inputs = Inputs.of(example)
        teacher = self.constants
        teacher_states = jax.lax.stop_gradient(teacher.objective.model.layer_states(teacher.params, inputs))
        student_states = self.model.layer_states(params, inputs, key=key if train else None)
        project = functools.partial(call, self.projection, params[self.projection_name])
        return layer_terms(student_states, teacher_states, project, inputs.mask)

    def flops(self, length: int) -> float:
        m = self.model
        projections = (m.num_layers + 1) * 2 * length * m.hidden_size * self.teacher_hidden_size
        return stack_flops(m.stack, length) + projections

    def constants_flops(self, length: int) -> float:
        return stack_flops(self.constants.objective.model.stack, length)

    def describe(self, batch: TokenBatch, example: Example, row: int) -> list[Line]:
        masked_lm = self.masked_lm.bind_unchecked(self.vocabulary)
        text, inputs, _, pair = masked_lm.describe(batch, example, row)
        size = int(np.sum(example["attention_mask"][row]))
        return [text, inputs, pair, Line(f"imitate {size} states of each layer, {size}² scores of each head", [], [])]


States = tuple[Float[Array, "_ batch length _"], Float[Array, "_ batch heads length length"]]
"""Hidden states and attention scores, as `Encoder.layer_states` returns them."""


def layer_terms(
    student_states: States, teacher_states: States, project: Callable[[jax.Array], jax.Array],
    mask: Int[Array, "batch length"],
) -> Terms:
    """Return the errors of a student's layers, each with coefficient 1 (see LayerDistillation).

    `project` maps the student's hidden size to the teacher's.
    """
    (hidden, scores), (teacher_hidden, teacher_scores) = student_states, teacher_states
    step = len(teacher_scores) // len(scores)
    token_weights = mask.astype(jnp.float32)
    pair_weights = token_weights[:, None, :, None] * token_weights[:, None, None, :]
    hidden_error, score_error = jnp.float32(0), jnp.float32(0)
    for student_layer, teacher_layer in zip(hidden, teacher_hidden[::step], strict=True):
        error = project(student_layer) - teacher_layer.astype(jnp.float32)
        hidden_error += jnp.sum(jnp.mean(jnp.square(error), axis=-1) * token_weights)
    for student_layer, teacher_layer in zip(scores, teacher_scores[step - 1 :: step], strict=True):
        score_error += jnp.sum(jnp.square(student_layer - teacher_layer) * pair_weights)
    return {
        "hidden_loss": Term(hidden_error, jnp.sum(token_weights), 1.0),
        "attention_loss": Term(score_error, scores[0].shape[1] * jnp.sum(pair_weights), 1.0),
    }
