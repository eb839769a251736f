"""RoBERTa-large (24 layers, width 1024): the published size and schedule.

Command:     jaxlm pretrain configs/roberta_large.py --run-dir runs/roberta_large --data.source "gs://YOUR/text/*.jsonl.zst"
Hardware:    published: 1,024 V100 GPUs; here see `jaxlm plan configs/roberta_large.py`
Faster:      on a GPU, --objective.model.attention-dropout 0 selects cuDNN's attention; the paper's rate is 0.1
Parameters:  355,412,057 with the published vocabulary of 50,265, whose padding symbol has id 1; 355,411,033 with id 0
Result:      published, MNLI dev after fine-tuning, one model: 90.2 (fairseq, examples/roberta; 160 GB of text)

Biases and norms have no weight decay; in fairseq they have it too. Weights begin as BERT's, from a normal distribution
cut at two standard deviations; fairseq's is not cut.
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.roberta import Roberta
from jaxlm.objectives.masked_lm import MaskedLM

experiment = Experiment(
    objective=MaskedLM(
        model=Roberta.published("large", dtype="bfloat16"), input_format="full-sentences", short_rate=0.0
    ),
    data=TextData(length=512, tokenizer_kind="byte-bpe", vocab_size=50265),
    optimizer=OptimizerConfig(learning_rate=4e-4, warmup_steps=30_000, b2=0.98, clip_norm=0.0),
    train=TrainConfig(steps=500_000, batch_size=8192, log_every=100, eval_every=10_000, checkpoint_every=5_000),
)
