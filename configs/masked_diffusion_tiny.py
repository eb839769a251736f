"""Small masked diffusion model for a CPU (ModernBERT of 4 layers, width 128), trained on Python's own documentation.

Every layer attends to all tokens. There is no dropout, the initial weights are larger, and training starts with rows of
16 tokens, as in bert_tiny.

Command:     jaxlm pretrain configs/masked_diffusion_tiny.py --run-dir runs/masked_diffusion_tiny
             jaxlm generate runs/masked_diffusion_tiny "Return a list of" --max-new-tokens 32
Hardware:    two CPU cores
Parameters:  1,103,104 with the vocabulary of 4,096 trained here
Result:      held-out diffusion_loss 6.064 at step 700 of 1,200, English Wikipedia (unigram entropy 6.887)

The rows of the first 450 steps are short, the held-out ones are not: 7.181 at step 400, 6.136 at step 600. At step 700
samples are frequent words and pieces of words without sentences: "The city of London of .. Gygy. Exonography and".
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, PhaseConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.modernbert import ModernBert
from jaxlm.objectives.masked_diffusion import MaskedDiffusion

experiment = Experiment(
    objective=MaskedDiffusion(
        model=ModernBert(
            vocab_size=4096, hidden_size=128, num_layers=4, num_heads=2, intermediate_size=192, max_positions=128,
            global_period=1, init_std=0.08,
        ),
    ),
    data=TextData(source="python-docs", length=128, tokenizer_kind="byte-bpe", vocab_size=4096, held_out=0.05),
    optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=60),
    train=TrainConfig(
        steps=1200, phases=(PhaseConfig(450, length=16), PhaseConfig(750)), batch_size=32, log_every=10,
        eval_every=100, eval_batches=12,
        checkpoint_every=100,
    ),
)
