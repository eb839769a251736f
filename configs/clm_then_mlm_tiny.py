"""Small encoder for a CPU (4 layers, width 128) that first learns to write, on Python's own documentation.

The recipe of "Should we still pretrain encoders with masked language modeling?" (Gisserot-Boukhlef et al. 2025) in
small: up to a half of the steps predict the next token, the others 40 % masks, and the rate decays at the end. The
layers are those of eurobert_tiny; during the first phases a token attends only to those before it.

Command:     jaxlm pretrain configs/clm_then_mlm_tiny.py --run-dir runs/clm_then_mlm_tiny
             jaxlm fill-mask runs/clm_then_mlm_tiny "Return a [MASK] of all the names."
Hardware:    two CPU cores
Parameters:  1,639,552 with the vocabulary of 4,096 trained here
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, PhaseConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.llama import EuroBert
from jaxlm.objectives.causal_lm import CausalLM
from jaxlm.objectives.masked_lm import MaskedLM

PHASES = (PhaseConfig(250, 16, objective=CausalLM()), PhaseConfig(200, objective=CausalLM()), PhaseConfig(450))

experiment = Experiment(
    objective=MaskedLM(
        model=EuroBert(
            vocab_size=4096, hidden_size=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32,
            intermediate_size=256, max_positions=128, init_std=0.08,
        ),
        mask_rate=0.4, mask_share=1.0, random_share=0.0, input_format="full-sentences", short_rate=0.0,
    ),
    data=TextData(source="python-docs", length=128, tokenizer_kind="byte-bpe", vocab_size=4096, held_out=0.05),
    optimizer=OptimizerConfig(
        learning_rate=2e-3, warmup_steps=60, schedule="wsd", decay_share=0.2, b2=0.95, eps=1e-5, weight_decay=0.1
    ),
    train=TrainConfig(
        steps=900, phases=PHASES, batch_size=32, log_every=10, eval_every=100, eval_batches=12, checkpoint_every=100
    ),
)
