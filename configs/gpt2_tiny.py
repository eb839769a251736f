"""Small GPT-2 for a CPU (4 layers, width 128), trained on Python's own documentation.

Command:     jaxlm pretrain configs/gpt2_tiny.py --run-dir runs/gpt2_tiny
             jaxlm generate runs/gpt2_tiny "Return a list of"
Hardware:    two CPU cores
Parameters:  1,858,304 with the vocabulary of 8,192 trained here
Result:      held-out lm_loss 9.040 to 5.895, English Wikipedia (configs/RESULTS.md)
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.gpt2 import Gpt2
from jaxlm.objectives.causal_lm import CausalLM

experiment = Experiment(
    objective=CausalLM(
        model=Gpt2(
            vocab_size=8192, hidden_size=128, num_layers=4, num_heads=2, intermediate_size=512, max_positions=128
        )
    ),
    data=TextData(source="python-docs", length=128, vocab_size=8192),
    optimizer=OptimizerConfig(
        learning_rate=3e-3, warmup_steps=50, schedule="cosine", final_share=0.1, b2=0.95, eps=1e-8, weight_decay=0.1
    ),
    train=TrainConfig(steps=300, batch_size=32, log_every=10, eval_every=100, eval_batches=8, checkpoint_every=100),
)
