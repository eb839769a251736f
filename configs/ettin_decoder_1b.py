"""Ettin decoder 1B (28 layers, width 1,792): the published size, and its first phase of training.

Command:     jaxlm pretrain configs/ettin_decoder_1b.py --run-dir runs/ettin_decoder_1b --data.source "gs://YOUR/*.jsonl.zst"
Hardware:    see `jaxlm plan configs/ettin_decoder_1b.py`
Parameters:  1,031,314,112 with the published vocabulary of 50,368

The differences are those of ettin_decoder_17m.py, with a ramp of the batch over 3 billion tokens there. The published
model had a third of the second and third phases.
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.modernbert import ModernBertDecoder
from jaxlm.objectives.causal_lm import CausalLM

experiment = Experiment(
    objective=CausalLM(model=ModernBertDecoder.published("1b", dtype="bfloat16")),
    data=TextData(length=1024, tokenizer_kind="byte-bpe", vocab_size=50368),
    optimizer=OptimizerConfig(
        name="stable-adamw", learning_rate=5e-4, warmup_steps=424, b2=0.98, weight_decay=0.1, clip_norm=0.0
    ),
    train=TrainConfig(steps=360_277, batch_size=4608, log_every=100, eval_every=5_000, checkpoint_every=2_500),
)
