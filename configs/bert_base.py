"""BERT-base (12 layers, width 768): the published size and schedule.

Command:     jaxlm pretrain configs/bert_base.py --run-dir runs/bert_base --data.source "gs://YOUR/text/*.jsonl.zst"
             (the paper: --data.length 512 --train.phases 900000x128x256,100000)
Hardware:    published: 4 Cloud TPUs (16 chips), four days; here see `jaxlm plan configs/bert_base.py`
Faster:      on a GPU, --objective.model.attention-dropout 0 selects cuDNN's attention; the paper's rate is 0.1
Parameters:  110,106,428 with the published vocabulary of 30,522
Result:      published, SQuAD 1.1 dev after fine-tuning: 88.4 F1 (google-research/bert, README)
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.bert import Bert
from jaxlm.objectives.masked_lm import MaskedLM

experiment = Experiment(
    objective=MaskedLM(model=Bert.published("base", dtype="bfloat16")),
    data=TextData(length=128, vocab_size=30522),
    optimizer=OptimizerConfig(learning_rate=1e-4, warmup_steps=10_000, bias_correction=False),
    train=TrainConfig(steps=1_000_000, batch_size=256, log_every=100, eval_every=10_000, checkpoint_every=5_000),
)
