"""Training from start to end, pretraining or a task: `pretrain(resolved, run_dir)` reads from top to bottom."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from typing import Any

import jax

from jaxlm.config.experiment import Experiment, Resolved
from jaxlm.config.json import flatten
from jaxlm.data.base import Data, Source
from jaxlm.huggingface.table import listed
from jaxlm.inference.samples import sampler
from jaxlm.objectives.base import PretrainedModel, load_constants, with_constants
from jaxlm.parallel.hosts import main_first, require_same, together
from jaxlm.parallel.mesh import check_batch, make_mesh
from jaxlm.parallel.rules import shardings
from jaxlm.paths import run_path
from jaxlm.runs import resume
from jaxlm.runs.folder import RunFolder, hold, owner
from jaxlm.runs.load import load_teacher
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.training.checkpoints import Checkpoints
from jaxlm.training.clock import Clock
from jaxlm.training.feed import Feed
from jaxlm.training.loop import StepLog, train
from jaxlm.training.metrics import MetricsWriter, Totals, evaluations, is_out_of_patience, last_evaluation, read_metrics
from jaxlm.training.program import Program, TrainState
from jaxlm.training.progress import Progress
from jaxlm.training.trackers import require_tracker
from jaxlm.trees import paths, subtrees, within
from jaxlm.types import Params, Report


def pretrain(resolved: Resolved, run_dir: str | os.PathLike[str], report: Report = print) -> dict[str, float]:
    """Train to `train.steps`, pretraining or a task, and resume if the folder has a checkpoint.

    Returns:
        The figures of the last evaluation.

    Raises:
        UserError: A flag, the data or the run folder does not fit.
        NotFinite: The loss diverges; a UserError and a FloatingPointError.
        Stopped: A signal stopped the run, which has been saved.
    """
    resolved.experiment.validate()
    folder, is_main, clock = run_path(run_dir), jax.process_index() == 0, Clock()
    with contextlib.ExitStack() as stack:
        def open_run() -> RunFolder:
            run = RunFolder.read(folder)
            resume.check_run(run, resolved)
            return run

        require_same(_settings(resolved.experiment))
        main_first(lambda: require_tracker(resolved.experiment.train.tracker), "find the tracker", everywhere=False)
        main_first(lambda: stack.enter_context(hold(folder)), "lock the run folder", everywhere=False)
        require_same({"owner of the run folder": owner(folder)})
        run = main_first(open_run, "check the run folder")
        return _pretrain(resolved, run, report if is_main else lambda _: None, stack, clock)


def _pretrain(
    resolved: Resolved, run: RunFolder, report: Report, stack: contextlib.ExitStack, clock: Clock
) -> dict[str, float]:
    experiment, source = resolved
    t, data, symbols = experiment.train, experiment.data, experiment.objective.symbols
    is_main = jax.process_index() == 0
    remarks = resume.schedule_remarks(run, experiment)  # before `write_run` writes config.json

    # Mesh: first, since its mistakes cost nothing to find and the text may take hours to prepare.
    mesh = make_mesh(experiment.mesh)
    check_batch(t.batch_size, t.accumulate, mesh, experiment.objective.row_group)

    # Tokenizer and teacher; then the text.
    if run.tokenizer_folder:
        data = dataclasses.replace(data, tokenizer=str(run.tokenizer_folder))
    tokenizer = main_first(
        lambda: source.tokenizer.with_symbols(symbols) if source else data.prepare_tokenizer(report, symbols),
        "prepare the tokenizer",
    )
    # The embedding of a pretrained model keeps its number of rows.
    vocabulary = dataclasses.replace(tokenizer.vocabulary, preserve_rows=source is not None or run.is_imported)
    constants = load_constants(experiment.objective.bind(vocabulary, data.length), load_teacher)
    text = _open_text(data, tokenizer, report)
    objective = experiment.objective.bind(vocabulary, data.length, text.statistics)
    feed = Feed(text, objective, t, data.length, mesh)
    samples = sampler(objective, tokenizer, feed.texts(3)) if t.sample_every and jax.process_count() == 1 else None
    report(f"{text.summary}; {t.steps:,} steps are {feed.passes:,.1f} passes over it")

    # Program. `write_run` makes the last checks, then writes the run's files.
    constants = jax.device_put(constants, shardings(constants, mesh))
    program = Program(objective, t, experiment.optimizer, mesh, constants)
    metadata = resume.run_metadata(run, experiment, source, text, tokenizer, constants)
    write_run = functools.partial(resume.write_run, run, experiment, tokenizer, vocabulary, metadata)
    main_first(write_run, "write the configuration", everywhere=False)

    # State: restored, from a pretrained model, or fresh.
    checkpoints = Checkpoints(run.path / "checkpoints", t.keep_checkpoints, criterion=t.criterion)
    stack.callback(checkpoints.close)
    with clock.during("restore" if checkpoints.steps() else "startup"):
        state, totals = initial_state(program, checkpoints, metadata, source, report)
        first = int(state.step)
    report(_description(program, feed) + (f", resumed at step {first:,}" if first else ""))
    if first >= t.steps or is_out_of_patience(evaluations(run.path, t.criterion, first), t):
        more = "steps" if first >= t.steps else "patience"
        report(f"Finished: {first:,} steps are done; raise --train.{more} to train longer. Run: {run.path}")
        return last_evaluation(run.path)[1]
    for line in [*remarks, *objective.text_remarks(text.statistics), "Compiling the step; its first figures follow."]:
        report(line)

    # Steps.
    clock.resume(read_metrics(run.path))  # before the writer leaves out the lines after the checkpoint
    open_writer = functools.partial(_metrics_writer, run, experiment, first)
    writer = main_first(lambda: stack.enter_context(open_writer()), "open the metrics", everywhere=False)
    progress = stack.enter_context(Progress(t.steps, first, enabled=is_main))
    log = StepLog(program, feed, checkpoints, first, writer, progress, totals, clock)
    evaluation = train(program, state, feed, checkpoints, log, metadata, text.statistics.unigram_entropy, samples)
    done = checkpoints.steps()[-1]  # fewer than `train.steps` if training stopped early
    progress.note(f"Finished {done:,}{f' of {t.steps:,}' if done < t.steps else ''} steps. Run: {run.path}")
    return evaluation


def _settings(experiment: Experiment) -> dict[str, Any]:
    """Return the fields that do not belong to one machine, by name."""
    return flatten(experiment, lambda setting: "path" not in setting.marks)


def _metrics_writer(
    run: RunFolder, experiment: Experiment, first: int
) -> contextlib.AbstractContextManager[MetricsWriter]:
    return contextlib.closing(MetricsWriter(run.path, experiment.train.tracker, first, _settings(experiment)))


def _open_text(data: Data, tokenizer: Tokenizer, report: Report) -> Source:
    """Open the data; each process tokenizes a share of it if that is not done yet."""
    main_first(lambda: data.survey(report), "read the text", everywhere=False)
    share = functools.partial(data.tokenize, tokenizer, jax.process_index(), jax.process_count(), report)
    together(share, "the other processes to tokenize their shares of the text")
    text = main_first(lambda: data.open(tokenizer, report), "prepare the text")
    require_same({"tokenizer": tokenizer.fingerprint, "text": text.fingerprint})
    return text


def _description(program: Program, feed: Feed) -> str:
    """Return the line that says what is trained, on what batches and devices."""
    devices = program.mesh.devices
    kind = f"{devices.size} {devices.flat[0].device_kind} device{'s' * (devices.size > 1)}"
    return f"{type(program.objective).__name__}: {program.size}, batches of {feed}, {kind}"


def initial_state(
    program: Program, checkpoints: Checkpoints, metadata: dict[str, Any], source: PretrainedModel | None, report: Report
) -> tuple[TrainState, Totals]:
    """Return the state to train from, and the sums of metrics that are not logged yet."""
    restored = checkpoints.restore(program.shapes, program.shardings, report)
    if restored is not None:
        return restored[0], Totals(*(restored[1][name] for name in ("unlogged", "skipped", "skipped_in_row")))
    if checkpoints.steps():  # only step 0, which has no optimizer state
        params, _ = checkpoints.restore_params(program.shapes.params, program.shardings.params, step=0)
        report("Starting from the parameters of step 0, as imported")
        return program.begin(params), Totals()
    fresh = program.init_params(program.train.seed)
    params = with_constants(program.objective, program.constants).initial_params(fresh, source)
    state = program.begin(params)
    if params is not fresh:
        if source is not None:
            remark = unshared(fresh, source)
            report(f"Beginning from the weights and the tokenizer of {metadata['imported_from']}{remark}")
        # Saved, so that a run that is killed before its next checkpoint does not start from random weights.
        checkpoints.save_params(state.params, metadata)
        checkpoints.wait()
    return state, Totals()


def unshared(params: Params, source: PretrainedModel) -> str:
    """Return the parameters that only the run or only the pretrained model has, as the end of a line; else ""."""
    ours = set(paths(params))
    theirs = {path for path in paths(source.params) if not any(within(path, fresh) for fresh in source.fresh)}
    lacking, unused = listed(subtrees(ours - theirs, ours)), listed(subtrees(theirs - ours, theirs))
    return (
        (f"; randomly initialized: {lacking}" if lacking else "")
        + (f"; unused weights: {unused}" if unused else "")
    )
