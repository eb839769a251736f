"""ELMo medium (2 × biLSTM of 2,048 cells, width 256): the published size; the schedule is that of the original.

Command:     jaxlm pretrain configs/elmo_medium.py --run-dir runs/elmo_medium --data.source "gs://YOUR/text/*.jsonl.zst"
Hardware:    published: three GTX 1080 for two weeks (the original size); here see `jaxlm plan configs/elmo_medium.py`
Parameters:  231,949,775; of these 28,027,728 without the softmax over 793,471 words
Result:      none cited for this size

Half of the rows are read forward, half backward. The official code multiplies the loss by 20, starts Adagrad's sums of
squares at 1 and clips gradients to 10. Without the factor these values are 1/400 and 0.5.
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.elmo import Elmo
from jaxlm.objectives.bidirectional_lm import BidirectionalLM

experiment = Experiment(
    objective=BidirectionalLM(model=Elmo.published("medium")),
    data=TextData(length=20, tokenizer_kind="words", vocab_size=793_471, sentences=True),
    optimizer=OptimizerConfig(
        name="adagrad", learning_rate=0.2, warmup_steps=0, schedule="constant", eps=1 / 400, clip_norm=0.5
    ),
    train=TrainConfig(steps=1_000_840, batch_size=768, log_every=100, eval_every=10_000, checkpoint_every=5_000),
)
