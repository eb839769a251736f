"""Small Reformer for one novel in a row of 524,288 tokens: the size of google/reformer-crime-and-punishment.

Command:     jaxlm pretrain configs/reformer_crime_and_punishment.py --run-dir runs/crime \
                 --data.source "novel.txt" --data.tokenizer spiece.model
Hardware:    published: 8 cores of a TPU v2, one row per device
Parameters:  2,748,224 with the published vocabulary of 320
Result:      none published; the checkpoint was made to show what fits

The recipe is that of trax's notebook (text_generation.ipynb), which stops after 600 steps and pads the novel at its
start by a random length. The published vocabulary is a SentencePiece model of 320 pieces, fewer than can be trained
here: pass it with --data.tokenizer, or use bytes with --data.vocab-size 258.
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.reformer import Reformer
from jaxlm.objectives.causal_lm import CausalLM

experiment = Experiment(
    objective=CausalLM(
        model=Reformer(
            vocab_size=320, hidden_size=256, num_layers=6, attention_types=("local", "lsh"), num_heads=2, head_dim=64,
            intermediate_size=512, axial_shape=(512, 1024), axial_widths=(64, 192), local_chunk_size=64,
            lsh_chunk_size=64, num_hashes=1, buckets=(64, 128), dropout=0.05, attention_dropout=0.05,
            lsh_attention_dropout=0.0,
        ),
        plain_stream=True,
    ),
    data=TextData(length=524_288, tokenizer_kind="bytes", vocab_size=320),
    optimizer=OptimizerConfig(
        learning_rate=0.01, warmup_steps=100, schedule="cosine", b1=0.86, b2=0.92, eps=1e-9, weight_decay=0.0,
        clip_norm=0.0,
    ),
    train=TrainConfig(steps=1_000, batch_size=8, eval_every=100, checkpoint_every=100),
)
