"""Reformer on bytes (12 layers, two streams of width 1,024, rows of 65,536): the size of google/reformer-enwik8.

Command:     jaxlm pretrain configs/reformer_enwik8.py --run-dir runs/reformer_enwik8 --data.source "gs://YOUR/enwik8.txt"
Hardware:    published: 8 devices, one row per device
Parameters:  149,182,722 with the 258 symbols of bytes
Result:      none published for the checkpoint; the paper's figures for enwik8 (section 5) are of other settings

The recipe is trax's for enwik8 (reformer_enwik8.gin), with the larger sizes from its comments. Two things differ:
trax's warm-up is linear from 0, while this schedule holds the peak, and trax initializes matrices by their sizes.
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.reformer import Reformer
from jaxlm.objectives.causal_lm import CausalLM

experiment = Experiment(
    objective=CausalLM(model=Reformer(), plain_stream=True),
    data=TextData(length=65_536, tokenizer_kind="bytes", vocab_size=258, normalization="identity"),
    optimizer=OptimizerConfig(
        learning_rate=7e-4, warmup_steps=2_000, schedule="inverse-sqrt", b2=0.98, eps=1e-9, weight_decay=0.0,
        clip_norm=0.0,
    ),
    train=TrainConfig(steps=100_000, batch_size=8, eval_every=500, checkpoint_every=5_000),
)
