"""GPT-3 13B (40 layers, width 5,120): the published size, context and schedule.

Command:     jaxlm pretrain configs/gpt3_13b.py --run-dir runs/gpt3_13b --data.source "gs://YOUR/text/*.jsonl.zst"
Hardware:    published: V100 GPUs (not how many); planned for v5e:16x16 with --train.accumulate 2: 7.5 GiB per chip,
             5.40 s per step, 62 % MFU
Parameters:  12,853,386,240 with the published vocabulary of 50,257
Result:      published, HellaSwag without examples: 70.9 (Brown et al. 2020, appendix H)

For the published vocabulary, GPT-2's, add --data.tokenizer FOLDER with its encoder.json and vocab.bpe. The paper prints
a width of 5,140 for 40 heads of 128; the width here is 5,120. Every second layer attends to a band of 256 tokens, a
width that the paper does not give; `--objective.model.band 0` makes all layers dense. 143,000 steps are 300 billion
tokens. The learning rate decays until the last step (in the paper until 260 billion tokens). The batch size is constant
(in the paper it grows over the first 4 to 12 billion tokens).
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.gpt3 import Gpt3
from jaxlm.objectives.causal_lm import CausalLM
from jaxlm.parallel.mesh import MeshConfig

experiment = Experiment(
    objective=CausalLM(
        model=Gpt3.published("13b", dtype="bfloat16", remat="full", loop_layers=True), plain_stream=True
    ),
    data=TextData(length=2048, vocab_size=50257),
    optimizer=OptimizerConfig(
        learning_rate=1e-4, warmup_steps=179, schedule="cosine", final_share=0.1, b2=0.95, eps=1e-8, weight_decay=0.1
    ),
    train=TrainConfig(steps=143_000, batch_size=1024, log_every=100, eval_every=2_000, checkpoint_every=1_000),
    mesh=MeshConfig(data=1, fsdp=-1),
)
