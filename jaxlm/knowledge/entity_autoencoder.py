"""Masked language modelling with the denoising entity autoencoder (ERNIE, Zhang et al. 2019, section 3.4)."""

from __future__ import annotations

import dataclasses
from typing import Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxlm.data.base import RowFormat
from jaxlm.errors import UserError
from jaxlm.fields import field, marks_of
from jaxlm.knowledge.entity_corruption import NONE, UNUSED, corrupt_entities
from jaxlm.knowledge.entity_vectors import ReadsEntities
from jaxlm.knowledge.ernie import Ernie
from jaxlm.models.bert import Bert
from jaxlm.models.heads import TransformHead
from jaxlm.models.layers.stack import call
from jaxlm.objectives.base import Example, Line, Terms, require_shares
from jaxlm.objectives.chunked_loss import MASKED_LOGIT, chunked_cross_entropy
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.types import Params, TokenBatch


@dataclasses.dataclass(frozen=True)
class EntityAutoencoder(MaskedLM, ReadsEntities):
    """Masked language modelling, a pair task, and the prediction of the entities that the text mentions.

    Loss: masked-LM + next-sentence + entity cross-entropy, unweighted. 5 % of the entities are replaced by another one
    of the batch, 15 % are dropped from the input, and all are predicted from the hidden state of the token at which
    their mention begins: a softmax over the entities of the whole batch before the corruption, and the null entity with
    logit 0, which is never right. The paper's softmax is over the entities of the sequence; this is the official
    code's, over the batch of all devices where the official code has that of one process. Rows with few entities stay
    in, which the paper (fewer than 3) and the official code (fewer than 5) leave out.
    """

    model: Ernie = field(Ernie(), weights=True)
    """The encoder."""
    random_entity_share: float = field(0.05, range="[0, 1]")
    """Share of the entities replaced by a random one of the batch."""
    dropped_entity_share: float = field(0.15, range="[0, 1]")
    """Share of the entities dropped from the input."""
    input_format: Literal["next-sentence", "sentence-order", "document", "full-sentences"] = field(
        "next-sentence", weights=True
    )
    """As in `MaskedLM`, but no packed rows."""
    max_entities: int = field(0, range="[0, inf)")
    """Maximum number of entities per row, the first ones; 0 means a quarter of the row's length."""

    shared_arrays = ("candidates",)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_shares(self, "random_entity_share", "dropped_entity_share")

    def with_pretrained_model(self, source: PretrainedModel) -> Self:
        """Return a copy with the pretrained model; a BERT gives all that it has in common with an ERNIE.

        Of a BERT with fewer layers than the preset, the last two read entities; raises UserError for fewer than 3.
        """
        pretrained = source.objective.model
        if type(pretrained) is Bert:
            if (layers := pretrained.num_layers) < 3:
                raise UserError(f"{source.path} has {layers} layers; give --init-from a BERT of 3 layers or more.")
            common = [f.name for f in dataclasses.fields(Bert) if not marks_of(f) & {"recipe", "resumable"}]
            text_layers = min(self.model.num_text_layers, layers - 2)
            values = {name: getattr(pretrained, name) for name in common} | {"num_text_layers": text_layers}
            return dataclasses.replace(self, model=dataclasses.replace(self.model, **values))
        return super().with_pretrained_model(source)

    def num_entity_slots(self, length: int) -> int:
        """Return the number of entities to predict per row."""
        return min(self.max_entities or max(1, length // 4), length)

    def row_format(self, length: int) -> RowFormat:
        return super().row_format(length)._replace(entities=self.entities)

    def init(self, key: jax.Array) -> Params:
        key_base, key_head = jax.random.split(key)
        return super().init(key_base) | {"entity_head": self._head.init_params(key_head)}

    def corrupt(self, key: jax.Array, batch: TokenBatch) -> Example:
        """Build rows as masked language modelling does, and corrupt their entities.

        Returns:
            Besides the arrays of `MaskedLM.corrupt`: `entities` int32 [batch, length], as the model reads them;
            `entity_positions`, `entity_labels` int32 and `entity_weights` float32 [batch, slots]; `candidates` int32 [1
            + batch · slots], shared by all rows; see `jaxlm.knowledge.entity_corruption.Entities`.
        """
        key_base, key_entities = jax.random.split(key)
        if batch.entities is None:
            batch = batch._replace(entities=np.full(batch.tokens.shape, NONE, np.int32))
        example = super().corrupt(key_base, batch)
        found = corrupt_entities(
            key_entities, example["entities"], slots=self.num_entity_slots(example["entities"].shape[1]),
            random_share=self.random_entity_share, drop_share=self.dropped_entity_share,
        )
        return example | found._asdict()

    def loss(self, params: Params, example: Example, key: jax.Array, train: bool) -> Terms:
        slots = example["entity_positions"].shape[1]
        positions = jnp.concatenate([self.positions(example), example["entity_positions"]], axis=1)
        hidden = self.model.hidden_states(
            params, self.entity_inputs(example), key=key if train else None, at=positions
        )
        terms = self.token_terms(params, example, hidden[:, :-slots])
        return terms | self.entity_terms(params, example, hidden[:, -slots:])

    def entity_terms(self, params: Params, example: Example, hidden: Float[Array, "batch slots hidden"]) -> Terms:
        """Return the entities' cross-entropy and accuracy, given the hidden states at their positions."""
        candidates, weights = example["candidates"], example["entity_weights"]
        entities = chunked_cross_entropy(
            call(self._head, params["entity_head"], hidden), self.entity_vectors(candidates), example["entity_labels"],
            weights, bias=jnp.where(candidates == UNUSED, MASKED_LOGIT, 0.0),
        )
        return entities.terms("dea", weights)

    def flops(self, length: int) -> float:
        """Return the FLOPs of one sequence, without the product with the candidates, whose number is the batch's."""
        slots = self.num_entity_slots(length)
        return super().flops(length) + 2.0 * slots * self.model.hidden_size * self.model.entity_hidden_size

    def describe(self, batch: TokenBatch, example: Example, row: int) -> list[Line]:
        lines = super().describe(batch, example, row)
        if not self.entities:
            return [*lines, Line("no entities: --objective.entities names no folder of their vectors", [], [])]
        for slot in np.flatnonzero(example["entity_weights"][row]):
            position = int(example["entity_positions"][row][slot])
            entity, original = (
                int(example["entities"][row][position]), int(example["candidates"][example["entity_labels"][row][slot]])
            )
            what = "kept" if entity == original else "dropped"
            if entity not in (original, NONE):
                what = f"now {self.entity_name(entity)}"
            title = f"{self.entity_name(original)}, {what}"
            lines.append(Line(title, [int(example["input_ids"][row][position])], [""]))
        return lines

    @property
    def _head(self) -> TransformHead:
        return TransformHead(self.model.stack, self.model.entity_hidden_size)
