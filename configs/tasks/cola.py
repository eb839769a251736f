"""CoLA: is a sentence grammatical? (GLUE; scored by the Matthews correlation)

Command:     jaxlm finetune configs/tasks/cola.py --init-from RUN_OR_HF_DIR --data.source CoLA/train.tsv \
                 --data.dev CoLA/dev.tsv --run-dir runs/cola
Data:        GLUE's own TSV, which has no header line;
             or --data.source tfds:glue/cola --data.dev tfds:glue/cola:validation \
                 --data.text-field sentence --data.label-field label
             (whose labels are unacceptable and acceptable, for 0 and 1)
Recipe:      BERT's grid for GLUE (Devlin et al. 2018, appendix A.3):
             batch 16 or 32, learning rate 2e-5 to 5e-5, 2 to 4 epochs
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.tasks.classification import Classification, TextRows

experiment = Experiment(
    objective=Classification(prompt="cola sentence: {text}", label_words=("0=unacceptable", "1=acceptable")),
    data=TextRows(text_field="4", label_field="2"),
    optimizer=OptimizerConfig(learning_rate=3e-5, warmup_steps=None, warmup_share=0.1),
    train=TrainConfig(steps=None, epochs=3, batch_size=32, eval_every=200, checkpoint_every=200, eval_batches=1000),
)
