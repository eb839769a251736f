"""Documents that repeat others: which are found, and what becomes of the text."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from etils import epath

from jaxlm.cli import main
from jaxlm.data import duplicates
from jaxlm.data.arrays import write_array, write_facts
from jaxlm.data.duplicates import BANDS, ROWS, SHINGLE, Keys, document_keys, find_duplicates, minima, word_hashes
from jaxlm.data.readers import NO_TEXT, PIECE, Cutter, Piece
from jaxlm.data.text import TextData
from jaxlm.errors import UserError
from tests.data.stand_ins import contents, part_of, parts_of, whole
from tests.data.test_text import prepare, write_words
from tests.params import first_fast


def pieces_of(documents):
    cutter = Cutter()
    for text in documents:
        yield from cutter.document(text)


def keys_of(documents, *arguments):
    return np.concatenate(list(document_keys(pieces_of(documents), *arguments)))


def repeats(folder, documents, is_near, parts=3):
    """Return which documents repeat an earlier one."""
    found, made = parts_of(pieces_of(documents), parts), Keys(str(folder / "keys"), is_near)
    for part in found:
        made.make(part)
    marks = find_duplicates(made, found, epath.Path(folder) / f"{len(documents)}-{is_near}-{parts}")
    return np.concatenate(marks).tolist()


def write_documents(path: Path, documents: list[str]) -> str:
    path.write_text("\n".join(json.dumps({"text": text}) for text in documents))
    return str(path)


def test_an_exact_duplicate_has_the_same_words(tmp_path):
    """Against a table of the texts themselves, in NFC with white space collapsed."""
    draw = np.random.default_rng(0)
    letters = ["a", "b", "\u00e9", "e\u0301", "한", unicodedata.normalize("NFD", "한"), " ", "  ", "\n", "\u3000"]
    documents = ["".join(draw.choice(letters, draw.integers(1, 5))) for _ in range(2000)]
    documents = [text for text in documents if text.strip()]
    seen: set[str] = set()
    plain = [" ".join(unicodedata.normalize("NFC", text).split()) for text in documents]
    expected = [text in seen or bool(seen.add(text)) for text in plain]
    assert repeats(tmp_path, documents, False) == expected and 100 < len(seen) < len(documents)


@pytest.mark.parametrize("space", [" ", "", "\n"])
def test_documents_of_several_pieces(tmp_path, space):
    """Their pieces may end elsewhere, where one has more white space."""
    text = space.join(f"w{number}" for number in range(PIECE // 3))
    others = [text, text.replace(" ", "  "), text + " ", text + "x", text.replace("w9", "v9")]
    expected = [False, True, True, False, False]
    assert len(list(pieces_of([text]))) > 1
    assert repeats(tmp_path, others, False) == expected
    keys = list(document_keys([NO_TEXT, *pieces_of([text]), NO_TEXT], False))
    assert np.concatenate(keys).shape == (1, 2), "NO_TEXT is no document"


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    return write_words(tmp_path_factory.mktemp("words") / "words.txt", 100)


@pytest.fixture
def config(documents, tmp_path):
    repeated = [*documents[:60], documents[3].replace(" ", "\n "), *documents[60:], *documents[5:9]]
    source = write_documents(tmp_path / "text.jsonl", repeated)
    return TextData(source=source, cache_dir=str(tmp_path / "cache"), vocab_size=600, held_out=0.05, length=32)


def test_the_store_is_that_of_the_text_without_them(config, documents, tmp_path):
    """The first ones stay, in their order; a tokenizer is trained on the text with them."""
    clean = dataclasses.replace(config, source=write_documents(tmp_path / "clean.jsonl", documents))
    exact, lines = dataclasses.replace(config, deduplicate="exact"), []
    ours = prepare(exact, lines.append)
    ours.tokenizer.save(tmp_path / "tokenizer")
    theirs = prepare(dataclasses.replace(clean, tokenizer=str(tmp_path / "tokenizer")), list)
    for split in ("train", "held_out"):
        assert contents(getattr(ours.store, split)) == contents(getattr(theirs.store, split))
        sizes = [store.manifest["parts"][split] | {"runs": 0} for store in (ours.store, theirs.store)]
        assert sizes[0] == sizes[1] and sizes[0]["documents"] > 5
    assert sum(line.startswith("Looking for exact duplicates") for line in lines) == 1
    assert prepare(config, list).store.fingerprint != theirs.store.fingerprint, "by default they stay"
    lines = []
    prepare(exact, lines.append)
    assert lines == [f"Left out of {config.source} as exact duplicates: 5 of 105 documents"]


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
    prepare(mixed, lines.append)
    assert lines[-1] == f"Left out of {other} as exact duplicates: 35 of 37 documents"


def test_the_command_tells_how_many(config, capsys):
    flags = ["--data.source", config.source, "--data.cache-dir", config.cache_dir, "--data.deduplicate", "exact"]
    assert main(["tokenize", "configs/bert_tiny.py", *flags, "--data.vocab-size", "600"]) == 0
    assert f"Left out of {config.source} as exact duplicates: 5 of 105 documents\n" in capsys.readouterr().out


def test_a_change_of_the_text_is_seen(config, documents):
    exact = dataclasses.replace(config, deduplicate="exact")
    before = prepare(exact, list).store
    write_documents(Path(config.source), documents[:50] * 2)
    lines = []
    assert prepare(exact, lines.append).store.fingerprint != before.fingerprint
    assert lines[-1].endswith("50 of 100 documents")


def least(words):
    """Return the minima of a document."""
    hashes, counts = word_hashes([" ".join(words)])
    return minima(hashes, counts)[0]


def shingles(words):
    return {tuple(words[i : i + SHINGLE]) for i in range(len(words) - SHINGLE + 1)}


def jaccard(one, other):
    return len(one & other) / len(one | other)


UNSPACED = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
MARKS = "\u200c\u200d" + "".join(c for c in map(chr, range(0x1F000)) if unicodedata.category(c)[0] == "M")


def test_words_have_their_combining_marks():
    """Vowel signs of Hindi neither divide words nor are left out."""
    hashes, counts = word_hashes(["हिन्दी भाषा", "दिन कल की बात", "दान कला को बीत", "می\u200cخواهم"])
    assert counts.tolist() == [2, 4, 4, 1]
    assert not np.isin(hashes[2:6], hashes[6:10]).any()
    one, other = (word_hashes([text])[0].tolist() for text in ("I ❤\ufe0f you", "I ❤ you"))
    assert one == other and len(one) == 2  # a mark after a symbol is no word


def plain_keys(pieces):
    """Return the keys of documents by their definition, in Python's integers.

    A word is the sum of code r^place of its characters mod 2^64, a hash of a shingle x is (x xor b) a mod 2^32.
    """
    found, (a, b), odd = [], (duplicates._A[:, 0].tolist(), duplicates._B[:, 0].tolist()), duplicates._ODD.tolist()
    assert len(set(zip(a, b, strict=True))) == len(a) == BANDS * ROWS and all(each % 2 for each in a)
    for piece in pieces:
        if piece.first:
            exact, words = hashlib.blake2b(digest_size=16), []
        text = unicodedata.normalize("NFC", piece.text)
        exact.update(("".join(f"{word} " for word in text.split()) or " ").encode())
        for start in range(0, len(text.casefold()), duplicates._LONGEST):
            part = text.casefold()[start : start + duplicates._LONGEST]
            words += [sum(ord(c) * pow(duplicates._R, k, 1 << 64) for k, c in enumerate(word)) % (1 << 64)
                      for word in re.findall(rf"[{UNSPACED}]|(?![{UNSPACED}])\w(?:(?![{UNSPACED}])[\w{MARKS}])*", part)]
        if piece.last:
            own = words or np.frombuffer(exact.digest(), "<u8").tolist()
            x = [sum(word * o for word, o in zip(own[i : i + SHINGLE], odd, strict=False)) % (1 << 64) >> 32
                 for i in range(max(1, len(own) - SHINGLE + 1))]
            lowest = [min((each ^ b[h]) * a[h] % (1 << 32) for each in x) for h in range(BANDS * ROWS)]
            bands = [sum(lowest[ROWS * band + k] * odd[SHINGLE + k] for k in range(ROWS)) % (1 << 64)
                     for band in range(BANDS)]
            found.append([*np.frombuffer(exact.digest(), "<u8").tolist(), *bands])
    return found


@pytest.mark.parametrize(("group", "longest", "at_once"), [(1, 7, 5), (40, 50, 16), (1 << 16, 1 << 17, 200)])
def test_keys_are_those_of_the_definition(monkeypatch, group, longest, at_once):
    """Whatever is hashed together: documents without a word to ones of many pieces, some with a last one of none."""
    monkeypatch.setattr(duplicates, "_GROUP", group)
    monkeypatch.setattr(duplicates, "_LONGEST", longest)
    monkeypatch.setattr(duplicates, "_AT_ONCE", at_once)
    draw = np.random.default_rng(0)
    letters = [*"ab_1 .,\n\0\u0e01\u4e00\uac00é\u0301", "\U00020000", "Word", "İ", "ΐ", " ß ", " w ", " \u3000"]
    pieces = []
    for _ in range(120):
        sizes = draw.integers(0, draw.choice([2, 4, 12, 60]), draw.choice([1, 1, 2, 5]))
        texts = ["".join(draw.choice(letters, size)) for size in sizes]
        pieces += [Piece(f"{text}.", number == 0, number == len(texts) - 1) for number, text in enumerate(texts)]
    expected = plain_keys(pieces)
    assert np.concatenate(list(document_keys(pieces, True))).tolist() == expected
    assert np.concatenate(list(document_keys(pieces, False))).tolist() == [keys[:2] for keys in expected]


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
        error = (least(one) == least(other)).mean() - truth
        deviation = math.sqrt(truth * (1 - truth) / (BANDS * ROWS))
        assert abs(error) <= 4 * deviation
        errors.append(error)
    assert abs(np.mean(errors)) <= 3 * deviation / math.sqrt(20)


@pytest.mark.parametrize(("similarity", "share"), first_fast([
    (0.75, 0.77), (0.6, 0.21), (0.7, 0.57), (0.8, 0.92), (0.9, 1.0)
]))
def test_pairs_are_found_with_the_probability_of_the_bands(tmp_path, similarity, share):
    """1 - (1 - s^8)^14, by 300 pairs of documents, within 3 standard deviations."""
    assert 1 - (1 - similarity**ROWS) ** BANDS == pytest.approx(share, abs=0.006)
    draw, documents, expected = np.random.default_rng(5), [], []
    for _ in range(300):
        pair = pair_of(draw, similarity)
        truth = jaccard(*map(shingles, pair))
        documents += [" ".join(words) for words in pair]
        expected.append(1 - (1 - truth**ROWS) ** BANDS)
    deviation = math.sqrt(sum(p * (1 - p) for p in expected))
    found = repeats(tmp_path, documents, True)
    assert not any(found[::2])
    assert abs(sum(found) - sum(expected)) <= 3 * deviation + 0.5


def test_agrees_with_datasketch():
    """MinHashLSH with the same bands finds as many of the pairs."""
    datasketch = pytest.importorskip("datasketch")
    draw, ours, theirs = np.random.default_rng(7), 0, 0
    for _ in range(200):
        pair = pair_of(draw, 0.75)
        one, other = keys_of([" ".join(words) for words in pair], True)
        ours += (one[2:] == other[2:]).any()
        lsh, sketches = datasketch.MinHashLSH(params=(BANDS, ROWS), num_perm=BANDS * ROWS), []
        for words in pair:
            sketches.append(datasketch.MinHash(num_perm=BANDS * ROWS))
            sketches[-1].update_batch([" ".join(each).encode() for each in shingles(words)])
        lsh.insert("one", sketches[0])
        theirs += bool(lsh.query(sketches[1]))
    assert abs(ours - theirs) <= 3 * math.sqrt(2 * 200 * 0.77 * 0.23)


def test_near_duplicates_of_an_earlier_document_leave(tmp_path):
    """Case, punctuation, NFC and white space do not count; exact duplicates are among them.

    A document between two others, which it is near to and which come first, joins no group: both stay.
    """
    draw = np.random.default_rng(0)
    base, other = ([f"word{n}" for n in draw.integers(0, 10**6, 300)] for _ in range(2))
    chain = [base, [*base[12:], *(f"x{n}" for n in range(12))]]
    chain.append([*chain[1][12:], *(f"y{n}" for n in range(12))])
    documents = [
        " ".join(other), " ".join(base), " ".join(chain[2]), " ".join(base).upper().replace(" ", ", "), "short text",
        " ".join(chain[1]), "Short  text!", "?!", "...", "?!", "a fairly different short text", "short text now",
    ]
    assert jaccard(shingles(chain[0]), shingles(chain[1])) > 0.9
    assert [number for number, is_near in enumerate(repeats(tmp_path, documents, True)) if is_near] == [2, 3, 5, 6, 9]
    assert [number for number, is_exact in enumerate(repeats(tmp_path, documents, False)) if is_exact] == [9]
    ends = [" ".join(base[:250]), " ".join(base[50:])]
    keys = keys_of([*ends, documents[1]], True)
    assert [(keys[one, 2:] == keys[2, 2:]).any() for one in (0, 1)] == [True, True]
    assert not (keys[0, 2:] == keys[1, 2:]).any(), "other words give another draw"
    assert repeats(tmp_path, [*ends, documents[1]], True) == [False, False, True]


@pytest.mark.parametrize(("size", "group"), [(1 << 24, 1 << 22), (5, 7), (5, 1 << 22)])
def test_repeats_are_those_of_all_pairs(tmp_path, monkeypatch, size, group):
    """Against a comparison of every document with all earlier ones, with the keys of several parts."""
    monkeypatch.setattr(duplicates, "_SORTED", size)
    monkeypatch.setattr(duplicates, "_GROUPED", group)
    draw = np.random.default_rng(2)
    for trial, count in enumerate((1, 30, 60)):
        parts = [part_of(whole([f"{trial} {number}"])) for number in range(3)]
        ends = np.sort(draw.integers(0, count + 1, 2))  # of parts, which may have no document
        keys = draw.integers(0, count, (count, 2 + BANDS)).astype(np.uint64)
        keys[:, 2:] = draw.integers(0, count * BANDS, (count, BANDS))
        made = Keys(str(tmp_path / "keys"), True)
        for part, own in zip(parts, np.split(keys, ends), strict=True):
            made.path(part).mkdir(parents=True)
            write_array(made.path(part) / "keys", own.T.ravel())
            write_facts(made.path(part) / "facts.json", {"format": duplicates.FORMAT, "documents": len(own)})
        expected = [
            any((keys[one, 2:] == keys[each, 2:]).any() or (keys[one, :2] == keys[each, :2]).all()
                for one in range(each)) for each in range(count)
        ]
        for _ in range(2):  # the second time from the disk
            found = find_duplicates(made, parts, epath.Path(tmp_path / str(trial)))
            assert [len(part) for part in found] == np.diff([0, *ends, count]).tolist()
            assert np.concatenate(found).tolist() == expected
        assert count == 1 or 5 < sum(expected) < count - 5


def test_small_parts_are_distributed_together(tmp_path, monkeypatch):
    """Each file of keys is opened once a group, however many parts the group has."""
    monkeypatch.setattr(duplicates, "_SORTED", 10)
    opened, path_open = [], Path.open
    monkeypatch.setattr(Path, "open", lambda self, *mode: opened.append(self.name) or path_open(self, *mode))
    assert repeats(tmp_path, [f"{number % 90}" for number in range(100)], False, 40) == [False] * 90 + [True] * 10
    assert sorted(opened, key=int) == [f"{number}" for number in range(10)]


def test_keys_that_cannot_be_sorted_are_a_sentence(tmp_path, monkeypatch):
    made, found = Keys(str(tmp_path), False), parts_of(whole(["a", "b", "a"]))
    for part in found:
        made.make(part)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"cannot be sorted in .*nowhere .* set the variable TMPDIR to a folder with 0"):
        find_duplicates(made, found, epath.Path(tmp_path / "found"))


def test_keys_of_a_part_are_made_once(tmp_path):
    made, (part, *_) = Keys(str(tmp_path), False), parts_of(whole(["a", "b", "a"]), 1)
    assert not made.is_done(part)
    made.make(part)
    before = os.stat(made.path(part)).st_ino
    made.make(part)
    assert made.is_done(part) and os.stat(made.path(part)).st_ino == before
    assert made.path(part) != Keys(str(tmp_path), True).path(part)


@pytest.mark.parametrize(
    "text", ["ภาษาไทยเป็นภาษาที่มีระดับเสียงของคำแน่นอน" * 4, "吾輩は猫である。名前はまだ無い。どこで生れたか" * 5]
)
def test_characters_where_words_have_no_spaces(tmp_path, text):
    """A change of one character of a hundred leaves most shingles, which words between spaces would not have."""
    changed = text[:60] + "字" + text[61:]
    assert repeats(tmp_path, [text, changed, text[::-1]], True) == [False, True, False]


def test_a_document_of_several_pieces_has_the_shingles_of_one():
    words = [f"w{number % 9973}" for number in range(PIECE // 2 - 2000)]
    text = " ".join(words)
    assert len(list(pieces_of([text]))) > 2
    expected = least(words).reshape(BANDS, ROWS) @ duplicates._ODD[SHINGLE:]
    np.testing.assert_array_equal(keys_of([text], True)[0, 2:], expected)
    # A last piece without a word adds no shorter shingle.
    pieces = list(pieces_of([text]))
    pieces = [*pieces[:-1], pieces[-1]._replace(last=False), pieces[-1]._replace(text=" .", first=False)]
    np.testing.assert_array_equal(np.concatenate(list(document_keys(pieces, True)))[0, 2:], expected)


def test_near_duplicates_leave_the_text(config, documents, tmp_path):
    near = documents[7].replace(documents[7].split()[30], "another", 1)
    source = write_documents(tmp_path / "near.jsonl", [*documents, near, documents[2]])
    config, lines = dataclasses.replace(config, source=source, deduplicate="near"), []
    prepare(config, lines.append)
    assert lines[-1] == f"Left out of {source} as near duplicates: 2 of 102 documents"
