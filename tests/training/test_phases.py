"""Phases of a run: stopped at their boundaries, changed, resumed and told."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.cli import main
from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig, parse_phases
from jaxlm.config.json import flatten
from jaxlm.config.presets import load_config, load_preset
from jaxlm.data.text import TextData
from jaxlm.errors import UserError
from jaxlm.fields import Setting
from jaxlm.models.bert import Bert
from jaxlm.models.llama import Llama
from jaxlm.models.modernbert import ModernBert
from jaxlm.objectives.causal_lm import CausalLM
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.parallel.mesh import MeshConfig, make_mesh
from jaxlm.runs.load import load_model, load_run
from jaxlm.runs.resolve import resolve
from jaxlm.runs.resume import _check_configuration, _check_phases, schedule_remarks
from jaxlm.runs.session import set_up, with_steps
from jaxlm.training.optimizers import make_optimizer, make_schedule
from jaxlm.training.program import check_program, make_update
from tests.training.support import (
    assert_same_arrays,
    metadata,
    metrics,
    stopped_after,
    write_text,
)
from tests.training.test_run import refused

PHASES = (
    "4x16, 4x32x4 optimizer.learning_rate=5e-3 optimizer.warmup_steps=1 optimizer.schedule=linear, "
    "4 objective.mask_rate=0.3 objective.model.activation=relu train.accumulate=2"
)


@pytest.mark.slow
def test_phases(preset, tmp_path, capsys):
    """Rows, then batch and schedule, then rates change, over a mixture; stopped at a boundary and inside, the run is
    that in one piece.
    """
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    mixture = f"{preset.parent / 'text.txt'}@0.7,{write_text(tmp_path / 'other.txt', seed=5)}@0.3"
    flags = [str(preset), "--train.phases", PHASES, "--train.log-every", "1", "--data.source", mixture]
    assert main(["pretrain", *flags, "--run-dir", str(whole)]) == 0
    said = capsys.readouterr().out
    second = "4 x 32 (optimizer.learning_rate 0.005, optimizer.warmup_steps 1, optimizer.schedule linear)"
    third = "8 x 32 (objective.mask_rate 0.3, objective.model.activation relu, train.accumulate 2)"
    assert f"batches of 16 x 16 for 4 steps, then {second} for 4 steps, then {third}, 1 cpu" in said
    assert f"From step 5 on, batches are {second}; so the loss may jump." in said
    assert f"From step 9 on, batches are {third}; so the loss may jump." in said
    assert re.search(r"Mixture of text 70\.0% \(.*\), other 30\.0% \(.*\); 12 steps are \d\.\d passes over it\n", said)
    # Warm-up of 2 steps and a constant rate, but for the phase that restarts its clock and has 4 steps of its own.
    rates = [0, 5e-3, 1e-2, 1e-2, 0, 5e-3, 5e-3 * 2 / 3, 5e-3 / 3, 1e-2, 1e-2, 1e-2, 1e-2]
    assert [line["learning_rate"] for line in metrics(whole)] == pytest.approx(rates)
    for steps in (4, 7, 12):
        code = stopped_after(steps, ["pretrain", *flags, "--run-dir", str(pieces)])
        assert code == (0 if steps == 12 else 143)
    assert metadata(pieces, 12) == metadata(whole, 12) and metrics(pieces) == metrics(whole)
    config = load_config(whole / "config.json")
    assert config.train.phases == parse_phases(PHASES) and len(config.phases) == 3
    # Later commands have the model of the last step, and the rates of the run.
    assert load_run(whole).objective.model.activation == "relu" != config.objective.model.activation
    assert load_run(whole).objective.mask_rate == 0.15
    for phases in (PHASES.replace("4x16", "5x16"), PHASES.replace("5e-3", "4e-3"), ""):
        said = refused(capsys, "pretrain", *flags, "--run-dir", pieces, "--train.phases", phases)
        assert "has done 12 steps" in said and "changes a phase that has begun; change only later ones" in said
    # --step is the number of steps before. Before another phase, `show` says what comes after it.
    for step, lengths in ((3, ["16", "32"]), (4, ["32"])):
        assert main(["show", str(whole), "--step", str(step), "--examples", "1"]) == 0
        said = capsys.readouterr().out
        assert re.findall(r"rows of at most (\d+) tokens", said)[: len(lengths)] == lengths
        assert (f"Batches are 16 x 16 up to step 4, then {second}:" in said) == (step == 3)
    assert main(["export", str(whole), str(tmp_path / "out")]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| Sequence length | 32 |" in card and "| Phases | 16 x 16 for 4 steps, then 4 x 32 (" in card
    # An encoder's vectors are those of `jaxlm embed`, which reads the folder's own settings.
    assert "UNEXPECTED" in card and "SentenceTransformer('out')" in card
    assert json.loads((tmp_path / "out" / "sentence_bert_config.json").read_text())["max_seq_length"] == 32
    assert main(["export", str(whole), str(tmp_path / "bare"), "--sentence-transformers", "none"]) == 0
    assert not (tmp_path / "bare" / "modules.json").exists()


def test_the_phases_of_a_preset_do_not_change_what_pretrained_weights_need():
    pretrained = PretrainedModel(MaskedLM(model=ModernBert()), {}, path="there")
    with pytest.raises(UserError, match=r"objective\.model\.global_theta 10000, .*there were trained with 160000"):
        resolve("modernbert_base", [], pretrained=pretrained)
    typed = "100 objective.model.global_theta=10000, 100"
    for phases in ("", typed):
        resolve("modernbert_base", ["--train.phases", phases, "--train.steps", "200"], pretrained=pretrained)


@pytest.mark.parametrize(("flags", "said"), [
    (["--objective.mask-rate", "0.3"], "--objective.mask-rate 0.3 leaves phase 1, 2 of train.phases at 0.5; to change"),
    (["--data.length", "64"], "--data.length 64 leaves phase 1 of train.phases at 16; to change that too, give"),
    (["--objective.mask-rate", "0.3", "--train.phases", "900"], ""), (["--train.seed", "1"], ""),
    (["--objective.mask-rate", "0.5"], ""),  # as in the phases
])
def test_a_flag_that_a_phase_of_the_preset_overrides_is_told(flags, said, capsys):
    resolve("eurobert_tiny", flags)
    told = capsys.readouterr().err
    assert said in told and bool(said) == bool(told)


def test_flags_extend_the_context_of_a_pretrained_model():
    """No parameter depends on the number of positions or on their rotation; without a flag they stay."""
    pretrained = PretrainedModel(CausalLM(model=Llama(max_positions=96, rope_theta=5e5)), {}, path="there")
    flags = ["--objective.model.max-positions", "256", "--objective.model.rope-scaling", "4.0"]
    for more, expected in (([], (96, 5e5, ())), (flags, (256, 5e5, (4.0,)))):
        model = resolve("llama_tiny", more, pretrained=pretrained).experiment.objective.model
        assert (model.max_positions, model.rope_theta, model.rope_scaling) == expected


def phased(phases: str, steps: int | None = 12, **train: Any) -> Experiment:
    train = TrainConfig(steps=steps, phases=phases, batch_size=8, **train)
    return with_steps(Experiment(MaskedLM(), TextData(length=32), train=train))


@pytest.mark.parametrize(("done", "before", "now"), [
    (6, "", "6, 6x16"),  # a run without phases gets one
    (6, "4x16, 8", "4x16, 3, 5 optimizer.weight_decay=0.1"),  # the current one ends earlier
    (4, "4x16, 8", "4x16, 8x8"),  # the first step of the second one is still to come
    (6, "4x16, 8x32x8", "4x16, 8"),  # the same in other words
    (6, "4x16, 8", "4x16, 8 objective.model.remat=full"),  # as any run may
])
def test_phases_to_come_may_change(done, before, now):
    _check_phases(SimpleNamespace(path="run", newest_step=done), phased(before), phased(now))


@pytest.mark.parametrize(("done", "before", "now"), [
    (6, "", "5, 6x16"), (5, "4x16, 8", "4x16, 8x8"), (5, "4x16, 8", "5x16, 8"), (0, "4x16, 8", "4x8, 8"),
    (5, "4x16, 8", "4x16, 8 optimizer.warmup_steps=10000"),  # the same number, and another clock
])
def test_phases_that_have_begun_may_not_change(done, before, now):
    with pytest.raises(UserError, match=f"run has done {max(done, 1)} steps with train.phases '{before}'"):
        _check_phases(SimpleNamespace(path="run", newest_step=done), phased(before), phased(now))


@pytest.mark.parametrize(("first", "is_refused"), [(4, False), (3, True)])
def test_a_mixture_with_phases_may_move(first, is_refused):
    """Its fingerprints tell whether it is the same text."""
    before, now = (
        dataclasses.replace(phased(f"{steps} data.source={folder}/a.txt, 8"),
                            data=TextData(f"{folder}/a.txt@1,{folder}/b.txt@2", length=32))
        for folder, steps in (("/old", 4), ("/new", first))
    )
    run = begun(before, 6)
    with pytest.raises(UserError, match="changes a phase that has begun") if is_refused else contextlib.nullcontext():
        _check_configuration(run, now)


@pytest.mark.parametrize(("phases", "steps", "length"), [
    ("4x16, 8", 12, None), ("4x16, 8", 4, 16), ("8, 4x16", 20, 16), ("", 12, None),
])
def test_a_run_that_ends_with_other_rows_says_so(phases, steps, length):
    remarks = schedule_remarks(SimpleNamespace(newest_step=0, experiment=None), phased(phases, steps))
    told = [line for line in remarks if f"read rows of {length} tokens, but evaluation" in line]
    assert bool(told) == bool(length) and not any("read rows" in line for line in remarks if line not in told)


def test_the_longest_rows_are_those_of_the_steps_that_were_done():
    """They are the length of a loaded model, of its export and of the card, whatever the run has at its end."""
    found = {phases: [phased(phases, 20).longest_rows(steps) for steps in (0, 1, 4, 5, 20)]
             for phases in ("4x16, 8", "4, 8x16", "4, 8x128x2", "")}
    assert found == {"4x16, 8": [16, 16, 16, 32, 32], "4, 8x16": [32] * 5, "4, 8x128x2": [32, 32, 32, 128, 128],
                     "": [32] * 5}


def test_the_clock_of_a_phase_is_that_of_its_remark():
    """The last phase decays over its last tenth: its end moves from step 100 to 200."""
    before, now = (phased("20x16, 80 optimizer.schedule=wsd", steps) for steps in (100, 200))
    (remark,) = schedule_remarks(SimpleNamespace(newest_step=95, experiment=before), now)
    assert "from step 182 to 200 instead of 92 to 100; 95 are done" in remark


def rates(experiment: Experiment) -> np.ndarray:
    """The learning rate of each step."""
    found = []
    for phase in experiment.phases:
        after, steps = phase.schedule_span()
        schedule = make_schedule(phase.experiment.optimizer.with_warmup(steps), steps, after)
        span = jnp.arange(phase.after, phase.last or experiment.train.steps)
        found.append(np.broadcast_to(schedule(span), span.shape))
    return np.concatenate(found)


@pytest.mark.parametrize(("fields", "factor"), [
    ("weight_decay=0.1", 1), ("b2=0.9 optimizer.clip_norm=0", 1), ("learning_rate=3e-4", 3),
])
def test_a_phase_without_a_schedule_follows_that_of_the_run(fields, factor):
    """Only a phase that names the schedule, its warm-up, its decay or its end begins one."""
    optimizer = OptimizerConfig(warmup_steps=None, warmup_share=0.25)
    one, two = (
        rates(dataclasses.replace(phased(phases), optimizer=optimizer.with_warmup(12)))
        for phases in ("6, 6", f"6, 6 optimizer.{fields}")
    )
    np.testing.assert_allclose(two, np.where(np.arange(12) < 6, one, factor * one), rtol=1e-6)
    assert one[6] > 0 == rates(phased("6, 6 optimizer.warmup_steps=2"))[6]


def test_a_phase_has_no_warmup_with_a_share_of_zero():
    """Neither before nor after the share of the run has become a number."""
    share = OptimizerConfig(warmup_steps=None, warmup_share=0.5)
    experiment = dataclasses.replace(
        phased("6, 6 optimizer.schedule=linear optimizer.warmup_share=0", None), optimizer=share
    )
    for each in (experiment, with_steps(experiment)):
        assert rates(each)[6] == share.learning_rate > rates(with_steps(experiment))[1]


def shared_warmup(steps: int, phases: str = "1000, 1000 optimizer.schedule=cosine", share: float = 0.1) -> Experiment:
    optimizer = OptimizerConfig(warmup_steps=None, warmup_share=share)
    return dataclasses.replace(phased(phases, steps), optimizer=optimizer)


def begun(experiment: Experiment, done: int) -> SimpleNamespace:
    return SimpleNamespace(path="run", age="", has_begun=True, newest_step=done, experiment=experiment,
                           metadata={"configuration": flatten(experiment, Setting.decides_result)})


@pytest.mark.parametrize(("done", "warmup"), [(900, 500), (1_000, 500), (1_150, 100)])
def test_a_phase_that_has_begun_keeps_its_warmup(done, warmup):
    """At the second start its share is of 5,000 steps in place of 1,000, and at the third one of 7,000."""
    run = begun(with_steps(shared_warmup(2_000)), done)
    for steps in (6_000, 8_000):
        resumed = shared_warmup(steps)
        _check_configuration(run, resumed)
        resumed = with_steps(resumed, run=run)
        assert resumed.phases[1].experiment.optimizer.with_warmup(steps - 1_000).warmup_steps == warmup
        run = begun(resumed, 1_150)
    with pytest.raises(UserError, match="changes a phase that has begun"):
        _check_configuration(run, shared_warmup(8_000, "1000, 1000 optimizer.schedule=cosine optimizer.warmup_steps=7"))


def test_a_run_that_has_begun_keeps_its_share_of_warmup():
    """Older runs have none in their metadata."""
    run = begun(with_steps(shared_warmup(2_000)), 1_150)
    with pytest.raises(UserError, match=r"optimizer.warmup_share: 0.1 -> 0.5"):
        _check_configuration(run, shared_warmup(2_000, share=0.5))
    del run.metadata["configuration"]["optimizer.warmup_share"]
    _check_configuration(run, shared_warmup(2_000))


@pytest.mark.parametrize(("field", "values"), [
    ("weight_decay", (0.1, 0.0)), ("clip_norm", (0.5, 0.0)), ("layer_decay", (0.8, 1.0)),
])
@pytest.mark.parametrize("order", [1, -1])
def test_a_phase_begins_or_ends_decay_and_clipping(field, values, order):
    """Its updates are those of an optimizer of its own, on the state of the run."""
    first, second = values[::order]
    model = Bert(vocab_size=64, hidden_size=8, num_layers=2, num_heads=2, intermediate_size=16, max_positions=32)
    experiment = dataclasses.replace(
        phased(f"6, 6 optimizer.{field}={second}"), objective=MaskedLM(model=model),
        optimizer=OptimizerConfig(warmup_steps=0, **{field: first}),
    )
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    check_program(experiment, mesh)
    last = experiment.phases[-1]
    run = make_update(experiment.objective, experiment.train, experiment.optimizer, mesh)
    phase = make_update(experiment.objective, experiment.train, last.experiment.optimizer, mesh, last, run.shapes)
    params = experiment.objective.init(jax.random.key(0))
    found, state = phase.optimizer.update(params, run.new_state(params).opt_state, params)
    alone = make_optimizer(last.experiment.optimizer, 12, model.input_params)
    assert_same_arrays(found, alone.update(params, alone.init(params), params)[0])
    assert jax.tree.structure(state) == jax.tree.structure(run.shapes.opt_state)


@pytest.mark.parametrize("fields", ["name=lion", "name=adagrad", "average=0.9", "freeze=('embeddings',)"])
def test_a_phase_that_stores_other_arrays_is_refused(fields):
    with pytest.raises(UserError, match=r"phase 2 of train.phases: .* would change the parameters, what the optimizer"):
        check_program(phased(f"6, 6 optimizer.{fields}"), make_mesh(MeshConfig(), jax.devices()[:1]))


@pytest.mark.parametrize(("size", "warmup", "peak", "stable", "later", "decay"), [
    ("base", 3_815, 8e-4, 374_902, 3e-4, 10_596), ("large", 1_664, 5e-4, 180_329, 5e-5, 9_781),
])
def test_modernbert_has_its_published_rates_at_every_step(size, warmup, peak, stable, later, decay):
    """Warner et al. 2024, appendix A: a linear warm-up, a constant rate, a later one, then 1 - sqrt to a thousandth."""
    experiment = load_preset(f"configs/modernbert_{size}.py")
    step = np.arange(experiment.train.steps)
    end = np.sqrt(np.maximum(step - (len(step) - decay), 0) / decay)
    expected = np.where(step < stable, peak * np.minimum(step / warmup, 1), later * (1 - 0.999 * end))
    np.testing.assert_allclose(rates(experiment), expected, rtol=1e-5, atol=1e-10)


@pytest.mark.slow
def test_a_phase_is_told_after_the_step_before_it(preset, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("jaxlm.training.progress.SECONDS_BETWEEN_LINES", 0.0)
    flags = ["--train.phases", "3x16,1", "--train.log-every", "1", "--train.steps", "4"]
    assert main(["pretrain", str(preset), "--run-dir", str(tmp_path / "run"), *flags]) == 0
    lines = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    told = next(number for number, line in enumerate(lines) if line.startswith("From step 4 on, batches are 8 x 32"))
    assert (lines[told - 1], lines[told + 1]) == ("step 3/4", "step 4/4")


WRITER_FIRST = """
from jaxlm.config.experiment import Experiment, OptimizerConfig, PhaseConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.bert import Bert
from jaxlm.models.llama import EuroBert, Llama
from jaxlm.objectives.causal_lm import CausalLM
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.objectives.replaced_tokens import ReplacedTokens

experiment = Experiment(
    objective={objective},
    data=TextData(source={text!r}, length=32, vocab_size=512, held_out=0.1),
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2, schedule="constant"),
    train=TrainConfig(steps=8, batch_size=8, log_every=1, eval_every=4, eval_batches=2, checkpoint_every=4,
                      tracker="none", phases={phases}),
)
"""
SIZES = "hidden_size=16, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=32, max_positions=32"
ENCODER = f"MaskedLM(model=EuroBert({SIZES}), input_format='document')"


def write_phases(folder, phases: str, objective: str = ENCODER) -> str:
    text = write_text(folder / "text.txt")
    (folder / "phases.py").write_text(WRITER_FIRST.format(text=str(text), objective=objective, phases=phases))
    return str(folder / "phases.py")


@pytest.fixture(scope="module")
def writer_first(tmp_path_factory):
    """A run that writes for four steps, then fills masks for four, and its preset."""
    folder = tmp_path_factory.mktemp("objectives")
    config = write_phases(folder, "(PhaseConfig(4, 16, objective=CausalLM()), PhaseConfig(4))")
    assert main(["pretrain", config, "--run-dir", str(folder / "whole")]) == 0
    return config, folder / "whole"


def test_a_phase_with_its_own_objective_is_the_run_of_that_objective(writer_first, tmp_path):
    """Up to the border, parameters are bit for bit those of a decoder's own steps; then the same ones go on."""
    config, whole = writer_first
    alone = write_phases(tmp_path, "()", f"CausalLM(model=Llama({SIZES}, rope_theta=250_000.0))")
    flags = ["--data.source", load_preset(config).data.source, "--data.length", "16", "--train.batch-size", "16"]
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    sessions = [set_up(resolve(*each), load_model).open_data(list) for each in ((alone, flags), (config,))]
    program, run = (session.program(mesh) for session in sessions)
    state = program.init_state(run.init_params(0))
    with contextlib.closing(sessions[0].feed(mesh).after(0)) as batches:
        for batch in itertools.islice(batches, 4):
            state, _ = program.train_step(state, batch, program.constants)
    assert_same_arrays(state.params, load_run(f"{whole}@4").params)
    lines = {line["step"]: line for line in metrics(whole)}
    assert {"lm_loss", "eval_lm_loss"} <= lines[4].keys() and "mlm_loss" not in lines[4]
    assert {"mlm_loss", "eval_mlm_loss"} <= lines[8].keys() and "lm_loss" not in lines[8]
    first, last = load_run(f"{whole}@4"), load_run(whole)
    assert [type(model.objective).__name__ for model in (first, last)] == ["CausalLM", "MaskedLM"]
    assert [type(model.objective.model).__name__ for model in (first, last)] == ["Llama", "EuroBert"]
    assert [model.length for model in (first, last)] == [16, 32]  # of the rows that it has read
    assert load_config(whole / "config.json").phases[0].experiment.objective.model.vocab_size == 512


@pytest.mark.parametrize("stops", [(4, 8), (3, 5, 8)])
def test_a_run_goes_on_across_the_border_between_objectives(writer_first, tmp_path, stops):
    config, whole = writer_first
    for steps in stops:
        code = stopped_after(steps, ["pretrain", config, "--run-dir", str(tmp_path / "run")])
        assert code == (0 if steps == 8 else 143)
    assert metadata(tmp_path / "run", 8) == metadata(whole, 8) and metrics(tmp_path / "run") == metrics(whole)


@pytest.mark.parametrize(("second", "is_refused"), [
    ("objective.model.activation=relu", True), ("objective.model.dropout=0.3 objective.mask_rate=0.3", False),
])
def test_a_mean_is_of_one_function(finished, second, is_refused):
    """Weights that were learnt with another activation are no weights of this one; dropout and rates leave it alone."""
    file = finished / "config.json"
    config = json.loads(file.read_text())
    config["train"]["phases"] = f"4, 8 {second}"
    file.write_text(json.dumps(config))
    load_run(f"{finished}@8,12")
    with pytest.raises(UserError, match="different objectives or models") if is_refused else contextlib.nullcontext():
        load_run(f"{finished}@4,12")


@pytest.mark.slow
def test_later_commands_have_the_objective_of_their_step(writer_first, capsys):
    config, whole = writer_first
    assert main(["generate", f"{whole}@4", "ba", "--max-new-tokens", "2"]) == 0
    assert main(["fill-mask", str(whole), "ba [MASK]"]) == 0
    assert main(["show", config, "--step", "3", "--examples", "1"]) == 0
    said = capsys.readouterr().out
    assert "CausalLM, batch of step 4: 16 rows of at most 16" in said
    assert "MaskedLM, batch of step 5: 8 rows of at most 32" in said
    for phase, shape in (("1", "batch 16 x 16"), ("2", "batch 8 x 32")):
        assert main(["plan", config, "--phase", phase, "--data.vocab-size", "512"]) == 0
        said = capsys.readouterr()
        assert shape in said.out and f"this is a step of phase {phase} of 2" in said.err
        assert "Batches are 16 x 16 (objective CausalLM) for 4 steps, then 8 x 32" in said.err


@pytest.mark.slow
def test_what_a_phase_does_not_use_is_left_alone(tmp_path):
    """The head of next-sentence prediction and its moments, beside gradients that weight decay would change."""
    bert = "MaskedLM(model=Bert(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32, max_positions=32))"
    single = "MaskedLM(input_format='document')"
    phases = f"(PhaseConfig(2), PhaseConfig(2, objective={single}), PhaseConfig(4))"
    config = write_phases(tmp_path, phases, bert)
    flags = ["--train.checkpoint-every", "1", "--train.keep-checkpoints", "9"]
    assert main(["pretrain", config, "--run-dir", str(tmp_path / "run"), *flags]) == 0
    sums = [metadata(tmp_path / "run", step)["checksums"] for step in (2, 3, 4, 5)]
    head = [name for name in sums[0] if "next_sentence" in name or "nsp" in name]
    others = [name for name in sums[0] if name not in head and "word" in name]
    assert len(head) == 6 and others  # kernel and bias, and their two moments
    for name in head:
        assert sums[0][name] == sums[1][name] == sums[2][name] != sums[3][name]
    for name in others:
        assert sums[1][name] != sums[2][name]


@pytest.mark.parametrize(("phases", "said"), [
    ("(PhaseConfig(4, objective=CausalLM(model=Llama(num_layers=2))), PhaseConfig(4))", "leave its model out"),
    ("(PhaseConfig(4, objective=MaskedLM()), PhaseConfig(4))", "phase 1 of train.phases: objective.input_format"),
    ("(PhaseConfig(4, objective=ReplacedTokens()), PhaseConfig(4))", "needs a NetworkPair, and the run has a EuroBert"),
    ("(PhaseConfig(4, fields={'data.temperature': 2.0}), PhaseConfig(4))", "are for a mixture of texts"),
])
def test_a_phase_with_other_parameters_is_refused(tmp_path, capsys, phases, said):
    assert said in refused(capsys, "pretrain", write_phases(tmp_path, phases), "--run-dir", tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_the_best_of_two_objectives_is_refused(writer_first, tmp_path, capsys):
    said = refused(capsys, "pretrain", writer_first[0], "--run-dir", tmp_path / "run", "--train.patience", "2")
    assert "compare evaluations of one objective" in said
