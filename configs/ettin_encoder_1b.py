"""Ettin encoder 1B (28 layers, width 1,792): the published size and its three phases of training.

Command:     jaxlm pretrain configs/ettin_encoder_1b.py --run-dir runs/ettin_encoder_1b --data.source "gs://YOUR/*.jsonl.zst"
Hardware:    see `jaxlm plan configs/ettin_encoder_1b.py`, with --phase 1 for rows of 1,024
Parameters:  1,031,314,112 with the published vocabulary of 50,368

The schedule is that of the size, with a ramp of the batch over 3 billion tokens there; the differences are those of
ettin_encoder_17m.py. The second and third phases have a third of the tokens.
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
    PhaseConfig(2279, fields={"objective.mask_rate": 0.3} | DECAY | {"optimizer.final_share": 0.5}),
    PhaseConfig(456, fields=DECAY | {
        "optimizer.final_share": 0.04, "optimizer.learning_rate": 2.5e-4, "optimizer.weight_decay": 0.2,
    }),
)

experiment = Experiment(
    objective=MaskedLM(model=ModernBert.published("ettin-1b", dtype="bfloat16", dropout=0.1), input_format="packed"),
    data=TextData(length=7936, tokenizer_kind="byte-bpe", vocab_size=50368),
    optimizer=OptimizerConfig(
        name="stable-adamw", learning_rate=5e-4, warmup_steps=424, schedule="constant", b2=0.98, weight_decay=0.1,
        clip_norm=0.0,
    ),
    train=TrainConfig(
        steps=363_012, phases=PHASES, batch_size=4608, log_every=100, eval_every=5_000, eval_batches=4,
        checkpoint_every=2_500,
    ),
)
