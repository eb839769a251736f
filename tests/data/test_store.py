"""Token stores: contents, held-out documents, fingerprints, and interrupted or damaged stores."""

import itertools
import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from jaxlm.data import arrays, build
from jaxlm.data.base import entropy
from jaxlm.data.build import StoreBuild
from jaxlm.data.fingerprint import HeldOutRule, Survey, TextHash, sample, survey
from jaxlm.data.readers import Cutter, Piece
from jaxlm.data.store import Store, store_fingerprint
from jaxlm.errors import UserError
from tests.data.stand_ins import ByteTokenizer, build_store, ids, store_of, whole


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(arrays, "SHARD", 4 * arrays.LINE)
    monkeypatch.setattr(arrays, "BLOCK", arrays.LINE)
    monkeypatch.setattr(build, "_CHUNK", 10_000)
    monkeypatch.setattr(build, "_GROUP", 50)


def contents(part):
    offsets = part.offsets.read(0, part.documents + 1)
    tokens = part.tokens.read(0, part.num_tokens)
    return [tokens[start:end].tolist() for start, end in itertools.pairwise(offsets)]


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
        vocabulary = ByteTokenizer.vocabulary.__class__(size=70_000, special=np.zeros(70_000, bool),
                                                        word_start=np.zeros(70_000, bool),
                                                        sentence_end=np.zeros(70_000, bool), pad=0)

        def encode_arrays(self, texts, *, num_threads=0):
            return [np.full(3, 69_999, np.int32) for _ in texts]

    store = store_of(tmp_path / "s", ["a"], tokenizer=Wide())
    assert contents(store.train) == [[69_999] * 3]
    assert contents(store_of(tmp_path / "t", ["a"]).train) == [[113]]


# Held-out documents.


def routes(documents):
    return survey(whole(documents))


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
    assert survey(pieces).bytes - store.held_out.text_bytes == store.train.text_bytes


def test_a_tail_that_begins_with_a_piece_ends_the_document_before_it(tmp_path):
    texts, text = ["word " * 20, " tail " * 4], ""
    pieces = [Piece(texts[0], True, False), Piece(texts[1], False, True)]
    text = survey(pieces)
    share = len(texts[1]) / text.bytes
    store = build_store(str(tmp_path / "s"), pieces, ByteTokenizer(), share, text)
    assert (contents(store.train), contents(store.held_out)) == ([ids(texts[0]).tolist()], [ids(texts[1]).tolist()])


@pytest.mark.slow
def test_small_texts_of_many_documents_hold_out_more_than_the_share(tmp_path):
    store = store_of(tmp_path / "s", [f"{number} " + "x" * 500 for number in range(2000)], held_out=0.001)
    assert 1 << 15 <= store.held_out.text_bytes < (1 << 15) + 600
    assert f"({store.held_out.documents} of 2,000 documents)" in store.summary
    assert "tokens to train on (1.0 bytes each, 503 per document)" in store.summary


@pytest.mark.parametrize(("count", "size"), [(60, 1000), (400, 800), (3000, 900), (90, 20_000)])
def test_the_least_is_held_out_whatever_the_hashes(count, size):
    """Documents of up to twice `size` bytes; of less than 320 KB of text the least is a tenth."""
    for seed in range(8):
        sizes = np.random.default_rng(seed).integers(10, 2 * size, count)
        documents = whole([f"{seed} {number} ".ljust(size, "x") for number, size in enumerate(sizes)])
        text, hashes = survey(documents), TextHash()
        rule = HeldOutRule.of(0.001, text)
        held = sum(len(piece.text) for piece in documents if hashes.add(piece) < rule.below)
        held += text.bytes - rule.tail
        least = min(1 << 15, text.bytes / 10)
        assert held >= least - 1
        if rule.below == text.least_below:  # otherwise the hashes hold out more than the share
            assert held <= least + 2 * size


def test_large_documents_are_held_out_by_the_tail():
    """By hash, documents of a share of the text would hold out far more than it."""
    facts = dict(fingerprint="", documents=200, bytes=10**7, lowest_route=5, highest_route=(1 << 64) - 5)
    assert HeldOutRule.of(0.1, Survey(**facts, least_below=1 << 50)) == HeldOutRule(round(0.1 * 2**64), 10**7)
    assert HeldOutRule.of(0.1, Survey(**facts, least_below=1 << 62)).below == 1 << 62
    assert HeldOutRule.of(0.1, Survey(**facts, least_below=0)) == HeldOutRule(0, 9 * 10**6)


def test_copies_of_one_document_are_not_all_held_out(tmp_path):
    """Copies have the same hash."""
    everything = HeldOutRule.of(1.0, Survey("", 3000, 9_000_000, 5, 5, 6))
    assert everything.below == 0
    below = HeldOutRule.of(0.01, Survey("", 3000, 9_000_000, 5, 1 << 63, 6)).below
    assert below == round(0.01 * 2**64)
    copies = store_of(tmp_path / "copies", ["the same"] * 500, held_out=0.01)
    assert copies.train.documents > 400 and copies.held_out.documents >= 1


def test_held_out_documents_are_chosen_by_their_text(tmp_path):
    documents = texts(200)
    one = {tuple(d) for d in contents(store_of(tmp_path / "a", documents, held_out=0.1).held_out)}
    two = {tuple(d) for d in contents(store_of(tmp_path / "b", documents[::-1], held_out=0.1).held_out)}
    assert one == two


# Fingerprints.


def test_the_fingerprint_of_a_text_depends_on_its_documents():
    same = routes(["one two", "three"])
    in_pieces = survey([Piece("one", True, False), Piece(" two", False, True), *whole(["three"])])
    assert in_pieces.fingerprint == same.fingerprint
    for other in (["one two three"], ["one", "two three"], ["three", "one two"], ["one two", "three", "three"]):
        assert routes(other).fingerprint != same.fingerprint
    assert (same.documents, same.bytes) == (2, 12)


def test_the_fingerprint_of_a_store_depends_on_text_tokenizer_and_settings(tmp_path):
    store = store_of(tmp_path / "s", ["a", "b"], held_out=0.25)
    a, b = routes(["a", "b"]), routes(["b"])
    assert store.fingerprint == store_fingerprint(a, "bytes", 0.25)
    others = (a, "b", 0.1), (a, "c", 0.1), (a, "b", 0.2), (b, "b", 0.1), (a, "b", 0.1, True)
    assert len({store_fingerprint(*facts) for facts in others}) == 5


def test_an_even_sample():
    pieces = whole(f"{number:05d}" + "x" * 95 for number in range(10_000))
    drawn = [int(text[:5]) for text in sample(pieces, 1_000_000, 100_000)]
    assert len(drawn) == pytest.approx(1000, abs=2)
    assert np.abs(np.diff(drawn) - 10).max() <= 1
    assert list(sample(pieces, 1_000_000, 2_000_000)) == [piece.text for piece in pieces]
    book = Piece("word " * 20_000, True, True)
    parts = list(sample([book] * 10, 1_000_000, 200_000))
    assert len(parts) == 10 and sum(map(len, parts)) == pytest.approx(200_000, rel=0.01)


# All or nothing.


def test_a_text_that_changes_meanwhile_is_refused(tmp_path):
    with pytest.raises(UserError, match="changed while it was tokenised"):
        build_store(tmp_path / "s", whole(["one", "two"]), text=routes(["one"]))
    assert not files_of(tmp_path)


def test_a_failing_build_leaves_no_store(tmp_path):
    def broken():
        yield from whole(texts(20))
        raise UserError("the file is damaged")

    with pytest.raises(UserError, match="the file is damaged"):
        build_store(tmp_path / "s", broken(), text=routes(texts(20)))
    assert "s" not in os.listdir(tmp_path)


def test_a_full_disk_is_one_sentence(tmp_path, monkeypatch):
    def no_space(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(build.os, "makedirs", no_space)
        with pytest.raises(UserError, match=r"000000.npz cannot be written \(No space left on device\)"):
            store_of(tmp_path / "s", ["a"])
    with monkeypatch.context() as patch:
        patch.setattr(arrays.ts, "open", no_space)
        with pytest.raises(UserError, match=r"s/.* cannot be written \(No space left on device\); free some space"):
            store_of(tmp_path / "s", ["a"])
    assert os.listdir(tmp_path) == ["s.chunks"]
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
        subprocess.run(["umount", disk], check=True)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        store_of(tmp_path / "file" / "s", ["a"])


def test_a_killed_build_goes_on_with_the_chunks_that_are_missing(tmp_path, monkeypatch):
    documents = [str(number) * 50 for number in range(20_000, 20_100)]
    script = (
        "import os, signal\n"
        "from jaxlm.data import build\n"
        "from tests.data.stand_ins import build_store, whole\n"
        "from jaxlm.data.fingerprint import survey\n"
        f"documents, build._CHUNK = whole({documents!r}), 1000\n"
        "def dying():\n"
        "    yield from documents[:90]\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        f"build_store({str(tmp_path / 's')!r}, dying(), text=survey(documents), workers=1)\n"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == -9
    assert os.listdir(tmp_path) == ["s.chunks"]
    with pytest.raises(UserError, match="no finished token store"):
        Store(str(tmp_path / "s"))
    encoded = []

    class Counting(ByteTokenizer):
        def encode_arrays(self, texts, *, num_threads=0):
            encoded.extend(texts)
            return super().encode_arrays(texts, num_threads=num_threads)

    monkeypatch.setattr(build, "_CHUNK", 1000)
    arrays.ArrayWriter(str(tmp_path / "s.chunks" / "abcd" / "train" / "tokens"), "uint16").close()
    store = store_of(tmp_path / "s", documents, tokenizer=Counting())
    assert 10 <= len(encoded) <= 30 and encoded == documents[-len(encoded) :]
    assert contents(store.train) == [ids(text).tolist() for text in documents]
    assert os.listdir(tmp_path) == ["s"]
    assert sorted(os.listdir(tmp_path / "s")) == sorted(["manifest.json", store.manifest["arrays"]])


def files_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def arrays_of(folder):
    """Return the folder of a store's arrays, which each build names anew."""
    return folder / Store(str(folder)).manifest["arrays"]


@pytest.mark.parametrize("share", [0, 0.1])
@pytest.mark.parametrize("has_many", [True, False])
def test_shards_by_several_machines_give_the_same_files(tmp_path, monkeypatch, share, has_many):
    """In any order, of any number, also from a file whose documents are longer than chunks, or empty."""
    monkeypatch.setattr(build, "_CHUNK", 150)
    documents = texts(60) if has_many else [" ".join(texts(40)), "", "short", " ".join(texts(30))]
    files = [list(Cutter().document(text)) for text in documents]
    files = [[piece for pieces in files[start : start + 7] for piece in pieces] for start in range(0, len(files), 7)]
    text = survey(*files)
    assert len(text.starts) == len(files) and text == survey(*files)
    StoreBuild(str(tmp_path / "alone"), files, text, ByteTokenizer(), share).finish()
    opened = []

    def read(number):
        opened.append(number)
        yield from files[number]

    def part():
        return StoreBuild(str(tmp_path / "s"), [read(n) for n in range(len(files))], text, ByteTokenizer(), share)

    part().tokenize(2, 3)
    assert not has_many or min(opened) >= 5, "it reads no file before its shard"
    first = files_of(tmp_path / "s.chunks")
    part().tokenize(0, 2)
    part().tokenize(1, 2)
    assert not part().missing() and first.items() <= files_of(tmp_path / "s.chunks").items()
    opened.clear()
    part().finish()
    assert not opened and files_of(arrays_of(tmp_path / "s")) == files_of(arrays_of(tmp_path / "alone"))
    manifests = [Store(str(tmp_path / name)).manifest | {"arrays": ""} for name in ("s", "alone")]
    assert manifests[0] == manifests[1]
    assert sorted(os.listdir(tmp_path)) == ["alone", "s"]


def test_a_damaged_chunk_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_CHUNK", 150)
    documents = texts(20)
    build_ = StoreBuild(str(tmp_path / "s"), [whole(documents)], routes(documents), ByteTokenizer(), 0.0)
    build_.tokenize()
    chunk = sorted((tmp_path / "s.chunks").iterdir())[1]
    data = bytearray(chunk.read_bytes())
    for place in range(len(data) // 4, len(data) * 3 // 4):
        data[place] ^= 1
    chunk.write_bytes(data)
    with pytest.raises(UserError, match=rf"{chunk} cannot be read"):
        build_.finish()


def test_a_build_that_joins_after_another_one_is_left_out(tmp_path, monkeypatch):
    documents = texts(100)
    first, second = (
        StoreBuild(str(tmp_path / "s"), [whole(documents)], routes(documents), ByteTokenizer(), 0.0) for _ in range(2)
    )
    close = build._SplitWriter.close

    def finished_by_another(writer):
        monkeypatch.setattr(build._SplitWriter, "close", close)
        first.finish()  # it removes the chunks, and the arrays of the second build
        return close(writer)

    second.tokenize()
    monkeypatch.setattr(build._SplitWriter, "close", finished_by_another)
    store = second.finish()
    assert contents(store.train) == [ids(text).tolist() for text in documents]
    assert os.listdir(tmp_path) == ["s"]
    assert sorted(os.listdir(tmp_path / "s")) == sorted(["manifest.json", store.manifest["arrays"]])


def test_two_builds_at_once(tmp_path):
    documents = texts(100)
    barrier = threading.Barrier(3)
    stores, errors = [], []

    def pieces():
        yield from whole(documents)
        barrier.wait(20)  # all are about to finish

    def work():
        try:
            stores.append(build_store(tmp_path / "s", pieces(), held_out=0.1, text=routes(documents)))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(stores) == 3
    assert len({store.fingerprint for store in stores}) == 1
    assert os.listdir(tmp_path) == ["s"]
    assert len(contents(Store(str(tmp_path / "s")).train)) == stores[0].train.documents


def test_a_finished_store_is_not_built_again(tmp_path):
    store_of(tmp_path / "s", ["a", "b"])
    before = os.stat(tmp_path / "s" / "manifest.json").st_mtime_ns

    def unread():
        raise AssertionError
        yield

    build_store(tmp_path / "s", unread(), held_out=0.0, text=routes(["a", "b"]))
    assert os.stat(tmp_path / "s" / "manifest.json").st_mtime_ns == before


def test_a_store_of_another_version_is_refused(tmp_path):
    store_of(tmp_path / "s", texts(5))
    manifest = tmp_path / "s" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 1}))
    with pytest.raises(UserError, match="another version of jaxlm; delete"):
        Store(str(tmp_path / "s"))


@pytest.mark.parametrize("harm", ["remove", "shorten", "manifest", "format", "metadata"])
def test_a_damaged_store_is_refused(tmp_path, harm):
    folder = tmp_path / "s"
    store_of(folder, texts(50))
    shard = arrays_of(folder) / "train" / "tokens" / "c" / "1" / "0"
    manifest = json.loads((folder / "manifest.json").read_text())
    if harm == "remove":
        shard.unlink()
    elif harm == "shorten":
        shard.write_bytes(shard.read_bytes()[:-10])
    elif harm == "manifest":
        (folder / "manifest.json").write_text('{"format": 1')
    elif harm == "format":
        (folder / "manifest.json").write_text(json.dumps(manifest | {"format": 0}))
    else:
        metadata = arrays_of(folder) / "train" / "tokens" / "zarr.json"
        metadata.write_text(metadata.read_text().replace("zarr_format", "zarr_forget"))
    with pytest.raises(UserError, match=r"damaged .*; delete the store|another version"):
        _ = Store(str(folder)).train


def test_flipped_bits_are_noticed(tmp_path):
    folder = tmp_path / "s"
    store = store_of(folder, texts(50))
    shard = arrays_of(folder) / "train" / "tokens" / "c" / "1" / "0"
    data = bytearray(shard.read_bytes())
    data[20] ^= 1
    shard.write_bytes(data)
    with pytest.raises(UserError, match="damaged"):
        Store(str(folder)).train.tokens.read(0, store.train.num_tokens)
    with pytest.raises(UserError, match="damaged"):
        Store(str(folder)).train.tokens.windows(np.array([4 * arrays.LINE]), 8)


def test_windows_of_an_array(tmp_path):
    values = np.arange(1000)
    writer = arrays.ArrayWriter(str(tmp_path / "a"), "int64")
    for start in range(0, 1000, 37):
        writer.append(values[start : start + 37])
    assert writer.close() == 1000
    array = arrays.FlatArray(str(tmp_path / "a"), 1000, arrays.context())
    for length in (1, 2, 63, 64, 65, 66, 130):
        starts = np.array([0, 1, 62, 63, 64, 65, 127, 1000 - length])
        assert (array.windows(starts, length) == starts[:, None] + np.arange(length)).all()
    assert (array.read(63, 129) == np.arange(63, 129)).all()
    assert len(array.read(5, 5)) == 0
    assert array.windows(np.array([990, 0]), 50)[1].tolist() == list(range(50))
    with pytest.raises(UserError, match="shape"):
        arrays.FlatArray(str(tmp_path / "a"), 900, arrays.context())
