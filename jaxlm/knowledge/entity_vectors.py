"""The frozen table of entity vectors that objectives and tasks of knowledge-enhanced models read."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxlm.data.readers import read_names
from jaxlm.errors import UserError
from jaxlm.fields import field
from jaxlm.knowledge.entity_corruption import NONE
from jaxlm.knowledge.knowledge_graph import read_vectors
from jaxlm.models.base import Inputs
from jaxlm.objectives.base import Constants, Example, Objective
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.paths import file_state
from jaxlm.tokenizers.vocabulary import Vocabulary


@dataclasses.dataclass(frozen=True)
class ReadsEntities(Objective):
    """An objective whose model reads the vectors of a knowledge graph's entities.

    The table [1 + entities, width] is float32. Its row 0 is zeros, for tokens without an entity. Every device holds it
    whole: 5 million vectors of 100 numbers take 2 GB. Split over `fsdp`, it would be gathered whole in every step.
    """

    entities: str = field("", resumable=True)
    """Folder of a knowledge graph's vectors: entity2id.txt, and vectors.safetensors or entity2vec.vec, such as `jaxlm
    export` writes for a TransE run. The default is that of the pretrained model."""
    num_entities: int = field(5_040_986, resumable=True, range="[1, inf)")
    """Number of entities in a plan without that folder (the paper's number)."""

    constants_field = "entities"

    def with_pretrained_model(self, source: PretrainedModel) -> Self:
        objective = super().with_pretrained_model(source)
        return dataclasses.replace(objective, entities=objective.entities or getattr(source.objective, "entities", ""))

    def load_constants(self, vocabulary: Vocabulary, load: Callable[[str], PretrainedModel]) -> Constants:
        return self.entity_table()

    def entity_table(self) -> Constants:
        """Return the table and a hash of the entities' names; () for a model that reads no entities."""
        if not self.model.entity_width:
            return ()
        return _table(self.entities, self.model.entity_width, self._folder_state())

    def constant_shapes(self, vocabulary: Vocabulary, load: Callable[[str], PretrainedModel]) -> Constants:
        if self.entities or not self.model.entity_width:
            return super().constant_shapes(vocabulary, load)
        shape = (1 + self.num_entities, self.model.entity_width)
        return {"vectors": jax.ShapeDtypeStruct(shape, np.float32), "names": jax.ShapeDtypeStruct((8,), np.uint32)}

    def entity_vectors(self, entities: Int[Array, "*shape"]) -> Float[Array, "*shape width"]:
        """Return the vectors of entities, zeros where there is none."""
        return self.constants["vectors"][jnp.maximum(entities, NONE) + 1]

    def entity_inputs(self, example: Example) -> Inputs:
        """Return the inputs of an example, with the vectors of its entities if the model reads them."""
        inputs = Inputs.of(example)
        if inputs.entities is None or not self.model.entity_width:
            return inputs
        return inputs._replace(entity_vectors=self.entity_vectors(inputs.entities))

    def entity_name(self, entity: Any) -> str:
        """Return the name of an entity, for `jaxlm show`."""
        return self.entity_names()[int(entity)]

    def entity_names(self) -> tuple[str, ...]:
        """Return the names of all entities, by id."""
        return _names(self.entities, self._folder_state())

    def _folder_state(self) -> tuple[Any, ...]:
        """Return the names and states of the folder's files."""
        if not self.entities:
            raise UserError(
                "objective.entities is empty; give --objective.entities the folder of a knowledge graph's vectors "
                "(entity2id.txt, and vectors.safetensors or entity2vec.vec)."
            )
        files = [path for path in sorted(Path(self.entities).glob("*")) if path.is_file()]
        return tuple((path.name, *file_state(str(path))) for path in files)


@functools.lru_cache(1)  # a task asks at every evaluation
def _table(folder: str, width: int, state: tuple[Any, ...]) -> Constants:
    """Return what `ReadsEntities.entity_table` does, read again if the `state` of the folder's files changes."""
    names, vectors = read_vectors(folder)
    if vectors.shape[1] != width:
        raise UserError(
            f"{folder} has vectors of {vectors.shape[1]} numbers, but objective.model.entity_hidden_size is {width}; "
            f"set it to {vectors.shape[1]}, or choose other vectors."
        )
    digest = hashlib.sha256("\n".join(names).encode()).digest()
    table = np.concatenate([np.zeros((1, width), np.float32), vectors])
    return {"vectors": table, "names": np.frombuffer(digest, np.uint32)}


@functools.lru_cache(1)
def _names(folder: str, state: tuple[Any, ...]) -> tuple[str, ...]:
    return read_names(folder, "entity")
