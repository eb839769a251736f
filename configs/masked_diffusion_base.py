"""Masked diffusion of MDLM's size and recipe (12 layers, width 768) on ModernBERT's layers.

Command:     jaxlm pretrain configs/masked_diffusion_base.py --run-dir runs/masked_diffusion_base --data.source "gs://YOUR/*.jsonl.zst"
             jaxlm generate runs/masked_diffusion_base "The weather" --max-new-tokens 128
Hardware:    see `jaxlm plan configs/masked_diffusion_base.py`
Parameters:  124,277,440 with a vocabulary of 50,368

Layers, width, length, batch, steps, learning rate, warm-up, dropout, clipping and average of the weights are those of
the published training on OpenWebText (kuleshov-group/mdlm). It differs from it as follows. The published network is a
diffusion transformer, with GPT-2's vocabulary and another output matrix than its embedding; here all layers attend to
all tokens, feed-forward layers are gated, of as many parameters, and no special symbol is ever masked. Documents of a
row do not see each other.
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.modernbert import ModernBert
from jaxlm.objectives.masked_diffusion import MaskedDiffusion

experiment = Experiment(
    objective=MaskedDiffusion(
        model=ModernBert(
            num_layers=12, intermediate_size=2048, max_positions=1024, global_period=1, global_theta=10_000.0,
            dtype="bfloat16", dropout=0.1, mlp_dropout=0.1,
        ),
    ),
    data=TextData(length=1024, tokenizer_kind="byte-bpe", vocab_size=50368),
    optimizer=OptimizerConfig(
        learning_rate=3e-4, warmup_steps=2_500, schedule="constant", b2=0.999, eps=1e-8, weight_decay=0.0,
        clip_norm=1.0, average=0.9999,
    ),
    train=TrainConfig(steps=1_000_000, batch_size=512, log_every=100, eval_every=10_000, checkpoint_every=2_500),
)
