"""Gemma 3 270M (18 layers, width 640): the published size, to continue on text of one's own.

Command:     jaxlm pretrain configs/gemma3_270m.py --run-dir runs/gemma3_270m --data.source "gs://YOUR/*.jsonl.zst"
Hardware:    see `jaxlm plan configs/gemma3_270m.py`
Parameters:  268,098,176 with the published vocabulary of 262,144

To continue the published model, add --init-from FOLDER with its Transformers folder. Its training is not published in
full; tokens, batch and schedule are this preset's, for 10 billion tokens. Every sixth layer attends to all tokens, the
others to 512. Heads of 256 are wider than those of the TPU's kernel for short rows: splash attention takes its place.
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.llama import Gemma3
from jaxlm.objectives.causal_lm import CausalLM

experiment = Experiment(
    objective=CausalLM(model=Gemma3.published("270m", dtype="bfloat16")),
    data=TextData(length=2048, tokenizer_kind="byte-bpe", vocab_size=262144),
    optimizer=OptimizerConfig(
        learning_rate=5e-5, warmup_steps=1_000, schedule="wsd", b2=0.95, eps=1e-8, weight_decay=0.1,
    ),
    train=TrainConfig(
        steps=10_000, batch_size=512, log_every=100, eval_every=5_000, eval_batches=4, checkpoint_every=2_500
    ),
)
