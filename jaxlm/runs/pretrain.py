"""Training from start to end, pretraining or a task: `pretrain(resolved, run_dir)` reads from top to bottom."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from typing import Any, NamedTuple

import jax
from etils import epath
from jax.sharding import Mesh

from jaxlm import hub
from jaxlm.config.experiment import Experiment, Resolved
from jaxlm.config.json import flatten
from jaxlm.config.presets import loaded_presets
from jaxlm.data.mixture import describe_draws
from jaxlm.errors import UserError
from jaxlm.huggingface.table import listed
from jaxlm.inference.samples import sampler
from jaxlm.objectives.base import Bound
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.parallel.hosts import from_main, main_first, require_same, require_shared, together
from jaxlm.parallel.mesh import check_batch, make_mesh
from jaxlm.paths import run_path
from jaxlm.runs import resume
from jaxlm.runs.folder import RunFolder, hold, split_steps
from jaxlm.runs.load import constant_arrays, load_model
from jaxlm.runs.session import Session, require_model, set_up
from jaxlm.training.checkpoints import Checkpoints
from jaxlm.training.clock import Clock
from jaxlm.training.loop import Run, train
from jaxlm.training.metrics import MetricsWriter, Totals, evaluations, is_out_of_patience, last_evaluation, read_metrics
from jaxlm.training.program import Program, TrainState, check_program
from jaxlm.training.progress import Progress
from jaxlm.training.trackers import require_tracker
from jaxlm.trees import leaves, subtrees, within
from jaxlm.types import Params, Report


class Trained(NamedTuple):
    """A run after its last step."""

    session: Session
    program: Program
    state: TrainState
    figures: dict[str, float]
    """Figures of the last evaluation; none without held-out data."""
    metadata: dict[str, Any]
    """Contents of data.json."""
    signal: int = 0
    """Signal that arrived in the last step, which stops what would follow; 0 for none."""


def pretrain(resolved: Resolved, run_dir: str | os.PathLike[str], report: Report = print) -> Trained:
    """Train to `train.steps`, pretraining or a task, and resume if the folder has a checkpoint.

    Raises:
        UserError: A flag, the data or the run folder does not fit.
        NotFinite: The loss diverges; a UserError and a FloatingPointError.
        Stopped: A signal stopped the run, which has been saved.
    """
    clock = Clock()
    resolved.experiment.validate()
    require_model(resolved.experiment)
    report = report if jax.process_index() == 0 else lambda _: None
    with contextlib.ExitStack() as stack:
        # What costs nothing to find comes first: the text may take hours to prepare.
        resolved, run = _open_folder(resolved, run_path(run_dir), stack)
        mesh = make_mesh(resolved.experiment.mesh)
        t, row_group = resolved.experiment.train, resolved.experiment.objective.row_group
        check_batch(t.batch_size, t.accumulate, mesh, row_group)
        setup = set_up(resolved, load_model, run, report, constant_arrays)
        if not setup.experiment.data.has_labels:  # before its rows are read, a task has no classes, and so no shapes
            check_program(setup.without_data().experiment, mesh)
        return _train(setup.open_data(report), mesh, report, stack, clock)


def _pinned(experiment: Experiment, run: RunFolder) -> Experiment:
    """Return the configuration with the commits of its models on the hub (see `jaxlm.hub`), those of the run first."""
    fields = (("data", "tokenizer", hub.TOKENIZER), ("objective", experiment.objective.constants_field, hub.MODEL))
    for part, field, files in fields:
        value = getattr(getattr(experiment, part), field, None)
        if isinstance(value, str) and value.startswith(hub.PREFIX):
            stored = getattr(getattr(run.experiment, part, None), field, None)
            changed = dataclasses.replace(getattr(experiment, part), **{field: hub.pin(value, stored, files)})
            experiment = dataclasses.replace(experiment, **{part: changed})
    return experiment


def _open_folder(
    resolved: Resolved, folder: epath.Path, stack: contextlib.ExitStack
) -> tuple[Resolved, RunFolder]:
    """Lock the run folder until `stack` closes; return the configuration with pinned models, and the folder's state."""
    def lock() -> None:
        require_tracker(resolved.experiment.train.tracker)
        stack.enter_context(hold(folder))

    def read() -> tuple[Resolved, RunFolder]:
        run = RunFolder.read(folder)
        found = resolved._replace(experiment=_pinned(resolved.experiment, run))
        resume.check_run(run, found)
        return found, run

    source = resolved.pretrained.path if resolved.pretrained else ""
    facts = _settings(resolved.experiment) | {"init_from": source * source.startswith(hub.PREFIX)}
    require_same(facts | {"code of presets": loaded_presets()})
    main_first(lock, "lock the run folder", everywhere=False)
    require_shared(folder, "--run-dir")
    if cache := resolved.experiment.data.shared_cache:
        require_shared(cache, "--data.cache-dir")
    return main_first(read, "check the run folder")


def _train(session: Session, mesh: Mesh, report: Report, stack: contextlib.ExitStack, clock: Clock) -> Trained:
    """Write the run's files, restore or initialize the state, and run the steps that are left."""
    experiment, run = session.experiment, session.run
    t = experiment.train
    program = session.program(mesh)
    if experiment.data.has_labels:  # a task may open a model for its rows, as KagNet does, on all processes
        feed = together(lambda: session.feed(mesh), "all to encode the rows")
    else:
        feed = main_first(lambda: session.feed(mesh), "count the rows")  # the others find counts of many
    texts = feed.texts(3) if t.sample_every and jax.process_count() == 1 else []

    def sample(objective: Bound, params: Params) -> list[str]:
        return sampler(objective, session.tokenizer, texts)(params)

    report(f"{session.source.summary}; {t.steps:,} steps are {feed.passes:,.1f} passes over it")
    for line in describe_draws(feed.draws):
        report(line)
    metadata = resume.run_metadata(session, program.constants)
    # It makes the last checks, then writes the run's files.
    main_first(lambda: resume.write_run(session, metadata), "write the configuration", everywhere=False)

    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(program.shapes))
    checkpoints = Checkpoints(run.path / "checkpoints", t.keep_checkpoints, criterion=t.criterion, size=size)
    stack.callback(checkpoints.close)
    with clock.during("restore" if checkpoints.steps() else "startup"):
        state, totals = restore_or_init_state(program, checkpoints, metadata, session.pretrained, report)
        after_step = int(state.step)
    report(_description(program, experiment) + (f", resumed at step {after_step:,}" if after_step else ""))
    if after_step >= t.steps or is_out_of_patience(evaluations(run.path, t.criterion, after_step), t):
        more = "steps" if after_step >= t.steps else "patience"
        report(f"Finished: {after_step:,} steps are done; raise --train.{more} to train longer. Run: {run.path}")
        return Trained(session, program, state, last_evaluation(run.path)[1], metadata)
    is_new = experiment.command == "pretrain" and not after_step
    remarks = _remarks(experiment, session.pretrained) if is_new else []
    for line in [*resume.schedule_remarks(run, experiment), *remarks, "Compiling the step; its first figures follow."]:
        report(line)

    clock.resume(read_metrics(run.path))  # before the writer leaves out the lines after the checkpoint

    def open_writer() -> MetricsWriter:
        metrics = MetricsWriter(run.path, t.tracker, after_step, _settings(experiment))
        return stack.enter_context(contextlib.closing(metrics))

    writer = main_first(open_writer, "open the metrics", everywhere=False)
    progress = stack.enter_context(Progress(t.steps, after_step, enabled=jax.process_index() == 0))
    steps = Run(program, feed, checkpoints, metadata, writer, progress, clock)
    state, figures, signal = train(steps, state, totals, sample if texts else None)
    done = checkpoints.steps()[-1]  # fewer than `train.steps` if training stopped early
    progress.note(f"Finished {done:,}{f' of {t.steps:,}' if done < t.steps else ''} steps. Run: {run.path}")
    return Trained(session, program, state, figures, metadata, signal)


def _settings(experiment: Experiment) -> dict[str, Any]:
    """Return the fields that do not belong to one machine, by name."""
    return flatten(experiment, lambda setting: "path" not in setting.marks)


def _description(program: Program, experiment: Experiment) -> str:
    """Return the line that says what is trained, on what batches and devices."""
    devices = program.mesh.devices
    kind = f"{devices.size} {devices.flat[0].device_kind} device{'s' * (devices.size > 1)}"
    return f"{type(program.objective).__name__}: {program.size}, batches of {experiment.describe_phases()}, {kind}"


def _remarks(experiment: Experiment, pretrained: PretrainedModel | None) -> list[str]:
    """Return remarks on other dropout than the model's that a new run began from, and on reading its text again."""
    if pretrained is None:
        return []
    own, model = experiment.objective.model, pretrained.objective.model
    rates = [f"{name} {getattr(model, name):g} -> {getattr(own, name):g}" for name in ("dropout", "attention_dropout")
             if hasattr(own, name) and getattr(model, name, getattr(own, name)) != getattr(own, name)]
    remarks = [f"Other dropout than in {pretrained.path}, which fine-tuning and exports take over: {', '.join(rates)}"]
    remarks *= bool(rates)
    theirs = RunFolder.read(pretrained.path).experiment if pretrained.step else None
    if theirs is None or theirs.data.source != experiment.data.source:
        return remarks
    if (share := getattr(theirs.data, "held_out", 1)) < getattr(experiment.data, "held_out", 0):
        remarks += [f"{pretrained.path} held out less of this text, so that it may have been trained on "
                    f"documents that are held out here; --data.held-out {share} holds out the same"]
    if (theirs.data.length, theirs.train.seed) != (experiment.data.length, experiment.train.seed):
        return remarks
    return [*remarks, f"The text is read from the beginning, in the order of {pretrained.path}; "
            f"--train.seed {experiment.train.seed + 1} gives another one"]


def restore_or_init_state(
    program: Program, checkpoints: Checkpoints, metadata: dict[str, Any], source: PretrainedModel | None, report: Report
) -> tuple[TrainState, Totals]:
    """Return the state to train from, and the sums of metrics that are not logged yet."""
    restored = checkpoints.restore(program.shapes, program.shardings, report)
    if restored is not None:
        return restored[0], Totals(*(restored[1][name] for name in ("unlogged", "skipped_in_row")))
    if from_main(bool(checkpoints.steps())):  # only step 0, which has no optimizer state
        params, _ = checkpoints.restore_params(program.shapes.params, program.shardings.params, step=0)
        report("Starting from the parameters of step 0, as imported")
        return program.init_state(params), Totals()
    if program.train.decay_steps:
        state = _state_of(program, source, report)
        checkpoints.save(state, int(state.step), metadata | Totals().state())
        return state, Totals()
    fresh = program.init_params(program.train.seed)
    params = program.objective.merge_pretrained(fresh, source)
    is_merged = params is not fresh
    lacking = unshared(fresh, source) if source is not None else ""
    del fresh  # the state may need its memory
    state = program.init_state(params)
    if is_merged:
        if source is not None:
            report(f"Beginning from the weights and the tokenizer of {source.path}{lacking}")
        # Saved, so that a run that is killed before its next checkpoint does not start from random weights.
        checkpoints.save_params(state.params, metadata)
        checkpoints.wait()
    return state, Totals()


def _state_of(program: Program, source: PretrainedModel, report: Report) -> TrainState:
    """Return the state of the checkpoint of another run, optimizer included."""
    checkpoints = Checkpoints(run_path(split_steps(source.path)[0]) / "checkpoints", read_only=True)
    try:
        restored = checkpoints.restore(program.shapes, program.shardings, report, source.step)
    finally:
        checkpoints.close()
    if restored is None:
        raise UserError(f"{source.path} no longer has step {source.step:,}; raise its --train.keep-checkpoints.")
    report(f"Going on from step {source.step:,} of {source.path}; the learning rate decays from here on")
    return restored[0]


def unshared(params: Params, source: PretrainedModel) -> str:
    """Return the parameters that only the run or only the pretrained model has, as the end of a line; else ""."""
    ours = set(leaves(params))
    theirs = {path for path in leaves(source.params) if not any(within(path, fresh) for fresh in source.fresh)}
    lacking, unused = listed(subtrees(ours - theirs, ours)), listed(subtrees(theirs - ours, theirs))
    return (
        (f"; randomly initialized: {lacking}" if lacking else "")
        + (f"; unused weights: {unused}" if unused else "")
    )
