"""STS-B: how similar are two sentences, from 0 to 5? (GLUE; scored by Pearson and Spearman correlations)

Command:     jaxlm finetune configs/tasks/stsb.py --init-from RUN_OR_HF_DIR --data.source STS-B/train.tsv \
                 --data.dev STS-B/dev.tsv --run-dir runs/stsb
Data:        GLUE's own TSV;
             or --data.source tfds:glue/stsb --data.dev tfds:glue/stsb:validation --data.label-field label
             (for the test split --data.label-field '', since its scores are -1)
Recipe:      BERT's grid for GLUE (Devlin et al. 2018, appendix A.3):
             batch 16 or 32, learning rate 2e-5 to 5e-5, 2 to 4 epochs
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.tasks.classification import Classification, TextRows

experiment = Experiment(
    objective=Classification(target="number", prompt="stsb sentence1: {text} sentence2: {text_pair}"),
    data=TextRows(text_field="sentence1", text_pair_field="sentence2", label_field="score"),
    optimizer=OptimizerConfig(learning_rate=3e-5, warmup_steps=None, warmup_share=0.1),
    train=TrainConfig(steps=None, epochs=3, batch_size=32, eval_every=200, checkpoint_every=200, eval_batches=1000),
)
