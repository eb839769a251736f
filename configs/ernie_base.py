"""ERNIE of Tsinghua, base (12 layers, width 768; entities 100 wide in the last 7 layers): the published size.

The vectors of Wikidata's entities are not among the parameters. The published run began with BERT-base, of which
`--init-from` reads a folder of Transformers or a run of bert_base; without it everything is trained from scratch. Its
learning rate stayed constant after the warm-up, 10 % of one pass over Wikipedia, 4,500 million tokens in 34,000 steps.

Command:     jaxlm pretrain configs/ernie_base.py --run-dir runs/ernie_base --init-from BERT_FOLDER \\
                 --data.source "text/*.jsonl.zst" --objective.entities VECTORS_FOLDER
Hardware:    published: 8 RTX 2080 Ti for about a day (thunlp/ERNIE, README)
Parameters:  114,751,532 with the published vocabulary of 30,522
Result:      published, after fine-tuning: FewRel 88.32 F1 (BERT-base 84.89), Open Entity 75.56 (73.56), FIGER 57.19
             accuracy (52.04) (Zhang et al. 2019)
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.knowledge.entity_autoencoder import EntityAutoencoder
from jaxlm.knowledge.ernie import Ernie
from jaxlm.knowledge.linked_text import LinkedText

experiment = Experiment(
    objective=EntityAutoencoder(model=Ernie.published("base", dtype="bfloat16")),
    data=LinkedText(length=256, vocab_size=30522),
    optimizer=OptimizerConfig(
        learning_rate=5e-5, warmup_steps=None, warmup_share=0.1, schedule="constant", bias_correction=False
    ),
    train=TrainConfig(steps=34_000, batch_size=512, log_every=100, eval_every=2_000, checkpoint_every=2_000),
)
