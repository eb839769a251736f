"""Small RoBERTa for a CPU (2 layers, width 128), trained on Python's own documentation.

As in bert_tiny, there is no dropout, the initial weights are larger, and training starts with rows of 16 tokens.
Documents are packed into full rows. The vocabulary is byte-level BPE, which has no unknown characters.

Command:     jaxlm pretrain configs/roberta_tiny.py --run-dir runs/roberta_tiny
             jaxlm fill-mask runs/roberta_tiny "Return a [MASK] of all the names."
Hardware:    two CPU cores
Parameters:  958,720 with the vocabulary of 4,096 trained here, whose padding symbol has id 1; 958,592 with id 0
Result:      held-out masked-LM loss 5.18 (unigram entropy 6.35), accuracy 0.224; two CPU cores, 2026-11-21
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, PhaseConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.roberta import Roberta
from jaxlm.objectives.masked_lm import MaskedLM

experiment = Experiment(
    objective=MaskedLM(
        model=Roberta(
            vocab_size=4096, hidden_size=128, num_layers=2, num_heads=2, intermediate_size=512, max_positions=128,
            dropout=0.0, attention_dropout=0.0, init_std=0.08,
        ),
        input_format="full-sentences", short_rate=0.0,
    ),
    data=TextData(source="python-docs", length=128, tokenizer_kind="byte-bpe", vocab_size=4096, held_out=0.05),
    optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=60),
    train=TrainConfig(
        steps=900, phases=(PhaseConfig(450, length=16), PhaseConfig(450)), batch_size=32, log_every=10,
        eval_every=100, eval_batches=12,
        checkpoint_every=100,
    ),
)
