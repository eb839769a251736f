"""GPT-3 350M (24 layers, width 1,024): the published size, context and schedule.

Command:     jaxlm pretrain configs/gpt3_350m.py --run-dir runs/gpt3_350m --data.source "gs://YOUR/text/*.jsonl.zst"
Hardware:    published: V100 GPUs (not how many); see `jaxlm plan configs/gpt3_350m.py`
Parameters:  355,871,744 with the published vocabulary of 50,257
Result:      published, HellaSwag without examples: 43.6 (Brown et al. 2020, appendix H)

For the published vocabulary, GPT-2's, add --data.tokenizer FOLDER with its encoder.json and vocab.bpe. Every second
layer attends to a band of 256 tokens, a width that the paper does not give; `--objective.model.band 0` makes all layers
dense. 572,000 steps are 300 billion tokens. The learning rate decays until the last step (in the paper until 260
billion tokens). The batch size is constant (in the paper it grows over the first 4 to 12 billion tokens).
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.gpt3 import Gpt3
from jaxlm.objectives.causal_lm import CausalLM

experiment = Experiment(
    objective=CausalLM(
        model=Gpt3.published("350m", dtype="bfloat16", remat="dots"), plain_stream=True
    ),
    data=TextData(length=2048, vocab_size=50257),
    optimizer=OptimizerConfig(
        learning_rate=3e-4, warmup_steps=715, schedule="cosine", final_share=0.1, b2=0.95, eps=1e-8, weight_decay=0.1
    ),
    train=TrainConfig(steps=572_000, batch_size=256, log_every=100, eval_every=2_000, checkpoint_every=1_000),
)
