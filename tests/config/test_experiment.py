"""The configuration tree: what a preset or a config.json says is checked as flags are."""

from __future__ import annotations

import json
import re

import pytest

from jaxlm.config.experiment import Experiment
from jaxlm.config.json import to_json
from jaxlm.config.presets import load_config
from jaxlm.errors import UserError
from jaxlm.objectives.causal_lm import CausalLM
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.objectives.replaced_tokens import ReplacedTokens
from jaxlm.objectives.span_corruption import SpanCorruption

BERT, ELECTRA, GPT2, T5 = (Experiment(objective=cls()) for cls in (MaskedLM, ReplacedTokens, CausalLM, SpanCorruption))
PLAIN = ["gelu", "gelu_new", "relu", "silu"]


def changed(experiment: Experiment, field: str, value: str) -> Experiment:
    """A copy with one field set past the classes' own checks, as a preset sets it where nobody checks types."""
    copy = Experiment(**vars(experiment) | {"objective": type(experiment.objective)()})
    *parents, name = field.split(".")
    config = copy
    for parent in parents:
        fresh = type(getattr(config, parent))()
        object.__setattr__(config, parent, fresh)
        config = fresh
    object.__setattr__(config, name, value)
    return copy


@pytest.mark.parametrize(
    ("experiment", "field", "value", "choices"),
    [
        (BERT, "optimizer.name", "sgd", [
            "adamw", "stable-adamw", "lion", "muon", "lamb", "adafactor", "adagrad"
        ]),
        (BERT, "optimizer.schedule", "linaer", ["linear", "cosine", "wsd", "inverse-sqrt", "constant"]),
        (BERT, "data.tokenizer_kind", "wordpiece", ["unigram", "bpe", "byte-bpe", "bytes", "words"]),
        (BERT, "objective.model.dtype", "float16", ["float32", "bfloat16"]),
        (GPT2, "objective.model.remat", "dot", ["none", "cheap", "dots", "full"]),
        (T5, "objective.model.attention", "flash", ["auto", "xla"]),
        (T5, "objective.model.activation", "mish", ["gelu", "gelu_new", "relu", "silu", "gated-gelu"]),
        (BERT, "objective.model.activation", "gated-gelu", PLAIN),
        (ELECTRA, "objective.model.activation", "gated-gelu", PLAIN),
        (GPT2, "objective.model.activation", "gated-gelu", PLAIN),
    ],
)
def test_a_value_that_is_no_choice_is_refused(experiment, field, value, choices):
    with pytest.raises(UserError, match=re.escape(f"{field} is '{value}'; it must be Literal{choices}.")):
        changed(experiment, field, value).validate()


@pytest.mark.parametrize("experiment", [BERT, ELECTRA, GPT2, changed(T5, "objective.model.activation", "gated-gelu")])
def test_what_the_types_list_is_accepted(experiment):
    experiment.validate()


def test_a_run_folders_configuration_is_checked_too(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(to_json(BERT)))
    assert load_config(path) == BERT
    path.write_text(json.dumps(to_json(changed(BERT, "optimizer.name", "sgd"))))
    with pytest.raises(UserError, match=r"optimizer\.name is 'sgd'"):
        load_config(path)
    path.write_text('{"model_type": "bert"}')
    with pytest.raises(UserError, match="but of a Transformers folder; `jaxlm import` makes a run of it"):
        load_config(path)
    for text in ("5", "null", '["model_type"]'):
        path.write_text(text)
        with pytest.raises(UserError, match=f"^{path} is no configuration of a jaxlm run\\.$"):
            load_config(path)


@pytest.mark.parametrize("levels", [500, 900, 100_000])  # too many for jaxlm, for the JSON parser
def test_a_deeply_nested_configuration_is_one_sentence(levels, tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"type": "Experiment", "objective": ' + "[" * levels + "]" * levels + "}")
    with pytest.raises(UserError, match=f"^{path} cannot be read .*recursion"):
        load_config(path)
