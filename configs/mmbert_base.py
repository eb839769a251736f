"""mmBERT-base (22 layers, width 768): the published size and its three phases of training.

Command:     jaxlm pretrain configs/mmbert_base.py --run-dir runs/mmbert_base --data.source "gs://YOUR/*.jsonl.zst"
Hardware:    see `jaxlm plan configs/mmbert_base.py`, with --phase 1 for rows of 1,024
Parameters:  307,786,240 with the published vocabulary of 256,000

2.3 trillion tokens in rows of 1,024 with 30 % masks; then rows of 8,192 with another base of rotary positions: 600
billion tokens with 15 % masks and 100 billion with 5 %, while the rate decays. The published training raises the batch
over its first 60 billion tokens, and draws from 60, 110 and 1,833 languages with weights n^0.7, n^0.5 and n^0.3 in the
three phases: set data.temperature in them, as mmbert_tiny does. For the published vocabulary, Gemma 2's, add
--data.tokenizer FOLDER.
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, PhaseConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.modernbert import ModernBert
from jaxlm.objectives.masked_lm import MaskedLM

FIRST = {"objective.mask_rate": 0.3, "objective.model.global_theta": 10000, "objective.model.local_theta": 10000}
DECAY = {
    "objective.mask_rate": 0.05, "optimizer.schedule": "wsd", "optimizer.decay_share": 1,
    "optimizer.decay_shape": "1-sqrt", "optimizer.final_share": 0.02, "optimizer.warmup_steps": 0,
}
PHASES = (PhaseConfig(487_433, 1024, 4608, FIRST), PhaseConfig(15_895), PhaseConfig(2649, fields=DECAY))

experiment = Experiment(
    objective=MaskedLM(
        model=ModernBert.published("mmbert-base", dtype="bfloat16", dropout=0.1), input_format="packed"
    ),
    data=TextData(length=8192, tokenizer_kind="byte-bpe", vocab_size=256_000),
    optimizer=OptimizerConfig(
        name="stable-adamw", learning_rate=8e-4, warmup_steps=636, schedule="constant", b2=0.95, eps=1e-8,
        weight_decay=0.1, clip_norm=0.0,
    ),
    train=TrainConfig(
        steps=505_977, phases=PHASES, batch_size=4608, log_every=100, eval_every=5_000, eval_batches=4,
        checkpoint_every=2_500,
    ),
)
