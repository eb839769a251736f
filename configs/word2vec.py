"""word2vec (3 million words, width 300): the size of the published Google News vectors.

The settings are those of the C code's script for a large model: a bag of 10 words to each side, 10 noise words
(its 3 passes: --train.epochs 3). The C code makes a gradient step for each word. A batch here is the mean over many
thousands of words, so Adagrad replaces plain gradient descent; its initial sum of squares is that of a word that occurs
once in such a batch.

Command:     jaxlm pretrain configs/word2vec.py --run-dir runs/word2vec --data.source "gs://YOUR/text/*.jsonl.zst"
             jaxlm export runs/word2vec vectors
Hardware:    published: one machine, 12 threads; here see `jaxlm plan configs/word2vec.py`
Parameters:  1,800,000,000; of these the 900,000,000 of the input vectors are exported
Result:      none is published of these settings in this size; that script, at width 500, is said to answer almost 78 %
             of the questions of questions-words.txt (tmikolov/word2vec, demo-train-big-model-v1.sh)
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.word2vec import Word2Vec
from jaxlm.objectives.skip_gram import SkipGram

experiment = Experiment(
    objective=SkipGram(model=Word2Vec(), bag_of_words=True, window=10, negatives=10, threshold=1e-5),
    data=TextData(length=1000, tokenizer_kind="words", vocab_size=3_000_000),
    optimizer=OptimizerConfig(name="adagrad", learning_rate=0.05, warmup_steps=0, clip_norm=0.0, eps=1e-10),
    train=TrainConfig(steps=500_000, batch_size=256, log_every=100, eval_every=10_000, checkpoint_every=10_000),
)
