"""Pretraining from start to end: `pretrain(experiment, run_dir)` reads from top to bottom."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import jax

from jaxlm.config.experiment import Experiment, Resolved
from jaxlm.huggingface.table import listed
from jaxlm.objectives.base import PretrainedModel, load_constants, with_constants
from jaxlm.parallel.hosts import main_first
from jaxlm.parallel.mesh import check_batch, make_mesh
from jaxlm.parallel.rules import shardings
from jaxlm.paths import local_folder
from jaxlm.runs import folder as run_folder
from jaxlm.runs import resume
from jaxlm.runs.load import load_teacher
from jaxlm.training.checkpoints import Checkpoints
from jaxlm.training.feed import Feed
from jaxlm.training.loop import StepLog, train
from jaxlm.training.metrics import MetricsWriter, Totals, evaluations, is_spent, last_evaluation
from jaxlm.training.program import Program, TrainState
from jaxlm.training.progress import Progress
from jaxlm.trees import paths, subtrees, within
from jaxlm.types import Params, Report


def pretrain(resolved: Resolved, run_dir: str | Path, report: Report = print) -> dict[str, float]:
    """Train to `train.steps`, pretraining or a task, and resume if the folder has a checkpoint.

    Returns:
        The figures of the last evaluation.

    Raises:
        UserError: the user's mistakes.
        NotFinite: the loss diverges; a UserError and a FloatingPointError.
        Stopped: a signal stopped the run, which has been saved.
    """
    resolved.experiment.validate()
    folder = local_folder(run_dir, "runs")
    with contextlib.ExitStack() as stack:
        def hold() -> None:
            stack.enter_context(run_folder.held(folder))
            resume.check_source(folder, resolved)
            resume.check_configuration(folder, resolved.experiment)

        main_first(hold, everywhere=False)
        report = report if jax.process_index() == 0 else lambda _: None
        return _pretrain(resolved, folder, report, stack)


def _pretrain(
    resolved: Resolved, folder: Path, report: Report, stack: contextlib.ExitStack
) -> dict[str, float]:
    experiment, source = resolved
    t = experiment.train

    # The mesh first: its mistakes are cheap to find, those in a corpus are not.
    mesh = make_mesh(experiment.mesh)
    check_batch(t.batch_size, t.accumulate, mesh, experiment.objective.row_group)

    # The tokenizer, what it lacks, teachers; then the text.
    data = resume.data_of(folder, experiment.data)
    symbols = experiment.objective.symbols
    pretrained = source.tokenizer.with_symbols(symbols) if source else None
    tokenizer = pretrained or main_first(lambda: data.prepare_tokenizer(report, symbols))
    imported = source is not None
    objective = resume.bind(folder, experiment, tokenizer.vocabulary, imported)
    constants = load_constants(objective, load_teacher)
    text = main_first(lambda: data.open(tokenizer, report))
    objective = resume.bind(folder, experiment, tokenizer.vocabulary, imported, text.statistics)
    feed = Feed(text, objective, t, data.length, mesh)
    report(f"{text.summary}; {t.steps:,} steps are {feed.passes:,.1f} passes over it")

    # The program; from here on the folder is this run's.
    constants = jax.device_put(constants, shardings(constants, mesh))
    begun_from = {"imported_from": source.path, "fresh": list(source.fresh)} if source else {}
    metadata = resume.run_metadata(folder, experiment, text, tokenizer, constants, begun_from)
    program = Program(objective, t, experiment.optimizer, mesh, constants)
    steps_before = run_folder.recorded_steps(folder)
    main_first(lambda: resume.claim(folder, experiment, tokenizer, metadata), everywhere=False)

    # The state: restored, begun from another model, or fresh.
    checkpoints = Checkpoints(folder / "checkpoints", t.keep_checkpoints)
    stack.callback(checkpoints.close)
    state, totals = initial_state(program, checkpoints, metadata, source, t.seed, report)
    first = int(state.step)
    entropy = text.statistics.unigram_entropy
    report(
        f"{type(objective).__name__}: {program.num_params:,} parameters, batches of {feed}, "
        f"{mesh.size} {mesh.devices.flat[0].device_kind} device{'s' * (mesh.size > 1)}"
        + (f", resumed at step {first:,}" if first else "")
    )
    if why := why_finished(experiment, folder, first):
        report(why)
        return last_evaluation(folder)[1]
    for remark in schedule_remarks(experiment, first, steps_before):
        report(remark)
    report("Compiling the step; its first figures follow.")

    # The steps.
    main = jax.process_index() == 0
    writer = MetricsWriter(folder, t.tensorboard, first) if main else None
    if writer:
        stack.callback(writer.close)
    progress = stack.enter_context(Progress(t.steps, first, enabled=main))
    log = StepLog(program, feed, checkpoints, first, writer, progress, totals)
    evaluation = train(program, state, feed, checkpoints, log, metadata, entropy)
    done = run_folder.newest_step(folder)  # fewer where training stopped early
    progress.note(f"Finished {done:,}{f' of {t.steps:,}' if done < t.steps else ''} steps. Run: {folder}")
    return evaluation


def initial_state(
    program: Program, checkpoints: Checkpoints, metadata: dict[str, Any], source: PretrainedModel | None, seed: int,
    report: Report,
) -> tuple[TrainState, Totals]:
    """The state that training goes on from, and the sums of metrics not logged yet."""
    restored = checkpoints.restore(program.shapes, program.shardings, report)
    if restored is not None:
        state, saved = restored
        resume.check_metadata(saved, metadata)
        return state, Totals(saved["unlogged"])
    if checkpoints.steps():  # of step 0, which has parameters only
        params, _ = checkpoints.restore_params(program.shapes.params, program.shardings.params, step=0)
        report("Starting from the parameters of step 0, as imported")
        return program.begin(params), Totals()
    params = program.init_params(seed)
    begun = with_constants(program.objective, program.constants).initial_params(params, source)
    state = program.begin(begun)
    if begun is not params:
        if source is not None:
            remark = unshared(params, source)
            report(f"Beginning from the weights and the tokenizer of {metadata['imported_from']}{remark}")
        # Kept, so that a run that is killed before its next checkpoint does not start anew from random weights.
        checkpoints.save_params(state.params, metadata)
        checkpoints.wait()
    return state, Totals()


def unshared(params: Params, source: PretrainedModel) -> str:
    """Which parameters only the run has, and which only the source: the end of a line, "" where both have the same."""
    own = set(paths(params))
    theirs = {path for path in paths(source.params) if not any(within(path, fresh) for fresh in source.fresh)}
    lacking, unused = listed(subtrees(own - theirs, own)), listed(subtrees(theirs - own, theirs))
    return (
        (f"; not in it, so from random weights: {lacking}" if lacking else "")
        + (f"; left out, without a place here: {unused}" if unused else "")
    )


def why_finished(experiment: Experiment, folder: Path, first: int) -> str:
    """A sentence where no step is left after step `first`; else ""."""
    t = experiment.train
    if first > t.steps:
        return f"Nothing to do: {folder} has {first:,} steps already; more than that in --train.steps trains on."
    if first == t.steps:
        return f"Finished: all {t.steps:,} steps are done. Run: {folder}  checkpoint: {folder / 'checkpoints'}/{first}"
    if is_spent(evaluations(folder, first), t.patience):
        return f"Finished early at step {first:,}; more train.patience, or 0, trains on. Run: {folder}"
    return ""


def schedule_remarks(experiment: Experiment, first: int, steps_before: int | None) -> list[str]:
    """What a user may not have meant about the number of steps."""
    t, optimizer = experiment.train, experiment.optimizer
    remarks = []
    if not first and t.short_steps >= t.steps:
        remarks.append(
            f"All {t.steps:,} steps read rows of {t.short_length} tokens and learn nothing of longer texts; if that is "
            "not meant, choose more train.steps or fewer train.short_steps."
        )
    if not first and optimizer.warmup_steps >= t.steps and optimizer.schedule != "inverse-sqrt":
        remarks.append(
            f"The learning rate rises over {optimizer.warmup_steps:,} steps and this run has {t.steps:,}; if that is "
            "not meant, lower optimizer.warmup_steps."
        )
    if first and steps_before not in (None, t.steps) and optimizer.schedule in ("linear", "cosine"):
        remarks.append(f"The learning rate now follows a schedule of {t.steps:,} steps instead of {steps_before:,}")
    return remarks
