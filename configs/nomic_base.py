"""Nomic BERT (12 layers, width 768): the published size, rows and number of steps.

Command:     jaxlm pretrain configs/nomic_base.py --run-dir runs/nomic_base --data.source "gs://YOUR/*.jsonl.zst"
Hardware:    published: 8 GPUs; here see `jaxlm plan configs/nomic_base.py`
Parameters:  137,354,304 with BERT's vocabulary of 30,522 in 30,528 rows
Result:      published: GLUE average 84 (nomic-ai/nomic-bert-2048, README)

Full rows hold documents that do not see each other, with 30 % masks; the published ones are joined. Batch, length and
steps are those of the README; the optimizer is that of the published configuration of rows of 128, which masks 15 % in
evaluation. For the published vocabulary, add --data.tokenizer FOLDER.
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.rotary_bert import NomicBert
from jaxlm.objectives.masked_lm import MaskedLM

experiment = Experiment(
    objective=MaskedLM(
        model=NomicBert.published("base", dtype="bfloat16"), mask_rate=0.3, input_format="packed", short_rate=0.0,
    ),
    data=TextData(length=2048, vocab_size=30522),
    optimizer=OptimizerConfig(
        learning_rate=5e-4, warmup_steps=6_000, b2=0.98, eps=1e-6, weight_decay=1e-5, clip_norm=0.0
    ),
    train=TrainConfig(
        steps=100_000, batch_size=4096, log_every=100, eval_every=5_000, eval_batches=4, checkpoint_every=2_500
    ),
)
