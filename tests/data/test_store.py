"""Token stores: contents against the documents, held-out text, fingerprints, and stores that cannot be written."""

import hashlib
import itertools
import json
import os
import subprocess

import numpy as np
import pytest
from etils import epath
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlm.data import arrays, shards, windows
from jaxlm.data.base import RowFormat, entropy
from jaxlm.data.readers import Cutter, Piece
from jaxlm.data.shards import Shards, Totals
from jaxlm.data.splits import HeldOutRule, leave_out_copies
from jaxlm.data.store import Store, write_store
from jaxlm.errors import UserError
from tests.data.stand_ins import (
    ByteTokenizer,
    Given,
    build_store,
    contents,
    ids,
    part_of,
    parts_of,
    split_text,
    store_of,
    whole,
)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Many groups of texts, and arrays that are too large for the memory."""
    monkeypatch.setattr(shards, "_GROUP", 50)
    for room in (arrays, windows):
        monkeypatch.setattr(room, "STRIDE", 4)
    monkeypatch.setattr(arrays, "_RESIDENT", 8)
    monkeypatch.setattr(arrays, "_OPEN", 2)


def hash_of(text):
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def texts(count):
    random = np.random.default_rng(1)
    return [f"document {number} " + "x" * int(random.integers(0, 90)) for number in range(count)]


def test_a_store_holds_every_document_once_in_order(tmp_path):
    documents = texts(300)
    store = store_of(tmp_path / "s", documents, held_out=0.2)
    train, held_out = contents(store.train), contents(store.held_out)
    expected = [ids(text).tolist() for text in documents]
    kept_out = {tuple(tokens) for tokens in held_out}
    assert train == [tokens for tokens in expected if tuple(tokens) not in kept_out]
    assert held_out == [tokens for tokens in expected if tuple(tokens) in kept_out]
    assert 35 < len(held_out) < 90  # 60 expected, 7 is a standard deviation
    assert store.train.documents + store.held_out.documents == 300
    assert store.train.text_bytes + store.held_out.text_bytes == sum(len(text.encode()) for text in documents)


def test_counts_and_entropy(tmp_path):
    store = store_of(tmp_path / "s", ["aab", "aab"], held_out=0)
    assert store.counts("train").sum() == 6 and store.counts("train")[ord("a") + 16] == 4
    assert entropy(store.counts("train")) == pytest.approx(-(2 / 3) * np.log(2 / 3) - (1 / 3) * np.log(1 / 3))
    assert store.statistics.unigram_entropy == 0
    assert store.held_out.documents == 0


def test_long_documents_are_joined_from_their_pieces(tmp_path):
    text = "word " * 100_000
    pieces = [*whole(["first"]), *Cutter().document(text), *whole(["last"])]
    assert len(pieces) > 5
    store = build_store(tmp_path / "s", pieces, held_out=0.0)
    assert contents(store.train) == [ids("first").tolist(), ids(text).tolist(), ids("last").tolist()]


def test_documents_without_tokens_are_left_out(tmp_path):
    store = store_of(tmp_path / "s", ["a", " ", "b"])
    assert contents(store.train) == [ids("a").tolist(), ids("b").tolist()]


def test_sentences_as_documents(tmp_path):
    """Each sentence is a document of the split of its own document, also where that comes in several pieces."""
    documents = [f"Number {i}. It has {i}.5 parts!\n\nAnd \u201cmore.\u201d" for i in range(40)]
    store = store_of(tmp_path / "s", documents, held_out=0.2, sentences=True)
    found = [["".join(chr(i - 16) if i < 144 else "?" for i in tokens) for tokens in contents(part)]
             for part in (store.train, store.held_out)]
    whole_documents = [number for part in found for number, sentence in enumerate(part) if sentence.startswith("Num")]
    assert len(whole_documents) == 40 and all(len(part) % 3 == 0 for part in found) and len(found[1]) >= 3
    first = found[0][0].removeprefix("Number").removesuffix(".")
    assert found[0][:2] == [f"Number{first}.", f"Ithas{first}.5parts!"] and found[0][2].startswith("And")
    assert "of 120 sentences" in store.summary
    text = "A piece that ends within " + "its last sentence. " * 10_000
    pieces = list(Cutter().document(text))
    parts = build_store(tmp_path / "p", pieces, held_out=0.0, sentences=True)
    assert len(pieces) > 2 and contents(parts.train)[1:] == [ids("its last sentence.").tolist()] * 9_999


def test_large_vocabularies_take_four_bytes(tmp_path):
    class Wide(ByteTokenizer):
        fingerprint = "wide"
        vocabulary = ByteTokenizer.vocabulary.__class__(size=70_000, special=np.zeros(70_000, bool),
                                                        word_start=np.zeros(70_000, bool),
                                                        sentence_end=np.zeros(70_000, bool), pad=0)

        def encode_arrays(self, texts):
            return [np.full(3, 69_999, np.int32) for _ in texts]

    store = store_of(tmp_path / "s", ["a"], tokenizer=Wide())
    assert contents(store.train) == [[69_999] * 3]
    assert contents(store_of(tmp_path / "t", ["a"]).train) == [[113]]


# Held-out documents.


def totals_of(folder, pieces, parts=3):
    return split_text(folder / "s", pieces, parts=parts)[1].totals


@pytest.mark.parametrize("share", [0.001, 0.01, 0.5])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_the_tail_of_few_documents_is_held_out(tmp_path, share, count):
    """A small text holds out a tenth even if the share is less; nothing is lost, and no word is cut."""
    documents = [" ".join(f"text{word}" for word in range(number, number + 100)) for number in range(count)]
    store = store_of(tmp_path / "s", documents, held_out=share)
    train, held_out = contents(store.train), contents(store.held_out)
    assert list(itertools.chain(*train, *held_out)) == ids("".join(documents)).tolist()
    part = store.held_out.num_tokens / (store.train.num_tokens + store.held_out.num_tokens)
    assert part == pytest.approx(max(share, 0.1), abs=0.02)
    assert bytes(i - 16 for i in held_out[0][:4]) == b"text"
    assert store.train.text_bytes + store.held_out.text_bytes == sum(map(len, documents))
    assert f"the last {store.held_out.text_bytes:,} bytes of the text" in store.summary
    assert store_of(tmp_path / "none", documents, held_out=0).held_out.documents == 0


@pytest.mark.parametrize("text", [
    "word " * 100_000, *(pytest.param(text, marks=pytest.mark.slow) for text in (
        "字" * 300_000, "a " * 30_000 + "b" * 300_000)),
])
def test_the_tail_of_one_long_document(tmp_path, text):
    """It has at least some thousand tokens for any share, and may begin within a document of several pieces."""
    pieces = list(Cutter().document(text))
    assert len(pieces) > 4
    store = build_store(tmp_path / "s", pieces, held_out=0.001)
    (train,), (held_out,) = contents(store.train), contents(store.held_out)
    assert train + held_out == ids(text).tolist()
    assert store.held_out.text_bytes == pytest.approx(1 << 15, abs=10)
    assert len(text.encode()) - store.held_out.text_bytes == store.train.text_bytes


def test_a_tail_that_begins_with_a_piece_ends_the_document_before_it(tmp_path):
    texts = ["word " * 20, " tail " * 4]
    pieces = [Piece(texts[0], True, False), Piece(texts[1], False, True)]
    share = len(texts[1]) / len("".join(texts))
    store = build_store(tmp_path / "s", pieces, held_out=share)
    assert (contents(store.train), contents(store.held_out)) == ([ids(texts[0]).tolist()], [ids(texts[1]).tolist()])


@pytest.mark.slow
def test_small_texts_of_many_documents_hold_out_more_than_the_share(tmp_path):
    store = store_of(tmp_path / "s", [f"{number} " + "x" * 500 for number in range(2000)], held_out=0.001)
    assert 1 << 15 <= store.held_out.text_bytes < (1 << 15) + 600
    assert f"({store.held_out.documents} of 2,000 documents)" in store.summary
    assert "tokens to train on (1.0 bytes each, 503 per document)" in store.summary


@pytest.mark.parametrize(("count", "size"), [(60, 1000), (400, 800), (3000, 900), (90, 20_000)])
def test_the_least_is_held_out_whatever_the_hashes(tmp_path, monkeypatch, count, size):
    """Documents of up to twice `size` bytes; of less than 320 KB of text the least is a tenth."""
    monkeypatch.setattr(shards, "_GROUP", 1 << 18)
    for seed in range(8 if count < 3000 else 3):
        sizes = np.random.default_rng(seed).integers(10, 2 * size, count)
        documents = whole([f"{seed} {number} ".ljust(size, "x") for number, size in enumerate(sizes)])
        _, text = split_text(tmp_path / "s", documents, 0.001, parts=1 + seed % 2)
        rule, text, made = text.rule, text.totals, text.shards
        held = sum(int(shard.read("sizes")[shard.read("hashes") < np.uint64(rule.below)].sum()) for shard in made)
        held += text.bytes - rule.tail
        least = min(1 << 15, text.bytes / 10)
        assert held >= least - 1
        if rule.below == text.least_below:  # otherwise the hashes hold out more than the share
            assert held <= least + 2 * size


def test_large_documents_are_held_out_by_the_tail():
    """By hash, documents of a share of the text would hold out far more than it."""
    facts = dict(digest="", documents=200, bytes=10**7, lowest=5, highest=(1 << 64) - 5)
    assert HeldOutRule.of(0.1, Totals(**facts, least_below=1 << 50)) == HeldOutRule(round(0.1 * 2**64), 10**7)
    assert HeldOutRule.of(0.1, Totals(**facts, least_below=1 << 62)).below == 1 << 62
    assert HeldOutRule.of(0.1, Totals(**facts, least_below=0)) == HeldOutRule(0, 9 * 10**6)


def test_copies_of_one_document_are_not_all_held_out(tmp_path):
    """Copies have the same hash."""
    everything = HeldOutRule.of(1.0, Totals("", 3000, 9_000_000, 5, 5, 6))
    assert everything.below == 0
    below = HeldOutRule.of(0.01, Totals("", 3000, 9_000_000, 5, 1 << 63, 6)).below
    assert below == round(0.01 * 2**64)
    copies = store_of(tmp_path / "copies", ["the same"] * 500, held_out=0.01)
    assert copies.train.documents > 400 and copies.held_out.documents >= 1


def test_one_line_without_spaces_holds_out_its_end(tmp_path):
    """The white space that ends it is no place to divide it."""
    store = store_of(tmp_path / "s", ["字" * 30_000 + "\n"], held_out=0.1)
    assert 0.09 < store.held_out.num_tokens / (store.train.num_tokens + store.held_out.num_tokens) < 0.11


def test_held_out_documents_are_chosen_by_their_text(tmp_path):
    documents = texts(200)
    one = {tuple(d) for d in contents(store_of(tmp_path / "a", documents, held_out=0.1).held_out)}
    two = {tuple(d) for d in contents(store_of(tmp_path / "b", documents[::-1], held_out=0.1).held_out)}
    assert one == two


# Fingerprints.


def test_the_fingerprint_of_a_text_depends_on_its_documents(tmp_path):
    same = totals_of(tmp_path, whole(["one two", "three"]))
    in_pieces = totals_of(tmp_path, [Piece("one", True, False), Piece(" two", False, True), *whole(["three"])])
    assert in_pieces.digest == same.digest
    for other in (["one two three"], ["one", "two three"], ["three", "one two"], ["one two", "three", "three"]):
        assert totals_of(tmp_path, whole(other)).digest != same.digest
    assert (same.documents, same.bytes) == (2, 12)


def test_facts_of_a_text_depend_on_no_parts(tmp_path):
    documents = whole(texts(30))
    assert len({totals_of(tmp_path, documents, count) for count in (1, 2, 7, 30)}) == 1


def test_the_fingerprint_of_a_store_depends_on_text_tokenizer_and_settings(tmp_path):
    class Other(ByteTokenizer):
        fingerprint = "other"

    documents, stores = texts(40), itertools.count()

    def fingerprint(*arguments, **named):
        return store_of(tmp_path / str(next(stores)), *arguments, **named).fingerprint

    first = fingerprint(documents, 0.1)
    assert first == fingerprint(documents, 0.1, parts=7)
    others = [fingerprint(documents[1:], 0.1), fingerprint(documents[::-1], 0.1), fingerprint(documents, 0.2),
              fingerprint(documents, 0.1, Other()), fingerprint(documents, 0.1, sentences=True)]
    assert len({first, *others}) == 6

    def without(marks, parts):  # duplicates
        found = parts_of(whole(documents), parts)
        removed = np.split(marks, np.cumsum([len(part.reader.given) for part in found])[:-1])
        return build_store(tmp_path / str(next(stores)), [], None, 0.1, False, found, removed).fingerprint

    thirds = np.arange(40) % 3 == 1
    assert len({without(thirds, parts) for parts in (1, 3, 7)}) == 1
    assert len({first, without(thirds, 1), without(np.arange(40) % 3 == 2, 1)}) == 3


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.data())
def test_splits_are_those_of_a_list_of_documents(tmp_path_factory, data):
    """Against plain Python: random documents, copies, duplicates that are left out, shares and parts."""
    folder = tmp_path_factory.mktemp("s")
    draw = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    count = data.draw(st.integers(1, 90))
    documents = [f"{'' if draw.random() < 0.2 else number}" + " xy" * int(draw.integers(1, 9))
                 for number in range(count)]
    share, parts = data.draw(st.sampled_from([0.0, 0.01, 0.2, 0.5])), data.draw(st.integers(1, 9))
    found = parts_of(whole(documents), parts)
    marks = draw.random(count) < data.draw(st.sampled_from([0.0, 0.3]))
    marks[0] = False
    removed = np.split(marks, np.cumsum([len(part.reader.given) for part in found])[:-1])
    shards_, text = split_text(folder / "s", [], share, parts=found, removed=removed)
    text = leave_out_copies([text])[0] if share and text.has_tail else text
    write_store(epath.Path(folder / "s"), "", share, shards_, text)
    store = Store(folder / "s", shards_.folder)
    train, held_out = contents(store.train), contents(store.held_out)

    kept = [text for text, mark in zip(documents, marks, strict=True) if not mark]
    size, rule = sum(map(len, kept)), text.rule
    assert size == text.totals.bytes and len(kept) == text.totals.documents
    by_hash = {text for text in kept if rule.below and hash_of(text) < rule.below}
    expected, position = ([], []), 0
    for each in kept:  # a document that the tail divides is cut at white space
        cut = max(0, rule.tail - position) if position + len(each) > rule.tail else len(each)
        if 0 < cut < len(each):
            space = each.find(" ", cut)
            cut = space if space >= 0 else cut
        position += len(each)
        halves = [("", each)] if each in by_hash else [(each[:cut], each[cut:])]
        for split, half in enumerate(halves[0]):
            if half:
                expected[split].append((half, 0 < cut < len(each)))
    if rule.tail < size and text.num_copies:
        tail = {half for half, _ in expected[1]}
        expected[0][:] = [(half, is_cut) for half, is_cut in expected[0] if is_cut or half not in tail]
    assert train == [ids(half).tolist() for half, _ in expected[0] if half.strip()]
    assert held_out == [ids(half).tolist() for half, _ in expected[1] if half.strip()]
    for split, tokens in (("train", train), ("held_out", held_out)):
        flat = list(itertools.chain(*tokens))
        assert store.counts(split).tolist() == np.bincount(np.array(flat, int), minlength=272).tolist()
        assert store.manifest["parts"][split]["longest"] == max(map(len, tokens), default=0)
    assert store.manifest["duplicates"] == marks.sum()


@pytest.mark.parametrize("packing", ["document", "packed", "packed-eos", "packed-room", "stream"])
def test_batches_are_the_same_where_arrays_are_too_large_for_the_memory(tmp_path, monkeypatch, packing):
    """A second opening reads what the first one counted, unless that one could not write it."""
    store_of(tmp_path / "s", texts(150), held_out=0.2)
    found, write = [], windows.write_array

    def refuse(path, values):
        raise UserError(f"{path} cannot be written.")

    for resident, written in ((1 << 20, write), (8, refuse), (8, write), (8, refuse)):
        monkeypatch.setattr(arrays, "_RESIDENT", resident)
        monkeypatch.setattr(windows, "write_array", written)
        store = Store(tmp_path / "s", tmp_path / "shards")
        assert store.train.offsets.is_resident == (resident > 8)
        batches = store.batches("train", 7, RowFormat(packing, 24, stride=24 * packing.startswith("stream")), 3)
        rows = [batches.batch(step) for step in (0, 1, 30, 1000)]
        found.append((batches.num_rows, batches.table.mean_length, [row.tokens.tolist() for row in rows],
                      [row.segment_ids.tolist() for row in rows]))
    assert found[0] == found[1] == found[2] == found[3]
    assert (tmp_path / "s" / "train" / "windows-24" / "sums").exists() == (packing == "document")


# All or nothing.


def test_a_reader_that_fails_leaves_no_shard(tmp_path):
    class Broken(Given):
        def read(self, source, start=0, end=None):
            yield from self.given
            raise UserError("the file is damaged")

    with pytest.raises(UserError, match="the file is damaged"):
        build_store(tmp_path / "s", [], parts=[part_of(whole(texts(20)), Broken)])
    assert os.listdir(tmp_path) == ["shards"] and not os.listdir(tmp_path / "shards")


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_is_one_sentence(tmp_path, monkeypatch, call):
    def no_space(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        if call == "fsync":
            patch.setattr(arrays.os, "fsync", no_space)
        else:
            patch.setattr(type(epath.Path(tmp_path)), "replace", no_space)
        with pytest.raises(UserError, match=r"/\w+(\.json)? cannot be written \(No space left on device\); free some"):
            store_of(tmp_path / "s", ["a"])
    assert not list(tmp_path.rglob("*.partial"))
    assert store_of(tmp_path / "s", ["a"]).train.documents == 1


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounts a small disk")
def test_a_really_full_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("may not mount")
    try:
        with pytest.raises(UserError, match="No space left on device"):
            store_of(disk / "s", ["x" * 100_000])
        assert not any(disk.rglob("*.partial"))
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)  # the exception may still hold a file


def test_the_limit_of_open_files_is_no_damage(tmp_path):
    resource = pytest.importorskip("resource")
    store, before = store_of(tmp_path / "s", ["a b c"] * 30), resource.getrlimit(resource.RLIMIT_NOFILE)
    train = store.train
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        with pytest.raises(UserError, match=r"cannot be read \(Too many open files\), but may be whole; fix"):
            train.tokens.read(0, 3)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert len(train.tokens.read(0, 3)) == 3


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        store_of(tmp_path / "file" / "s", ["a"])


def test_a_finished_store_and_finished_shards_stay(tmp_path):
    """Also where another process, which began when they were not there, comes late."""
    parts = parts_of(whole(texts(30)))
    made, text = split_text(tmp_path / "s", [], 0.1, parts=parts)
    write_store(epath.Path(tmp_path / "s"), "", 0.1, made, text)
    before = {path: path.stat().st_ino for path in tmp_path.rglob("*")}
    for part in parts:
        Shards(made.folder, made.tokenizer).make(part)
    write_store(epath.Path(tmp_path / "s"), "", 0.1, made, text)
    assert {path: path.stat().st_ino for path in tmp_path.rglob("*")} == before


def test_a_store_of_another_version_is_refused(tmp_path):
    store_of(tmp_path / "s", texts(5))
    manifest = tmp_path / "s" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 1}))
    with pytest.raises(UserError, match=r"another version of jaxlm\); delete \S+/s and run again"):
        Store(tmp_path / "s", tmp_path / "shards")


def test_a_folder_without_a_store(tmp_path):
    with pytest.raises(UserError, match=r"manifest\.json is missing"):
        Store(tmp_path / "s", tmp_path / "shards")
