"""QNLI: does a sentence answer a question? (GLUE)

Command:     jaxlm finetune configs/tasks/qnli.py --init-from RUN_OR_HF_DIR --data.source QNLI/train.tsv \
                 --data.dev QNLI/dev.tsv --run-dir runs/qnli
Data:        GLUE's own TSV;
             or --data.source tfds:glue/qnli --data.dev tfds:glue/qnli:validation --data.id-field idx
Recipe:      BERT's grid for GLUE (Devlin et al. 2018, appendix A.3):
             batch 16 or 32, learning rate 2e-5 to 5e-5, 2 to 4 epochs
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.tasks.classification import Classification, TextRows

experiment = Experiment(
    objective=Classification(prompt="qnli question: {text} sentence: {text_pair}"),
    data=TextRows(text_field="question", text_pair_field="sentence", id_field="index"),
    optimizer=OptimizerConfig(learning_rate=3e-5, warmup_steps=None, warmup_share=0.1),
    train=TrainConfig(steps=None, epochs=3, batch_size=32, eval_every=500, checkpoint_every=500, eval_batches=1000),
)
