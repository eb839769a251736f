"""ALBERT-xlarge (24 layers with shared parameters, width 2048): the published size and schedule.

Command:     jaxlm pretrain configs/albert_xlarge.py --run-dir runs/albert_xlarge --data.source "gs://YOUR/text/*.jsonl.zst"
Version 2:   the same without dropout (--objective.model.dropout 0 --objective.model.attention-dropout 0) on more text
             and for longer (--train.steps 3000000)
Hardware:    published: 64 to 512 Cloud TPU v3; here see `jaxlm plan configs/albert_xlarge.py`
Faster:      on a GPU, --objective.model.attention-dropout 0 selects cuDNN's attention
Parameters:  59,021,490 with the published vocabulary of 30,000
Result:      published, average of five tasks' dev sets after fine-tuning:
             85.5 (SQuAD 1.1 92.5 F1, SQuAD 2.0 86.1 F1, MNLI 86.4, SST-2 92.4, RACE 74.8)
             (google-research/albert, README, version 1)

The limit of 20 predictions per row is that of the published command; 15 % of 512 tokens would be 77. There are
32 heads, by the paper's rule of a head for 64 of the width; the released model has 16 (--objective.model.num-heads 16).
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.albert import Albert
from jaxlm.objectives.masked_lm import MaskedLM

experiment = Experiment(
    objective=MaskedLM(
        model=Albert.published("xlarge", dtype="bfloat16"), input_format="sentence-order", whole_word=True,
        longest_ngram=3, max_predictions=20,
    ),
    data=TextData(length=512, vocab_size=30000),
    optimizer=OptimizerConfig(name="lamb", learning_rate=1.76e-3, warmup_steps=3125, bias_correction=False),
    train=TrainConfig(steps=125_000, batch_size=4096, log_every=100, eval_every=5_000, checkpoint_every=2_500),
)
