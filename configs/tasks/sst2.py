"""SST-2: is a sentence of a film review positive? (GLUE)

Command:     jaxlm finetune configs/tasks/sst2.py --init-from RUN_OR_HF_DIR --data.source SST-2/train.tsv \
                 --data.dev SST-2/dev.tsv --run-dir runs/sst2
Data:        GLUE's own TSV;
             or --data.source tfds:glue/sst2 --data.dev tfds:glue/sst2:validation
             (whose labels are negative and positive, for 0 and 1)
Recipe:      BERT's grid for GLUE (Devlin et al. 2018, appendix A.3):
             batch 16 or 32, learning rate 2e-5 to 5e-5, 2 to 4 epochs
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.tasks.classification import Classification, TextRows

experiment = Experiment(
    objective=Classification(prompt="sst2 sentence: {text}", label_words=("0=negative", "1=positive")),
    data=TextRows(text_field="sentence"),
    optimizer=OptimizerConfig(learning_rate=3e-5, warmup_steps=None, warmup_share=0.1),
    train=TrainConfig(steps=None, epochs=3, batch_size=32, eval_every=500, checkpoint_every=500, eval_batches=1000),
)
