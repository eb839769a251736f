"""Checks of a run folder before a run begins or resumes, and the files that tie it to configuration and text."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from typing import Any

import jax

from jaxlm import hub
from jaxlm.config.experiment import Experiment, PhaseConfig, Resolved, parse_phases
from jaxlm.config.json import differences, flatten, from_json, to_json
from jaxlm.errors import UserError
from jaxlm.fields import Setting, settings, with_value
from jaxlm.objectives.base import Constants
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.parallel.checksums import checksums, digest
from jaxlm.paths import real_path
from jaxlm.runs.folder import RunFolder, write_json, write_metadata
from jaxlm.runs.session import Session, with_begun_warmups
from jaxlm.training.metrics import read_metrics

_OF_STATE = ("optimizer.name", "optimizer.average", "optimizer.freeze")
"""Fields of the optimizer on which the shapes of its state depend."""


def check_run(run: RunFolder, resolved: Resolved) -> None:
    """Raise UserError if the folder holds a run that this configuration and pretrained model cannot resume.

    Before the first step everything may change, except for the fields on which saved parameters depend: imported ones,
    or those that a student has of its teacher.
    """
    _check_checkpoints(run)
    _check_source(run, resolved)
    _check_decay(run, resolved.experiment)
    if not _waits_for_data(run, resolved.experiment, resolved.pretrained):
        _check_configuration(run, resolved.experiment)


def _check_checkpoints(run: RunFolder) -> None:
    """Raise UserError for a run that has lost its checkpoints, rather than begin it again and leave out its metrics."""
    if run.newest_step or run.experiment is None:
        return
    t, last = run.experiment.train, max((line["step"] for line in read_metrics(run.path)), default=0)
    done = last - (t.decay_steps and t.steps - t.decay_steps)
    if 0 < 2 * t.checkpoint_every < done:  # the second save waits for the first, which was then whole
        raise UserError(
            f"{run.path} has done {last:,} steps and holds no checkpoint of them; bring checkpoints/ back, or remove "
            "metrics.jsonl to start over."
        )


def _waits_for_data(run: RunFolder, experiment: Experiment, pretrained: PretrainedModel | None) -> bool:
    """Return whether `write_run` checks the configuration: its rows have the labels, or it gets other parameters."""
    return pretrained is not None and (experiment.data.has_labels or not run.has_begun)


def _check_configuration(run: RunFolder, experiment: Experiment) -> None:
    if run.has_begun:  # its metadata cannot be edited by hand as config.json can
        before = dict(run.metadata.get("configuration") or flatten(run.experiment, Setting.decides_result))
        phases = from_json(before.pop("train.phases", ()))  # those that have not begun may change
        if experiment.optimizer.warmup_steps is None:  # a share: a run keeps its warm-up
            before.pop("optimizer.warmup_steps", None)
        if changed := differences(before, flatten(experiment, Setting.decides_result)):
            _refuse(run, changed, _as_phase(run, experiment, changed))
        named = {name: value for name, value in vars(run.experiment.data).items() if name in ("source", "temperature")}
        before = dataclasses.replace(experiment, data=dataclasses.replace(experiment.data, **named))  # text may move
        before = with_value(before, "train.phases", phases)
        _check_phases(run, *(with_begun_warmups(each, run) for each in (before, experiment)))
    elif run.saved_steps:
        _refuse(run, differences(*(
            flatten(each, lambda setting: setting.needs_weights() and setting.decides_result())
            for each in (run.experiment, experiment)
        )))


def _check_phases(run: RunFolder, before: Experiment, experiment: Experiment) -> None:
    """Raise UserError unless the phases that have begun are those of the run, whose current one may end elsewhere."""
    done = max(run.newest_step, 1)
    old, new = ([
        (phase.after, phase.has_schedule, flatten(phase.experiment, Setting.decides_result),
         each.data.phase_shares(phase.experiment.data))
        for phase in each.phases if phase.after < done
    ] for each in (before, experiment))
    if old != new:
        raise UserError(
            f"{run.path} has done {done:,} steps with train.phases {before.phases_text!r}, and "
            f"{experiment.phases_text!r} changes a phase that has begun; change only later ones, or choose another "
            "--run-dir and start from this run with --init-from."
        )


def _check_source(run: RunFolder, resolved: Resolved) -> None:
    init_from = resolved.pretrained and resolved.pretrained.path
    source = run.metadata.get("imported_from")
    if init_from is None and source is not None and not run.saved_steps:
        raise UserError(
            f"{run.path} was started from {source} but has saved no checkpoint; pass --init-from {source} again."
        )
    if init_from is not None and run.saved_steps and (source is None or real_path(source) != real_path(init_from)):
        raise UserError(
            f"{run.path} began from {source or 'fresh parameters'}, not from {init_from}; resume it with "
            f"`jaxlm {run.experiment.command} {run.path}`, or choose another --run-dir."
        )


def _check_decay(run: RunFolder, experiment: Experiment) -> None:
    """Raise UserError for a decay that has begun, if the run that it branched off has gone on since."""
    t, before = experiment.train, run.experiment and run.experiment.train
    if run.saved_steps and t.decay_steps and t.steps != before.steps:
        raise UserError(
            f"{run.path} decays from step {before.steps - before.decay_steps:,} to {before.steps:,}, and now it would "
            f"end at {t.steps:,}; resume it with `jaxlm pretrain {run.path}`, without --init-from and --train.steps."
        )


def _as_phase(run: RunFolder, experiment: Experiment, changed: list[str]) -> str:
    """Return the advice to change fields for the steps to come; "" if a phase cannot, or if there are phases."""
    names, done, steps = {line.partition(":")[0] for line in changed}, run.newest_step, experiment.train.steps or 0
    fields = [setting for setting in settings(experiment) if setting.name in names]
    has_phases = run.experiment.train.phases or experiment.train.phases
    if has_phases or not 0 < done < steps or any(s.decides_weights() or s.name in _OF_STATE for s in fields):
        return ""
    with contextlib.suppress(UserError):
        phase = PhaseConfig(steps - done, fields={setting.name: setting.value for setting in fields})
        phases = parse_phases(text := f"{done}, {phase}")
        now = with_value(run.experiment, "train.phases", phases)
        now.validate()
        if phases[1] == phase and not now.phases[1].has_schedule:  # it would begin with a warm-up
            folder = shlex.quote(str(run.path))
            command = f"jaxlm {experiment.command} {folder} --train.steps {steps} --train.phases '{text}'"
            return f", or change them from here on with `{command}` and your other flags"
    return ""


def _refuse(run: RunFolder, changed: list[str], instead: str = "") -> None:
    if changed:
        more = "; …" if len(changed) > 4 else ""
        raise UserError(
            f"{run.path}{run.age} holds a run of another configuration ({'; '.join(changed[:4])}{more}); "
            f"pass the same values{instead}, or choose another --run-dir and start from this one with --init-from."
        )


def schedule_remarks(run: RunFolder, experiment: Experiment) -> list[str]:
    """Return remarks on a number of steps that the user may not have meant."""
    t, optimizer, remarks = experiment.train, experiment.optimizer, []
    length, last = experiment.data.length, experiment.phase_at(t.steps).experiment.data.length
    for phase in experiment.phases:
        if phase.after >= t.steps:
            remarks.append(
                f"Phase {phase.number} of train.phases begins after step {phase.after:,}, and the run ends at step "
                f"{t.steps:,}; if that is not meant, raise --train.steps"
            )
    if last != length:
        remarks.append(
            f"The last steps read rows of {last} tokens, but evaluation and samples have --data.length {length}; "
            "if that is not meant, change --train.phases or --train.steps"
        )
    if run.newest_step:
        phases = [each.phase_at(run.newest_step) for each in (run.experiment, experiment)]
        optimizer = phases[1].experiment.optimizer
        before, steps = (phase.schedule_span()[1] for phase in phases)
        if run.newest_step < t.steps and steps != before and optimizer.schedule in ("linear", "cosine"):
            remarks.append(f"The learning rate now follows a schedule of {steps:,} steps instead of {before:,}")
        if optimizer.schedule == "wsd":
            old, new = (phase.decay_span() for phase in phases)
            if old != new and run.newest_step > min(old[0], new[0]):
                remarks.append(
                    f"The learning rate now decays from step {new[0]:,} to {new[1]:,} instead of {old[0]:,} to "
                    f"{old[1]:,}; {run.newest_step:,} are done, so that it jumps"
                )
        return remarks
    for phase in experiment.phases:
        _, steps = phase.schedule_span()
        optimizer = phase.experiment.optimizer.with_warmup(steps)
        if phase.after < t.steps and optimizer.warmup_steps >= steps and optimizer.schedule != "inverse-sqrt":
            of, it = (f" of phase {phase.number}", "it") if phase.has_schedule else ("", "this run")
            remarks.append(
                f"The learning rate{of} rises over {optimizer.warmup_steps:,} steps and {it} has {steps:,}; if that is "
                f"not meant, {'set optimizer.warmup_steps in it' if of else 'lower optimizer.warmup_steps'}"
            )
    return list(dict.fromkeys(remarks))


def run_metadata(session: Session, constants: Constants) -> dict[str, Any]:
    """Return the metadata for data.json and every checkpoint.

    It has the fingerprints of token store, tokenizer and constants (key "frozen"; the arrays are on their devices), the
    text's source and unigram entropy in nats, the fields that decide the result, and the model that the run began from.
    """
    pretrained, experiment, source = session.pretrained, session.experiment, session.source
    path = pretrained.path if pretrained else ""
    if path and not path.startswith(hub.PREFIX):  # the working directory may be another one then
        path = real_path(path)
    begun_from = {"imported_from": path, "fresh": list(pretrained.fresh)} if pretrained else {}
    begun_from |= {"settings": pretrained.settings._replace(length=pretrained.length).to_json()} if pretrained else {}
    return session.run.metadata | begun_from | {
        "data": source.fingerprint,
        "tokenizer": session.tokenizer.fingerprint,
        "frozen": digest(checksums(constants)[0]) if jax.tree.leaves(constants) else None,
        "source": experiment.data.source,
        "unigram_entropy": source.statistics.unigram_entropy,
        "configuration": flatten(experiment, Setting.decides_result),
    }


def write_run(session: Session, metadata: dict[str, Any]) -> None:
    """Write configuration, metadata and tokenizer, which make the folder a run.

    It is called when everything else has been checked, so that a mistake in a flag leaves no run behind.

    Raises:
        UserError: The text, the teacher or the configuration is not that of the run, as after an edit of config.json.
    """
    run, experiment = session.run, session.experiment
    saved = run.metadata
    if run.has_begun and saved.get("data") != metadata["data"]:
        raise UserError(
            f"the text has changed since this run{run.age} began, or other parts of it are held out: it has learnt "
            f"from {saved.get('source', 'other text')} (store {str(saved.get('data'))[:12]}), and {metadata['source']} "
            f"now gives {metadata['data'][:12]}; bring the old text back, or choose another --run-dir and start from "
            "this run with --init-from."
        )
    if (run.has_begun or run.saved_steps) and saved.get("frozen") != metadata["frozen"]:
        raise UserError(
            f"objective.{experiment.objective.constants_field} holds other weights than when this run{run.age} began; "
            "give it the same folder, or choose another --run-dir and start from this run with --init-from."
        )
    if _waits_for_data(run, experiment, session.pretrained):
        _check_configuration(run, experiment)
    if run.has_begun or run.saved_steps:
        objective = run.experiment.objective
        model = objective.model.for_vocabulary(session.objective.vocabulary)
        before = dataclasses.replace(run.experiment, objective=dataclasses.replace(objective, model=model))
        _refuse(run, differences(*(
            flatten(each, lambda setting: "vocabulary" in setting.marks) for each in (before, experiment)
        )))
    if session.kept is experiment:
        write_json(run.path / "config.json", to_json(experiment))
    write_metadata(run.path, metadata)
    if run.tokenizer_folder is None:
        (run.path / "tokenizer").rmtree(missing_ok=True)  # left by a start that did no step
        session.tokenizer.save(run.path / "tokenizer")
