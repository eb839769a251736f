"""Every preset: it loads, its docstring's parameter count is true, and recipes are as published."""

import json
import math
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxlm.config.flags import override
from jaxlm.config.json import to_json
from jaxlm.config.presets import load_preset, preset_files
from jaxlm.errors import UserError
from jaxlm.knowledge.knowledge_graph import Vectors, write_vectors
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.parallel.mesh import make_mesh
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.training.optimizers import make_schedule
from jaxlm.training.program import Program

CONFIGS = Path(__file__).parents[2] / "configs"
PRESETS = sorted(path.stem for path in CONFIGS.glob("*.py"))


def preset(name):
    return load_preset(str(CONFIGS / f"{name}.py"))


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name.endswith(("_tiny", "bert_base")) else pytest.mark.slow) for name in PRESETS
])
def test_it_loads_and_has_as_many_parameters_as_it_says(name):
    experiment = preset(name)
    experiment.validate()
    data = experiment.data
    size = getattr(data, "vocab_size", experiment.objective.model.vocab_size)
    vocabulary = Vocabulary.stand_in(size, experiment.objective.symbols)
    objective = experiment.objective.bind(vocabulary, data.length)
    shapes = jax.eval_shape(objective.init, jax.random.key(0))
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    (said,) = re.findall(r"^Parameters:(.*)$", (CONFIGS / f"{name}.py").read_text(), re.M)
    assert f"{count:,}" in said.replace("; ", " ").split()


BERT = dict(name="adamw", learning_rate=1e-4, warmup_steps=10_000, schedule="linear", b1=0.9, b2=0.999, eps=1e-6,
            bias_correction=False, weight_decay=0.01, clip_norm=1.0)
GPT2 = dict(name="adamw", warmup_steps=2_000, schedule="cosine", b1=0.9, b2=0.95, weight_decay=0.1, clip_norm=1.0)
REFORMER = dict(name="adamw", learning_rate=7e-4, warmup_steps=2_000, schedule="inverse-sqrt", b1=0.9, b2=0.98,
                eps=1e-9, weight_decay=0.0, clip_norm=0.0)  # trax clips only where it is asked to
T5 = dict(name="adafactor", schedule="inverse-sqrt", weight_decay=0.0)

# optimizer; steps, batch, length
RECIPES = {
    "bert_base": (BERT, 1_000_000, 256, 128),
    "bert_large": (BERT, 1_000_000, 256, 128),
    "electra_small": (BERT | dict(learning_rate=5e-4), 1_000_000, 128, 128),
    "electra_base": (BERT | dict(learning_rate=2e-4), 766_000, 256, 512),
    "electra_large": (BERT | dict(learning_rate=2e-4), 400_000, 2048, 512),
    "ernie_base": (
        BERT | dict(learning_rate=5e-5, warmup_steps=None, warmup_share=0.1, schedule="constant"), 34_000, 512, 256
    ),
    "gpt1": (GPT2 | dict(learning_rate=2.5e-4, b2=0.999, weight_decay=0.01, final_share=0.0), 3_000_000, 64, 512),
    # Brown et al. 2020, table 2.1: 0.5, 1, 2 and 3.2 million tokens a step, 300 billion in all.
    **{
        f"gpt3_{size}": (GPT2 | dict(learning_rate=rate, warmup_steps=warmup, final_share=0.1), steps, batch, 2048)
        for size, rate, warmup, steps, batch in (
            ("125m", 6e-4, 715, 572_000, 256), ("350m", 3e-4, 715, 572_000, 256), ("760m", 2.5e-4, 715, 572_000, 256),
            ("1_3b", 2e-4, 358, 286_000, 512), ("2_7b", 1.6e-4, 358, 286_000, 512),
            ("6_7b", 1.2e-4, 179, 143_000, 1024), ("13b", 1e-4, 179, 143_000, 1024),
            ("175b", 0.6e-4, 119, 95_400, 1536),
        )
    },
    "reformer_enwik8": (REFORMER, 100_000, 8, 65_536),
    "reformer_enwik8_768": (REFORMER, 100_000, 8, 65_536),
    "nomic_base": (
        BERT | dict(learning_rate=5e-4, warmup_steps=6_000, b2=0.98, bias_correction=True, weight_decay=1e-5,
                    clip_norm=0.0), 100_000, 4096, 2048
    ),
    "masked_diffusion_base": (
        BERT | dict(learning_rate=3e-4, warmup_steps=2_500, schedule="constant", eps=1e-8, bias_correction=True,
                    weight_decay=0.0), 1_000_000, 512, 1024
    ),
    "gpt2": (GPT2 | dict(learning_rate=6e-4), 600_000, 512, 1024),
    "gpt2_medium": (GPT2, 600_000, 512, 1024),
    "gpt2_large": (GPT2, 600_000, 512, 1024),
    "gpt2_xl": (GPT2, 600_000, 512, 1024),
} | {
    f"t5_{size}": (T5, 1_000_000, batch, 512)
    for sizes, batch in (
        (("small", "base", "large", "3b", "11b"), 2048),
        (("1_1_small", "1_1_base", "1_1_large", "1_1_xl", "1_1_xxl"), 256),
    )
    for size in sizes
}


@pytest.mark.parametrize("name", RECIPES)
def test_published_recipes(name):
    experiment = preset(name)
    optimizer, steps, batch, length = RECIPES[name]
    assert {field: getattr(experiment.optimizer, field) for field in optimizer} == optimizer
    train = experiment.train
    assert (train.steps, train.batch_size, experiment.data.length, train.phases) == (steps, batch, length, ())


@pytest.mark.parametrize(
    ("name", "rate"), [("bert_base", 0.15), ("electra_small", 0.15), ("electra_base", 0.15), ("electra_large", 0.25)]
)
def test_masking_rates(name, rate):
    assert preset(name).objective.mask_rate == rate


@pytest.mark.parametrize(
    ("name", "step", "rate"),
    [
        ("t5_base", 5_000, 0.01), ("t5_1_1_xxl", 40_000, 0.005), ("t5_11b", 999_999, 0.001),  # 1/sqrt(max(step, 10^4))
        ("gpt2", 2_000, 6e-4), ("gpt2", 600_000, 6e-5), ("bert_large", 10_000, 1e-4), ("bert_large", 1_000_000, 0.0),
    ],
)
def test_learning_rates(name, step, rate):
    experiment = preset(name)
    found = float(make_schedule(experiment.optimizer, experiment.train.steps)(step))
    assert found == pytest.approx(rate, rel=1e-4, abs=1e-10)


def test_t5_1_1_is_pretrained_without_dropout_and_1_0_with_it():
    dropout = {name: preset(name).objective.model.dropout for name in PRESETS if name.startswith("t5_")}
    assert dropout.pop("t5_tiny") == 0.0
    assert dropout == {name: 0.0 if "1_1" in name else 0.1 for name in dropout}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PRESETS if name.endswith("_tiny")])
def test_a_tiny_preset_trains_in_bfloat16(name, tmp_path):
    """With a vocabulary of a multiple of 128 and a loss of one chunk, where XLA's CPU lacks some products."""
    flags = ["--objective.model.dtype", "bfloat16", "--train.batch-size", "4"]
    flags += [] if name == "transe_tiny" else ["--data.length", "32"]
    teacher_flags = ["--objective.teacher", "a run of bert_mini"]
    write_vectors(tmp_path, "entity", Vectors(tuple(map(str, range(256))), np.ones((256, 100), np.float32)))
    flags += {"distilbert_tiny": teacher_flags, "tinybert_tiny": teacher_flags,
              "elmo_tiny": ["--objective.noise-words", "512"],
              "ernie_tiny": ["--objective.entities", str(tmp_path)]}.get(name, [])
    experiment = override(preset(name), flags, "")
    vocabulary, length = Vocabulary.stand_in(1024, experiment.objective.symbols), experiment.data.length
    objective = experiment.objective.bind(vocabulary, length)
    assert objective.model.vocab_size == 1024

    def teacher(_: str) -> PretrainedModel:
        own = preset("bert_mini").objective.bind(vocabulary, 32)
        return PretrainedModel(own, jax.jit(own.init)(jax.random.key(1)))

    constants = objective.load_constants(objective.vocabulary, teacher)
    objective, mesh = objective.with_constants(constants), make_mesh(experiment.mesh, jax.devices()[:1])
    program = Program(objective, experiment.train, experiment.optimizer, mesh)
    batch = experiment.data.synthetic(4, objective.row_format(length), vocabulary)
    state, terms = program.train_step(program.init_state(program.init_params(0)), batch, constants)
    assert int(state.step) == 1 and np.isfinite(float(terms["loss"].total))


def test_only_a_name_that_ends_in_py_is_executed(tmp_path, monkeypatch):
    """A run folder's name never stands for a Python file beside it, nor a bare name for one in the user's configs/."""
    (tmp_path / "configs").mkdir()
    for path in (tmp_path / "run.py", tmp_path / "configs" / "run.py", tmp_path / "run"):
        path.write_text("raise SystemExit('executed')")
    monkeypatch.chdir(tmp_path)
    for name in ("run", "configs/run", str(tmp_path / "run"), "configs", "run.txt", ""):
        with pytest.raises(UserError, match="there is no preset or run folder"):
            load_preset(name)
    with pytest.raises(UserError, match=r"did you mean configs/run\.py"):
        load_preset("configs/run")


def test_presets_are_found_by_name_in_any_folder(tmp_path, monkeypatch):
    by_file = {path.stem: load_preset(str(path)) for path in (*CONFIGS.glob("*.py"), *CONFIGS.glob("tasks/*.py"))}
    monkeypatch.chdir(tmp_path)
    assert len(by_file) > 100 and preset_files().keys() == by_file.keys()
    assert {name: load_preset(name) for name in ("bert_base", "sst2")} == {
        name: by_file[name] for name in ("bert_base", "sst2")
    }
    (tmp_path / "gpt2").mkdir()
    assert load_preset("gpt2") == by_file["gpt2"]
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(to_json(by_file["bert_tiny"])))
    assert load_preset("gpt2") == by_file["bert_tiny"]  # a run folder
    (tmp_path / "bert_base.py").write_text((CONFIGS / "gpt1.py").read_text())
    assert load_preset("bert_base") == by_file["bert_base"] and load_preset("bert_base.py") == by_file["gpt1"]
    for name, words in (("bert_bse", r"did you mean bert_base"), ("sst_2", r"did you mean sst2"),
                        (f"{CONFIGS}/t5_bas.py", rf"did you mean {CONFIGS}/t5_base\.py"),
                        ("???", r"the presets are the files in .*presets\.")):
        with pytest.raises(UserError, match=words):
            load_preset(name)
