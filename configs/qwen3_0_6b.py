"""Qwen3-0.6B (28 layers, width 1024): the published size, to continue on text of one's own.

Command:     jaxlm pretrain configs/qwen3_0_6b.py --run-dir runs/qwen3_0_6b --data.source "gs://YOUR/*.jsonl.zst"
Hardware:    see `jaxlm plan configs/qwen3_0_6b.py`
Parameters:  596,049,920 with the published vocabulary of 151,936

To continue the published model, add --init-from FOLDER with its Transformers folder. Its training is not published in
full; tokens, batch and schedule are this preset's, for 10 billion tokens. The published tokenizer has fewer ids than
the embedding has rows.
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.llama import Qwen3
from jaxlm.objectives.causal_lm import CausalLM
from jaxlm.parallel.mesh import MeshConfig

experiment = Experiment(
    objective=CausalLM(model=Qwen3.published("0.6b", dtype="bfloat16")),
    data=TextData(length=2048, tokenizer_kind="byte-bpe", vocab_size=151936),
    optimizer=OptimizerConfig(
        learning_rate=5e-5, warmup_steps=1_000, schedule="wsd", b2=0.95, eps=1e-8, weight_decay=0.1,
    ),
    train=TrainConfig(
        steps=10_000, batch_size=512, log_every=100, eval_every=5_000, eval_batches=4, checkpoint_every=2_500
    ),
    mesh=MeshConfig(data=1, fsdp=-1),
)
