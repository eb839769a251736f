"""Small pretrained models of each family, rows of each task, and `jaxlm finetune` on them."""

from __future__ import annotations

import json
from pathlib import Path

import jax

from jaxlm.cli import main
from jaxlm.huggingface import ModelCard, export_folder
from jaxlm.models.albert import Albert
from jaxlm.models.bert import Bert
from jaxlm.models.electra import Electra
from jaxlm.models.gpt1 import Gpt1
from jaxlm.models.gpt2 import Gpt2
from jaxlm.models.t5 import T5
from jaxlm.models.xlnet import Xlnet
from jaxlm.objectives.causal_lm import CausalLM
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.objectives.permutation_lm import PermutationLM
from jaxlm.objectives.replaced_tokens import ReplacedTokens
from jaxlm.objectives.span_corruption import SpanCorruption
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.tokenizers.training import train_tokenizer

FAST = ("--train.steps", "2", "--train.batch-size", "4", "--data.length", "64",
        "--train.tracker", "none")


def finetune(preset, source, model, run, *flags):
    return main(["finetune", f"configs/tasks/{preset}.py", "--init-from", model, "--data.source", str(source),
                 "--run-dir", str(run), "--json", *FAST, *flags])


def result(capsys):
    """Return the only object on standard output."""
    return json.loads(capsys.readouterr().out)


WORDS = ["red", "blue", "green", "old", "new", "small", "house", "river", "cat", "dog", "runs", "sleeps", "eats", "the"]
SIZES = dict(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32)
POSITIONS = dict(max_positions=64)
# Random bits take long to compile, so only ELECTRA has dropout.
NO_DROPOUT = dict(dropout=0.0, attention_dropout=0.0)
GENERATOR = {f"generator_{name}": value for name, value in SIZES.items()}
OBJECTIVES = {
    "bert": lambda: MaskedLM(model=Bert(**SIZES, **NO_DROPOUT, **POSITIONS)),
    "albert": lambda: MaskedLM(
        model=Albert(**SIZES, **NO_DROPOUT, **POSITIONS, embedding_size=8), input_format="sentence-order"
    ),
    "electra": lambda: ReplacedTokens(model=Electra(
        **(SIZES | {"num_layers": 2}), **POSITIONS, **GENERATOR, embedding_size=8,
    )),
    "xlnet": lambda: PermutationLM(model=Xlnet(**SIZES, **NO_DROPOUT)),
    "gpt1": lambda: CausalLM(model=Gpt1(
        **(SIZES | {"intermediate_size": 64}), **NO_DROPOUT, **POSITIONS, activation="gelu_new",
    )),
    "gpt2": lambda: CausalLM(model=Gpt2(**SIZES, **NO_DROPOUT, **POSITIONS)),
    "t5": lambda: SpanCorruption(model=T5(**SIZES, **NO_DROPOUT, head_dim=8)),
}


def tokenizer_of(folder: Path) -> Tokenizer:
    """Train a tokenizer of whole words and letters."""
    letters = "abcdefghijklmnopqrstuvwxyz?"
    texts = [" ".join(WORDS[i:] + WORDS[:i]) + f" {a}{a}." for i in range(len(WORDS)) for a in letters]
    return train_tokenizer(texts, folder, kind="bpe", vocab_size=512)


def pretrained(family: str, folder: Path) -> Path:
    """Return a Transformers folder with random weights."""
    tokenizer = tokenizer_of(folder / "tokenizer")
    objective = OBJECTIVES[family]().bind(tokenizer.vocabulary, 64)
    params = jax.jit(objective.init)(jax.random.key(0))
    return export_folder(folder / family, objective, jax.device_get(params), tokenizer, ModelCard())


def sentences(count: int) -> list[str]:
    """Return texts of two to nine words."""
    return [" ".join(WORDS[(i * j + j) % len(WORDS)] for j in range(2, 4 + i % 8)) for i in range(count)]


def write_rows(folder: Path) -> dict[str, Path]:
    """Write a file of rows for each preset; the label of a text says whether it contains "cat"."""
    texts = [f"{text} {'cat' if i % 2 else 'dog'}" for i, text in enumerate(sentences(40))]
    labels = ["yes" if "cat" in text else "no" for text in texts]
    files = {
        "classify.tsv": "text\tlabel\n" + "".join(f"{t}\t{x}\n" for t, x in zip(texts, labels, strict=True)),
        "pair.tsv": "text\ttext_pair\tlabel\n" + "".join(
            f"{t}\t{o}\t{i % 4}.5\n" for i, (t, o) in enumerate(zip(texts, texts[::-1], strict=True))),
        "choose.jsonl": "".join(json.dumps({
            "text": t, "choices": ["a cat", "a dog", "a house"], "label": i % 3}) + "\n" for i, t in enumerate(texts)),
        "tag.conll": "\n\n".join(
            "\n".join(f"{word}\t{'B-X' if word == 'cat' else 'O'}" for word in t.split()) for t in texts) + "\n",
        "text_to_text.tsv": "source\ttarget\n" + "".join(f"{t}\t{t.split()[0]}\n" for t in texts),
        "squad.json": json.dumps({"data": [{"title": "x", "paragraphs": [
            {"context": f"{t}. {' '.join(texts[:4])} {t}", "qas": [
                {"id": f"q{i}", "question": "what runs?", "is_impossible": i % 3 == 0,
                 "answers": [] if i % 3 == 0 else [{"text": t.split()[1], "answer_start": t.index(t.split()[1])}]}]}
            for i, t in enumerate(texts)]}]}),
    }
    files["same.tsv"] = files["classify.tsv"]  # another file to evaluate on
    for name, content in files.items():
        (folder / name).write_text(content)
    return {name.partition(".")[0]: folder / name for name in files}
