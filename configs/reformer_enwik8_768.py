"""Reformer on bytes (12 layers, two streams of width 768, rows of 65,536): trax's own configuration for enwik8.

Command:     jaxlm pretrain configs/reformer_enwik8_768.py --run-dir runs/reformer_enwik8_768 \
                 --data.source "gs://YOUR/enwik8.txt"
Hardware:    published: 8 devices, one row per device
Parameters:  56,406,786 with the 258 symbols of bytes
Result:      none published for these sizes, which are the paper's made smaller to fit less memory

The recipe is trax's (reformer_enwik8.gin). Two things differ: trax's warm-up is linear from 0, while this schedule
holds the peak, and trax initializes matrices by their sizes.
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.reformer import Reformer
from jaxlm.objectives.causal_lm import CausalLM

experiment = Experiment(
    objective=CausalLM(
        model=Reformer(
            hidden_size=768, head_dim=64, intermediate_size=2048, axial_widths=(256, 512)
        ),
        plain_stream=True,
    ),
    data=TextData(length=65_536, tokenizer_kind="bytes", vocab_size=258, normalization="identity"),
    optimizer=OptimizerConfig(
        learning_rate=7e-4, warmup_steps=2_000, schedule="inverse-sqrt", b2=0.98, eps=1e-9, weight_decay=0.0,
        clip_norm=0.0,
    ),
    train=TrainConfig(steps=100_000, batch_size=8, eval_every=500, checkpoint_every=5_000),
)
