"""Transformers models of the same sizes on PyTorch, timed by `jaxlm bench --peer huggingface`."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxlm.analysis.recipes import recipe_of, task_inputs
from jaxlm.analysis.timing import Side
from jaxlm.config.experiment import Experiment, OptimizerConfig
from jaxlm.data.labelled import Arrays
from jaxlm.errors import UserError, install
from jaxlm.huggingface import ModelCard, export_folder
from jaxlm.huggingface.families import family_of
from jaxlm.inference.generate import prepare_prompts
from jaxlm.objectives.base import Objective
from jaxlm.tasks.base import Task
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.training.program import corruption_key
from jaxlm.types import Params, Report, TokenBatch


def torch_device() -> str:
    """Return PyTorch's name of the device that jax uses, and let it use tensor cores for float32, as jax does."""
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"--peer huggingface needs {' and '.join(missing)}; {install('test')}, or leave --peer out."
        )
    import torch

    torch.set_float32_matmul_precision("high")
    platform = jax.default_backend()
    if platform == "gpu" and not torch.cuda.is_available():
        raise UserError("PyTorch finds no GPU, but jax uses one; install PyTorch with CUDA, or leave --peer out.")
    if platform not in ("cpu", "gpu") or jax.device_count() > 1:
        raise UserError(
            f"--peer huggingface compares on one CPU or one GPU; jax has {jax.device_count()} {platform} devices."
        )
    return "cuda" if platform == "gpu" else "cpu"


def new_models(objective: Objective) -> list[Any]:
    """Return randomly initialized Transformers models of the objective's sizes."""
    import transformers

    models = []
    for counterpart in family_of(objective).models(objective):
        config = dict(counterpart.config)
        config = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
        models.append(getattr(transformers, counterpart.architecture)(config))
    return models


def synchronize(device: str) -> None:
    """Wait until the device has finished."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


class TrainStep:
    """Train step of an objective's recipe on one fixed corrupted batch, under torch.compile where that works."""

    def __init__(
        self, experiment: Experiment, objective: Objective, batch: TokenBatch, report: Report = print
    ) -> None:
        """Create models and optimizer, and corrupt the batch as our first step does."""
        self.recipe, self.device = recipe_of(objective), torch_device()
        import torch

        self.experiment, self.objective, self.report = experiment, objective, report
        seed = experiment.train.seed
        torch.manual_seed(seed)
        self.models = [model.to(self.device).train() for model in new_models(objective)]
        if self.recipe.share:
            self.recipe.share(objective, self.models)
        self.callable = [torch.compile(model) for model in self.models]
        example = jax.device_get(jax.jit(objective.corrupt)(corruption_key(seed, 0), batch))
        self.inputs = {
            name: torch.from_numpy(np.array(value, np.int64)).to(self.device)
            for name, value in self.recipe.inputs(objective, example).items()
            if name != "attention_mask" or not np.all(value)  # without one, all kernels of its attention are open to it
        }
        self.parameters = list(dict.fromkeys(p for model in self.models for p in model.parameters()))
        self.optimizer, self.optimizer_name = make_optimizer(experiment.optimizer, self.parameters)

    def side(self) -> Side:
        """Return the side to time."""
        return Side(" + ".join(type(model).__name__ for model in self.models), self.run, self.describe)

    def run(self, steps: int) -> None:
        """Do a number of steps, without torch.compile if it fails in the first one."""
        import torch

        for _ in range(steps):
            try:
                self.step()
            except torch.OutOfMemoryError as error:
                raise UserError("PyTorch has too little memory beside jax; lower --train.batch-size, or leave out "
                                "--peer.") from error
            except Exception as error:  # the compiler's failures have many types; a missing C++ compiler is common
                if self.callable is self.models:
                    raise
                reason = (str(error).strip().splitlines() or [""])[0]
                self.report(f"torch.compile failed ({type(error).__name__}: {reason[:160]}); timing PyTorch eagerly.")
                self.callable = self.models
                self.optimizer.zero_grad(set_to_none=True)
                self.step()
        synchronize(self.device)

    def step(self) -> None:
        """Update the parameters once."""
        import torch

        with torch.autocast(self.device, torch.bfloat16, enabled=self.objective.model.dtype == "bfloat16"):
            loss = self.recipe.loss(self.objective, self.callable, self.inputs)
        loss.backward()
        if clip := self.experiment.optimizer.clip_norm:
            torch.nn.utils.clip_grad_norm_(self.parameters, clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def describe(self) -> dict[str, Any]:
        """Return optimizer, peak memory and a note on how the step was run."""
        import torch
        import transformers

        how = "eager, since torch.compile failed here" if self.callable is self.models else "torch.compile"
        microbatches = self.experiment.train.accumulate
        note = (
            f"Transformers {transformers.__version__} on PyTorch {torch.__version__}, {how}, "
            f"{self.objective.model.dtype} products of float32 parameters, {self.optimizer_name} "
            f"(jaxlm: {self.experiment.optimizer.name}), the same dropout rates, fixed batch (no corruption)"
            f"{f' in one piece where jaxlm takes {microbatches}' if microbatches > 1 else ''}"
        )
        memory = torch.cuda.max_memory_allocated() if self.device == "cuda" else None
        return {"optimizer": self.optimizer_name, "peak_memory_bytes": memory, "note": note}


def make_optimizer(config: OptimizerConfig, parameters: list[Any]) -> tuple[Any, str]:
    """Return the counterpart of our optimizer, at the peak learning rate, and its name.

    AdamW corrects the bias of its moments even if ours does not: the cost is the same.
    """
    import torch

    if config.name == "adafactor":
        from transformers.optimization import Adafactor

        # `relative_step=False` takes the learning rate as given; the other defaults are ours too.
        adafactor = Adafactor(parameters, lr=config.learning_rate, scale_parameter=True, relative_step=False)
        return adafactor, "Transformers' Adafactor"
    if config.name == "adagrad":
        adagrad = torch.optim.Adagrad(parameters, config.learning_rate, initial_accumulator_value=config.eps, eps=0.0)
        return adagrad, "Adagrad"
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    betas = (config.b1, config.b2)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.eps, fused=True), "fused AdamW"


def generation(objective: Objective, prompts: list[list[int]], new_tokens: int) -> Side:
    """Return the side of Transformers' `generate`: greedy, eager, with its own cache, in our dtype."""
    device = torch_device()
    import torch

    (model,) = new_models(objective)
    model = model.eval().to(device, getattr(torch, objective.model.dtype))
    ids = torch.tensor(prepare_prompts(objective, prompts, new_tokens)).to(device)

    def run(_: int) -> None:
        with torch.no_grad():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, min_new_tokens=new_tokens,
                do_sample=False, pad_token_id=0,
            )
        synchronize(device)
        assert out.shape[1] >= new_tokens

    return Side(f"{type(model).__name__}.generate", run)


def fine_tuning(
    experiment: Experiment, task: Task, params: Params, tokenizer: Tokenizer, examples: Sequence[Arrays], steps: int
) -> Side:
    """Return the side of Transformers' `Trainer` on the same rows, grouped by length."""
    device = torch_device()
    import transformers

    rows = [task_inputs(task, row) for row in examples]
    with tempfile.TemporaryDirectory() as folder:
        out = export_folder(Path(folder) / "model", task, params, tokenizer, ModelCard())
        config = transformers.AutoConfig.from_pretrained(out)
        model = getattr(transformers, config.architectures[0]).from_pretrained(out)
        hf_tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    labels_tokens = isinstance(rows[0].get("labels"), list)
    pad = transformers.DataCollatorForTokenClassification if labels_tokens else transformers.DataCollatorWithPadding
    optimizer = experiment.optimizer
    arguments = transformers.TrainingArguments(
        output_dir=str(Path(tempfile.gettempdir()) / "unused"), max_steps=steps,
        per_device_train_batch_size=experiment.train.batch_size,
        learning_rate=optimizer.learning_rate, weight_decay=optimizer.weight_decay, max_grad_norm=optimizer.clip_norm,
        train_sampling_strategy="group_by_length", save_strategy="no", logging_strategy="no", report_to=[],
        disable_tqdm=True, use_cpu=device == "cpu", bf16=task.model.dtype == "bfloat16",
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, data_collator=pad(hf_tokenizer))
    trainer.remove_callback(transformers.PrinterCallback)  # it writes to standard output
    return Side(f"Trainer, {config.architectures[0]}", lambda _: trainer.train())
