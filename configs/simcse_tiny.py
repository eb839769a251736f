"""Text vectors from text alone, for a CPU: unsupervised SimCSE with a trained encoder.

A sentence under one draw of dropout finds itself under another, among the sentences of the batch (Gao et al. 2021,
section 3). The encoder is that of --init-from, of any family with [CLS] and [SEP], with the dropout given here. Their
layer between [CLS] and the loss, which is dropped after training, is left out; the vector is the mean of the tokens.

With --objective.positives cloze --data.sentences False --data.length 256 a sentence finds the passage around it instead
(the inverse cloze task, Lee et al. 2019).

Command:     jaxlm pretrain configs/simcse_tiny.py --init-from RUN_OR_HF_DIR --data.source 'texts/*.txt' \
                 --run-dir runs/simcse_tiny
Hardware:    two CPU cores
Parameters:  4,369,408 with the published vocabulary of 30,522
Result:      a bert_mini of 1,500 steps gets worse: Spearman on STS-B 0.375 before, 0.239 after 100 steps (three seeds)
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.bert import Bert
from jaxlm.objectives.self_contrastive import SelfContrastive

experiment = Experiment(
    objective=SelfContrastive(model=Bert.published("tiny")),
    data=TextData(source="python-docs", length=32, sentences=True, vocab_size=30522),
    optimizer=OptimizerConfig(learning_rate=1e-4, warmup_steps=20),
    train=TrainConfig(steps=300, batch_size=64, log_every=10, eval_every=50, eval_batches=12, checkpoint_every=100),
)
