"""TinyBERT-6 (6 layers, width 768): the published size, by general distillation.

Command:     jaxlm pretrain configs/tinybert_6.py --run-dir runs/tinybert_6 \\
                 --objective.teacher BERT_DIR --data.tokenizer BERT_DIR --data.source "gs://YOUR/text/*.jsonl.zst"
             (BERT_DIR: a run of bert_base, or bert-base-uncased as Transformers saves it)
Hardware:    not published; see `jaxlm plan configs/tinybert_6.py --objective.teacher BERT_DIR`
Parameters:  66,955,008 with the published vocabulary of 30,522, of which 590,592 are the projection, which is not
             exported; as many as a pooler has, which general distillation does not train and the published 67M count
Result:      published, GLUE test average after task distillation as well: 79.4, BERT-base 79.5 (Jiao et al. 2020,
             table 1)

Batch size, weight decay and learning rate are the released code's. 310,000 steps are its three epochs of the paper's
2.5 billion words of Wikipedia, at 1.3 tokens per word. Two things differ: weights begin from a normal distribution
that is cut at two standard deviations, and gradients are clipped together, not each tensor's.
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.bert import Bert
from jaxlm.objectives.layer_distillation import LayerDistillation

experiment = Experiment(
    objective=LayerDistillation(
        model=Bert(num_layers=6, dtype="bfloat16")
    ),
    data=TextData(length=128, vocab_size=30522),
    optimizer=OptimizerConfig(learning_rate=5e-5, warmup_steps=31_000, bias_correction=False),
    train=TrainConfig(steps=310_000, batch_size=256, log_every=100, eval_every=10_000, checkpoint_every=5_000),
)
