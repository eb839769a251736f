"""ELMo (2 × biLSTM of 4,096 cells, width 512): the published size and schedule.

Command:     jaxlm pretrain configs/elmo.py --run-dir runs/elmo --data.source "gs://YOUR/text/*.jsonl.zst"
Hardware:    published: three GTX 1080 for two weeks (the original size); here see `jaxlm plan configs/elmo.py`
Parameters:  500,651,471; of these 93,600,848 without the softmax over 793,471 words
Result:      published, NER (CoNLL 2003, F1) with it as input: 92.22 ± 0.10 (allennlp.org/elmo)

Half of the rows are read forward, half backward. The official code multiplies the loss by 20, starts Adagrad's sums of
squares at 1 and clips gradients to 10. Without the factor these values are 1/400 and 0.5.
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.elmo import Elmo
from jaxlm.objectives.bidirectional_lm import BidirectionalLM

experiment = Experiment(
    objective=BidirectionalLM(model=Elmo.published("original")),
    data=TextData(length=20, tokenizer_kind="words", vocab_size=793_471, sentences=True),
    optimizer=OptimizerConfig(
        name="adagrad", learning_rate=0.2, warmup_steps=0, schedule="constant", eps=1 / 400, clip_norm=0.5
    ),
    train=TrainConfig(steps=1_000_840, batch_size=768, log_every=100, eval_every=10_000, checkpoint_every=5_000),
)
