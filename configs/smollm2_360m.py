"""SmolLM2 360M (32 layers, width 960): the published size and number of tokens.

Command:     jaxlm pretrain configs/smollm2_360m.py --run-dir runs/smollm2_360m --data.source "gs://YOUR/*.jsonl.zst"
Hardware:    see `jaxlm plan configs/smollm2_360m.py`
Parameters:  361,821,120 with the published vocabulary of 49,152

The layers have 15 query and 5 key/value heads of 64, so that 128 does not divide their width: on a TPU splash attention
takes the place of the kernel for short rows. The published model saw 4 trillion tokens; batch, learning rate and
schedule are this preset's. Attention stays within a document.
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.llama import Llama
from jaxlm.objectives.causal_lm import CausalLM

experiment = Experiment(
    objective=CausalLM(model=Llama.published("smollm2-360m", dtype="bfloat16")),
    data=TextData(length=2048, tokenizer_kind="byte-bpe", vocab_size=49152),
    optimizer=OptimizerConfig(
        learning_rate=3e-3, warmup_steps=2_000, schedule="wsd", decay_share=0.2, decay_shape="linear", b2=0.95,
        eps=1e-8, weight_decay=0.01,
    ),
    train=TrainConfig(
        steps=3_814_698, batch_size=512, log_every=100, eval_every=5_000, eval_batches=4, checkpoint_every=2_500
    ),
)
