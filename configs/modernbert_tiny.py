"""Small ModernBERT for a CPU (4 layers, width 128), trained on Python's own documentation.

There is no dropout, the initial weights are larger, and training starts with rows of 16 tokens, as in bert_tiny. The
first and the last layer attend to all tokens, the others to 16 before and after. Documents are packed into full rows.

Command:     jaxlm pretrain configs/modernbert_tiny.py --run-dir runs/modernbert_tiny
             jaxlm fill-mask runs/modernbert_tiny "Return a [MASK] of all the names."
Hardware:    two CPU cores
Parameters:  1,103,104 with the vocabulary of 4,096 trained here
Result:      held-out mlm_loss 4.992 after 830 steps with 8,192 pieces, English Wikipedia (unigram entropy 6.918)
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, PhaseConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.modernbert import ModernBert
from jaxlm.objectives.masked_lm import MaskedLM

experiment = Experiment(
    objective=MaskedLM(
        model=ModernBert(
            vocab_size=4096, hidden_size=128, num_layers=4, num_heads=2, intermediate_size=192, max_positions=128,
            local_attention=32, init_std=0.08,
        ),
        mask_rate=0.3, input_format="packed",
    ),
    data=TextData(source="python-docs", length=128, tokenizer_kind="byte-bpe", vocab_size=4096, held_out=0.05),
    optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=60),
    train=TrainConfig(
        steps=900, phases=(PhaseConfig(450, length=16), PhaseConfig(450)), batch_size=32, log_every=10,
        eval_every=100, eval_batches=12,
        checkpoint_every=100,
    ),
)
