"""Fine-tuning for the package's task, on rows.jsonl beside this file."""

from pathlib import Path

from tinylab.smoothed import ReviewRows, Smoothed

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig

experiment = Experiment(
    objective=Smoothed(),
    data=ReviewRows(source=str(Path(__file__).with_name("rows.jsonl")), length=32),
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2, schedule="constant"),
    train=TrainConfig(steps=4, batch_size=8, log_every=2, eval_every=0, checkpoint_every=0, tracker="none"),
)
