"""Small word2vec for a CPU (skip-gram, width 64), trained on Python's own documentation.

Command:     jaxlm pretrain configs/word2vec_tiny.py --run-dir runs/word2vec_tiny
             jaxlm export runs/word2vec_tiny vectors
Hardware:    two CPU cores
Parameters:  524,288 with the 4,096 words and symbols counted here
Result:      held-out noise_loss 4.151 to 2.562, English Wikipedia (configs/RESULTS.md)
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.word2vec import Word2Vec
from jaxlm.objectives.skip_gram import SkipGram

experiment = Experiment(
    objective=SkipGram(model=Word2Vec(vocab_size=4096, hidden_size=64)),
    data=TextData(source="python-docs", length=64, tokenizer_kind="words", vocab_size=4096, held_out=0.05),
    optimizer=OptimizerConfig(learning_rate=5e-3, warmup_steps=20, weight_decay=0.0),
    train=TrainConfig(steps=1500, batch_size=32, log_every=20, eval_every=250, eval_batches=12, checkpoint_every=250),
)
