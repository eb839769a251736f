"""Training loop: steps, metrics, evaluations and checkpoints, until the last step or a signal."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxlm.config.experiment import TrainConfig
from jaxlm.errors import Stopped, UserError
from jaxlm.models.layers.kernel_choice import recorded_choices
from jaxlm.objectives.base import Bound, Term, Terms
from jaxlm.parallel.hosts import from_main
from jaxlm.parallel.peaks import peak_flops
from jaxlm.training.checkpoints import Checkpoints
from jaxlm.training.clock import Clock, watchdog
from jaxlm.training.feed import Feed
from jaxlm.training.metrics import MetricsWriter, Totals, best_step, evaluations, is_out_of_patience
from jaxlm.training.profile import profiled
from jaxlm.training.program import Program, TrainState
from jaxlm.training.progress import Progress
from jaxlm.types import Params


class NotFinite(UserError, FloatingPointError):
    """The loss, the gradients or the state are no longer finite; such a state is never saved."""


class Miscomputed(UserError):
    """A step that was computed twice has two results; its update is not used."""

    exit_code = 3


@dataclasses.dataclass(frozen=True)
class Run:
    """What all steps of a run share."""

    program: Program
    feed: Feed
    checkpoints: Checkpoints
    metadata: dict[str, Any]
    """What every checkpoint records about the run."""
    writer: MetricsWriter | None
    """Writer of metrics.jsonl; None except on process 0."""
    progress: Progress
    clock: Clock


def train(
    run: Run, state: TrainState, totals: Totals, sample: Callable[[Bound, Params], list[str]] | None = None
) -> tuple[TrainState, dict[str, float], int]:
    """Run the steps after `state.step`; return the last state and the figures of the last evaluation.

    The third value is the number of a signal that came in the last step, 0 for none. The run is whole: the caller
    leaves out what would follow it.

    `totals` were not logged before the run was resumed; `sample` returns the lines that `train.sample_every` asks for.

    Raises:
        NotFinite: The loss has diverged, or Miscomputed: a replayed step has two results.
        Stopped: A signal has stopped the run; its state has been saved.
    """
    program, feed, checkpoints, t = run.program, run.feed, run.checkpoints, run.program.train
    step = after_step = int(state.step)
    folder, figures, stop_signal = checkpoints.folder.parent, {}, 0
    log = StepLog(run, after_step, totals)
    history = evaluations(folder, t.criterion, up_to=after_step)
    if t.uses_best and after_step not in history:
        _check_criterion(program.at(after_step + 1), state, feed, log)
    with (
        _stop_signals(after_step) as stop, contextlib.closing(feed.after(after_step)) as batches,
        watchdog(log.clock, t.stall_seconds), profiled(t.profile_steps, folder, log.progress.note) as profile,
    ):
        for step in range(after_step + 1, t.steps + 1):
            profile(step, state)
            current = program.at(step)
            state = run_step(current, state, batches, log, step)
            if change := feed.change_at(step):  # after the line of the step before
                log.progress.note(change)
            stop_signal = stop(step)
            should_evaluate = _is_due(step, t.eval_every, t)
            should_sample = sample is not None and step % t.sample_every == 0
            should_save = _is_due(step, t.checkpoint_every, t) or stop_signal or (should_evaluate and t.uses_best)
            if not (should_evaluate or should_sample or should_save):
                continue
            log.read()
            figures = _evaluate(current, state, feed, log, step) if should_evaluate and feed.has_held_out else {}
            log.write(step, figures)
            if figures:
                history[step] = figures[t.criterion]
                log.progress.note(evaluation_line(step, figures, current, feed, history))
            if should_sample:
                with log.clock.during("evaluation"):
                    log.write_samples(step, sample(current.eval_objective, state.eval_params))
            if should_save:
                _save(run, state, log, step, history)
            if is_out_of_patience(history, t) and step < t.steps:
                log.progress.note(f"Stopped after step {step:,}: no better {t.criterion} in {t.patience} evaluations.")
                break
            if stop_signal and step < t.steps:
                line = f"Stopped by a signal after step {step:,}; saved. Run the same command to go on."
                _finish(checkpoints, log, [line])
                raise Stopped(stop_signal)
        stop_signal = stop(step + 1) or stop_signal  # of several processes, one during the last step's save
        kept = {step: history[step] for step in checkpoints.steps() if step in history}
        _finish(checkpoints, log, _describe_best(kept, t))
        stop_signal = stop(0) or stop_signal  # another run of this process begins at 1 again
    return state, figures, stop_signal


def _finish(checkpoints: Checkpoints, log: StepLog, lines: list[str]) -> None:
    """Wait for the checkpoints that are being written, then print how the run has ended and where its time went."""
    with log.clock.during("save"):
        checkpoints.wait()
    for line in (*lines, str(log.clock)):
        log.progress.note(line)


def _describe_best(history: dict[int, float], train: TrainConfig) -> list[str]:
    if not (train.uses_best and history):
        return []
    step = best_step(history, train.criterion)
    return [f"Best: step {step:,}, {train.criterion} {history[step]:.4f}; later commands read this one."]


def _evaluate(program: Program, state: TrainState, feed: Feed, log: StepLog, step: int) -> dict[str, float]:
    with log.clock.during("evaluation"):
        figures = evaluate(program, state, feed)
    if not math.isfinite(figures.get("loss", 0.0)):
        raise log.not_finite(step, "the held-out loss")
    return figures


def _save(run: Run, state: TrainState, log: StepLog, step: int, history: dict[int, float]) -> None:
    with run.clock.during("save"):
        if run.writer:
            with contextlib.suppress(UserError):  # the next one copies all lines again
                run.writer.sync()
        try:
            run.checkpoints.save(state, step, run.metadata | log.totals.state(), history)
        except FloatingPointError:
            raise log.not_finite(step, "the state") from None


def run_step(program: Program, state: TrainState, batches: Iterator[Any], log: StepLog, step: int) -> TrainState:
    """Start `step` and return its state, before the device has computed it.

    The first step of each phase and shape is compiled, and this waits for its end, so that its time counts as
    compilation.
    """
    clock = log.clock
    clock.switch("lost" if step <= clock.lost_until else "step")
    batch = log.next_batch(batches)
    is_replayed = program.train.replay_every > 0 and step % program.train.replay_every == 0
    train_step = program.replay_step if is_replayed else program.train_step
    compiled = (id(train_step), *(array.shape for array in jax.tree.leaves(batch)))
    if compiled not in log.compiled_steps:
        log.compiled_steps[compiled] = step
        jax.block_until_ready(log.running)  # the step before is none of the compilation
        with clock.during("compilation"):
            with recorded_choices() as kernels:  # named before minutes of compilation
                train_step.trace(state, batch, program.constants)
            if kernels():
                log.progress.note(f"Attention: {kernels()}.")
            state, terms = jax.block_until_ready(train_step(state, batch, program.constants))
    else:
        state, terms = train_step(state, batch, program.constants)
    if is_replayed and (different := int(terms.pop("replay").total)):
        raise log.miscomputed(step, different)
    log.finish_previous()  # while the device computes this one
    log.running = (step, terms)
    return state


def _is_due(step: int, every: int, t: TrainConfig) -> bool:
    """Return whether `step` is a multiple of `every` or the last step; with 0 only the last step is."""
    return step == t.steps or (every > 0 and step % every == 0)


def _check_criterion(program: Program, state: TrainState, feed: Feed, log: StepLog) -> None:
    """Raise UserError before the steps if nothing is held out, or if `train.best_by` is no figure of this run.

    The names of the figures are those of an evaluation, which is printed.
    """
    if not feed.has_held_out:
        raise UserError("train.best_by and train.patience need held-out data; set --data.held-out, or leave them out.")
    if program.train.best_by:
        log.progress.note(evaluation_line(int(state.step), evaluate(program, state, feed), program, feed, {}))


def evaluate(program: Program, state: TrainState, feed: Feed) -> dict[str, float]:
    """Return the figures of the held-out data.

    They are the mean of every term over the held-out batches; "loss", their weighted sum as in training; and, if
    `train.best_by` does not name a loss, the metrics of a task. Of a mixture they are the means over its sources by
    their shares, and that of the primary metric is also told for each source, as "wiki_mlm_loss".
    """
    name, parts = program.train.best_by, {}
    for source in feed.held_out_shares:
        totals, memory = Totals(), program.initial_memory()
        for index, batch in enumerate(feed.held_out(program.eval_objective, source)):
            terms, memory = program.eval_step(state.eval_params, batch, np.int32(index), program.constants, memory)
            totals.add(terms)
        parts[source] = {"loss": totals.loss()} | totals.means()
    figures = {}
    for figure in dict.fromkeys(figure for part in parts.values() for figure in part):
        found = [(feed.held_out_shares[source], part[figure]) for source, part in parts.items() if figure in part]
        figures[figure] = sum(share * value for share, value in found) / sum(share for share, _ in found)
    primary = program.eval_objective.primary_metric
    figures |= {f"{source}_{primary}": part[primary] for source, part in parts.items() if source and primary in part}
    if program.objective.scores_rows and name and not name.endswith("loss"):
        scores = program.objective.score_rows(state.eval_params, feed.source, feed.length, program.train.batch_size)
        figures |= {figure: float(value) for figure, value in scores.items()}
    if name and name not in figures:
        raise UserError(f"train.best_by is {name!r}; the figures of this run are {', '.join(figures)}.")
    return from_main(figures)  # those of a task differ by a rounding, and all processes must stop at the same step


def evaluation_line(
    step: int, figures: dict[str, float], program: Program, feed: Feed, history: Mapping[int, float]
) -> str:
    """Return the printed line of an evaluation, the criterion or else the primary metric first.

    `history` has the criterion's figure of every evaluation so far.
    """
    objective, t = program.eval_objective, program.train
    name = t.best_by or objective.primary_metric
    others = "  ".join(f"{key} {value:.4f}" for key, value in figures.items() if key not in ("loss", name))
    entropy = feed.source.statistics.unigram_entropy
    remark = f" (unigram entropy {entropy:.4f})" if name in objective.token_losses else ""
    if t.uses_best and history:
        best = best_step(history, t.criterion)
        remark += " (best so far)" if best == step else f" (best: {history[best]:.4f} at step {best:,})"
    return f"step {step:,}  held out: {name} {figures.get(name, math.nan):.4f}{remark}  {others}"


class StepLog:
    """What the host knows of the steps: metrics, wall time, skipped steps and compiled steps.

    Metrics are averaged and written every `train.log_every` steps and with every evaluation. They are read one step
    late, so that the device always has the next step to work on.
    """

    def __init__(self, run: Run, after_step: int, totals: Totals) -> None:
        """Begin after `after_step`, 0 for a new run, with the sums that were not logged before a resumed run ended."""
        self.progress, self.clock, self._run, self.totals = run.progress, run.clock, run, totals
        self._peak = peak_flops(run.program.mesh.devices.flat[0]) * run.program.mesh.size
        self._after_step = after_step
        self.running: tuple[int, Terms] | None = None
        """The newest step and its terms, until they are read."""
        self.compiled_steps: dict[tuple[Any, ...], int] = {}
        """Programs and shapes of the batches so far, and the step that was compiled for each."""
        self._clock_seconds, self._clock_step = run.clock.training_seconds(), after_step

    def finish_previous(self) -> None:
        """Read the step that was started last, and write its line."""
        if (step := self.read()) is not None:
            self.write(step, {})

    def read(self) -> int | None:
        """Wait for the newest step, read its terms and return its number; None if they have been read."""
        if self.running is None:
            return None
        (step, terms), self.running = self.running, None
        self._read(step, terms)
        return step

    def next_batch(self, batches: Iterator[Any]) -> Any:
        """Return the next batch; the wait counts as `data` if the device had finished the newest step meanwhile."""
        before = self.clock.switch("data")
        batch = next(batches)
        is_busy = self.running is not None and not self.running[1]["loss"].total.is_ready()
        self.clock.switch(before, ended=before if is_busy else None)
        return batch

    def write(self, step: int, evaluation: dict[str, float]) -> None:
        """Show and write the means of the steps since the last line, if a line is due after `step`.

        The first step of a resumed run is only shown: its sums go on, so that the lines are those of one start.
        """
        t = self._run.program.train
        if step % t.log_every == 0 or step in (1, t.steps) or evaluation:
            figures = self._figures(step, self.totals.means())
            if self._run.writer:
                held_out = {f"eval_{name}": value for name, value in evaluation.items()}
                self._run.writer.write(step, figures | held_out | self.clock.figures())
        elif step == self._after_step + 1:
            figures = self._figures(step, self.totals.peek())
        else:
            return
        self.progress.show(step, figures)

    def _figures(self, step: int, means: dict[str, float]) -> dict[str, float]:
        """Return the means with the learning rate and the speed since the last figures."""
        now, program = self.clock.training_seconds(), self._run.program.at(step)
        num_compiled = sum(self._clock_step < compiled <= step for compiled in self.compiled_steps.values())
        num_timed, seconds = step - self._clock_step - num_compiled, now - self._clock_seconds
        both = (self._clock_step + 1, step)
        is_one_phase = len({(id(self._run.program.at(each)), self._run.feed.shape(each)) for each in both}) == 1
        self._clock_seconds, self._clock_step = now, step
        means = {"loss": means.pop("loss", math.nan)} | means  # nan if all steps were skipped
        means["learning_rate"] = _on_host(program.schedule, step - 1)
        if not num_timed or not is_one_phase:  # all steps were compiled, or two phases share the line
            return means
        speed, (length, rows) = num_timed / seconds, self._run.feed.shape(step)
        means["tokens_per_second"] = speed * rows * length
        flops = program.step_flops(length, rows)
        if self._peak and flops:
            means["mfu"] = speed * flops / self._peak
        return means

    def write_samples(self, step: int, lines: list[str]) -> None:
        """Print samples, and write them into the run folder."""
        for line in lines:
            self.progress.note(f"step {step:,}  sample: {line}")
        if self._run.writer:
            self._run.writer.tracker.text(step, "samples", lines)

    def not_finite(
        self, step: int, what: str,
        advice: str = "Begin another run with a lower optimizer.learning_rate or more optimizer.warmup_steps.",
    ) -> NotFinite:
        """Return the error for a loss, a gradient or a state that is not finite."""
        return NotFinite(f"{what} of step {step:,} is not finite; {self._newest_checkpoint()}. {advice}")

    def miscomputed(self, step: int, different: int) -> Miscomputed:
        """Return the error for a step whose two computations differ in a number of arrays."""
        return Miscomputed(
            f"step {step:,} was computed twice (--train.replay-every), and {different:,} arrays of loss and gradients "
            f"differ, so that a device computes wrongly; {self._newest_checkpoint()}. Run `jaxlm check`, and go on "
            "with the same command on other devices."
        )

    def _newest_checkpoint(self) -> str:
        """Return the words about the newest checkpoint, once all are written."""
        with contextlib.suppress(UserError):
            self._run.checkpoints.wait()
        newest, folder = max(self._run.checkpoints.steps(), default=0), self._run.checkpoints.folder
        saved = f"the newest checkpoint is of step {newest:,}, in {folder / str(newest)}"
        return saved if newest else f"no checkpoint had been saved yet in {folder}"

    def _read(self, step: int, terms: Terms) -> None:
        """Wait for a step and add its terms, or count it as one of those that may be skipped."""
        values, totals, limit = jax.device_get(terms), self.totals, self._run.program.train.skip_nonfinite
        parts = {"loss": "the loss", "grad_norm": "the gradient"}
        wrong = [what for name, what in parts.items() if not math.isfinite(values[name].total)]
        if wrong and totals.skipped_in_row >= limit:
            raise self.not_finite(step, wrong[0], (
                f"Go on with --train.skip-nonfinite {limit + 5}, or lower optimizer.learning_rate: in a phase after "
                "the newest checkpoint, or in another run."
            ))
        totals.skipped_in_row = totals.skipped_in_row + 1 if wrong else 0
        if wrong:
            count = totals.skipped_in_row
            self.progress.note(f"Step {step:,} is skipped: {wrong[0]} is not finite ({count} of {limit} in a row).")
        totals.add(({} if wrong else values) | ({"skipped": Term(float(bool(wrong)), 1.0)} if limit else {}))


def _on_host(schedule: Callable[[int], Any], step: int) -> float:
    """Return the schedule's value, computed on the CPU without waiting for the accelerator."""
    with contextlib.suppress(RuntimeError), jax.default_device(jax.local_devices(backend="cpu")[0]):
        return float(schedule(step))
    return float(schedule(step))


@contextlib.contextmanager
def _stop_signals(after_step: int) -> Iterator[Callable[[int], int]]:
    """Yield a function to call after every step that follows `after_step`.

    It returns the number of the signal to stop for, or 0 to continue. SIGTERM, SIGHUP and the first Ctrl-C stop the
    run; a second Ctrl-C interrupts at once. With several processes a signal to any of them stops all after the same
    step.
    """
    several, received = jax.process_count() > 1, 0

    def receive(number: int, frame: Any) -> None:
        nonlocal received
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received = number
        if number == signal.SIGINT:  # written at once and not by `print`, which a signal must not enter twice
            with contextlib.suppress(OSError):  # of `2>&1 | tee`, which the same Ctrl-C has ended
                os.write(2, b"\nStopping after this step; Ctrl-C again interrupts at once, without saving.\n")
        if several:  # jax's handler of SIGTERM tells the other processes
            signal.raise_signal(signal.SIGTERM)

    def stop(step: int) -> int:
        if not several:
            return received
        if not (multihost_utils.reached_preemption_sync_point(step) or is_early):
            return 0
        return int(multihost_utils.process_allgather(np.int32(received)).max()) or int(signal.SIGTERM)

    # jax lets the processes meet once, at one more than the last step that it was told, so at 1 before the first.
    is_early = several and multihost_utils.reached_preemption_sync_point(1)
    if several:
        multihost_utils.reached_preemption_sync_point(after_step)
    numbers = [signal.SIGINT] + [signal.SIGTERM] * (not several)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup sets it
        numbers.append(signal.SIGHUP)
    try:
        previous = {number: signal.signal(number, receive) for number in numbers}
    except ValueError:  # not the main thread, as in a notebook server
        previous = {}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler or signal.SIG_DFL)
