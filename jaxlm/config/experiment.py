"""Configuration of a run: `Experiment` and its parts."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, Self

from jaxlm.data.base import Data
from jaxlm.data.text import TextData
from jaxlm.errors import UserError
from jaxlm.fields import check_ranges, check_type, check_types, field, settings, with_value
from jaxlm.objectives.base import Objective
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.parallel.mesh import MeshConfig


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer and learning-rate schedule."""

    name: Literal["adamw", "stable-adamw", "lion", "muon", "lamb", "adafactor", "adagrad"] = "adamw"
    """adamw (decoupled weight decay), stable-adamw (with update clipping; set clip_norm to 0 with it; ModernBERT), lion
    (sign of the momentum), muon (orthogonalized momentum for the kernels of layers, adamw for the others), lamb (for
    very large batches), adafactor (factored second moments, as in T5), adagrad (ELMo, word2vec)."""
    learning_rate: float = field(1e-4, range="(0, inf)")
    """Peak learning rate."""
    warmup_steps: int | None = field(10_000, range="[0, inf)")
    """Linear warm-up steps from 0 to the peak learning rate; None: `warmup_share` of the steps."""
    warmup_share: float = field(0.0, range="[0, inf)")
    """Share of the steps that are warm-up, where `warmup_steps` is None."""
    layer_decay: float = field(1.0, range="[0, inf)")
    """Factor on the learning rate from each layer to the one below it; the head has the full rate (ELECTRA, XLNet)."""
    schedule: Literal["linear", "cosine", "wsd", "inverse-sqrt", "constant"] = "linear"
    """Decay after the warm-up: linear or cosine to final_share of the peak at the last step, only over the last
    `decay_share` of the steps (wsd: warm-up, stable, decay), 1/sqrt(step), or none."""
    decay_share: float = field(0.1, resumable=True, range="[0, 1]")
    """Share of the steps that decay, at the end (wsd). Before them a run may resume with another one or more steps."""
    decay_shape: Literal["linear", "cosine", "1-sqrt"] = "linear"
    """Shape of that decay (wsd)."""
    final_share: float = field(0.0, range="[0, inf)")
    """Final learning rate as a fraction of the peak (linear, cosine, wsd)."""
    b1: float = field(0.9, range="[0, 1)")
    """Decay rate of the first moment (adamw, stable-adamw, lamb), weight of the momentum in the update (lion)."""
    b2: float = field(0.999, range="[0, 1)")
    """Decay rate of the second moment (adamw, stable-adamw, lamb) or of the momentum (lion: 0.99)."""
    eps: float = field(1e-6, range="(0, inf)")
    """Epsilon, added outside the square root (adamw, stable-adamw, lamb); initial sum of squares (adagrad)."""
    bias_correction: bool = True
    """Adam's bias correction (adamw, stable-adamw, lamb). BERT and ELECTRA were trained without."""
    weight_decay: float = field(0.01, range="[0, inf)")
    """Decoupled weight decay of kernels and embeddings (`DECAYED`); biases and norms have none, nor has adafactor or
    adagrad."""
    clip_norm: float = field(1.0, range="[0, inf)")
    """Global gradient norm to clip to; 0 turns clipping off."""
    average: float = field(0.0, range="[0, 1)")
    """Decay of an exponential moving average of the parameters, min(average, (1 + step) / (10 + step)), such as 0.999;
    evaluation, samples and later commands read it in place of the parameters. 0: none."""
    freeze: tuple[str, ...] = ()
    """Patterns of names of parameters that are not trained, such as 'embeddings' '*/bias'; a later '!classifier' takes
    out what an earlier '*' has chosen. A name stands for all parameters below it, '*' also for several levels, and the
    layers of a stack are one parameter."""

    def own_update(self) -> Any:
        """Return an `optax.GradientTransformation` in place of that of `name`, for a subclass; None for none.

        Clipping comes before it; weight decay, frozen parameters and the learning rate after it.
        """
        return None

    def own_schedule(self, steps: int) -> Callable[[Any], Any] | None:
        """Return the learning rate of the `steps` after the warm-up, by 0-based step, for a subclass; None for none.

        With `schedule` wsd they are those of its decay.
        """
        return None

    def stable_steps(self, steps: int) -> int:
        """Return the number of steps before the decay of wsd, in a run of `steps`."""
        return steps - round(self.decay_share * steps)

    def with_warmup(self, steps: int) -> Self:
        """Return a copy whose `warmup_steps` are a number: where they are None, `warmup_share` of `steps`."""
        if self.warmup_steps is not None:
            return self
        return dataclasses.replace(self, warmup_steps=round(self.warmup_share * steps))


@dataclasses.dataclass(frozen=True)
class PhaseConfig:
    """Phase of a run: its steps and the fields that it sets."""

    steps: int = field(range="[1, inf)")
    """Number of steps."""
    length: int | None = field(None, range="[1, inf)")
    """Tokens of a row (`data.length`); None: the run's."""
    batch_size: int | None = field(None, range="[1, inf)")
    """Rows of a batch (`train.batch_size`); None: as many tokens a batch as the run."""
    fields: Mapping[str, Any] | tuple[tuple[str, Any], ...] = ()
    """Values of other fields, by dotted names such as "optimizer.learning_rate"; given as a dictionary."""
    objective: Objective | None = None
    """Objective of its own on the run's parameters, for presets alone; None: the run's. Its model is the run's, with
    attention in the direction that it needs. Parameters that it does not use are left alone; it may not add any.
    Adam counts the steps of all phases, so give the first phase that trains a head `optimizer.warmup_steps` of its own.
    Held-out text is evaluated with it, too."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", tuple(dict(self.fields).items()))
        check_types(self)
        check_ranges(self, "train.phases: ")

    def __str__(self) -> str:
        """Return it as a flag has it: "700x16 objective.mask_rate=0.3"."""
        rest = self.changes
        sizes = [self.steps, *([rest.pop("data.length")] if "data.length" in rest else [])]
        if len(sizes) > 1 and "train.batch_size" in rest:
            sizes.append(rest.pop("train.batch_size"))
        return " ".join(["x".join(map(str, sizes)), *(f"{name}={_shown(value)}" for name, value in rest.items())])

    @property
    def changes(self) -> dict[str, Any]:
        """The values that it sets, by dotted names."""
        parts = {"objective": self.objective, "data.length": self.length, "train.batch_size": self.batch_size}
        return {name: value for name, value in parts.items() if value is not None} | dict(self.fields)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Training length, batch size, evaluation and checkpoints."""

    steps: int | None = field(1_000_000, resumable=True, range="[1, inf)")
    """Optimizer steps in total; None: `epochs` passes over the training data, or the sum of the `phases`."""
    epochs: float = field(0.0, resumable=True, range="[0, inf)")
    """Passes over the training data, text or labelled rows, where `steps` is None; as a flag in place of a preset's
    (with `--train.phases=` where that has phases)."""
    batch_size: int = field(256, range="[1, inf)")
    """Global batch size: sequences per optimizer step, over all devices."""
    phases: tuple[PhaseConfig, ...] = ()
    """Phases of the run. As a flag, with commas between: STEPS, STEPSxLENGTH or STEPSxLENGTHxBATCH each, as in
    '700x16, 800' (attention is learnt sooner over short rows, and costs less). The last one ends with `steps`. A length
    without a batch has as many tokens a batch as the run. FIELD=VALUE after them sets any field of objective and
    optimizer that leaves shapes as they are, train.accumulate, data.temperature, or data.source (in a preset, some
    sources of the run's mixture), as in '800x128 optimizer.learning_rate=3e-4'; what a phase does not set is the
    run's. In a preset a phase may also have an objective of its own (see `PhaseConfig`). A phase that sets
    optimizer.schedule, warmup_…, decay_… or final_share has a learning-rate schedule of its own, over its own steps;
    all others share one over the whole run, which optimizer.learning_rate scales. Evaluation is at the run's length,
    batch, rates and shares, but with the phase's own objective. Phases that have not begun may
    change when a run is resumed. Empty: none."""
    decay_steps: int = field(0, range="[0, inf)")
    """Steps of a run that only decays the learning rate of another one to `optimizer.final_share`: it goes on from the
    checkpoint of `--init-from RUN` or `RUN@STEP`, optimizer included. 0: a run of its own."""
    accumulate: int = field(1, range="[1, inf)")
    """Gradient-accumulation microbatches."""
    seed: int = field(0, range="[0, 4294967296)")
    """Random seed of initialization, data order, corruption and dropout."""
    log_every: int = field(10, resumable=True, range="[1, inf)")
    """Steps between lines of metrics."""
    eval_every: int = field(1000, resumable=True, range="[0, inf)")
    """Steps between evaluations on held-out text; the last step is always evaluated. 0: only the last step."""
    patience: int = field(0, resumable=True, range="[0, inf)")
    """Number of evaluations in a row without a better figure (see `best_by`) after which training stops; later commands
    then read the best checkpoint. 0: train to the last step."""
    best_by: str = field("", resumable=True)
    """Held-out figure that chooses the best checkpoint, which later commands then read: a metric of the task (f1: the
    highest), which every evaluation then computes, or a loss (the lowest). Empty: the loss, where `patience` is set."""
    eval_batches: int = field(32, resumable=True, range="[1, inf)")
    """Maximum number of held-out batches per evaluation. Runs of another batch size, length or vocabulary read other
    rows; compare them where this is enough for all."""
    sample_every: int = field(0, resumable=True, range="[0, inf)")
    """Steps between samples of what the model makes of three held-out texts: filled masks, or continuations. They are
    printed and written as TensorBoard text. 0: none. Only with one process."""
    checkpoint_every: int = field(1000, resumable=True, range="[0, inf)")
    """Steps between checkpoints; the last step is always saved. 0: only the last step."""
    keep_checkpoints: int = field(3, resumable=True, range="[1, inf)")
    """Number of newest checkpoints to keep, besides the best one."""
    skip_nonfinite: int = field(0, resumable=True, range="[0, inf)")
    """Number of steps in a row that may be left out because their loss or gradient is not finite: parameters and
    optimizer then stay as they were, while the learning rate and a recurrence memory go on; the memory is reset if it
    is not finite. The next such step ends the run. `skipped` in the metrics is their share. A high but finite loss is
    never left out."""
    replay_every: int = field(0, resumable=True, range="[0, inf)")
    """Steps between those that compute loss and gradients twice, with `deterministic`; the run ends with exit code 3
    where a bit differs, before the update is used. 0: none."""
    profile_steps: str = field("", resumable=True)
    """First and last step to profile on process 0, as 100:105, for TensorBoard's profile plugin (`pip install xprof`);
    written into the run folder. Choose steps after the first, which compiles. Empty: none."""
    deterministic: bool = field(False, resumable=True)
    """Compile the steps so that a GPU gives the same bits for the same inputs, as other devices do anyway: it then
    takes slower algorithms, and none by its time."""
    stall_seconds: int = field(600, resumable=True, range="[0, inf)")
    """Seconds without a finished step after which the stacks of all threads are printed; after twice as long the
    process exits with 1. Compilation, evaluation and saving may take ten times as long, and everything
    twice as long as the longest phase so far. 0: wait forever."""
    tracker: Literal["tensorboard", "wandb", "trackio", "none"] = field("tensorboard", resumable=True)
    """Where the metrics go besides metrics.jsonl: TensorBoard events in the run folder, Weights & Biases (extra
    `[wandb]`) or trackio (extra `[trackio]`)."""

    @property
    def uses_best(self) -> bool:
        """Whether later commands read the best checkpoint, and not the newest."""
        return bool(self.patience or self.best_by)

    def __post_init__(self) -> None:
        if isinstance(self.phases, str):  # the flag's text
            object.__setattr__(self, "phases", parse_phases(self.phases))

    @property
    def criterion(self) -> str:
        """Name of the figure that chooses the best checkpoint."""
        return self.best_by or "loss"


class Phase(NamedTuple):
    """A part of a run: steps with one batch shape, objective and learning-rate schedule."""

    number: int
    """Its number, from 1."""
    after: int
    """Number of steps before it."""
    last: int | None
    """Its last step; None for the last phase, which ends with the run."""
    changes: Mapping[str, Any]
    """Values that it sets, by the dotted names of their fields."""
    experiment: Experiment
    """The run's configuration with these values, without phases."""

    def __str__(self) -> str:
        """Return the shape of its batches and the other values that it sets: "32 x 128 (objective.mask_rate 0.3)"."""
        e, shape = self.experiment, ("data.length", "train.batch_size")
        others = ", ".join(f"{name} {_shown(value)}" for name, value in self.changes.items() if name not in shape)
        return f"{e.train.batch_size} x {e.data.length}" + (f" ({others})" if others else "")

    def sets(self, *prefixes: str) -> bool:
        """Return whether it sets a field whose dotted name begins with one of `prefixes`."""
        return any(name.startswith(prefixes) for name in self.changes)

    @property
    def has_schedule(self) -> bool:
        """Whether it has a learning-rate schedule of its own."""
        return self.sets(*_OF_SCHEDULE)

    def schedule_span(self) -> tuple[int, int]:
        """Return (number of steps before, number of steps of) the learning-rate schedule that it follows."""
        after, steps = (self.after, self.last) if self.has_schedule else (0, None)
        return after, (steps or self.experiment.train.steps) - after

    def decay_span(self) -> tuple[int, int]:
        """Return (last step before, last step of) the decay of wsd."""
        after, steps = self.schedule_span()
        return after + self.experiment.optimizer.stable_steps(steps), after + steps

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Name the phase in UserErrors."""
        try:
            yield
        except UserError as error:
            raise UserError(f"phase {self.number} of train.phases: {error}") if self.changes else error from None


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Configuration of a run. Presets build one; flags override its fields."""

    objective: Objective
    data: Data = TextData()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    mesh: MeshConfig = field(MeshConfig(), resumable=True)

    @property
    def command(self) -> str:
        """The command of `jaxlm` that trains it."""
        return self.objective.command

    @property
    def symbols(self) -> tuple[str, ...]:
        """Special tokens that the objectives of all phases need beyond those of every trained tokenizer."""
        objectives = [self.objective, *(phase.objective for phase in self.train.phases if phase.objective)]
        return tuple(dict.fromkeys(name for objective in objectives for name in objective.symbols))

    @functools.cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The phases of `train.phases`; without any, the whole run is one."""
        run, after, found = with_value(self, "train.phases", ()), 0, []
        for number, each in enumerate(self.train.phases, 1):
            phase = Phase(number, after, after + each.steps, each.changes, run)
            with phase.named():
                found.append(phase._replace(experiment=run.with_changes(phase.changes)))
            after += each.steps
        return (*found[:-1], found[-1]._replace(last=None)) if found else (Phase(1, 0, None, {}, self),)

    @property
    def phases_text(self) -> str:
        """`train.phases` as the flag has them."""
        return ", ".join(map(str, self.train.phases))

    def phase_at(self, step: int) -> Phase:
        """Return the phase of a step, counted from 1."""
        return next(phase for phase in self.phases if phase.last is None or step <= phase.last)

    def longest_rows(self, steps: int) -> int:
        """Return the tokens of the longest rows of the first `steps`."""
        return max(phase.experiment.data.length for phase in self.phases if phase.after < max(steps, 1))

    def describe_phases(self, steps: int | None = None) -> str:
        """Describe the phases of the first `steps`, by default all: "256 x 16 for 700 steps, then 32 x 128"."""
        *earlier, last = [phase for phase in self.phases if phase.after < (steps or self.train.steps)]
        return ", then ".join([*(f"{phase} for {phase.last - phase.after:,} steps" for phase in earlier), str(last)])

    def with_changes(self, changes: Mapping[str, Any]) -> Self:
        """Return the configuration of a phase.

        A length without a batch size gets one with as many tokens as this batch.
        """
        changes, own = dict(changes), self
        if objective := changes.pop("objective", None):
            if not isinstance(objective, Objective):
                raise UserError("an objective of its own is for the PhaseConfig of a preset, not for a flag.")
            own = dataclasses.replace(self, objective=self.objective.for_phase(objective))
        constants = f"objective.{own.objective.constants_field}"
        fields = {s.name: s for s in settings(own) if s.name.startswith(_OF_PHASE) and s.name != constants}
        for name, value in changes.items():
            if name.startswith("objective.") and name not in fields:
                raise UserError(f"{name} is no field that a phase of {type(own.objective).__name__} can set.")
            if name not in fields or dataclasses.is_dataclass(fields[name].value) or "vocabulary" in fields[name].marks:
                raise UserError(f"{name} is no field that a phase can set; those are data.length, data.source, "
                                "data.temperature, train.batch_size, train.accumulate, and fields of objective and "
                                "optimizer.")
            if name in _OF_VECTORS and value != fields[name].value:
                raise UserError(f"{name} is one for a whole run, whose model is used with it; leave it out.")
            check_type(fields[name]._replace(value=value))
            own = with_value(own, name, value)
        has_schedule = any(name.startswith(_OF_SCHEDULE) for name in changes)
        has_share = own.optimizer.warmup_share or "optimizer.warmup_share" in changes
        if has_schedule and has_share and "optimizer.warmup_steps" not in changes:
            own = with_value(own, "optimizer.warmup_steps", None)  # a share of the phase's own steps
        own.data.validate()
        self.data.phase_shares(own.data)
        if "data.length" not in changes or "train.batch_size" in changes:
            return own
        rows, length, own_length = self.train.batch_size, self.data.length, own.data.length
        if rows * length % own_length:
            raise UserError(f"rows of {own_length} tokens do not divide a batch of {rows} x {length} tokens; choose "
                            "another length, or give a batch size as in 700x16x256.")
        return with_value(own, "train.batch_size", rows * length // own_length)

    def validate(self) -> None:
        """Raise UserError for the first value of a wrong type or out of range."""
        check_types(self)
        self.data.validate()
        t = self.train
        check_ranges(self.optimizer, "optimizer.")
        check_ranges(t, "train.")
        if t.batch_size % t.accumulate:
            raise UserError(f"train.batch_size {t.batch_size} is not divisible by train.accumulate {t.accumulate}.")
        if t.accumulate > 1 and not self.objective.is_separable:
            raise UserError(
                f"train.accumulate {t.accumulate} would compare only the rows of a microbatch with each other; set it "
                f"to 1, and objective.chunks to {t.accumulate} to save as much memory."
            )
        if t.batch_size < (n := self.objective.min_rows):
            raise UserError(f"train.batch_size is {t.batch_size}; {type(self.objective).__name__} needs {n} or more.")
        if t.profile_steps and not _is_range(t.profile_steps):
            raise UserError(f"train.profile_steps is {t.profile_steps!r}; it must be FIRST:LAST, such as 100:105.")
        if t.uses_best and not self.data.has_held_out:
            raise UserError(
                "train.best_by and train.patience need held-out data; set --data.held-out, or leave them out."
            )
        if t.uses_best and any(phase.objective for phase in t.phases):
            raise UserError(
                "train.best_by and train.patience compare evaluations of one objective, and a phase has another; leave "
                "them out."
            )
        if t.sample_every and (not self.objective.answer_kind or self.objective.scores_rows):
            raise UserError(
                "train.sample_every is for pretraining of models that fill masks or write text; leave it at 0 for "
                f"{type(self.objective).__name__}."
            )
        if t.phases and t.epochs:
            raise UserError("train.phases and train.epochs both give steps; set --train.phases= or --train.epochs 0.")
        if t.phases and self.data.has_labels:
            raise UserError("train.phases is for text without labels; leave it empty.")
        for phase in self.phases if t.phases else ():
            with phase.named():
                phase.experiment.validate()


_OF_PHASE = (
    "objective.", "optimizer.", "data.length", "data.source", "data.temperature", "train.batch_size", "train.accumulate"
)
"""Beginnings of the names of the fields that a phase may set. `Program.at` refuses those that change the state."""
_OF_VECTORS = tuple(f"objective.{name}" for name in (
    "predicts_next", "pooling", "normalize", "interaction", "expand_queries", "skiplist_words"
))
"""Names of the fields by which later commands use a model, which a phase does not set."""
_OF_SCHEDULE = tuple(f"optimizer.{name}" for name in ("schedule", "warmup_", "decay_", "final_share"))
"""Beginnings of the names of the fields with which a phase begins a learning-rate schedule of its own."""
_PHASE = re.compile(r"([1-9]\d*)(?:x([1-9]\d*))?(?:x([1-9]\d*))?((?:\s+[\w.-]+=\S+)*)")


def parse_phases(text: str) -> tuple[PhaseConfig, ...]:
    """Return the phases of the flag --train.phases, which `PhaseConfig.__str__` writes; raise UserError for others."""
    found = []
    for part in re.split(r",(?![^()]*\))", text) if text else ():  # not at the commas of a tuple
        match = _PHASE.fullmatch(part.strip())
        if match is None:
            raise UserError(f"train.phases has {part.strip()!r}; a phase is STEPS, STEPSxLENGTH or STEPSxLENGTHxBATCH, "
                            "then FIELD=VALUE for other fields, with commas between phases, as in 700x16,800x128.")
        *sizes, others = match.groups()
        pairs = (pair.split("=", 1) for pair in others.split())
        fields = {name.replace("-", "_"): _literal(value) for name, value in pairs}
        found.append(PhaseConfig(*(int(size) if size else None for size in sizes), fields))
    return tuple(found)


def _literal(text: str) -> Any:
    """Return the number, boolean or None that a text spells, else the text."""
    with contextlib.suppress(ValueError, SyntaxError):
        return math.inf if text == "inf" else ast.literal_eval(text)
    return text


def _shown(value: Any) -> str:
    """Return the text of a value of a phase; an objective is its class."""
    return type(value).__name__ if dataclasses.is_dataclass(value) else str(value).replace(", ", ",")


def _is_range(steps: str) -> bool:
    first, _, last = steps.partition(":")
    return first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last)


class Resolved(NamedTuple):
    """Complete configuration (see `jaxlm.runs.resolve`), and the pretrained model that the run begins with."""

    experiment: Experiment
    pretrained: PretrainedModel | None = None
