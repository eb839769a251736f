"""XLM-R large (24 layers, width 1024): the published size, steps and batch.

Command:     jaxlm pretrain configs/xlm_roberta_large.py --run-dir runs/xlm_roberta_large --data.source "gs://YOUR/text/*.jsonl.zst"
Hardware:    published: 500 V100 GPUs; here see `jaxlm plan configs/xlm_roberta_large.py`
Faster:      on a GPU, --objective.model.attention-dropout 0 selects cuDNN's attention; RoBERTa's rate is 0.1
Parameters:  560,142,482 with the published vocabulary of 250,002, whose padding symbol has id 1; 560,141,458 with id 0

The paper gives no learning rate; this is RoBERTa's. The paper samples each language in proportion to its share of the
text to the power of 0.3: give a source for each language, with commas between, and --data.temperature 3.3. Biases and
norms have no weight decay; in fairseq they have it too. Weights begin as BERT's, from a normal distribution cut at two
standard deviations; fairseq's is not cut.
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.xlm_roberta import XlmRoberta
from jaxlm.objectives.masked_lm import MaskedLM

experiment = Experiment(
    objective=MaskedLM(
        model=XlmRoberta.published("large", dtype="bfloat16"), input_format="full-sentences", short_rate=0.0
    ),
    data=TextData(length=512, tokenizer_kind="unigram", vocab_size=250002),
    optimizer=OptimizerConfig(learning_rate=4e-4, warmup_steps=30_000, b2=0.98, clip_norm=0.0),
    train=TrainConfig(steps=1_500_000, batch_size=8192, log_every=100, eval_every=10_000, checkpoint_every=5_000),
)
