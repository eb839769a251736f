"""ModernBERT-base (22 layers, width 768): the published size and its three phases of training.

Command:     jaxlm pretrain configs/modernbert_base.py --run-dir runs/modernbert_base --data.source "gs://YOUR/*.jsonl.zst"
Hardware:    published: 8 H100 GPUs; here see `jaxlm plan configs/modernbert_base.py`, with --phase 6 for rows of 1,024
Parameters:  149,655,232 with the published vocabulary of 50,368
Result:      published: GLUE average 88.4 (answerdotai/ModernBERT-base, README)

1.7 trillion tokens in rows of 1,024, of which the first 50 billion raise the batch from 768 to 4,608 in equal steps;
then rows of 8,192 with another base of rotary positions in global layers: 250 billion tokens at a constant rate and 50
billion that decay. Masks are 30 %, in evaluation 15 %. The published training differs as follows. StableAdamW clips the
updates of query, key and value together, and those of the two halves of the gated feed-forward. Weight decay of 1e-5 a
step at the peak is 0.0125 of the learning rate, and 0.0333 of the later one, as here. Documents that do not fit a
packed row are truncated; here they go on in another one. [CLS] and [SEP] may be masked, and random tokens may be
special. The vocabulary is OLMo's; it is trained here.
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, PhaseConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.modernbert import ModernBert
from jaxlm.objectives.masked_lm import MaskedLM

FIRST = {"objective.mask_rate": 0.3, "objective.model.global_theta": 10000}
LATER = {
    "objective.mask_rate": 0.3, "optimizer.learning_rate": 3e-4, "optimizer.weight_decay": 0.0333,
    "optimizer.warmup_steps": 0,
}
DECAY = {
    "optimizer.schedule": "wsd", "optimizer.decay_share": 1, "optimizer.decay_shape": "1-sqrt",
    "optimizer.final_share": 0.001,
}
PHASES = (
    *(PhaseConfig(4239, 1024, rows, FIRST) for rows in (768, 1536, 2304, 3072, 3840)),
    PhaseConfig(353_707, 1024, 4608, FIRST),
    PhaseConfig(52_982, fields=LATER),
    PhaseConfig(10_596, fields=LATER | DECAY),
)

experiment = Experiment(
    objective=MaskedLM(model=ModernBert.published("base", dtype="bfloat16", dropout=0.1), input_format="packed"),
    data=TextData(length=8192, tokenizer_kind="byte-bpe", vocab_size=50368),
    optimizer=OptimizerConfig(
        name="stable-adamw", learning_rate=8e-4, warmup_steps=3_815, schedule="constant", b2=0.98, weight_decay=0.0125,
        clip_norm=0.0,
    ),
    train=TrainConfig(
        steps=438_480, phases=PHASES, batch_size=576, log_every=100, eval_every=5_000, checkpoint_every=2_500
    ),
)
