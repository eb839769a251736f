"""ALBERT-xxlarge (12 layers with shared parameters, width 4096): the published size and schedule.

Command:     jaxlm pretrain configs/albert_xxlarge.py --run-dir runs/albert_xxlarge --data.source "gs://YOUR/text/*.jsonl.zst"
Version 2:   the same without dropout (--objective.model.dropout 0 --objective.model.attention-dropout 0) on more text
             and for longer (--train.steps 3000000)
Hardware:    published: 64 to 512 Cloud TPU v3; planned for v5e:16x16 with --train.accumulate 2: 11.6 GiB per chip,
             798 ms per step, 77 % MFU
Faster:      on a GPU, --objective.model.attention-dropout 0 selects cuDNN's attention
Parameters:  223,158,450 with the published vocabulary of 30,000
Result:      published, average of five tasks' dev sets after fine-tuning:
             88.7 (SQuAD 1.1 94.1 F1, SQuAD 2.0 88.1 F1, MNLI 88.0, SST-2 95.2, RACE 82.3)
             (Lan et al. 2019, table 2)

The limit of 20 predictions per row is that of the published command; 15 % of 512 tokens would be 77.
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.albert import Albert
from jaxlm.objectives.masked_lm import MaskedLM

experiment = Experiment(
    objective=MaskedLM(
        model=Albert.published("xxlarge", dtype="bfloat16"), input_format="sentence-order", whole_word=True,
        longest_ngram=3, max_predictions=20,
    ),
    data=TextData(length=512, vocab_size=30000),
    optimizer=OptimizerConfig(name="lamb", learning_rate=1.76e-3, warmup_steps=3125, bias_correction=False),
    train=TrainConfig(steps=125_000, batch_size=4096, log_every=100, eval_every=5_000, checkpoint_every=2_500),
)
