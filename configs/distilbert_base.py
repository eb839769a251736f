"""DistilBERT-base (6 layers, width 768): the published size, loss and schedule.

Command:     jaxlm pretrain configs/distilbert_base.py --run-dir runs/distilbert_base \\
                 --objective.teacher BERT_DIR --data.tokenizer BERT_DIR --data.source "gs://YOUR/text/*.jsonl.zst"
             (BERT_DIR: a run of bert_base, or bert-base-uncased as Transformers saves it)
Hardware:    published: 8 V100 GPUs of 16 GB for about 90 hours
Faster:      on a GPU, --objective.model.attention-dropout 0 selects cuDNN's attention; the paper's rate is 0.1
Parameters:  66,985,530 with the published vocabulary of 30,522; the teacher's are neither trained nor saved
Result:      published, GLUE dev average after fine-tuning: 77.0, BERT-base 79.5 (the README of the released code)

Loss weights, temperature, masks and optimizer are those of the released code's command; the batch size is the paper's.
6,400 steps are the paper's three epochs of BERT's 3.3 billion words, at 1.3 tokens per word.
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.distilbert import Distilbert
from jaxlm.objectives.distillation import Distillation

experiment = Experiment(
    objective=Distillation(model=Distilbert(dtype="bfloat16")),
    data=TextData(length=512, vocab_size=30522),
    optimizer=OptimizerConfig(
        learning_rate=5e-4, warmup_steps=320, b2=0.98, eps=1e-6, weight_decay=0.0, clip_norm=5.0
    ),
    train=TrainConfig(steps=6_400, batch_size=4096, log_every=10, eval_every=400, checkpoint_every=200),
)
