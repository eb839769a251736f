"""An objective as configured and one that is bound."""

from __future__ import annotations

import contextlib
import dataclasses

import jax
import numpy as np
import pytest

from jaxlm.config.json import to_json
from jaxlm.data.base import Statistics
from jaxlm.errors import UserError
from jaxlm.fields import settings
from jaxlm.knowledge.entity_autoencoder import EntityAutoencoder
from jaxlm.knowledge.entity_vectors import ReadsEntities
from jaxlm.models.llama import Llama
from jaxlm.objectives.base import Bound, class_of
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.objectives.span_boundary import SpanBoundary
from jaxlm.systems import all_tasks, system_of
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import TokenBatch

V = Vocabulary.stand_in(200)


def test_a_bound_objective_is_one_of_its_class_and_of_bound():
    configured = MaskedLM(mask_rate=0.2)
    bound = configured.bind(V, 32)
    assert isinstance(bound, MaskedLM) and isinstance(bound, Bound) and not isinstance(configured, Bound)
    assert type(bound) is type(MaskedLM().bind(V, 64)) and class_of(bound) is class_of(configured) is MaskedLM
    assert (bound.mask_rate, bound.model.vocab_size, configured.model.vocab_size) == (0.2, 200, 30522)
    assert bound == configured.bind(V, 32) != configured and hash(bound) == hash(configured.bind(V, 32))
    assert dataclasses.replace(bound, mask_rate=0.15) == MaskedLM().bind(V, 32) and bound.bind(V, 64) == bound
    both = EntityAutoencoder().bind(V, 32)
    assert isinstance(both, ReadsEntities) and class_of(both) is EntityAutoencoder
    assert system_of(both) is system_of(EntityAutoencoder())


def test_what_is_configured_has_no_examples():
    with pytest.raises(AttributeError, match="has no attribute 'vocabulary'"):
        MaskedLM().corrupt(jax.random.key(0), TokenBatch(*np.ones((2, 2, 32), np.int32)))


def test_the_configuration_of_a_bound_objective_is_as_configured():
    bound = MaskedLM(mask_rate=0.2).bind(V, 32, Statistics(np.ones(200), 0.0), {"table": np.ones(3)})
    sized = dataclasses.replace(MaskedLM(mask_rate=0.2), model=bound.model)
    assert to_json(bound) == to_json(sized)
    assert [s.name for s in settings(bound)] == [s.name for s in settings(sized)]


def test_binding_checks():
    with pytest.raises(UserError, match="use 8 or more"):
        MaskedLM().check(V, 7)
    with pytest.raises(UserError, match="use 8 or more"):
        MaskedLM().bind(V, 7)
    assert MaskedLM().bind_unchecked(V).vocabulary is V


@pytest.mark.parametrize("is_causal", [True, False])
def test_an_objective_for_either_direction_takes_both(is_causal):
    class Either(MaskedLM):
        is_causal = None

    Either(model=Llama(is_causal=is_causal)).require_direction()
    with contextlib.nullcontext() if not is_causal else pytest.raises(UserError, match="SpanBoundary needs False"):
        SpanBoundary(model=Llama(is_causal=is_causal)).require_direction()


@pytest.mark.parametrize("kind", [entry.task for entry in all_tasks()])
def test_symbols_are_known_before_the_vocabulary(kind):
    bound = kind.bind_unchecked(kind(model=MaskedLM().model), V)
    assert bound.symbols == kind(model=MaskedLM().model).symbols
