"""Every family of the registry at its default size, against the names and shapes of Transformers' classes."""

from __future__ import annotations

import dataclasses

import jax
import pytest
import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

from jaxlm import systems
from jaxlm.errors import UserError
from jaxlm.huggingface.families import family_named, family_of
from jaxlm.models.bert import Bert
from jaxlm.models.deberta import DebertaV3
from jaxlm.models.elmo import Elmo
from jaxlm.models.gpt2 import Gpt2
from jaxlm.models.gpt3 import Gpt3
from jaxlm.models.llama import Qwen3
from jaxlm.objectives.causal_lm import CausalLM
from jaxlm.systems import System, all_systems, importable
from jaxlm.tasks.classification import Classification
from jaxlm.tokenizers.vocabulary import Vocabulary

SYSTEMS = all_systems()
EXPORTED = [system for system in SYSTEMS if system.family]


def objective_of(system):
    """Return the objective at its default size, without bands, which have no class."""
    changes = dict(two_segments=False) if system.model is DebertaV3 else {}
    objective = system.objective(model=system.model(**(dict(band=0) if system.model is Gpt3 else {})), **changes)
    return objective.bind_unchecked(Vocabulary.stand_in(objective.model.vocab_size))


@pytest.mark.parametrize("system", EXPORTED, ids=lambda system: system.model.__name__)
def test_names_and_shapes_are_those_of_the_classes(system):
    objective = objective_of(system)
    template = jax.eval_shape(objective.init, jax.random.key(0))
    for model in family_of(objective).models(objective):
        config = transformers.AutoConfig.for_model(**model.config)
        with torch.device("meta"):
            theirs = getattr(transformers, model.architecture)(config)
        tensors = revert_weight_conversion(theirs, dict(theirs.named_parameters(remove_duplicate=True)))
        shapes = {name: tuple(p.shape) for name, p in tensors.items()}  # of a file
        if model.architecture == "BertModel":  # TinyBERT's pooler is untrained
            shapes = {name: shape for name, shape in shapes.items() if not name.startswith("pooler.")}
        if model.architecture == "DebertaV2Model":
            shapes = {f"deberta.{name}": shape for name, shape in shapes.items()}
        names = model.table.tensor_shapes(template)
        # Published DeBERTas have these beside the tensors of the class.
        beside = ("mask_predictions.", "deberta.embeddings.position_embeddings.")
        names = {name: shape for name, shape in names.items() if not name.startswith(beside)}
        assert {model.table.ties.get(name, name): shape for name, shape in shapes.items()} == names


def test_import_finds_the_family_by_model_type():
    for system in EXPORTED:
        objective = objective_of(system)
        family = family_of(objective)
        assert family_named(family.model_type, "here").read_objective == family.read_objective


@pytest.mark.parametrize(("name", "part"), [
    ("qwen2", "biases of queries, keys and values"), ("new", "ntk's scaling"), ("ultrabert", "head of two layers"),
    ("umt5", "relative positions of its own in each layer"), ("t5gemma2", "vision tower"), ("gemma3", "gemma3_text"),
    ("t5gemma", "attn_logit_softcapping"),
])
def test_other_types_are_refused_by_the_part_that_is_missing(name, part):
    with pytest.raises(UserError, match=f"here holds a model of the family '{name}', which needs .*{part}.*; "):
        family_named(name, "here")


def test_one_family_of_each_model_and_model_type_is_imported():
    models, exported = ([type(system.model().text_model) for system in systems] for systems in (importable(), EXPORTED))
    assert len(models) == len(set(models)) and set(models) == set(exported)
    families = {id(family): family.model_type for family in (family_of(objective_of(s)) for s in importable())}
    assert len(families) == len(set(families.values()))


def test_a_class_from_outside_has_the_family_of_its_base_in_a_module_of_several(monkeypatch):
    """One of another base has the first, whose table may fit it."""
    for name in ("_SYSTEMS", "_CLASSES"):
        monkeypatch.setattr(systems, name, {})
    for base, model_type in ((Qwen3, "qwen3"), (Gpt2, "llama")):
        kind = dataclasses.dataclass(frozen=True)(type(f"My{base.__name__}", (base,), {}))
        systems.register(System(CausalLM, kind, "llama"))
        assert family_of(CausalLM(model=kind())).model_type == model_type


@pytest.mark.parametrize("order", [SYSTEMS, SYSTEMS[::-1]], ids=["forward", "backward"])
def test_the_order_of_the_systems_decides_nothing(order, monkeypatch):
    """A new objective without a family in front of the others changes nothing either."""
    task = Classification(model=Bert(), labels=("a", "b")).bind_unchecked(Vocabulary.stand_in(99))
    model_types = ("bert", "distilbert", "gpt2")
    imported = [family_named(name, "here") for name in model_types]
    monkeypatch.setattr(systems, "_SYSTEMS", {})
    systems.register(System(CausalLM, Bert), System(CausalLM, Elmo), *order)
    assert family_of(task).models(task)[0].architecture == "BertForSequenceClassification"
    assert [family_named(name, "here") for name in model_types] == imported
    with pytest.raises(UserError, match="the model Elmo has no class in Transformers"):
        family_of(Classification(model=Elmo(), labels=("a", "b")))
