"""Ettin encoder 17M (7 layers, width 256): the published size and its three phases of training.

Command:     jaxlm pretrain configs/ettin_encoder_17m.py --run-dir runs/ettin_encoder_17m --data.source "gs://YOUR/*.jsonl.zst"
Hardware:    see `jaxlm plan configs/ettin_encoder_17m.py`, with --phase 1 for rows of 1,024
Parameters:  16,913,600 with the published vocabulary of 50,368

1.7 trillion tokens in rows of 1,024, at a constant rate and with a base of rotary positions of 10,000; then rows of
7,936 and a base of 160,000: 250 billion tokens that decay to half the rate, and 50 billion from there to 0.04 of it.
Masks are 30 %, in the last phase and in evaluation 15 %. The published training differs as follows. Its long rows have
7,999 tokens, for which neither TPUs nor GPUs have an attention kernel; 7,936 is 62 times 128. StableAdamW clips
the updates of query, key and value together, and those of the two halves of the gated feed-forward; weight decay at the
peak is the same. The batch grows to 4,608 rows over the first 125 billion tokens, and the warm-up has its number of
tokens here. Rows are not packed. [CLS] and [SEP] may be masked, and random tokens may be special.
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, PhaseConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.modernbert import ModernBert
from jaxlm.objectives.masked_lm import MaskedLM

FIRST = {"objective.mask_rate": 0.3, "objective.model.global_theta": 10000, "objective.model.local_theta": 10000}
DECAY = {
    "optimizer.schedule": "wsd", "optimizer.decay_share": 1, "optimizer.decay_shape": "1-sqrt",
    "optimizer.warmup_steps": 0,
}
PHASES = (
    PhaseConfig(360_277, 1024, 4608, FIRST),
    PhaseConfig(6837, fields={"objective.mask_rate": 0.3} | DECAY | {"optimizer.final_share": 0.5}),
    PhaseConfig(1368, fields=DECAY | {
        "optimizer.final_share": 0.04, "optimizer.learning_rate": 1.5e-3, "optimizer.weight_decay": 0.2,
    }),
)

experiment = Experiment(
    objective=MaskedLM(model=ModernBert.published("ettin-17m", dtype="bfloat16", dropout=0.1), input_format="packed"),
    data=TextData(length=7936, tokenizer_kind="byte-bpe", vocab_size=50368),
    optimizer=OptimizerConfig(
        name="stable-adamw", learning_rate=3e-3, warmup_steps=848, schedule="constant", b2=0.98, weight_decay=0.1,
        clip_norm=0.0,
    ),
    train=TrainConfig(
        steps=368_482, phases=PHASES, batch_size=4608, log_every=100, eval_every=5_000, eval_batches=4,
        checkpoint_every=2_500,
    ),
)
