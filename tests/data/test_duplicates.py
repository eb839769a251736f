"""Documents that repeat others: which are found, and what becomes of the text."""

from __future__ import annotations

import dataclasses
import json
import math
import unicodedata
import zlib
from pathlib import Path

import numpy as np
import pytest

from jaxlm.cli import main
from jaxlm.data import build, duplicates
from jaxlm.data.duplicates import BANDS, PRIME, ROWS, SHINGLE, document_keys, first_of, minima
from jaxlm.data.readers import NO_TEXT, PIECE, Cutter
from jaxlm.data.text import TextData
from tests.data.test_text import prepare, write_words
from tests.params import first_fast


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
    found = first_of(keys_of(documents, False))
    assert found.tolist() == expected and 100 < len(seen) < len(documents)


@pytest.mark.parametrize("space", [" ", "", "\n"])
def test_documents_of_several_pieces(space):
    """Their pieces may end elsewhere, where one has more white space."""
    text = space.join(f"w{number}" for number in range(PIECE // 3))
    others = [text, text.replace(" ", "  "), text + " ", text + "x", text.replace("w9", "v9")]
    expected = [0, 0, 0, 3, 4]
    assert len(list(pieces_of([text]))) > 1
    assert first_of(keys_of(others, False)).tolist() == expected
    assert len(list(document_keys([NO_TEXT, *pieces_of([text]), NO_TEXT], False))) == 1, "NO_TEXT is no document"


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


@pytest.mark.parametrize("kind", ["exact", "near"])
def test_workers_and_shards_give_the_same_store(config, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(build, "_CHUNK", 4_000)
    exact = dataclasses.replace(config, deduplicate=kind)
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


def shingles(words):
    return {tuple(words[i : i + SHINGLE]) for i in range(len(words) - SHINGLE + 1)}


def jaccard(one, other):
    return len(one & other) / len(one | other)


def test_hashes_are_those_of_the_formula():
    """(a x + c) mod 2^61 - 1 in Python's integers, for each shingle of five words."""
    words = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "and", "the", "hen"]
    codes, odd = [zlib.crc32(word.encode()) for word in words], duplicates._ODD.tolist()
    x = [sum(c * o for c, o in zip(codes[i:], odd[:SHINGLE], strict=False)) % (1 << 64) >> 32 for i in range(8)]
    a, c = duplicates._A[:, 0].tolist(), duplicates._C[:, 0].tolist()
    expected = [min((a[h] * each + c[h]) % PRIME for each in x) for h in range(BANDS * ROWS)]
    assert minima(words).tolist() == expected and set(minima([]).tolist()) == {PRIME}
    extreme = np.array([0, 1, (1 << 32) - 1], np.uint64)  # of x, where a product could overflow
    for each in extreme.tolist():
        duplicates_of = [(value * each + c[h]) % PRIME for h, value in enumerate(a)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(duplicates, "_ODD", np.full(SHINGLE + ROWS, 1 << 32, np.uint64))
            patch.setattr(duplicates.zlib, "crc32", lambda data, each=each: each)
            assert minima(["word"]).tolist() == duplicates_of


def pair_of(draw, similarity, size=400):
    """Two lists of words whose shingles have about this Jaccard similarity: a part at the end is replaced."""
    words = [f"w{number}" for number in draw.integers(0, 10**6, size)]
    kept = round(size * 2 * similarity / (1 + similarity))
    return words, words[:kept] + [f"v{number}" for number in draw.integers(0, 10**6, size - kept)]


@pytest.mark.parametrize("similarity", [0.0, 0.3, 0.6, 0.9, 1.0])
def test_agreeing_hashes_estimate_the_similarity(similarity):
    """Within 3 standard deviations of a mean over 20 pairs, and each within 4 of its own."""
    draw, errors = np.random.default_rng(3), []
    for _ in range(20):
        one, other = pair_of(draw, similarity)
        truth = jaccard(shingles(one), shingles(other))
        error = (minima(one) == minima(other)).mean() - truth
        deviation = math.sqrt(truth * (1 - truth) / (BANDS * ROWS))
        assert abs(error) <= 4 * deviation
        errors.append(error)
    assert abs(np.mean(errors)) <= 3 * deviation / math.sqrt(20)


@pytest.mark.parametrize(("similarity", "share"), first_fast([
    (0.75, 0.77), (0.6, 0.21), (0.7, 0.57), (0.8, 0.92), (0.9, 1.0)
]))
def test_pairs_are_found_with_the_probability_of_the_bands(similarity, share):
    """1 - (1 - s^8)^14, by 300 pairs of documents, within 3 standard deviations."""
    assert 1 - (1 - similarity**ROWS) ** BANDS == pytest.approx(share, abs=0.006)
    draw, found, expected = np.random.default_rng(5), [], []
    for _ in range(300):
        pair = pair_of(draw, similarity)
        truth = jaccard(*map(shingles, pair))
        keys = keys_of([" ".join(words) for words in pair], True)
        found.append(first_of(keys)[1] == 0)
        expected.append(1 - (1 - truth**ROWS) ** BANDS)
    deviation = math.sqrt(sum(p * (1 - p) for p in expected))
    assert abs(sum(found) - sum(expected)) <= 3 * deviation + 0.5


def test_agrees_with_datasketch():
    """MinHashLSH with the same bands finds as many of the pairs."""
    datasketch = pytest.importorskip("datasketch")
    draw, ours, theirs = np.random.default_rng(7), 0, 0
    for _ in range(200):
        pair = pair_of(draw, 0.75)
        ours += first_of(keys_of([" ".join(words) for words in pair], True))[1] == 0
        lsh, sketches = datasketch.MinHashLSH(params=(BANDS, ROWS), num_perm=BANDS * ROWS), []
        for words in pair:
            sketches.append(datasketch.MinHash(num_perm=BANDS * ROWS))
            sketches[-1].update_batch([" ".join(each).encode() for each in shingles(words)])
        lsh.insert("one", sketches[0])
        theirs += bool(lsh.query(sketches[1]))
    assert abs(ours - theirs) <= 3 * math.sqrt(2 * 200 * 0.77 * 0.23)


def test_near_duplicates_are_joined_and_the_first_stays():
    """Case, punctuation, NFC and white space do not count; a chain is one group; exact duplicates are among them."""
    draw = np.random.default_rng(0)
    base, other = ([f"word{n}" for n in draw.integers(0, 10**6, 300)] for _ in range(2))
    chain = [base, [*base[12:], *(f"x{n}" for n in range(12))]]
    chain.append([*chain[1][12:], *(f"y{n}" for n in range(12))])
    documents = [
        " ".join(other), " ".join(base), " ".join(chain[2]), " ".join(base).upper().replace(" ", ", "), "short text",
        " ".join(chain[1]), "Short  text!", "?!", "...", "?!", "a fairly different short text", "short text now",
    ]
    assert jaccard(shingles(chain[0]), shingles(chain[1])) > 0.9
    assert first_of(keys_of(documents, True)).tolist() == [0, 1, 1, 1, 4, 1, 4, 7, 8, 7, 10, 11]
    assert first_of(keys_of(documents, False)).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 7, 10, 11]


def test_groups_are_the_components_of_the_graph():
    """Against a search by hand: documents with a common key in a column are neighbours."""
    draw = np.random.default_rng(2)
    for size in (1, 30, 60):
        keys = draw.integers(0, size, (size, 2 + 3)).astype(np.uint64)
        expected = np.arange(size)
        for start in range(size):
            todo = [start]
            while todo:
                one = todo.pop()
                for each in range(size):
                    common = (keys[one, 2:] == keys[each, 2:]).any() or (keys[one, :2] == keys[each, :2]).all()
                    if common and expected[each] > start:
                        expected[each] = start
                        todo.append(each)
        assert first_of(keys).tolist() == expected.tolist()


@pytest.mark.parametrize(
    "text", ["ภาษาไทยเป็นภาษาที่มีระดับเสียงของคำแน่นอน" * 4, "吾輩は猫である。名前はまだ無い。どこで生れたか" * 5]
)
def test_characters_where_words_have_no_spaces(text):
    """A change of one character of a hundred leaves most shingles, which words between spaces would not have."""
    changed = text[:60] + "字" + text[61:]
    keys = keys_of([text, changed, text[::-1]], True)
    assert first_of(keys).tolist() == [0, 0, 2]


def test_a_document_of_several_pieces_has_the_shingles_of_one():
    words = [f"w{number % 9973}" for number in range(3 * PIECE // 5)]
    text = " ".join(words)
    assert len(list(pieces_of([text]))) > 2
    expected = minima(words).reshape(BANDS, ROWS) @ duplicates._ODD[SHINGLE:]
    np.testing.assert_array_equal(keys_of([text], True)[0, 2:], expected)
    # A last piece without a word adds no shorter shingle.
    pieces = list(pieces_of([text]))
    pieces = [*pieces[:-1], pieces[-1]._replace(last=False), pieces[-1]._replace(text=" .", first=False)]
    np.testing.assert_array_equal(next(document_keys(pieces, True))[2:], expected)


def test_near_duplicates_leave_the_text(config, documents, tmp_path):
    near = documents[7].replace(documents[7].split()[30], "another", 1)
    source = write_documents(tmp_path / "near.jsonl", [*documents, near, documents[2]])
    config, lines = dataclasses.replace(config, source=source, deduplicate="near"), []
    config.survey(lines.append)
    assert lines[-1] == f"Left out of {source} as near duplicates: 2 of 102 documents"
