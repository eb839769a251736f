"""SciTLDR: one-sentence summaries of papers; also for your own summaries.

Command:     jaxlm finetune configs/tasks/summarise.py --init-from RUN_OR_HF_DIR --data.source train.jsonl \
                 --data.dev dev.jsonl --run-dir runs/summarise
Data:        JSON lines with a list of sentences and a list of summaries
Recipe:      T5's prefix; AdamW at a tenth of T5's learning rate
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.tasks.text_to_text import PairRows, TextToText

experiment = Experiment(
    objective=TextToText(prefix="summarize: ", metric="rouge", max_target=64),
    data=PairRows(source_field="source", target_field="target"),
    optimizer=OptimizerConfig(learning_rate=1e-4, warmup_steps=None, warmup_share=0.1),
    train=TrainConfig(steps=None, epochs=3, batch_size=16, eval_every=200, checkpoint_every=200, eval_batches=1000),
)
