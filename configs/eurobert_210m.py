"""EuroBERT-210M (12 layers, width 768): the published size and its two phases of training.

Command:     jaxlm pretrain configs/eurobert_210m.py --run-dir runs/eurobert_210m --data.source "gs://YOUR/*.jsonl.zst"
Hardware:    see `jaxlm plan configs/eurobert_210m.py`, with --phase 1 for rows of 2,048
Parameters:  310,266,624 with the published vocabulary of 128,256, 211,766,016 without the output matrix

4.8 trillion tokens in rows of 2,048 with 50 % masks and a base of rotary positions of 10,000, then 200 billion in rows
of 8,192 with 10 % and 250,000 while the rate decays. A masked token always becomes the mask. Full rows are joined
documents, closed by the end symbol. The published batch and warm-up were not found: the batch of 4.7 million tokens is
that of Gisserot-Boukhlef et al. 2025 with these models. Rows of random length in the last phase are left out. For the
published vocabulary, add --data.tokenizer FOLDER.
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, PhaseConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.llama import EuroBert
from jaxlm.objectives.masked_lm import MaskedLM

FIRST = {"objective.mask_rate": 0.5, "objective.model.rope_theta": 10_000}
DECAY = {"optimizer.schedule": "wsd", "optimizer.decay_share": 1, "optimizer.warmup_steps": 0}
PHASES = (PhaseConfig(1_017_253, 2048, 2304, FIRST), PhaseConfig(42_385, fields=DECAY))

experiment = Experiment(
    objective=MaskedLM(
        model=EuroBert.published("210m", dtype="bfloat16"), input_format="full-sentences", mask_rate=0.1,
        mask_share=1.0, random_share=0.0, short_rate=0.0,
    ),
    data=TextData(length=8192, tokenizer_kind="byte-bpe", vocab_size=128256),
    optimizer=OptimizerConfig(
        learning_rate=1e-4, warmup_steps=2_000, schedule="constant", b2=0.95, eps=1e-5, weight_decay=0.1
    ),
    train=TrainConfig(
        steps=1_059_638, phases=PHASES, batch_size=576, log_every=100, eval_every=5_000, eval_batches=4,
        checkpoint_every=2_500,
    ),
)
