"""Text to text, on your own data, for T5 and decoders.

Command:     jaxlm finetune configs/tasks/text_to_text.py --init-from RUN_OR_HF_DIR --data.source train.tsv \
                 --data.dev dev.tsv --run-dir runs/text_to_text
Data:        TSV or CSV with a header line, JSON lines, tfds:NAME; columns by --data.source-field,
             --data.target-field
Recipe:      T5's is Adafactor at a constant 1e-3; here AdamW at a tenth of that
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.tasks.text_to_text import PairRows, TextToText

experiment = Experiment(
    objective=TextToText(),
    data=PairRows(source_field="source", target_field="target"),
    optimizer=OptimizerConfig(learning_rate=1e-4, warmup_steps=None, warmup_share=0.1),
    train=TrainConfig(steps=None, epochs=3, batch_size=32, eval_every=500, checkpoint_every=500, eval_batches=1000),
)
