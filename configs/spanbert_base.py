"""SpanBERT-base (12 layers, width 768): the published size and schedule.

Command:     jaxlm pretrain configs/spanbert_base.py --run-dir runs/spanbert_base --data.source "gs://YOUR/text/*.jsonl.zst"
Hardware:    published: 32 V100 GPUs; here see `jaxlm plan configs/spanbert_base.py`
Faster:      on a GPU, --objective.model.attention-dropout 0 selects cuDNN's attention; the published rate is 0.1
Parameters:  110,300,480 with the published cased vocabulary of 28,996, with the private span boundary head
Result:      published, SQuAD 1.1 dev after fine-tuning: 92.4 F1; SQuAD 2.0 dev 83.6 F1
             (facebookresearch/SpanBERT, README)

Rows may end within a sentence; the published ones end with a sentence. Biases and norms have no weight decay.
Weights begin as BERT's, from a normal distribution cut at two standard deviations; the published are not cut.
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.bert import Bert
from jaxlm.objectives.span_boundary import SpanBoundary

experiment = Experiment(
    objective=SpanBoundary(model=Bert.published("base", vocab_size=28996, dtype="bfloat16")),
    data=TextData(length=512, vocab_size=28996),
    optimizer=OptimizerConfig(learning_rate=1e-4, warmup_steps=10_000, eps=1e-8),
    train=TrainConfig(steps=2_400_000, batch_size=256, log_every=100, eval_every=10_000, checkpoint_every=5_000),
)
