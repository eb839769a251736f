"""Word order with a gated encoder of one layer, over text.txt beside this file."""

from pathlib import Path

from tinylab.gated import GatedBert
from tinylab.shuffled import Shuffled

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData

SIZES = dict(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32, max_positions=32)

experiment = Experiment(
    objective=Shuffled(model=GatedBert(**SIZES, dropout=0.0, attention_dropout=0.0), input_format="document"),
    data=TextData(source=str(Path(__file__).with_name("text.txt")), length=32, vocab_size=512, held_out=0.1),
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2, schedule="constant"),
    train=TrainConfig(steps=12, batch_size=8, log_every=3, eval_every=0, eval_batches=2, checkpoint_every=4,
                      tracker="none"),
)
