"""What the marks of fields do: JSON, flags and comparisons go by them, for any dataclass."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re

import pytest

from jaxlm import systems
from jaxlm.config import flags
from jaxlm.config.experiment import Experiment, TrainConfig
from jaxlm.config.flags import override
from jaxlm.config.json import differences, flatten, from_json, to_json
from jaxlm.errors import UserError
from jaxlm.fields import Setting, check_ranges, field
from jaxlm.objectives.base import Objective
from jaxlm.tokenizers.vocabulary import Vocabulary


@dataclasses.dataclass(frozen=True)
class Layer:
    width: int = 4


@dataclasses.dataclass(frozen=True)
class Model:
    """A model of two layers."""

    layers: tuple[Layer, ...] = (Layer(), Layer(8))
    rates: tuple[float, ...] = (0.5,)
    size: int = 16
    """The size."""
    dropout: float = field(0.1, recipe=True)
    remat: str = field("none", resumable=True)


@dataclasses.dataclass(frozen=True)
class Learn(Objective):
    """What is learnt."""

    model: Model = field(Model(), weights=True)
    rate: float = 0.15
    cache: str = field("", path=True)


BOUND = Experiment(objective=Learn().bind_unchecked(Vocabulary.stand_in(160)))


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    for cls in (Layer, Model, Learn):
        monkeypatch.setitem(systems._CLASSES, systems.type_name(cls), cls)


def test_what_decides_the_result_and_what_decides_the_weights():
    result = set(flatten(BOUND.objective, Setting.decides_result))
    assert result == {"model", "model.layers", "model.rates", "model.size", "model.dropout", "rate"}
    weights = set(flatten(BOUND.objective, Setting.decides_weights))
    assert weights == {"model", "model.layers", "model.rates", "model.size"}
    steps = {name for name in flatten(BOUND, Setting.decides_result) if name.startswith(("train.", "mesh"))}
    kept = ("batch_size", "phases", "decay_steps", "accumulate", "seed")
    assert steps == {f"train.{name}" for name in kept}


@dataclasses.dataclass(frozen=True)
class Ranges:
    share: float = field(0.5, range="[0, 1]")
    rate: float | None = field(0.5, range="(0, inf)")


def test_ranges_have_open_and_closed_ends():
    for share, rate in ((0, 0.1), (1, 1e300), (0.5, None)):
        check_ranges(Ranges(share, rate), "")
    for values, words in (((-0.1, 1), "x.share is -0.1; it must be in [0, 1]."), ((1.1, 1), "x.share is 1.1"),
                          ((0, 0.0), "x.rate is 0.0; it must be in (0, inf)."), ((0, math.inf), "x.rate is inf"),
                          ((math.nan, 1), "x.share is nan")):
        with pytest.raises(UserError, match=re.escape(words)):
            check_ranges(Ranges(*values), "x.")


def test_json_has_neither_bound_fields_nor_paths():
    objective = Learn(cache="/elsewhere", rate=0.2).bind_unchecked(Vocabulary.stand_in(170))
    changed = dataclasses.replace(BOUND, objective=objective)
    value = to_json(changed)
    assert set(value["objective"]) == {"type", "model", "rate"}
    back = from_json(value | {"objective": value["objective"] | {"cache": "/elsewhere"}})
    assert back == Experiment(objective=Learn(rate=0.2)), "a path of another machine is not taken either"
    with pytest.raises(UserError, match="has a field 'vocabulary' that Learn does not have"):
        from_json({"type": "tests:Learn", "vocabulary": 3})


def test_differences_are_named():
    other = dataclasses.replace(BOUND, objective=Learn(model=Model(size=8)), train=TrainConfig(steps=3))
    assert differences(flatten(BOUND), flatten(other)) == [
        "objective.model.size: 16 -> 8", "train.steps: 1000000 -> 3",
    ]
    assert differences({"old": 1, "same": 2}, {"new": 1, "same": 2}) == [], "fields of another version"


def test_flags_keep_what_no_flag_sets(capsys):
    changed = override(BOUND, ["--objective.model.size", "3", "--objective.model.rates", "1", "2"], "x")
    assert changed.objective == dataclasses.replace(BOUND.objective, model=Model(size=3, rates=(1.0, 2.0)))
    assert changed.objective.vocabulary is BOUND.objective.vocabulary
    with pytest.raises(SystemExit):
        override(BOUND, ["--objective.rate", "1", "--help"], "x")
    said = capsys.readouterr().out
    assert "--objective.model.size INT" in said and "A model of two layers." in said
    assert "--objective.vocabulary" not in said and "--objective.model.layers" not in said
    for name in ("vocabulary", "model.layers", "model.layers.0.width"):
        with pytest.raises(UserError, match="there is no field"):
            override(BOUND, [f"--objective.{name}", "3"], "x")
    assert not flags._is_struct((1, 2)) and flags._is_struct((Layer(),))


def test_types_are_checked_in_tuples_too():
    for bad, name in ((Learn(model=Model(rates=(1, "x"))), "objective.model.rates"),
                      (Learn(model=3), "objective.model"), (Learn(rate="x"), "objective.rate"), ((), "objective")):
        with pytest.raises(UserError, match=f"^{name} is .*; it must be "):
            Experiment(objective=bad).validate()
    with pytest.raises(UserError, match=r"such as Model\(\)\.$"):
        Experiment(objective=Learn(model=Model)).validate()


def test_no_field_of_an_objective_hides_a_method():
    """As KagNet's `vectors`, a path, once hid the method by which every run is opened."""
    objectives = {*(system.objective for system in systems.all_systems()), *(task.task for task in systems.all_tasks())}
    hidden = [f"{cls.__name__}.{one.name}" for cls in objectives for one in dataclasses.fields(cls)
              for base in cls.__mro__ if inspect.isfunction(vars(base).get(one.name))]
    assert len(objectives) > 20 and not hidden
