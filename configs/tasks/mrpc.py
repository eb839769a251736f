"""MRPC: do two sentences mean the same? (GLUE; scored by F1 and accuracy)

Command:     jaxlm finetune configs/tasks/mrpc.py --init-from RUN_OR_HF_DIR --data.source MRPC/train.tsv \
                 --data.dev MRPC/dev.tsv --run-dir runs/mrpc
Data:        GLUE's own TSV;
             or --data.source tfds:glue/mrpc --data.dev tfds:glue/mrpc:validation \
                 --data.text-field sentence1 --data.text-pair-field sentence2 --data.label-field label
             (whose labels are not_equivalent and equivalent, for 0 and 1)
Recipe:      BERT's grid for GLUE (Devlin et al. 2018, appendix A.3):
             batch 16 or 32, learning rate 2e-5 to 5e-5, 2 to 4 epochs;
             small: often started from a model fine-tuned on MNLI (--init-from RUN)
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.tasks.classification import Classification, TextRows

experiment = Experiment(
    objective=Classification(
        prompt="mrpc sentence1: {text} sentence2: {text_pair}", label_words=("0=not_equivalent", "1=equivalent")
    ),
    data=TextRows(text_field="#1 String", text_pair_field="#2 String", label_field="Quality"),
    optimizer=OptimizerConfig(learning_rate=3e-5, warmup_steps=None, warmup_share=0.1),
    train=TrainConfig(steps=None, epochs=3, batch_size=32, eval_every=100, checkpoint_every=100, eval_batches=1000),
)
