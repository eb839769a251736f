"""Small mmBERT for a CPU (4 layers, width 128): three phases over texts of several languages.

The recipe of mmBERT (Marone et al. 2025) in small: 30 %, 15 % and 5 % masks; longer rows and another base of rotary
positions from the second phase on; shares of the languages by their sizes to the power of 0.7, 0.5 and 0.3, so that the
small ones are read more towards the end; and a rate that decays in the last phase. The layers are those of
modernbert_tiny. Give a text for each language; a language that is to come late is left out of `data.source` of the
earlier phases.

Command:     jaxlm pretrain configs/mmbert_tiny.py --run-dir runs/mmbert_tiny --data.source english.jsonl,korean.jsonl
             jaxlm fill-mask runs/mmbert_tiny "It was the largest [MASK] of the country."
Hardware:    two CPU cores
Parameters:  1,631,488 with a vocabulary of 8,192
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, PhaseConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.modernbert import ModernBert
from jaxlm.objectives.masked_lm import MaskedLM

FIRST = {
    "objective.mask_rate": 0.3, "data.temperature": 1 / 0.7, "objective.model.global_theta": 10_000,
    "objective.model.local_theta": 10_000,
}
SECOND = {"data.temperature": 1 / 0.5}
DECAY = {
    "objective.mask_rate": 0.05, "optimizer.schedule": "wsd", "optimizer.decay_share": 1,
    "optimizer.decay_shape": "1-sqrt", "optimizer.final_share": 0.02, "optimizer.warmup_steps": 0,
}
PHASES = (PhaseConfig(500, 16, fields=FIRST), PhaseConfig(300, fields=SECOND), PhaseConfig(200, fields=DECAY))

experiment = Experiment(
    objective=MaskedLM(
        model=ModernBert(
            vocab_size=8192, hidden_size=128, num_layers=4, num_heads=2, intermediate_size=192, max_positions=128,
            local_attention=32, global_theta=160_000, local_theta=160_000, init_std=0.08,
        ),
        mask_rate=0.15, input_format="packed",
    ),
    data=TextData(
        source="english.jsonl,korean.jsonl", temperature=1 / 0.3, length=128, tokenizer_kind="bpe", vocab_size=8192,
        held_out=0.02,
    ),
    optimizer=OptimizerConfig(
        name="stable-adamw", learning_rate=2e-3, warmup_steps=60, schedule="constant", b2=0.95, eps=1e-8,
        weight_decay=0.1, clip_norm=0.0,
    ),
    train=TrainConfig(
        steps=1_000, phases=PHASES, batch_size=32, log_every=10, eval_every=100, eval_batches=12, checkpoint_every=100
    ),
)
