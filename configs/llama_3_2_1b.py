"""Llama 3.2 1B (16 layers, width 2048): the published size, to continue on text of one's own.

Command:     jaxlm pretrain configs/llama_3_2_1b.py --run-dir runs/llama_3_2_1b --data.source "gs://YOUR/*.jsonl.zst"
Hardware:    see `jaxlm plan configs/llama_3_2_1b.py`
Parameters:  1,235,814,400 with the published vocabulary of 128,256

To continue the published model, add --init-from FOLDER with its Transformers folder. Its training is not published in
full, and made use of larger models; tokens, batch and schedule are this preset's, for 10 billion tokens. Rotary
frequencies are scaled by 32 for long texts.
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.llama import Llama
from jaxlm.objectives.causal_lm import CausalLM
from jaxlm.parallel.mesh import MeshConfig

experiment = Experiment(
    objective=CausalLM(model=Llama.published("3.2-1b", dtype="bfloat16")),
    data=TextData(length=2048, tokenizer_kind="byte-bpe", vocab_size=128256),
    optimizer=OptimizerConfig(
        learning_rate=5e-5, warmup_steps=1_000, schedule="wsd", b2=0.95, eps=1e-8, weight_decay=0.1,
    ),
    train=TrainConfig(
        steps=10_000, batch_size=512, log_every=100, eval_every=5_000, eval_batches=4, checkpoint_every=2_500
    ),
    mesh=MeshConfig(data=1, fsdp=-1),
)
