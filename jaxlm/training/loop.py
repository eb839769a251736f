"""Pretraining from start to end: `pretrain(experiment, run_dir)` reads top to bottom."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxlm.config.experiment import Experiment
from jaxlm.data.text import prepare_store, prepare_tokenizer
from jaxlm.errors import UserError
from jaxlm.parallel.hosts import main_first
from jaxlm.parallel.mesh import check_batch, make_mesh
from jaxlm.parallel.peaks import peak_flops
from jaxlm.paths import local_folder
from jaxlm.runs import folder as run_folder
from jaxlm.runs import resume
from jaxlm.training.checkpoints import Checkpoints
from jaxlm.training.feed import Feed
from jaxlm.training.metrics import UNIGRAM_BASELINE, MetricsWriter, Totals, last_evaluation
from jaxlm.training.optimizers import make_optimizer, make_schedule
from jaxlm.training.progress import Progress
from jaxlm.training.step import TrainState, make_eval_step, make_init, make_train_step

Report = Callable[[str], None]


class NotFinite(UserError, FloatingPointError):
    """The loss, the gradients or the state are no longer numbers; nothing of it has been saved."""


def pretrain(
    experiment: Experiment,
    run_dir: str | Path,
    report: Report = print,
) -> dict[str, float]:
    """Trains to `train.steps`, resuming if the folder has a checkpoint; returns the last evaluation's figures.

    Raises UserError for the user's mistakes; its subclass NotFinite, also a FloatingPointError, when the loss diverges.
    """
    experiment.validate()
    folder = local_folder(run_dir, "runs")
    with contextlib.ExitStack() as stack:
        def hold() -> None:
            run_folder.create(folder)
            stack.enter_context(run_folder.lock(folder))
            resume.check_configuration(folder, experiment)

        main_first(hold, everywhere=False)
        return _pretrain(experiment, folder, report if jax.process_index() == 0 else lambda _: None, stack)


def _pretrain(experiment: Experiment, folder: Path, report: Report, stack: contextlib.ExitStack) -> dict[str, float]:
    t = experiment.train
    main = jax.process_index() == 0

    # The mesh comes first: its mistakes are cheap to find, a corpus is not.
    mesh = make_mesh(experiment.mesh)
    check_batch(t.batch_size, t.accumulate, mesh)

    # The objective that knows the vocabulary, then the text: the order of what a mistake costs to find.
    data = resume.data_of(folder, experiment.data)
    tokenizer = main_first(lambda: prepare_tokenizer(data, report))
    objective = resume.bind(folder, experiment, tokenizer.vocabulary)
    store = main_first(lambda: prepare_store(data, tokenizer, report))
    metadata = resume.run_metadata(folder, experiment, store, tokenizer)
    feed = Feed(experiment, store, objective, mesh)

    # The state's shapes and where they live; from here on the folder is this run's.
    optimizer = make_optimizer(experiment.optimizer, t.steps)
    learning_rate = make_schedule(experiment.optimizer, t.steps)
    init, shapes, layout = make_init(objective, optimizer, mesh)
    steps_before = run_folder.recorded_steps(folder)
    main_first(lambda: resume.claim(folder, experiment, tokenizer, metadata), everywhere=False)

    # The state: restored, imported, or fresh.
    checkpoints = Checkpoints(folder / "checkpoints", t.keep_checkpoints)
    stack.callback(checkpoints.close)
    totals = Totals()
    restored = checkpoints.restore(shapes, layout, report)
    if restored is not None:
        state, saved = restored
        resume.check_metadata(saved, metadata)
        totals.sums = {name: tuple(pair) for name, pair in saved["unlogged"].items()}
    else:
        state = init(jax.random.key(t.seed))
        if checkpoints.steps():  # of step 0: an import
            params, _ = checkpoints.restore_params(shapes.params, layout.params, step=0)
            state = state._replace(params=params)
            report(f"Starting from imported parameters in {folder}")
    first = int(state.step)
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes.params))
    report(
        f"{type(objective).__name__}: {parameters:,} parameters, batches of {feed}, "
        f"{mesh.size} {mesh.devices.flat[0].device_kind} device{'s' * (mesh.size > 1)}"
        + (f", resumed at step {first:,}" if first else "")
    )
    entropy = store.unigram_entropy("held_out")
    if first >= t.steps:
        report(f"Finished: all {t.steps:,} steps are done. Run: {folder}  checkpoint: {folder / 'checkpoints'}/{first}")
        return last_evaluation(folder)[1]

    if t.short_steps >= t.steps:
        report(
            f"All {t.steps:,} steps read rows of {t.short_length} tokens and learn nothing of longer texts; if that is "
            "not meant, choose more train.steps or fewer train.short_steps."
        )
    if experiment.optimizer.warmup_steps >= t.steps and experiment.optimizer.schedule != "inverse-sqrt":
        report(
            f"The learning rate rises over {experiment.optimizer.warmup_steps:,} steps and this run has {t.steps:,}; "
            "if that is not meant, lower optimizer.warmup_steps."
        )
    if first and steps_before not in (None, t.steps) and experiment.optimizer.schedule in ("linear", "cosine"):
        report(f"The learning rate now follows a schedule of {t.steps:,} steps instead of {steps_before:,}")
    train_step = make_train_step(objective, optimizer, mesh, layout, seed=t.seed, accumulate=t.accumulate)
    eval_step = make_eval_step(objective, mesh, layout, seed=t.seed)

    def evaluate(state: TrainState) -> dict[str, float]:
        totals = Totals()
        for index, batch in enumerate(feed.held_out()):
            totals.add(eval_step(state.params, batch, np.int32(index)))
        return totals.means()

    writer = MetricsWriter(folder, t.tensorboard, first) if main else None
    if writer:
        stack.callback(writer.close)
    progress = stack.enter_context(Progress(t.steps, first, enabled=main))
    stop = stack.enter_context(_stop_signals())
    peak = peak_flops(mesh.devices.flat[0]) * mesh.size
    evaluation: dict[str, float] = {}
    clock, clock_step = time.perf_counter(), first
    source = feed.after(first)
    stack.callback(source.close)

    def not_finite(step: int, what: str) -> NotFinite:
        with contextlib.suppress(UserError):
            checkpoints.wait()
        kept = max(checkpoints.steps(), default=0)
        return NotFinite(
            f"{what} of step {step:,} is not finite; "
            + (f"the last good checkpoint is of step {kept:,}, in {checkpoints.folder / str(kept)}" if kept
               else f"no checkpoint had been saved yet in {checkpoints.folder}")
            + ". Begin another run with a lower optimizer.learning_rate or more optimizer.warmup_steps."
        )

    def read(step: int, metrics: Any) -> None:
        """Adds up the metrics of a step, once the device has done it; stops the run when its loss is no number."""
        values = totals.add(metrics)
        for name, what in (("loss", "the loss"), ("grad_norm", "the gradient")):
            if not math.isfinite(values[name][0]):
                raise not_finite(step, what)

    def log(step: int, evaluation: dict[str, float]) -> None:
        """One line of metrics where one is due: every log_every steps and with every evaluation."""
        nonlocal clock, clock_step
        due = step % t.log_every == 0 or step in (1, t.steps) or evaluation
        if not due and step != first + 1:
            return
        now = time.perf_counter()
        speed = (step - clock_step) / (now - clock)
        clock, clock_step = now, step
        means = totals.means() if due else totals.peek()
        means = {"loss": means.pop("loss")} | means
        means["learning_rate"] = _on_host(learning_rate, step - 1)
        means["tokens_per_second"] = speed * t.batch_size * data.length
        if peak:
            means["mfu"] = speed * feed.flops(step) / peak
        if writer and due:
            writer.write(step, means | {f"eval_{name}": value for name, value in evaluation.items()})
        progress.show(step, means)

    pending: tuple[int, Any] | None = None
    for step in range(first + 1, t.steps + 1):
        state, metrics = train_step(state, next(source))
        if pending is not None:  # read one step late, so that the device always has the next step to work on
            read(*pending)
            log(pending[0], {})
        pending = (step, metrics)
        stopping = stop(step)
        ending = stopping or step == t.steps
        evaluating = step == t.steps or (t.eval_every and step % t.eval_every == 0)
        saving = ending or (t.checkpoint_every and step % t.checkpoint_every == 0)
        if not evaluating and not saving:
            continue
        read(*pending)
        pending, figures, paused = None, {}, time.perf_counter()
        if evaluating and feed.has_held_out:
            figures = evaluation = evaluate(state)
            if not math.isfinite(figures["loss"]):
                raise not_finite(step, "the held-out loss")
        clock += time.perf_counter() - paused
        log(step, figures)
        if figures:
            progress.note(_evaluation_line(step, figures, objective.primary_metric, entropy))
        if saving:
            paused = time.perf_counter()
            try:
                # A copy: it is written in the background, while the next steps add to the sums.
                checkpoints.save(state, step, metadata | {"unlogged": dict(totals.sums)}, figures.get("loss"))
            except FloatingPointError:
                raise not_finite(step, "the state") from None
            clock += time.perf_counter() - paused
        if stopping and step < t.steps:
            checkpoints.wait()
            progress.note(f"Stopped by a signal after step {step:,}; saved. Run the same command to go on.")
            return evaluation
    checkpoints.wait()
    if main:
        progress.note(f"Finished {t.steps:,} steps. Run: {folder}")
    return evaluation


def _on_host(schedule: Callable[[int], Any], step: int) -> float:
    """The schedule's value without a place in the queue of the accelerator."""
    with contextlib.suppress(RuntimeError), jax.default_device(jax.local_devices(backend="cpu")[0]):
        return float(schedule(step))
    return float(schedule(step))


def _evaluation_line(step: int, means: dict[str, float], name: str, entropy: float) -> str:
    figures = "  ".join(f"{key} {value:.4f}" for key, value in means.items() if key not in ("loss", name))
    baseline = f" (unigram entropy {entropy:.4f})" if name in UNIGRAM_BASELINE else ""
    return f"step {step:,}  held out: {name} {means.get(name, math.nan):.4f}{baseline}  {figures}"


@contextlib.contextmanager
def _stop_signals() -> Iterator[Callable[[int], bool]]:
    """A function that says after each step whether to save and end: on SIGTERM and on the first Ctrl-C; a second Ctrl-C
    interrupts at once. Of several processes all end after the same step, whichever of them had the SIGTERM."""
    if jax.process_count() > 1:
        yield multihost_utils.reached_preemption_sync_point
        return
    requested = False

    def ask(signum: int, frame: Any) -> None:
        nonlocal requested
        if requested and signum == signal.SIGINT:
            raise KeyboardInterrupt
        requested = True

    try:
        previous = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    except ValueError:  # not the main thread (a notebook server, say): signals are not ours
        previous = {}
    try:
        yield lambda step: requested
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
