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
from jaxlm.models.base import Model
from jaxlm.objectives.base import Constants, Objective, PretrainedModel
from jaxlm.parallel.hosts import main_first, require_same, together
from jaxlm.runs.folder import NO_RUN, RunFolder
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.training.feed import Feed
from jaxlm.training.program import Program
from jaxlm.types import Report


@dataclasses.dataclass(frozen=True)
class Session:
    """An opened run: configuration, tokenizer, objective, constants, pretrained model and, after `with_rows`, data.

    Attributes:
        experiment: The configuration. Its objective is bound to the vocabulary; a task's is complete after `with_rows`.
        run: State of the run's folder when it was opened; empty for a preset.
        tokenizer: The tokenizer; None if the vocabulary is a stand-in.
        constants: Arrays that the loss reads and that are not trained, on the host, or their shapes.
        pretrained: The model that training begins with; after `with_rows` only the parameters that the objective uses.
        rows: The opened data; None before `with_rows`.
    """

    experiment: Experiment
    run: RunFolder
    tokenizer: Tokenizer | None
    constants: Constants = ()
    pretrained: PretrainedModel | None = None
    rows: Source | None = None

    @property
    def objective(self) -> Objective:
        """The bound objective."""
        return self.experiment.objective

    def with_rows(self, report: Report = print) -> Self:
        """Open the data, and bind the objective to what it tells: token counts, or the labels of a task.

        Each process tokenizes a share of a text if that is not done yet.

        Args:
            report: Receives remarks about the data and progress messages.

        Raises:
            UserError: The data cannot be read or used, or differs between processes.
        """
        experiment, pretrained, run = self.experiment, self.pretrained, self.run
        data, length = experiment.data, experiment.data.length
        data.check_format(self.objective.row_format(length))
        main_first(lambda: data.survey(report), "read the text", everywhere=False)
        together(
            lambda: data.tokenize(self.tokenizer, jax.process_index(), jax.process_count(), report),
            "the other processes to tokenize their shares of the text",
        )
        rows = main_first(lambda: data.open(self.tokenizer, report), "prepare the text")
        require_same({"tokenizer": self.tokenizer.fingerprint, "text": rows.fingerprint})
        objective = self.objective
        if pretrained is not None or not objective.is_task:  # a task that is resumed has its labels in its folder
            objective = objective.with_rows(rows, data)
        if pretrained is not None:
            pretrained = dataclasses.replace(pretrained, params=objective.select_params(pretrained))
        objective = objective.bind(objective.vocabulary, length, rows.statistics)
        objective.with_constants(self.constants)  # only to refuse a teacher with other labels
        if not run.has_begun:
            for line in objective.remarks(rows, length):
                report(line)
        optimizer = experiment.optimizer
        if run.has_begun and optimizer.warmup_steps is None:  # more steps do not change the warm-up that is done
            optimizer = dataclasses.replace(optimizer, warmup_steps=run.experiment.optimizer.warmup_steps)
        experiment = dataclasses.replace(experiment, objective=objective, optimizer=optimizer)
        experiment = with_steps(experiment, 0 if experiment.train.steps else objective.num_examples(rows, length))
        return dataclasses.replace(self, experiment=experiment, pretrained=pretrained, rows=rows)

    def replace(self, **parts: Any) -> Self:
        """Return a copy with other parts of the experiment. A new objective must be bound; constants and rows stay."""
        return dataclasses.replace(self, experiment=dataclasses.replace(self.experiment, **parts))

    def program(self, mesh: Mesh) -> Program:
        """Return the program of the train step over a mesh."""
        e = self.experiment
        return Program(self.objective, e.train, e.optimizer, mesh, self.constants, e.phases)

    def feed(self, mesh: Mesh) -> Feed:
        """Return the batches of the data on the devices of a mesh."""
        return Feed(self.rows, self.experiment, mesh)

    def synthetic_batch(self) -> Any:
        """Return full rows of random tokens, as the host provides them."""
        row_format = self.objective.row_format(self.experiment.data.length)
        return self.experiment.data.synthetic(self.experiment.train.batch_size, row_format, self.objective.vocabulary)


def open_session(
    resolved: Resolved, run: RunFolder = NO_RUN, report: Report = print,
    constants_of: Callable[[Objective], Constants] = lambda objective: (), *, use_stand_in: bool = False,
    for_inference: bool = False,
) -> Session:
    """Open a run up to its data: the tokenizer, the bound objective and its constants.

    Args:
        resolved: The configuration and the pretrained model.
        run: The run's folder; of a preset it is empty.
        report: Receives a line about everything that takes time.
        constants_of: Returns the constants of the bound objective, or their shapes; by default none.
        use_stand_in: Whether a preset gets a stand-in for the vocabulary that its model was published with.
        for_inference: Whether an imported model may lack what only training needs, such as T5's sentinels.

    Raises:
        UserError: The tokenizer, the teacher or the sequence length does not suit the objective.
    """
    experiment, pretrained = resolved
    objective = experiment.objective
    if use_stand_in and run.tokenizer_folder is None:
        tokenizer, vocabulary = None, Vocabulary.stand_in(objective.model.vocab_size, objective.symbols)
    else:
        tokenizer = _find_tokenizer(resolved, run, report)
        vocabulary = tokenizer.vocabulary
    # The embedding of a pretrained model keeps its number of rows.
    preserve_rows = pretrained is not None or run.is_imported
    vocabulary = dataclasses.replace(vocabulary, preserve_rows=preserve_rows)
    if for_inference and run.is_imported:
        objective = dataclasses.replace(objective, vocabulary=vocabulary)
    else:
        objective = objective.bind(vocabulary, experiment.data.length)
    experiment = dataclasses.replace(experiment, objective=objective)
    for phase in experiment.phases if experiment.train.phases and not for_inference else ():
        with phase.named():
            _check_phase(phase, experiment)
    return Session(experiment, run, tokenizer, constants_of(objective), pretrained)


def _check_phase(phase: Phase, experiment: Experiment) -> None:
    """Raise UserError if the objective of a phase cannot have its rows."""
    e = phase.experiment
    shape, whole = ((each.train.batch_size, each.data.length) for each in (e, experiment))
    if e.objective.row_format(e.data.length).stride and shape != whole:
        raise UserError(f"{type(e.objective).__name__} reads a stream in rows of one length and batches of one size.")
    e.objective.bind(e.objective.vocabulary, e.data.length)


def _find_tokenizer(resolved: Resolved, run: RunFolder, report: Report) -> Tokenizer:
    """Return the tokenizer of the pretrained model or of the run; otherwise the one that the data names or trains."""
    data, symbols = resolved.experiment.data, resolved.experiment.objective.symbols
    if resolved.pretrained is not None:
        return resolved.pretrained.tokenizer.with_symbols(symbols)
    if run.tokenizer_folder is None:
        return main_first(lambda: data.prepare_tokenizer(report, symbols), "prepare the tokenizer")
    tokenizer = Tokenizer.load(run.tokenizer_folder)
    for name in symbols:  # refuses a tokenizer that lacks one
        tokenizer.vocabulary.id(name)
    return tokenizer


def require_model(experiment: Experiment) -> None:
    """Raise UserError for a task whose model is still to be given."""
    if experiment.objective.is_task and experiment.objective.model == Model():
        raise UserError(
            "a task needs a trained model; pass --init-from RUN_OR_HF_DIR, or give a fine-tuned run in place of the "
            "preset."
        )


def with_steps(experiment: Experiment, num_examples: int = 0) -> Experiment:
    """Compute `train.steps` from epochs or phases, and `optimizer.warmup_steps` from its share, where they are None.

    Args:
        experiment: The experiment.
        num_examples: Examples of an epoch; 0 if they are not read.

    Raises:
        UserError: There is no number of steps, and no phases, epochs or examples.
    """
    train = experiment.train
    if train.steps is None and train.phases:
        train = dataclasses.replace(train, steps=sum(phase.steps for phase in train.phases))
    elif train.steps is None:
        if not train.epochs * num_examples:
            raise UserError("train.steps is None; give a number, train.phases, or for a new run train.epochs.")
        train = dataclasses.replace(train, steps=math.ceil(train.epochs * num_examples / train.batch_size))
    return dataclasses.replace(experiment, train=train, optimizer=experiment.optimizer.with_warmup(train.steps))
