"""Small XLNet for a CPU (2 layers, width 128), trained on Python's own documentation.

Command:     jaxlm pretrain configs/xlnet_tiny.py --run-dir runs/xlnet_tiny
             jaxlm generate runs/xlnet_tiny "Return a list of"
Hardware:    two CPU cores
Parameters:  958,080 with the vocabulary of 4,096 trained here
Result:      held-out plm_loss 9.449 to 5.471, English Wikipedia (configs/RESULTS.md)
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.xlnet import Xlnet
from jaxlm.objectives.permutation_lm import PermutationLM

experiment = Experiment(
    objective=PermutationLM(
        model=Xlnet(
            vocab_size=4096, hidden_size=128, num_layers=2, num_heads=2, intermediate_size=512, dropout=0.0,
            attention_dropout=0.0, init_std=0.08,
        ),
        memory_length=48,
    ),
    data=TextData(source="python-docs", length=64, vocab_size=4096, held_out=0.05),
    optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=60),
    train=TrainConfig(steps=900, batch_size=64, log_every=10, eval_every=100, eval_batches=12, checkpoint_every=100),
)
