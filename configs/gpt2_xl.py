"""GPT-2 1.5B (48 layers, width 1,600): the published size and context, with nanoGPT's open recipe.

Command:     jaxlm pretrain configs/gpt2_xl.py --run-dir runs/gpt2_xl --data.source "gs://YOUR/text/*.jsonl.zst"
             (on more than 64 chips add --mesh.data -1 --mesh.fsdp 64: the width divides by 64 at most)
Hardware:    not published; see `jaxlm plan configs/gpt2_xl.py`
Parameters:  1,557,611,200 with the published vocabulary of 50,257
Result:      published, OpenWebText: 2.54 for the released weights (karpathy/nanoGPT, README)

For the published vocabulary, add --data.tokenizer FOLDER with GPT-2's encoder.json and vocab.bpe. The learning rate is
GPT-3's for this size; the rest is nanoGPT's recipe for 124M. Attention stays within a document. The published figure is
for a plain stream of documents, `--objective.plain-stream True`.
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.gpt2 import Gpt2
from jaxlm.objectives.causal_lm import CausalLM
from jaxlm.parallel.mesh import MeshConfig

experiment = Experiment(
    objective=CausalLM(model=Gpt2.published("xl", dtype="bfloat16", remat="full", loop_layers=True)),
    data=TextData(length=1024, vocab_size=50257),
    optimizer=OptimizerConfig(
        learning_rate=2e-4, warmup_steps=2_000, schedule="cosine", final_share=0.1, b2=0.95, eps=1e-8,
        weight_decay=0.1,
    ),
    train=TrainConfig(steps=600_000, batch_size=512, log_every=100, eval_every=2_000, checkpoint_every=2_000),
    mesh=MeshConfig(data=1, fsdp=-1),
)
