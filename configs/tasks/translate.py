"""Translation from English to French; also for your own pairs.

Command:     jaxlm finetune configs/tasks/translate.py --init-from RUN_OR_HF_DIR --data.source train.tsv \
                 --data.dev dev.tsv --run-dir runs/translate
Data:        TSV without a header line
Recipe:      T5's prefix; AdamW at a tenth of T5's learning rate
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.tasks.text_to_text import PairRows, TextToText

experiment = Experiment(
    objective=TextToText(prefix="translate English to French: ", metric="bleu", max_target=64),
    data=PairRows(source_field="1", target_field="2", length=128),
    optimizer=OptimizerConfig(learning_rate=1e-4, warmup_steps=None, warmup_share=0.1),
    train=TrainConfig(steps=None, epochs=3, batch_size=32, eval_every=500, checkpoint_every=500, eval_batches=1000),
)
