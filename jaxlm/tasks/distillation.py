"""Classification distilled from a fine-tuned teacher, as in DistilBERT and TinyBERT."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.data.labelled import Arrays
from jaxlm.errors import UserError
from jaxlm.fields import field
from jaxlm.models.encoder import Encoder
from jaxlm.models.heads import LinearHead
from jaxlm.models.layers.stack import call
from jaxlm.objectives.base import Bound, Term, Terms
from jaxlm.objectives.layer_distillation import LayerDistillation, layer_terms
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.objectives.teacher import Mismatch, layer_mismatches, require_fit, text_mismatches
from jaxlm.tasks.classification import Classification
from jaxlm.tasks.pooled import flat_inputs
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import Params


@dataclasses.dataclass(frozen=True)
class DistilledClassification(Classification):
    """loss = soft_weight · T² KL(teacher ‖ student) + hard_weight · loss of the labels + layer_weight · layer errors.

    T is the temperature. For numbers the squared difference takes the place of the divergence. The layer errors are
    those of attention scores and hidden states. TinyBERT (Jiao et al. 2019, section 3.2) first learns the layers
    (layer_weight 1, soft_weight 0), then the predictions (layer_weight 0, soft_weight 1). The student starts from the
    model of --init-from.
    """

    teacher: str = field("", resumable=True)
    """A run, a Transformers folder or `hf:ORG/NAME` of a model fine-tuned on the same labels, in any order,
    with the student's tokenizer."""
    temperature: float = field(1.0, range="(0, inf)")
    """Temperature of both softmaxes."""
    soft_weight: float = field(1.0, range="[0, inf)")
    """Weight of the loss against the teacher's predictions."""
    hard_weight: float = field(0.0, range="[0, inf)")
    """Weight of the loss of the labels."""
    layer_weight: float = field(0.0, weights=True, range="[0, inf)")
    """Weight of the layer errors; above 0 the student must have as many attention heads as the teacher."""
    teacher_hidden_size: int = field(768, weights=True)
    """Width of the teacher's hidden states, if layer_weight is above 0."""

    private_params = ("projection_to_teacher",)

    def __post_init__(self) -> None:
        super().__post_init__()
        weights = (self.soft_weight, self.hard_weight, self.layer_weight)
        if not any(weights) or self.both_orders or self.lm_coefficient or self.is_multi_label:
            raise UserError(
                "objective.soft_weight, hard_weight and layer_weight must not all be 0, both_orders must be False, "
                "lm_coefficient 0 and target class or number."
            )

    @property
    def _projection(self) -> LinearHead:
        return LinearHead(self.model.stack, self.teacher_hidden_size)

    def init(self, key: jax.Array) -> Params:
        key_task, key_projection = jax.random.split(key)
        params, projection = super().init(key_task), self._projection.init_params(key_projection)
        return params | {"projection_to_teacher": projection} if self.layer_weight else params

    def select_params(self, source: PretrainedModel) -> Params:
        """Return the parameters, and the projection that layer distillation has trained for the teacher's width."""
        params, theirs = super().select_params(source), source.objective
        if isinstance(theirs, LayerDistillation) and theirs.teacher_hidden_size == self.teacher_hidden_size:
            params |= {"projection_to_teacher": source.params[theirs.projection_name]} if self.layer_weight else {}
        return params

    def load_constants(self, vocabulary: Vocabulary, load: Callable[[str], PretrainedModel]) -> PretrainedModel:
        if not self.teacher:
            raise UserError("objective.teacher is empty; give --objective.teacher a fine-tuned run or folder.")
        teacher = load(self.teacher)
        task, theirs, ours = teacher.objective, teacher.objective.model, self.model
        if task.name != self.name:
            raise UserError(
                f"the teacher {self.teacher} was not fine-tuned for classification; fine-tune one with the same preset."
            )
        mismatches = [*text_mismatches(self.teacher, task, self, vocabulary)]
        # The teacher reads the student's rows.
        if task.is_multi_label:
            mismatches.append(Mismatch("several labels per row", ""))
        if task.both_orders:
            mismatches.append(Mismatch("rows with a pair in both orders", ""))
        ours_around, theirs_around = self.template_for(vocabulary), task.template
        if (theirs_around.single, theirs_around.pair) != (ours_around.single, ours_around.pair):
            mismatches.append(Mismatch("other special tokens around its texts", ""))
        if self.layer_weight:
            if not isinstance(theirs, Encoder) or not isinstance(ours, Encoder):
                raise UserError("objective.layer_weight is for encoders; set it to 0.")
            mismatches += layer_mismatches(theirs, ours, self.teacher_hidden_size)
        # The student's weights are trained, so no flag changes its sizes.
        require_fit(self.teacher, [
            mismatch if mismatch.flags.startswith("--objective.teacher") else mismatch._replace(flags="")
            for mismatch in mismatches
        ])
        model = theirs.with_execution(**ours.execution)
        return dataclasses.replace(teacher, objective=dataclasses.replace(task, model=model))

    def bind(
        self, vocabulary: Vocabulary, length: int, statistics: Any = None, constants: PretrainedModel | tuple[()] = (),
        load: Callable[[str], PretrainedModel] | None = None,
    ) -> Bound:
        if constants and set(theirs := constants.objective.labels) != set(self.labels):
            names, found = (", ".join(labels) or "(numbers)" for labels in (self.labels, theirs))
            raise UserError(
                f"the teacher {self.teacher} was not fine-tuned on the labels {names}: it has {found}; choose one with "
                "these labels, or fine-tune one with the same preset."
            )
        return super().bind(vocabulary, length, statistics, constants, load)

    def loss(self, params: Params, example: Arrays, key: jax.Array, train: bool) -> Terms:
        teacher, weights, inputs = self.constants, self.weights(example), flat_inputs(example)
        key, hidden = key if train else None, None
        if self.layer_weight:  # the logits follow from the same forward pass
            states = self.model.layer_states(params, inputs, key=jax.random.split(key)[0] if train else None)
            hidden = states[0][-1]
        ours = self.row_logits(params, self.pooled(params, example, key, hidden))
        terms = self.label_terms(ours, example["label"], weights)
        terms["task_loss"] = terms["task_loss"]._replace(coefficient=self.hard_weight)
        if self.soft_weight:
            theirs = jax.lax.stop_gradient(teacher.objective.predict(teacher.params, example)["logits"])
            if (order := teacher.objective.labels) != self.labels:
                theirs = theirs[:, np.array([order.index(label) for label in self.labels])]
            terms["soft_loss"] = Term.of(self._difference(ours, theirs), weights, self.soft_weight)
        if self.layer_weight:
            hidden = jax.lax.stop_gradient(teacher.objective.model.layer_states(teacher.params, inputs))
            mask = inputs.mask * (weights[:, None] > 0)
            projection = functools.partial(call, self._projection, params["projection_to_teacher"])
            errors = layer_terms(states, hidden, projection, mask)
            terms |= {name: term._replace(coefficient=self.layer_weight) for name, term in errors.items()}
        return terms

    def constants_flops(self, length: int) -> float:
        return self.constants.objective.flops(length)

    def _difference(self, ours: jax.Array, theirs: jax.Array) -> jax.Array:
        if self.target == "number":
            return jnp.square(ours[:, 0] - theirs[:, 0])
        p, q = (jax.nn.log_softmax(logits / self.temperature) for logits in (theirs, ours))
        return self.temperature**2 * jnp.sum(jnp.exp(p) * (p - q), axis=-1)
