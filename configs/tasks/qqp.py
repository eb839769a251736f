"""QQP: do two questions mean the same? (GLUE; scored by F1 and accuracy)

Command:     jaxlm finetune configs/tasks/qqp.py --init-from RUN_OR_HF_DIR --data.source QQP/train.tsv \
                 --data.dev QQP/dev.tsv --run-dir runs/qqp
Data:        GLUE's own TSV;
             or --data.source tfds:glue/qqp --data.dev tfds:glue/qqp:validation --data.label-field label
             (whose labels are not_duplicate and duplicate, for 0 and 1)
Recipe:      BERT's grid for GLUE (Devlin et al. 2018, appendix A.3):
             batch 16 or 32, learning rate 2e-5 to 5e-5, 2 to 4 epochs
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.tasks.classification import Classification, TextRows

experiment = Experiment(
    objective=Classification(
        prompt="qqp question1: {text} question2: {text_pair}", label_words=("0=not_duplicate", "1=duplicate")
    ),
    data=TextRows(text_field="question1", text_pair_field="question2", label_field="is_duplicate"),
    optimizer=OptimizerConfig(learning_rate=3e-5, warmup_steps=None, warmup_share=0.1),
    train=TrainConfig(steps=None, epochs=3, batch_size=32, eval_every=1000, checkpoint_every=1000, eval_batches=1000),
)
