"""KagNet (Lin et al. 2019) on CommonsenseQA: the answer whose concepts a knowledge graph links to the question's.

Command:     jaxlm finetune configs/tasks/kagnet.py --init-from RUN_OR_HF_DIR --data.source train.jsonl \
                 --data.dev dev.jsonl --objective.graph conceptnet.tsv --objective.vectors VECTORS --run-dir runs/kagnet
Data:        CommonsenseQA's own JSON lines. `python -m jaxlm.knowledge.concept_graph ASSERTIONS conceptnet.tsv`
             prepares ConceptNet; VECTORS is what configs/transe_tiny.py exports for it, trained with --train.epochs 30,
             since its 600 steps are for a smaller graph. Needs the extra [knowledge].
Parameters:  those of the encoder, 696,374 with statement vectors of width 1024, and the tables of the graph
Recipe:      batches of 50 questions, 15 epochs, margin 0.2, Adam 1e-3; decoupled weight decay where the official code
             has an L2 term, and no AMSGrad. The encoder is frozen, as published; --objective.train-encoder True wants
             a rate of 1e-4.
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.knowledge.kagnet import KagNet
from jaxlm.tasks.multiple_choice import ChoiceRows

experiment = Experiment(
    objective=KagNet(),
    data=ChoiceRows(
        text_field="question.stem", choices_fields="question.choices", label_field="answerKey", id_field="id",
        length=70,
    ),
    optimizer=OptimizerConfig(
        learning_rate=1e-3, warmup_steps=0, schedule="constant", weight_decay=1e-4, eps=1e-8, clip_norm=0.0,
    ),
    train=TrainConfig(
        steps=None, epochs=15, batch_size=50, eval_every=170, checkpoint_every=170, patience=5, eval_batches=1000,
    ),
)
