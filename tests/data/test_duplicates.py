"""Documents that repeat others: which are found, and what becomes of the text."""

from __future__ import annotations

import dataclasses
import json
import unicodedata
from pathlib import Path

import numpy as np
import pytest

from jaxlm.cli import main
from jaxlm.data import build
from jaxlm.data.duplicates import document_keys, first_of
from jaxlm.data.readers import NO_TEXT, PIECE, Cutter
from jaxlm.data.text import TextData
from tests.data.test_text import prepare, write_words


def pieces_of(documents):
    cutter = Cutter()
    for text in documents:
        yield from cutter.document(text)


def keys_of(documents, *arguments):
    return np.stack(list(document_keys(pieces_of(documents), *arguments)))


def write_documents(path: Path, documents: list[str]) -> str:
    path.write_text("\n".join(json.dumps({"text": text}) for text in documents))
    return str(path)


def test_an_exact_duplicate_has_the_same_words(tmp_path):
    """Against a table of the texts themselves, in NFC with white space collapsed."""
    draw = np.random.default_rng(0)
    letters = ["a", "b", "\u00e9", "e\u0301", "한", unicodedata.normalize("NFD", "한"), " ", "  ", "\n", "\u3000"]
    documents = ["".join(draw.choice(letters, draw.integers(1, 5))) for _ in range(2000)]
    documents = [text for text in documents if text.strip()]
    seen: dict[str, int] = {}
    plain = [" ".join(unicodedata.normalize("NFC", text).split()) for text in documents]
    expected = [seen.setdefault(text, number) for number, text in enumerate(plain)]
    found = first_of(keys_of(documents))
    assert found.tolist() == expected and 100 < len(seen) < len(documents)


@pytest.mark.parametrize("space", [" ", "", "\n"])
def test_documents_of_several_pieces(space):
    """Their pieces may end elsewhere, where one has more white space."""
    text = space.join(f"w{number}" for number in range(PIECE // 3))
    others = [text, text.replace(" ", "  "), text + " ", text + "x", text.replace("w9", "v9")]
    expected = [0, 0, 0, 3, 4]
    assert len(list(pieces_of([text]))) > 1
    assert first_of(keys_of(others)).tolist() == expected
    assert len(list(document_keys([NO_TEXT, *pieces_of([text]), NO_TEXT]))) == 1, "a row without text is no document"


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    return write_words(tmp_path_factory.mktemp("words") / "words.txt", 100)


@pytest.fixture
def config(documents, tmp_path):
    repeated = [*documents[:60], documents[3].replace(" ", "\n "), *documents[60:], *documents[5:9]]
    source = write_documents(tmp_path / "text.jsonl", repeated)
    return TextData(source=source, cache_dir=str(tmp_path / "cache"), vocab_size=600, held_out=0.05, length=32)


def test_the_store_is_that_of_the_text_without_them(config, documents, tmp_path):
    """The first ones stay, in their order; the tokenizer reads the same text."""
    clean = dataclasses.replace(config, source=write_documents(tmp_path / "clean.jsonl", documents))
    exact, lines = dataclasses.replace(config, deduplicate="exact"), []
    ours, theirs = prepare(exact, lines.append), prepare(clean, list)
    assert ours.store.fingerprint == theirs.store.fingerprint and ours.tokenizer == theirs.tokenizer
    assert sum(line.startswith("Looking for exact duplicates") for line in lines) == 1
    assert prepare(config, list).store.fingerprint != theirs.store.fingerprint, "by default they stay"
    lines = []
    exact.survey(lines.append)
    assert lines == [f"Left out of {config.source} as exact duplicates: 5 of 105 documents"]


def test_workers_and_shards_give_the_same_store(config, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_CHUNK", 4_000)
    exact = dataclasses.replace(config, deduplicate="exact")
    tokenizer = exact.prepare_tokenizer(list)
    found = []
    for workers in (1, 4):
        other = dataclasses.replace(exact, cache_dir=str(tmp_path / str(workers)), workers=workers)
        for shard in range(workers):
            other.tokenize(tokenizer, shard, workers, list)
        store = other.open(tokenizer, list)
        found.append((store.manifest | {"arrays": ""}, store.train.tokens.read(0, store.train.num_tokens).tolist()))
    assert found[0] == found[1]


def test_sources_of_a_mixture_have_no_document_in_common(config, documents, tmp_path):
    """The first source keeps it; also of several files of a source."""
    other = tmp_path / "other"
    other.mkdir()
    write_documents(other / "a.jsonl", [*documents[:30], "one more document of words"])
    write_documents(other / "b.jsonl", ["one more document of words", documents[40], "a last one of a few words"] * 2)
    source, lines = f"{config.source}@1,{other}@1", []
    mixed = dataclasses.replace(config, source=source, deduplicate="exact", held_out=0.0)
    stores = prepare(mixed, lines.append).store.stores
    assert [store.train.documents for store in stores.values()] == [100, 2]
    lines = []
    mixed.survey(lines.append)
    assert lines[-1].splitlines()[-1] == f"Left out of {other} as exact duplicates: 35 of 37 documents"


def test_the_command_tells_how_many(config, capsys):
    flags = ["--data.source", config.source, "--data.cache-dir", config.cache_dir, "--data.deduplicate", "exact"]
    assert main(["tokenize", "configs/bert_tiny.py", *flags, "--data.vocab-size", "600"]) == 0
    assert f"Left out of {config.source} as exact duplicates: 5 of 105 documents\n" in capsys.readouterr().out


def test_a_change_of_the_text_is_seen(config, documents):
    exact = dataclasses.replace(config, deduplicate="exact")
    before = prepare(exact, list).store
    write_documents(Path(config.source), documents[:50] * 2)
    lines = []
    exact.survey(lines.append)
    assert lines[-1].endswith("50 of 100 documents")
    assert prepare(exact, list).store.fingerprint != before.fingerprint
