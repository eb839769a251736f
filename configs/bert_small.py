"""BERT-small (4 layers, width 512): the published size and schedule.

Command:     jaxlm pretrain configs/bert_small.py --run-dir runs/bert_small --data.source "gs://YOUR/text/*.jsonl.zst"
             (the paper: --data.length 512 --train.phases 900000x128x256,100000)
Hardware:    one GPU or a TPU slice (see `jaxlm plan configs/bert_small.py`)
Faster:      on a GPU, --objective.model.attention-dropout 0 selects cuDNN's attention; the paper's rate is 0.1
Parameters:  29,058,876 with the published vocabulary of 30,522
Result:      published, GLUE average: 71.2 (google-research/bert, README)
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.bert import Bert
from jaxlm.objectives.masked_lm import MaskedLM

experiment = Experiment(
    objective=MaskedLM(model=Bert.published("small", dtype="bfloat16")),
    data=TextData(length=128, vocab_size=30522),
    optimizer=OptimizerConfig(learning_rate=1e-4, warmup_steps=10_000, bias_correction=False),
    train=TrainConfig(steps=1_000_000, batch_size=256, log_every=100, eval_every=10_000, checkpoint_every=5_000),
)
