"""Small GPT-1 for a CPU (4 layers, width 128), trained on Python's own documentation.

As in bert_tiny, there is no dropout, the initial weights are larger, and training starts with rows of 16 tokens. At
GPT-2's learning rates a post-norm model learns only token frequencies.

Command:     jaxlm pretrain configs/gpt1_tiny.py --run-dir runs/gpt1_tiny
             jaxlm generate runs/gpt1_tiny "Return a list of"
Hardware:    two CPU cores
Parameters:  1,858,048 with the vocabulary of 8,192 trained here
Result:      held-out lm_loss 9.534 to 6.299, English Wikipedia (configs/RESULTS.md)
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, PhaseConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.gpt1 import Gpt1
from jaxlm.objectives.causal_lm import CausalLM

experiment = Experiment(
    objective=CausalLM(
        model=Gpt1(
            vocab_size=8192, hidden_size=128, num_layers=4, num_heads=2, intermediate_size=512, max_positions=128,
            dropout=0.0, attention_dropout=0.0, init_std=0.08, position_init_std=0.08,
        )
    ),
    data=TextData(source="python-docs", length=128, vocab_size=8192),
    optimizer=OptimizerConfig(
        learning_rate=7e-4, warmup_steps=50, schedule="cosine", final_share=0.1, eps=1e-8, weight_decay=0.01
    ),
    train=TrainConfig(
        steps=600, phases=(PhaseConfig(400, length=16), PhaseConfig(200)), batch_size=16, log_every=10,
        eval_every=100, eval_batches=8,
        checkpoint_every=100,
    ),
)
