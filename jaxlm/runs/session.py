"""The session: a run opened once, from its resolved configuration to the program and the batches that train it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Self

import jax
from jax.sharding import Mesh

from jaxlm.config.experiment import Experiment, Phase, Resolved
from jaxlm.data.base import Source
from jaxlm.errors import UserError
from jaxlm.fields import with_value
from jaxlm.models.base import Model
from jaxlm.objectives.base import Bound, Constants, Objective
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.parallel.hosts import main_first, require_same, share_signals, together
from jaxlm.runs.folder import NO_RUN, RunFolder
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.training.feed import Feed
from jaxlm.training.program import Program
from jaxlm.types import Report


@dataclasses.dataclass(frozen=True)
class Setup:
    """The first stage of a session: what is cheap has been opened and checked, and no data has been read."""

    experiment: Experiment
    """The configuration, with the model of the vocabulary."""
    run: RunFolder
    tokenizer: Tokenizer | None
    vocabulary: Vocabulary
    """Facts about the tokenizer; a stand-in if there is none."""
    constants: Constants
    pretrained: PretrainedModel | None
    load: Callable[[str], PretrainedModel]

    def without_data(self) -> Session:
        """Return the session of a plan or of an evaluation, which trains on no data."""
        return self._bound(self.experiment, None, self.pretrained)

    def open_data(self, report: Report = print) -> Session:
        """Open the data, and bind the objective to what it tells: token counts, or the labels of a task.

        Each process tokenizes a share of a text if that is not done yet. Remarks about the data are reported.

        Raises:
            UserError: The data cannot be read or used, or differs between processes.
        """
        e, run, pretrained = self.experiment, self.run, self.pretrained
        data = e.data
        for phase in e.phases:
            data.check_format(phase.experiment.objective.row_format(phase.experiment.data.length))
        if jax.process_count() > 1:  # one process alone tokenizes all of it in `open`
            together(
                lambda: data.tokenize(self.tokenizer, jax.process_index(), jax.process_count(), report),
                "the other processes to tokenize their shares of the text",
            )
        source = main_first(lambda: data.open(self.tokenizer, report), "prepare the text")
        share_signals()
        require_same({"tokenizer": self.tokenizer.fingerprint, "text": source.fingerprint})
        for phase in e.phases if e.train.phases else ():
            with phase.named():
                phase.experiment.objective.with_labels_of(source, data)
        if pretrained is not None or run.experiment is None:  # a run that is resumed has its labels in its folder
            e = dataclasses.replace(e, objective=e.objective.with_labels_of(source, data))
        if pretrained is not None:
            pretrained = dataclasses.replace(pretrained, params=e.objective.select_params(pretrained))
        session = self._bound(e, source, pretrained)
        objective = session.objective
        if not run.has_begun:
            for line in objective.remarks(source, data.length):
                report(line)
        num_examples = 0 if e.train.steps else objective.num_examples(source, data.length)
        return dataclasses.replace(session, experiment=with_steps(session.experiment, num_examples, run))

    def _bound(self, e: Experiment, source: Source | None, pretrained: PretrainedModel | None) -> Session:
        statistics = None if source is None else source.statistics
        objective = e.objective.bind(self.vocabulary, e.data.length, statistics, self.constants, self.load)
        return Session(dataclasses.replace(e, objective=objective), self.run, self.tokenizer, pretrained, source)


@dataclasses.dataclass(frozen=True)
class Session:
    """An opened run, complete: nothing in it changes any more.

    Attributes:
        experiment: The configuration, with a bound objective.
        run: State of the run's folder when it was opened; empty for a preset.
        tokenizer: The tokenizer; None if the vocabulary is a stand-in.
        pretrained: The model that training begins with, with the parameters that the objective uses; None for none.
        source: The opened data; None for a plan or an evaluation.
    """

    experiment: Experiment
    run: RunFolder
    tokenizer: Tokenizer | None
    pretrained: PretrainedModel | None
    source: Source | None

    @property
    def objective(self) -> Bound:
        """The bound objective."""
        return self.experiment.objective

    @property
    def kept(self) -> Experiment:
        """The configuration of the run's folder: a finished run keeps its own, whatever the flags say."""
        is_finished = self.run.experiment is not None and self.experiment.train.steps <= self.run.newest_step
        return self.run.experiment if is_finished else self.experiment

    def replace(self, **parts: Any) -> Self:
        """Return a copy with other parts of the experiment; a new objective must be bound."""
        return dataclasses.replace(self, experiment=dataclasses.replace(self.experiment, **parts))

    def program(self, mesh: Mesh) -> Program:
        """Return the program of the train step over a mesh."""
        e = self.experiment
        return Program(self.objective, e.train, e.optimizer, mesh, e.phases)

    def feed(self, mesh: Mesh) -> Feed:
        """Return the batches of the data on the devices of a mesh."""
        return Feed(self.source, self.experiment, mesh)

    def synthetic_batch(self) -> Any:
        """Return full rows of random tokens, as the host provides them."""
        row_format = self.objective.row_format(self.experiment.data.length)
        return self.experiment.data.synthetic(self.experiment.train.batch_size, row_format, self.objective.vocabulary)


def set_up(
    resolved: Resolved, load: Callable[[str], PretrainedModel], run: RunFolder = NO_RUN, report: Report = print,
    constants_of: Callable[[Objective, Vocabulary], Constants] = lambda *_: (), *, use_stand_in: bool = False,
) -> Setup:
    """Open and check what is cheap of a run: the tokenizer, the sizes of the model and the constants.

    A preset has an empty `run`. Without `constants_of` an objective has no constants. With `use_stand_in` a preset has
    a stand-in for the vocabulary that its model was published with.
    """
    experiment, pretrained = resolved
    objective = experiment.objective
    if use_stand_in and run.tokenizer_folder is None:
        tokenizer, vocabulary = None, Vocabulary.stand_in(objective.model.vocab_size, experiment.symbols)
    else:
        tokenizer = find_tokenizer(resolved, run, report)
        vocabulary = tokenizer.vocabulary
    # The embedding of a pretrained model keeps its number of rows.
    vocabulary = dataclasses.replace(vocabulary, preserve_rows=pretrained is not None or run.is_imported)
    objective.check(vocabulary, experiment.data.length)
    objective = dataclasses.replace(objective, model=objective.model.for_vocabulary(vocabulary))
    experiment = dataclasses.replace(experiment, objective=objective)
    for phase in experiment.phases if experiment.train.phases else ():
        with phase.named():
            _check_phase(phase, experiment, vocabulary)
    return Setup(experiment, run, tokenizer, vocabulary, constants_of(objective, vocabulary), pretrained, load)


def _check_phase(phase: Phase, experiment: Experiment, vocabulary: Vocabulary) -> None:
    """Raise UserError if the objective of a phase cannot have its rows."""
    e = phase.experiment
    shape, whole = ((each.train.batch_size, each.data.length) for each in (e, experiment))
    if e.objective.row_format(e.data.length).stride and shape != whole:
        raise UserError(f"{type(e.objective).__name__} reads a stream in rows of one length and batches of one size.")
    e.objective.check(vocabulary, e.data.length)


def find_tokenizer(resolved: Resolved, run: RunFolder, report: Report = print) -> Tokenizer:
    """Return the tokenizer of the run or of the pretrained model; otherwise the one that the data names or trains."""
    data, symbols = resolved.experiment.data, resolved.experiment.symbols
    if run.tokenizer_folder is None and resolved.pretrained is not None:
        return resolved.pretrained.tokenizer.with_symbols(symbols)
    if run.tokenizer_folder is None:
        return main_first(lambda: data.prepare_tokenizer(report, symbols), "prepare the tokenizer")
    tokenizer = Tokenizer.load(run.tokenizer_folder)
    for name in symbols:  # refuses a tokenizer that lacks one
        tokenizer.vocabulary.id(name)
    return tokenizer


def require_model(experiment: Experiment) -> None:
    """Raise UserError for a task whose model is still to be given."""
    if experiment.objective.model == Model():
        raise UserError(
            "a task needs a trained model; pass --init-from RUN_OR_HF_DIR, or give a fine-tuned run in place of the "
            "preset."
        )


def with_steps(experiment: Experiment, num_examples: int = 0, run: RunFolder = NO_RUN) -> Experiment:
    """Compute `train.steps` from epochs or phases, and `optimizer.warmup_steps` from its share, where they are None.

    A run that is resumed keeps its warm-up, and that of its phases: more steps do not change what is done.
    """
    train, optimizer = experiment.train, experiment.optimizer
    if train.steps is None and train.phases:
        train = dataclasses.replace(train, steps=sum(phase.steps for phase in train.phases))
    elif train.steps is None:
        if not train.epochs * num_examples:
            raise UserError("train.steps is None; give a number, train.phases, or for a new run train.epochs.")
        train = dataclasses.replace(train, steps=math.ceil(train.epochs * num_examples / train.batch_size))
    if run.has_begun and optimizer.warmup_steps is None:
        optimizer = dataclasses.replace(optimizer, warmup_steps=run.experiment.optimizer.warmup_steps)
    found = dataclasses.replace(experiment, train=train, optimizer=optimizer.with_warmup(train.steps))
    return with_begun_warmups(found, run) if run.has_begun else found


def with_begun_warmups(experiment: Experiment, run: RunFolder) -> Experiment:
    """Return the configuration whose phases that have begun keep the warm-up steps that their share was in `run`."""
    phases = list(experiment.train.phases)
    for index, each in enumerate(phases):
        phase = experiment.phases[index]
        is_share = phase.has_schedule and phase.experiment.optimizer.warmup_steps is None
        if is_share and phase.after < max(run.newest_step, 1):
            own = run.experiment.phase_at(phase.after + 1)
            warmup = own.experiment.optimizer.with_warmup(own.schedule_span()[1]).warmup_steps
            phases[index] = with_value(each, "fields", (*each.fields, ("optimizer.warmup_steps", warmup)))
    return with_value(experiment, "train.phases", tuple(phases))
