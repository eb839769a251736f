"""Small EuroBERT for a CPU (4 layers, width 128), trained on Python's own documentation.

The recipe is the published one in small: 50 % masks, all of them the mask symbol, and a base of rotary positions of
10,000; then 10 % and 250,000 while the rate decays. Four query heads share two key/value heads. The initial weights are
larger, and training starts with rows of 16 tokens, as in modernbert_tiny.

Command:     jaxlm pretrain configs/eurobert_tiny.py --run-dir runs/eurobert_tiny
             jaxlm fill-mask runs/eurobert_tiny "Return a [MASK] of all the names."
Hardware:    two CPU cores
Parameters:  1,639,552 with the vocabulary of 4,096 trained here
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, PhaseConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.llama import EuroBert
from jaxlm.objectives.masked_lm import MaskedLM

FIRST = {"objective.mask_rate": 0.5, "objective.model.rope_theta": 10_000}
DECAY = {"optimizer.schedule": "wsd", "optimizer.decay_share": 1, "optimizer.warmup_steps": 0}
PHASES = (PhaseConfig(400, 16, fields=FIRST), PhaseConfig(300, fields=FIRST), PhaseConfig(200, fields=DECAY))

experiment = Experiment(
    objective=MaskedLM(
        model=EuroBert(
            vocab_size=4096, hidden_size=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32,
            intermediate_size=256, max_positions=128, init_std=0.08,
        ),
        mask_rate=0.1, mask_share=1.0, random_share=0.0, input_format="full-sentences", short_rate=0.0,
    ),
    data=TextData(source="python-docs", length=128, tokenizer_kind="byte-bpe", vocab_size=4096, held_out=0.05),
    optimizer=OptimizerConfig(
        learning_rate=2e-3, warmup_steps=60, schedule="constant", b2=0.95, eps=1e-5, weight_decay=0.1
    ),
    train=TrainConfig(
        steps=900, phases=PHASES, batch_size=32, log_every=10, eval_every=100, eval_batches=12, checkpoint_every=100
    ),
)
