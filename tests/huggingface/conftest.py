"""Fixtures: a small WordPiece tokenizer, and the models of test_llama*.py."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from jaxlm.huggingface import import_folder
from jaxlm.tokenizers.tokenizer import Tokenizer
from tests.huggingface.rotary_models import Pair, save
from tests.huggingface.support import VOCAB


@pytest.fixture(scope="session")
def vocab_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
    path.write_text("\n".join(VOCAB) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tokenizer(vocab_file: Path) -> Tokenizer:
    return Tokenizer.load(vocab_file)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory):
    """Make a model by its name, once."""
    @functools.cache
    def make(name: str) -> Pair:
        folder = tmp_path_factory.mktemp(name)
        theirs = save(name, folder)
        return Pair(theirs, folder, import_folder(folder))

    return make
