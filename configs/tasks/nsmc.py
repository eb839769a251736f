"""NSMC: is a Korean film review positive?

Command:     jaxlm finetune configs/tasks/nsmc.py --init-from RUN_OR_HF_DIR --data.source ratings_train.txt \
                 --data.dev ratings_test.txt --run-dir runs/nsmc
Data:        its own TSV (github.com/e9t/nsmc)
Recipe:      BERT's grid for GLUE (Devlin et al. 2018, appendix A.3):
             batch 16 or 32, learning rate 2e-5 to 5e-5, 2 to 4 epochs
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.tasks.classification import Classification, TextRows

experiment = Experiment(
    objective=Classification(),
    data=TextRows(text_field="document", id_field="id"),
    optimizer=OptimizerConfig(learning_rate=3e-5, warmup_steps=None, warmup_share=0.1),
    train=TrainConfig(steps=None, epochs=3, batch_size=32, eval_every=500, checkpoint_every=500, eval_batches=1000),
)
