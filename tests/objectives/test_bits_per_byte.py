"""Bits per byte of held-out text, against bytes that are counted in the text itself."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.cli import main
from jaxlm.config.presets import load_config
from jaxlm.data.base import Statistics
from jaxlm.models.gpt2 import Gpt2
from jaxlm.objectives.causal_lm import CausalLM
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.tokenizers.training import train_tokenizer
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.training.metrics import best_step
from jaxlm.types import TokenBatch
from tests.training.support import metrics, write_text

ODD = "naïve — 日本語 👩‍🚀\n\tindented  twice, \u00a0 and “quoted” ½ … ﬁn\n<0x0A> ##end ▁mark"
PRESET = """
from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.gpt2 import Gpt2
from jaxlm.objectives.causal_lm import CausalLM

experiment = Experiment(
    objective=CausalLM(model=Gpt2(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32, max_positions=32)),
    data=TextData(source={text!r}, length=32, vocab_size=400, held_out=0.2),
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=1),
    train=TrainConfig(steps=3, batch_size=4, eval_every=0, eval_batches=100_000, tracker="none"),
)
"""


@pytest.fixture(scope="module")
def vocab_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
    letters = "abcdefghijklmnopqrstuvwxyz."
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "ran", "on", *letters]
    path.write_text("\n".join([*pieces, *(f"##{letter}" for letter in letters)]) + "\n")
    return path


TEXTS = (ODD, "", "a", "日", "\n\n x\n", "".join(map(chr, range(32, 0x250))))


@pytest.mark.parametrize("kind", ["byte-bpe", "bytes"])
def test_byte_level_tokens_have_the_bytes_of_the_text(tmp_path, kind):
    tokenizer = train_tokenizer([ODD * 3], tmp_path, kind=kind, vocab_size=420, normalization="identity")
    for text in TEXTS:
        assert tokenizer.vocabulary.num_bytes[tokenizer.encode(text)].sum() == len(text.encode())


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_sentencepiece_tokens_have_the_bytes_of_the_text_and_of_a_space_before_it(tmp_path, kind):
    tokenizer = train_tokenizer([ODD * 3], tmp_path, kind=kind, vocab_size=490, normalization="identity")
    for line in ("naïve — 日本語 👩‍🚀", "a", "two  spaces", "日", "<0x0A> unseen Ж"):
        assert tokenizer.vocabulary.num_bytes[tokenizer.encode(line)].sum() == len(f" {line}".encode())


def test_pieces_of_published_kinds(vocab_file):
    """WordPiece drops spaces; [UNK] and special tokens stand for no bytes that are known."""
    tokenizer = Tokenizer.load(vocab_file)
    num_bytes, v = tokenizer.vocabulary.num_bytes, tokenizer.vocabulary
    assert num_bytes[tokenizer.encode("the cat ran on.")].sum() == len("thecatranon.")
    assert num_bytes[tokenizer.encode("cats")].tolist() == [3, 1]
    assert num_bytes[[v.pad, v.unk, v.cls, v.sep, v.mask]].tolist() == [0] * 5


@pytest.mark.slow
def test_a_run_on_ascii_text(tmp_path):
    """The bytes of the targets, counted in their decoded text, and the ends of documents, which have none."""
    preset, run = tmp_path / "tiny.py", tmp_path / "run"
    preset.write_text(PRESET.format(text=str(write_text(tmp_path / "text.txt"))))
    assert main(["pretrain", str(preset), "--run-dir", str(run), "--data.tokenizer-kind", "byte-bpe"]) == 0
    (figures,) = (line for line in metrics(run) if "eval_lm_loss" in line)
    assert not [name for line in metrics(run) for name in line if name == "bits_per_byte"]  # only of held-out text
    experiment, tokenizer = load_config(run / "config.json"), Tokenizer.load(run / "tokenizer")
    objective = experiment.objective.bind(tokenizer.vocabulary, 32)
    store = experiment.data.open(tokenizer)
    labels = []
    for batch in store.batches("held_out", 4, objective.row_format(32), 0).evaluation(4, 100_000):
        example = objective.corrupt(jax.random.key(0), TokenBatch(*map(jnp.asarray, batch[:2])))
        labels += np.asarray(example["labels"])[np.asarray(example["weights"]) > 0].tolist()
    decoded = tokenizer.decode(labels)
    assert decoded.isascii() and 0.8 * store.held_out.text_bytes < len(decoded) < store.held_out.text_bytes
    expected = figures["eval_lm_loss"] * len(labels) / math.log(2) / len(decoded)
    assert figures["eval_bits_per_byte"] == pytest.approx(expected, rel=1e-5)


def bound(vocabulary: Vocabulary, counts: np.ndarray | None, num_bytes: int) -> CausalLM:
    statistics = Statistics(np.zeros(vocabulary.size, np.int64), 0.0, 0.0, counts, num_bytes)
    return CausalLM(model=Gpt2(max_positions=32)).bind(vocabulary, 32, statistics)


def test_the_whole_held_out_split_has_the_bytes_of_its_text(tmp_path, vocab_file):
    """Whatever spaces, case or accents a tokenizer drops."""
    v = dataclasses.replace(Tokenizer.load(vocab_file).vocabulary, eos=3)
    texts = ["The cat sat  on the mat.", "a dog", "Én old   tree"]
    ids = np.concatenate([Tokenizer.load(vocab_file).encode(text) for text in texts])
    size = sum(len(text.encode()) for text in texts)
    counts = np.bincount(ids, minlength=v.size)
    term = bound(v, counts, size).bits_per_byte(jnp.float32(50.0), jnp.asarray([ids]), jnp.ones((1, len(ids))))
    assert float(term["bits_per_byte"].weight) == pytest.approx(size, rel=1e-6)
    assert float(term["bits_per_byte"].total) == pytest.approx(50 / math.log(2), rel=1e-6)
    assert term["bits_per_byte"].coefficient == 0.0

    counts[v.unk] = len(ids)  # a text of unknown words has no likelihood
    arguments = jnp.float32(1.0), jnp.asarray([ids]), jnp.ones((1, len(ids)))
    assert not bound(v, counts, size).bits_per_byte(*arguments)
    assert not bound(v, None, 0).bits_per_byte(*arguments)
    assert not bound(v, np.zeros_like(counts), 0).bits_per_byte(*arguments)
    stand_in = Vocabulary.stand_in(200)
    assert not bound(stand_in, np.ones(200, np.int64), 100).bits_per_byte(*arguments)


def test_fewer_bits_are_better():
    assert best_step({1: 2.0, 2: 1.5, 3: 1.75}, "bits_per_byte") == 2
    assert best_step({1: math.nan, 2: 0.5, 3: 0.75}, "pearson") == 3 and best_step({1: 9.0, 2: 8.0}, "perplexity") == 2
