"""MNLI: does the first text entail the second, contradict it, or neither? (GLUE)

Command:     jaxlm finetune configs/tasks/mnli.py --init-from RUN_OR_HF_DIR --data.source MNLI/train.tsv \
                 --data.dev MNLI/dev_matched.tsv --run-dir runs/mnli
Data:        GLUE's own TSV;
             or --data.source tfds:glue/mnli --data.dev tfds:glue/mnli:validation_matched \
                 --data.text-field premise --data.text-pair-field hypothesis --data.label-field label
Recipe:      BERT's grid for GLUE (Devlin et al. 2018, appendix A.3):
             batch 16 or 32, learning rate 2e-5 to 5e-5, 2 to 4 epochs
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.tasks.classification import Classification, TextRows

experiment = Experiment(
    objective=Classification(prompt="mnli hypothesis: {text_pair} premise: {text}"),
    data=TextRows(text_field="sentence1", text_pair_field="sentence2", label_field="gold_label"),
    optimizer=OptimizerConfig(learning_rate=3e-5, warmup_steps=None, warmup_share=0.1),
    train=TrainConfig(steps=None, epochs=3, batch_size=32, eval_every=1000, checkpoint_every=1000, eval_batches=1000),
)
