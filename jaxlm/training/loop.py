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

from jaxlm.errors import UserError
from jaxlm.experiment import Experiment
from jaxlm.parallel.hosts import local_rows, place_rows
from jaxlm.parallel.mesh import BATCH_AXES, make_mesh
from jaxlm.parallel.peaks import peak_flops
from jaxlm.parallel.rules import batch_sharding
from jaxlm.text.batches import Batches
from jaxlm.text.data import prepare
from jaxlm.training import run_folder
from jaxlm.training.checkpoints import Checkpoints
from jaxlm.training.metrics import MetricsWriter, Totals, draw_curves, headline, last_evaluation
from jaxlm.training.optimizers import make_optimizer, make_schedule
from jaxlm.training.progress import Progress
from jaxlm.training.step import TrainState, make_eval_step, make_init, make_train_step
from jaxlm.types import TokenBatch

Report = Callable[[str], None]


def pretrain(
    experiment: Experiment,
    run_dir: str | Path,
    report: Report = print,
) -> dict[str, float]:
    """Trains to `train.steps`, resuming if the folder has a checkpoint; returns the last evaluation's figures.

    Raises UserError for the user's mistakes and FloatingPointError when the loss is not finite.
    """
    experiment.validate()
    folder = Path(run_dir)
    main = jax.process_index() == 0
    if main:
        run_folder.create(folder)
    with contextlib.ExitStack() as stack:
        if main:
            stack.enter_context(run_folder.lock(folder))
            run_folder.claim(folder, experiment)
        return _pretrain(experiment, folder, report if main else lambda _: None, stack)


def _pretrain(experiment, folder, report, stack):
    t = experiment.train
    main = jax.process_index() == 0

    # The mesh comes first: its mistakes are cheap to find, a corpus is not.
    mesh = make_mesh(experiment.mesh)
    ways = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    if (t.batch_size // t.accumulate) % ways:
        raise UserError(
            f"train.batch_size {t.batch_size} in {t.accumulate} part{'s' * (t.accumulate > 1)} is not divisible by "
            f"data x fsdp = {ways} devices; change train.batch_size or the mesh."
        )

    # The tokenizer of a run that exists is its own: retraining one from a changed text would change every id.
    own_tokenizer = folder / "tokenizer"
    data = experiment.data
    data, resuming = (
        (_with_tokenizer(data, own_tokenizer), True) if own_tokenizer.is_dir() else (data, False)
    )
    prepared = prepare(data, report)
    objective = experiment.objective.bind(prepared.tokenizer.vocabulary, data.length)
    store = prepared.store
    facts = {"data": store.fingerprint, "tokenizer": prepared.tokenizer.fingerprint, "source": experiment.data.source}
    if main:
        _check_facts(folder, facts)
        if not resuming:
            prepared.tokenizer.save(own_tokenizer)
        if not (folder / "data.json").exists():
            run_folder.write_json(folder / "data.json", facts)
    raw_length = objective.raw_length(data.length)
    batches = Batches(store, "train", t.batch_size, raw_length, objective.packing, t.seed)
    held_out = Batches(store, "held_out", t.batch_size, raw_length, objective.packing, t.seed)

    # State: restored, imported, or fresh.
    optimizer = make_optimizer(experiment.optimizer, t.steps)
    learning_rate = make_schedule(experiment.optimizer, t.steps)
    init, shapes, layout = make_init(objective, optimizer, mesh)
    checkpoints = Checkpoints(folder / "checkpoints", t.keep_checkpoints)
    stack.callback(checkpoints.close)
    restored = checkpoints.restore(shapes, layout, report)
    if restored is not None:
        state, saved_facts = restored
        _check_saved_facts(saved_facts, facts)
    else:
        state = init(jax.random.key(t.seed))
        if checkpoints.steps():  # of step 0: an import
            params, _ = checkpoints.restore_params(shapes.params, layout.params)
            state = state._replace(params=params)
            report(f"Starting from imported parameters in {folder}")
    first = int(state.step)
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes.params))
    report(
        f"{type(objective).__name__}: {parameters:,} parameters, batches of {t.batch_size} x {data.length}, "
        f"{mesh.size} {mesh.devices.flat[0].device_kind} device{'s' * (mesh.size > 1)}"
        + (f", resumed at step {first:,}" if first else "")
    )
    if first >= t.steps:
        report(f"Finished: all {t.steps:,} steps are done; the run is in {folder}.")
        return last_evaluation(folder)

    train_step = make_train_step(objective, optimizer, mesh, layout, seed=t.seed, accumulate=t.accumulate)
    eval_step = make_eval_step(objective, mesh, layout, seed=t.seed)
    sharding = batch_sharding(mesh)
    rows = local_rows(sharding, t.batch_size, raw_length)
    place = place_rows(sharding, t.batch_size, rows)

    def on_device(stream: Iterator[TokenBatch]) -> Iterator[TokenBatch]:
        for batch in stream:
            yield TokenBatch(place(np.asarray(batch.tokens)), place(np.asarray(batch.segment_ids)))

    def evaluate(state: TrainState) -> dict[str, float]:
        totals = Totals()
        for index, batch in enumerate(on_device(held_out.evaluation(t.batch_size, t.eval_batches, rows))):
            totals.add(eval_step(state.params, batch, np.int32(index)))
        return totals.means()

    writer = MetricsWriter(folder, t.tensorboard, first) if main else None
    if writer:
        stack.callback(writer.close)
    progress = stack.enter_context(Progress(t.steps, first, enabled=main))
    stop = stack.enter_context(_stop_signals())
    step_flops = 3 * objective.flops(data.length) * t.batch_size
    peak = peak_flops(mesh.devices.flat[0], getattr(experiment.objective.model, "dtype", "float32")) * mesh.size
    entropy = store.unigram_entropy("held_out")
    totals, evaluation, last_saved = Totals(), {}, first or None
    pending: tuple[int, Any] | None = None
    clock, clock_step = time.perf_counter(), first
    stream = batches.stream(first, rows)
    stack.callback(stream.close)
    source = on_device(stream)

    def read(pending: tuple[int, Any]) -> None:
        """Metrics of a step that the device has been given to do; stops the run when its loss is no number."""
        nonlocal clock, clock_step
        step, metrics = pending
        values = totals.add(metrics)
        if not math.isfinite(values["loss"][0]):
            kept = f"the last good checkpoint is of step {last_saved:,}" if last_saved else "there is no checkpoint yet"
            raise FloatingPointError(
                f"the loss of step {step:,} is not finite ({values['loss'][0]}); {kept}, in {folder / 'checkpoints'}. "
                "Lower optimizer.learning_rate or lengthen optimizer.warmup_steps and start anew from there."
            )
        if step % t.log_every == 0 or step == t.steps or step == first + 1:
            now = time.perf_counter()
            speed = (step - clock_step) / (now - clock)
            clock, clock_step = now, step
            means = totals.means()
            means["learning_rate"] = float(learning_rate(step - 1))
            means["real_tokens"] = means.pop("real_tokens", 0.0)
            means["tokens_per_second"] = speed * t.batch_size * data.length
            if peak:
                means["mfu"] = speed * step_flops / peak
            if writer:
                writer.write(step, means)
            progress.show(step, means)

    for step in range(first + 1, t.steps + 1):
        state, metrics = train_step(state, next(source))
        if pending is not None:
            read(pending)  # one step late, so that the device always has the next step to work on
        pending = (step, metrics)
        ending = step == t.steps or stop.requested
        evaluating = step == t.steps or (t.eval_every and step % t.eval_every == 0)
        if ending or evaluating or (t.checkpoint_every and step % t.checkpoint_every == 0):
            read(pending)
            pending, eval_loss = None, None
            if evaluating and held_out.num_rows:
                paused = time.perf_counter()
                evaluation = evaluate(state)
                name = headline(objective, evaluation)
                eval_loss = evaluation["loss"]
                if writer:
                    writer.write(step, {f"eval_{key}": value for key, value in evaluation.items()})
                progress.note(_evaluation_line(step, evaluation, name, entropy))
                clock += time.perf_counter() - paused
            if ending or (t.checkpoint_every and step % t.checkpoint_every == 0):
                paused = time.perf_counter()
                checkpoints.save(state, step, facts, eval_loss)
                last_saved = step
                clock += time.perf_counter() - paused
        if stop.requested and step < t.steps:
            checkpoints.wait()
            progress.note(f"Stopped by a signal after step {step:,}; saved. Run the same command to go on.")
            return evaluation
    checkpoints.wait()
    if main:
        curves = draw_curves(folder, entropy)
        progress.note(f"Finished {t.steps:,} steps. Run: {folder}" + (f"  curves: {curves}" if curves else ""))
    return evaluation


def _with_tokenizer(data, tokenizer_folder):
    import dataclasses

    return dataclasses.replace(data, tokenizer=str(tokenizer_folder))


def _check_facts(folder: Path, facts: dict[str, str]) -> None:
    path = folder / "data.json"
    if path.exists():
        import json

        _check_saved_facts(json.loads(path.read_text(encoding="utf-8")), facts)


def _check_saved_facts(saved: dict[str, str], now: dict[str, str]) -> None:
    if saved.get("data") != now["data"]:
        raise UserError(
            f"the text has changed since this run began: its store was {saved.get('data')}, and {now['source']} now "
            f"gives {now['data']}; bring the old text back, or choose another --run-dir."
        )


def _evaluation_line(step: int, means: dict[str, float], name: str, entropy: float) -> str:
    figures = "  ".join(f"{key} {value:.4f}" for key, value in means.items() if key not in ("loss", name))
    return f"step {step:,}  held out: {name} {means.get(name, float('nan')):.4f} (unigram entropy {entropy:.4f})  {figures}"


class _StopRequest:
    requested = False


@contextlib.contextmanager
def _stop_signals() -> Iterator[_StopRequest]:
    """SIGTERM and the first Ctrl-C ask the loop to save and end; a second Ctrl-C interrupts at once."""
    request = _StopRequest()

    def ask(signum: int, frame: Any) -> None:
        if request.requested and signum == signal.SIGINT:
            raise KeyboardInterrupt
        request.requested = True

    try:
        previous = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    except ValueError:  # not the main thread (a notebook server, say): signals are not ours
        yield request
        return
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
