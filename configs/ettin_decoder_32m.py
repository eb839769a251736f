"""Ettin decoder 32M (10 layers, width 384): the published size and its three phases of training.

Command:     jaxlm pretrain configs/ettin_decoder_32m.py --run-dir runs/ettin_decoder_32m --data.source "gs://YOUR/*.jsonl.zst"
Hardware:    see `jaxlm plan configs/ettin_decoder_32m.py`, with --phase 1 for rows of 1,024
Parameters:  32,081,344 with the published vocabulary of 50,368

The differences are those of ettin_decoder_17m.py, with a ramp of the batch over 100 billion tokens there.
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, PhaseConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.modernbert import ModernBertDecoder
from jaxlm.objectives.causal_lm import CausalLM

FIRST = {"objective.model.global_theta": 10000, "objective.model.local_theta": 10000}
DECAY = {
    "optimizer.schedule": "wsd", "optimizer.decay_share": 1, "optimizer.decay_shape": "1-sqrt",
    "optimizer.warmup_steps": 0,
}
PHASES = (
    PhaseConfig(360_277, 1024, 4608, FIRST),
    PhaseConfig(6837, fields=DECAY | {"optimizer.final_share": 0.5}),
    PhaseConfig(1368, fields=DECAY | {
        "optimizer.final_share": 0.04, "optimizer.learning_rate": 1.5e-3, "optimizer.weight_decay": 0.2,
    }),
)

experiment = Experiment(
    objective=CausalLM(model=ModernBertDecoder.published("32m", dtype="bfloat16", dropout=0.1)),
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
