"""BERT-large (24 layers, width 1024): the published size and schedule.

Command:     jaxlm pretrain configs/bert_large.py --run-dir runs/bert_large --data.source "gs://YOUR/text/*.jsonl.zst"
             (the paper: --data.length 512 --train.phases 900000x128x256,100000)
Hardware:    published: 16 Cloud TPUs (64 chips), four days; here see `jaxlm plan configs/bert_large.py`
Faster:      on a GPU, --objective.model.attention-dropout 0 selects cuDNN's attention; the paper's rate is 0.1
Parameters:  336,226,108 with the published vocabulary of 30,522
Result:      published, SQuAD 1.1 dev after fine-tuning: 90.9 F1 (google-research/bert, README)
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.bert import Bert
from jaxlm.objectives.masked_lm import MaskedLM

experiment = Experiment(
    objective=MaskedLM(model=Bert.published("large", dtype="bfloat16")),
    data=TextData(length=128, vocab_size=30522),
    optimizer=OptimizerConfig(learning_rate=1e-4, warmup_steps=10_000, bias_correction=False),
    train=TrainConfig(steps=1_000_000, batch_size=256, log_every=100, eval_every=10_000, checkpoint_every=5_000),
)
