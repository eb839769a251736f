"""ModernBERT-large (28 layers, width 1,024): the published size and its three phases of training.

Command:     jaxlm pretrain configs/modernbert_large.py --run-dir runs/modernbert_large --data.source "gs://YOUR/*.jsonl.zst"
Hardware:    published: 8 H100 GPUs; here see `jaxlm plan modernbert_large`, with --phase 11 for rows of 1,024
Parameters:  395,881,664 with the published vocabulary of 50,368
Result:      published: GLUE average 90.4 (answerdotai/ModernBERT-large, README)

The phases and differences are those of modernbert_base.py, with a batch that grows from 448 to 4,928 rows over 10
billion tokens. After 900 billion tokens the learning rate is 5e-5, where theirs was rolled back. Theirs starts from the
weights of base, tiled, and its warm-up is linear in tokens, 2 billion, here in steps of the growing batch.
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, PhaseConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.modernbert import ModernBert
from jaxlm.objectives.masked_lm import MaskedLM

FIRST = {"objective.mask_rate": 0.3, "objective.model.global_theta": 10000}
LATER = {"optimizer.learning_rate": 5e-5, "optimizer.warmup_steps": 0}
DECAY = {
    "optimizer.schedule": "wsd", "optimizer.decay_share": 1, "optimizer.decay_shape": "1-sqrt",
    "optimizer.final_share": 0.001,
}
PHASES = (
    *(PhaseConfig(396, 1024, 448 * size, FIRST) for size in range(1, 11)),
    PhaseConfig(176_369, 1024, 4928, FIRST),
    PhaseConfig(162_298, 1024, 4928, FIRST | LATER),
    PhaseConfig(49_541, 8192, 616, {"objective.mask_rate": 0.3} | LATER),
    PhaseConfig(9781, fields={"objective.mask_rate": 0.3} | LATER | DECAY),
)

experiment = Experiment(
    objective=MaskedLM(model=ModernBert.published("large", dtype="bfloat16", dropout=0.1), input_format="packed"),
    data=TextData(length=8192, tokenizer_kind="byte-bpe", vocab_size=50368),
    optimizer=OptimizerConfig(
        name="stable-adamw", learning_rate=5e-4, warmup_steps=1_664, schedule="constant", b2=0.98, weight_decay=0.02,
        clip_norm=0.0,
    ),
    train=TrainConfig(
        steps=401_949, phases=PHASES, batch_size=624, log_every=100, eval_every=5_000, checkpoint_every=2_500
    ),
)
