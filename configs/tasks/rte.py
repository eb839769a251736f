"""RTE: does the first text entail the second? (GLUE)

Command:     jaxlm finetune configs/tasks/rte.py --init-from RUN_OR_HF_DIR --data.source RTE/train.tsv \
                 --data.dev RTE/dev.tsv --run-dir runs/rte
Data:        GLUE's own TSV;
             or --data.source tfds:glue/rte --data.dev tfds:glue/rte:validation
Recipe:      BERT's grid for GLUE (Devlin et al. 2018, appendix A.3):
             batch 16 or 32, learning rate 2e-5 to 5e-5, 2 to 4 epochs;
             small: often started from a model fine-tuned on MNLI (--init-from RUN)
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.tasks.classification import Classification, TextRows

experiment = Experiment(
    objective=Classification(prompt="rte sentence1: {text} sentence2: {text_pair}"),
    data=TextRows(text_field="sentence1", text_pair_field="sentence2"),
    optimizer=OptimizerConfig(learning_rate=3e-5, warmup_steps=None, warmup_share=0.1),
    train=TrainConfig(steps=None, epochs=3, batch_size=32, eval_every=100, checkpoint_every=100, eval_batches=1000),
)
