"""Small Llama for a CPU (4 layers, width 128), trained on Python's own documentation.

Four query heads share two key/value heads.

Command:     jaxlm pretrain configs/llama_tiny.py --run-dir runs/llama_tiny
             jaxlm generate runs/llama_tiny "Return a list of"
Hardware:    two CPU cores
Parameters:  1,787,008 with the vocabulary of 8,192 trained here
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.llama import Llama
from jaxlm.objectives.causal_lm import CausalLM

experiment = Experiment(
    objective=CausalLM(
        model=Llama(
            vocab_size=8192, hidden_size=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32,
            intermediate_size=352, max_positions=128, tied_head=True,
        )
    ),
    data=TextData(source="python-docs", length=128, vocab_size=8192),
    optimizer=OptimizerConfig(
        learning_rate=3e-3, warmup_steps=50, schedule="cosine", final_share=0.1, b2=0.95, eps=1e-8, weight_decay=0.1
    ),
    train=TrainConfig(steps=1_000, batch_size=32, log_every=10, eval_every=100, eval_batches=8, checkpoint_every=100),
)
