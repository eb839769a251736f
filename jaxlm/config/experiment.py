"""Configuration of a run: `Experiment` and its parts."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

from jaxlm.data.base import Data
from jaxlm.data.text import TextData
from jaxlm.errors import UserError
from jaxlm.fields import check_ranges, check_types, field
from jaxlm.objectives.base import Objective, PretrainedModel
from jaxlm.parallel.mesh import MeshConfig


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer and learning-rate schedule."""

    name: Literal["adamw", "stable-adamw", "lion", "muon", "lamb", "adafactor", "adagrad"] = "adamw"
    """adamw (decoupled weight decay), stable-adamw (with update clipping, in place of `clip_norm`; ModernBERT), lion
    (sign of the momentum), muon (orthogonalized momentum for the kernels of layers, adamw for the others), lamb (for
    very large batches), adafactor (factored second moments, as in T5), adagrad (ELMo, word2vec)."""
    learning_rate: float = field(1e-4, range="(0, inf)")
    """Peak learning rate."""
    warmup_steps: int | None = field(10_000, range="[0, inf)")
    """Linear warm-up steps from 0 to the peak learning rate; None: `warmup_share` of the steps."""
    warmup_share: float = field(0.0, resumable=True, range="[0, inf)")
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
    """Decoupled weight decay of kernels and embeddings; biases and norm scales have none (XLNet: see `DECAYED`)."""
    clip_norm: float = field(1.0, range="[0, inf)")
    """Global gradient norm to clip to; 0 turns clipping off."""
    freeze: tuple[str, ...] = ()
    """Patterns of names of parameters that are not trained, such as 'embeddings' '*/bias'; a later '!classifier' takes
    out what an earlier '*' has chosen. A name stands for all parameters below it, '*' also for several levels, and the
    layers of a stack are one parameter."""

    def stable_steps(self, steps: int) -> int:
        """Return the number of steps before the decay of wsd, in a run of `steps`."""
        return steps - round(self.decay_share * steps)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Training length, batch size, evaluation and checkpoints."""

    steps: int | None = field(1_000_000, resumable=True, range="[1, inf)")
    """Optimizer steps in total; None: `epochs` passes over the rows of a task."""
    epochs: float = field(0.0, resumable=True, range="[0, inf)")
    """Passes over the rows of a task, where `steps` is None."""
    batch_size: int = field(256, range="[1, inf)")
    """Global batch size: sequences per optimizer step, over all devices."""
    short_steps: int = field(0, range="[0, inf)")
    """Steps at the beginning with rows of `short_length` tokens, in batches with as many tokens: attention is learnt
    sooner over short rows, and costs less (BERT: 90 % of the steps at 128 tokens, the rest at 512). Evaluation is
    always at `data.length`."""
    short_length: int = 16
    """Sequence length of those steps, special tokens included; it must divide `data.length`."""
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
    """Maximum number of held-out batches per evaluation."""
    sample_every: int = field(0, resumable=True, range="[0, inf)")
    """Steps between samples of what the model makes of three held-out texts: filled masks, or continuations. They are
    printed and written as TensorBoard text. 0: none. Only with one process."""
    checkpoint_every: int = field(1000, resumable=True, range="[0, inf)")
    """Steps between checkpoints; the last step is always saved. 0: only the last step."""
    keep_checkpoints: int = field(3, resumable=True, range="[1, inf)")
    """Number of newest checkpoints to keep, besides the best one."""
    skip_nonfinite: int = field(0, resumable=True, range="[0, inf)")
    """Number of steps in a row that may be left out because their loss or gradient is not finite: parameters, optimizer
    and its schedule then stay as they were, while a recurrence memory goes on with the text, and is reset if it is not
    finite. The next such step ends the run. `skipped` in the metrics is their share.
    A high but finite loss is never left out."""
    profile_steps: str = field("", resumable=True)
    """First and last step to profile on process 0, as 100:105, for TensorBoard's profile plugin (`pip install xprof`);
    written into the run folder. Choose steps after the first, which compiles. Empty: none."""
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

    @property
    def criterion(self) -> str:
        """Name of the figure that chooses the best checkpoint."""
        return self.best_by or "loss"


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Configuration of a run. Presets in configs/ build one; flags override its fields."""

    objective: Objective
    data: Data = TextData()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    mesh: MeshConfig = field(MeshConfig(), resumable=True)

    @property
    def command(self) -> str:
        """The command of `jaxlm` that trains it."""
        return "finetune" if self.objective.is_task else "pretrain"

    def validate(self) -> None:
        """Raise UserError for the first value of a wrong type or out of range."""
        check_types(self)
        self.data.validate()
        t = self.train
        check_ranges(self.optimizer, "optimizer.")
        check_ranges(t, "train.")
        if t.batch_size % t.accumulate:
            raise UserError(f"train.batch_size {t.batch_size} is not divisible by train.accumulate {t.accumulate}.")
        if t.profile_steps and not _is_range(t.profile_steps):
            raise UserError(f"train.profile_steps is {t.profile_steps!r}; it must be FIRST:LAST, such as 100:105.")
        if t.uses_best and not self.data.has_held_out:
            raise UserError(
                "train.best_by and train.patience need held-out data; set --data.held-out, or leave them out."
            )
        if t.sample_every and (not self.objective.answer_kind or self.objective.is_task):
            raise UserError(
                "train.sample_every is for pretraining of models that fill masks or write text; leave it at 0 for "
                f"{type(self.objective).__name__}."
            )
        if t.short_steps and self.objective.is_task:
            raise UserError("train.short_steps is for pretraining; set it to 0.")
        if t.short_steps and (t.short_length < 1 or self.data.length % t.short_length):
            raise UserError(
                f"train.short_length {t.short_length} does not divide data.length {self.data.length}; choose another "
                "one, or train.short_steps 0."
            )


def _is_range(steps: str) -> bool:
    first, _, last = steps.partition(":")
    return first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last)


class Resolved(NamedTuple):
    """Complete configuration (see `jaxlm.runs.resolve`), and the pretrained model that the run begins with."""

    experiment: Experiment
    pretrained: PretrainedModel | None = None
