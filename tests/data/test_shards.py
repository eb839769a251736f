"""Shards: the same bytes whoever makes them, however often they are killed, and what becomes of damaged files."""

import dataclasses
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from etils import epath

from jaxlm.data import parts, shards
from jaxlm.data.base import RowFormat
from jaxlm.data.duplicates import Keys, find_duplicates
from jaxlm.data.mentions import Mention
from jaxlm.data.readers import Cutter, Piece
from jaxlm.data.shards import Shard, Shards, Totals
from jaxlm.data.splits import SplitText
from jaxlm.data.store import Store, write_store
from jaxlm.data.text import TextData
from jaxlm.errors import UserError
from tests.data.stand_ins import (
    ByteTokenizer,
    OffsetTokenizer,
    contents,
    files_of,
    part_of,
    parts_of,
    split_text,
    whole,
)


def linked(text):
    """Return a document in which every capital letter is a mention of itself."""
    mentions = tuple(Mention(place, place + 1, char) for place, char in enumerate(text) if char.isupper())
    return list(Cutter().document(text, mentions))


@pytest.mark.parametrize("sentences", [False, True])
@pytest.mark.parametrize("cut", [None, 150])
@pytest.mark.parametrize("group", [1, 1 << 18])
def test_the_same_part_gives_the_same_bytes(tmp_path, monkeypatch, sentences, cut, group):
    """However many texts are encoded together, but for the numbers of a group's texts; made again, it stays."""
    part = part_of([piece for number in range(40) for piece in linked(f"Document {number} of A. And B! " * 3)])
    made = []
    for folder in ("a", "b"):
        monkeypatch.setattr(shards, "_GROUP", 1 << 18 if folder == "a" else group)
        shards_ = Shards(str(tmp_path / folder), OffsetTokenizer(), sentences, cut)
        assert not shards_.is_done(part)
        shards_.make(part)
        shards_.make(part)
        assert shards_.is_done(part) and os.listdir(tmp_path / folder) == [shards_.path(part).name]
        made.append(files_of(shards_.path(part)))
    assert made[0] == made[1] and ("sentences" in made[0]) == sentences and "entities" in made[0]


def test_the_name_of_a_shard_follows_from_all_that_it_depends_on(tmp_path):
    class Other(ByteTokenizer):
        fingerprint = "other"

    one, two = (part_of(whole([text])) for text in "ab")
    plain, *others = (Shards(str(tmp_path), *own) for own in (
        [ByteTokenizer()], [Other()], *([ByteTokenizer(), *more] for more in ([True], [False, 0], [False, 1]))))
    names = [plain.path(one), plain.path(two), *(other.path(one) for other in others)]
    assert len(set(names)) == len(names)


def test_a_shard_holds_its_documents(tmp_path):
    """Against Python: hashes, sizes, ends, counts; a document of several pieces is one."""
    import hashlib

    long = "word " * 30_000
    pieces = [*whole(["one é", "two"]), Piece("", True, True), *Cutter().document(long), *whole(["two"])]
    made = Shards(str(tmp_path), ByteTokenizer())
    made.make(part_of(pieces))
    shard, texts = Shard(made.path(part_of(pieces))), ["one é", "two", long, "two"]
    first = next(iter(Cutter().document(long))).text
    hashes = [hashlib.sha256(text.encode()).digest()[:8] for text in ("one é", "two", first, "two")]
    assert shard.read("hashes").tolist() == [int.from_bytes(each, "little") for each in hashes]
    assert shard.read("sizes").tolist() == [len(text.encode()) for text in texts]
    lengths = [len("".join(text.split()).encode()) for text in texts]
    assert shard.read("ends").tolist() == np.cumsum(lengths).tolist()
    expected = np.bincount(np.frombuffer("".join("".join(texts).split()).encode(), np.uint8) + 16, minlength=272)
    assert shard.read("counts").tolist() == expected.tolist()
    facts = shard.facts
    assert (facts["documents"], facts["tokens"], facts["blank"]) == (4, sum(lengths), 1)
    assert facts["bytes"] == sum(map(len, map(str.encode, texts))) and facts["divided"] == -1


def test_the_lowest_hashes_of_shards_give_those_of_the_text(tmp_path, monkeypatch):
    """Against a sort of all documents, of which only so many are kept as are needed."""
    monkeypatch.setattr(shards, "LEAST", 600)
    draw = np.random.default_rng(0)
    for count in (1, 5, 400):
        documents = whole([f"{number} " + "x" * int(draw.integers(1, 60)) for number in range(count)])
        _, text = split_text(tmp_path / "s", documents, parts=min(count, 6))
        hashes = np.concatenate([shard.read("hashes") for shard in text.shards])
        sizes = np.concatenate([shard.read("sizes") for shard in text.shards])
        total, held, least = sizes.sum(), 0, 0
        for number in np.argsort(hashes):
            if held < min(600, total / 10):
                held, least = held + sizes[number], int(hashes[number]) + 1
        assert text.totals.least_below == (least if held <= total / 5 else 0)
        assert (text.totals.lowest, text.totals.highest) == (hashes.min(), hashes.max())
    assert Totals.of(iter([])).documents == 0


class SlowTokenizer(ByteTokenizer):
    """It takes a hundredth of a second for each text of a part."""

    def encode_arrays(self, texts):
        time.sleep(0.01)
        return super().encode_arrays(texts)


SCRIPT = """
    import sys
    from jaxlm.data import parts
    from jaxlm.data.text import TextData
    from tests.data.test_shards import SlowTokenizer
    parts.LEAST, source, cache, deduplicate = 1500, *sys.argv[1:]
    print("ready", flush=True)
    TextData(source=source, cache_dir=cache, held_out=0.05, deduplicate=deduplicate).open(SlowTokenizer(), list)
"""


def started(*arguments):
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(SCRIPT), *map(str, arguments)],
                            stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_kills_at_random_moments(tmp_path, monkeypatch, kills):
    """The next process goes on, and the files of the cache are those of an undisturbed one."""
    monkeypatch.setattr(parts, "LEAST", 1500)
    draw, source = np.random.default_rng(kills), tmp_path / "text.txt"
    words = [" ".join(map(str, draw.integers(0, 999, 20))) for _ in range(600)]
    source.write_text("\n\n".join([*words, *words[:50], "a long document at the end " * 90]))
    data = TextData(source=str(source), cache_dir=str(tmp_path / "whole"), held_out=0.05, deduplicate="exact")
    begun = time.monotonic()
    expected = data.open(SlowTokenizer(), list)
    duration = time.monotonic() - begun
    killed, done = 0, set()
    while killed < kills:
        process = started(source, tmp_path / "cache", "exact")
        assert process.stdout.readline() == "ready\n"
        time.sleep(draw.uniform(0, duration / kills * 1.5))
        process.send_signal(signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
        now = {path.name for path in (tmp_path / "cache").glob("shards/*") if not path.name.endswith(".partial")}
        assert done <= now and all((tmp_path / "cache" / "shards" / name / "facts.json").exists() for name in now)
        done = now
    before = {name: (tmp_path / "cache" / "shards" / name).stat().st_ino for name in done}
    found = dataclasses.replace(data, cache_dir=str(tmp_path / "cache")).open(SlowTokenizer(), list)
    assert {name: (tmp_path / "cache" / "shards" / name).stat().st_ino for name in done} == before
    for part in (tmp_path / "cache").rglob("*.partial"):
        shutil.rmtree(part, ignore_errors=True)
    assert files_of(tmp_path / "cache") == files_of(tmp_path / "whole")
    assert found.fingerprint == expected.fingerprint and contents(found.train) == contents(expected.train)


def test_builds_at_once_give_one_store(tmp_path, monkeypatch):
    """Three of them in one cache folder; each reads what it opened while the others still write."""
    monkeypatch.setattr(parts, "LEAST", 1500)
    source = tmp_path / "text.txt"
    source.write_text("\n\n".join(f"document {number} " + "word " * 9 for number in range(300)))
    data = TextData(source=str(source), cache_dir=str(tmp_path / "cache"), held_out=0.05, deduplicate="near")
    barrier = threading.Barrier(3)

    class Waiting(ByteTokenizer):
        def encode_arrays(self, texts):
            if b"document 299 " in texts[-1].encode():
                barrier.wait(20)  # all make the last part at the same time
            return super().encode_arrays(texts)

    def work(_):
        store = data.open(Waiting(), list)
        return store.fingerprint, contents(store.train), contents(store.held_out)

    with ThreadPoolExecutor(3) as pool:
        stores = list(pool.map(work, range(3)))
    assert stores[0] == stores[1] == stores[2]
    assert not list(tmp_path.rglob("*.partial"))
    alone = dataclasses.replace(data, cache_dir=str(tmp_path / "alone"))
    alone.open(ByteTokenizer(), list)
    assert files_of(tmp_path / "cache") == files_of(tmp_path / "alone")


# Damaged files.


def damaged(data):
    """Yield what may become of a file."""
    yield None
    yield b""
    yield b"text instead"
    for length in {1, len(data) // 2, max(0, len(data) - 1), len(data) // 4096 * 4096 - 4096}:
        if 0 < length < len(data):
            yield data[:length]
    for place in {0, len(data) // 3, len(data) - 9, len(data) - 1} if data else ():
        if 0 <= place < len(data):
            yield data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def everything(folder, graph):
    """Return all that a run reads of a store."""
    store = Store(folder / "store", folder / "shards")
    batches = store.batches("train", 3, RowFormat("document", 9, entities=str(graph)), 0)
    rows = [part.tolist() for step in range(9) for part in batches.batch(step)]
    packed = store.batches("held_out", 2, RowFormat("packed-eos", 9), 0).batch(0).tokens.tolist()
    return (rows, packed, contents(store.train), contents(store.held_out), store.summary, store.fingerprint,
            store.statistics.token_counts.tolist(), list(store.remarks("", "exact")))


@pytest.fixture
def whole_store(tmp_path):
    """A store of three shards, of which the last is divided, with what is read of it."""
    from jaxlm.knowledge.knowledge_graph import Vectors, write_vectors

    (graph := tmp_path / "graph").mkdir()
    write_vectors(graph, "entity", Vectors(("D", "X"), np.zeros((2, 4), np.float32)))
    texts = [f"Document {number} " + "X y z " * (9 + 40 * number) for number in range(7)]
    found = parts_of([piece for text in texts for piece in linked(text)])
    removed = [np.arange(sum(piece.last for piece in part.reader.given)) == 1 for part in found]
    made, text = split_text(tmp_path / "store", [], 0.2, OffsetTokenizer(), parts=found, removed=removed)
    assert text.has_tail
    write_store(epath.Path(tmp_path / "store"), "the text", 0.2, made, text)
    return tmp_path, graph, found, removed, made


def harms(folder, step=1):
    """Yield a folder's files, each damaged in every way, or every one of `step` ways, and mended afterwards."""
    ways = itertools.count()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            for changed in (each for each in damaged(data) if next(ways) % step == 0):
                path.unlink(missing_ok=True)
                if changed is not None:
                    path.write_bytes(changed)
                yield path
            path.write_bytes(data)


STEPS = pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.slow)])


@STEPS
def test_a_damaged_store_is_one_sentence_or_whole(whole_store, step):
    folder, graph, *_ = whole_store
    expected, refused = everything(folder, graph), set()
    used = [part / name for part, name in itertools.product(
        (folder / "store" / "train", folder / "store" / "held_out"), ("offsets", "runs", "places", "counts"))]
    for path in itertools.chain(harms(folder / "store", step // 2 or 1), harms(folder / "shards", step)):
        try:
            assert everything(folder, graph) == expected, path
        except UserError as error:
            assert "\n" not in str(error)
            refused.add(path)
    assert step > 1 or {*used, folder / "store" / "manifest.json"} <= refused
    assert len(refused) > 5 and {"tokens", "entities"} <= {path.name for path in refused}


@STEPS
def test_a_damaged_shard_gives_no_store_or_the_right_one(whole_store, step):
    folder, _, found, removed, made = whole_store
    expected, refused = files_of(folder / "store"), set()
    for path in harms(folder / "shards", step):
        try:
            text = SplitText.of(found, made, 0.2, removed)
            write_store(epath.Path(folder / "again"), "the text", 0.2, made, text)
            assert files_of(folder / "again") == expected, path
        except UserError as error:
            assert "\n" not in str(error)
            refused.add(path.name)
        shutil.rmtree(folder / "again", ignore_errors=True)
        assert not list(folder.rglob("*.partial"))
    assert refused >= {"tokens", "ends", "hashes", "sizes", "counts", "facts.json"} or (step > 1 and len(refused) > 3)


def test_damaged_keys_are_one_sentence(tmp_path):
    found, made, refused = parts_of(whole(["a b c", "d", "a b c", "d e f"])), Keys(str(tmp_path / "keys"), True), set()
    for part in found:
        made.make(part)
    expected = np.concatenate(find_duplicates(made, found, epath.Path(tmp_path / "first"))).tolist()
    assert expected == [False, False, True, False]
    for number, path in enumerate(harms(tmp_path / "keys")):
        try:
            marks = find_duplicates(made, found, epath.Path(tmp_path / f"again{number}"))
            assert np.concatenate(marks).tolist() == expected, path
        except UserError as error:
            assert "\n" not in str(error)
            refused.add(path.name)
    assert refused == {"keys", "facts.json"}
    for path in harms(tmp_path / "first"):
        try:
            assert np.concatenate(find_duplicates(made, found, epath.Path(tmp_path / "first"))).tolist() == expected
        except UserError as error:
            assert "\n" not in str(error)
            refused.add(path.name)
    assert "repeats" in refused


def test_what_the_sentence_advises_mends(tmp_path):
    """Delete the folder that it names, and run again: also of a text whose end is held out."""
    source = tmp_path / "text.txt"
    source.write_text("\n\n".join("word " * (90 * size) for size in (1, 1, 2, 3)))
    data = TextData(source=str(source), cache_dir=str(tmp_path / "cache"), held_out=0.2, deduplicate="exact")
    expected = contents(data.open(ByteTokenizer(), list).train)
    before = files_of(tmp_path / "cache")
    for name in before:
        path = tmp_path / "cache" / name
        path.write_bytes(b"")
        if path.name == "repeats":  # read where a store is made
            shutil.rmtree(tmp_path / "cache" / "stores")
        for _ in range(3):
            try:
                assert contents(data.open(ByteTokenizer(), list).train) == expected
                break
            except UserError as error:
                assert " is damaged (" in str(error)
                (delete,) = [word.rstrip(";") for word in str(error).partition("; delete ")[2].split()[:1]]
                shutil.rmtree(delete, ignore_errors=True)
        else:
            pytest.fail(f"{name} stays damaged")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(before[name])
    assert json.loads(before[next(name for name in before if name.endswith("manifest.json"))])["held_out_tail"]


def test_tokens_that_are_cut_off_are_noticed_before_they_are_read(tmp_path):
    source = tmp_path / "text.txt"
    source.write_text("\n\n".join(f"document {number} " * 9 for number in range(300)))
    data = TextData(source=str(source), cache_dir=str(tmp_path / "cache"))
    data.open(ByteTokenizer(), list)
    (tokens,) = (tmp_path / "cache").glob("shards/*/tokens")
    for length in (tokens.stat().st_size - 1, 0):
        os.truncate(tokens, length)
        with pytest.raises(UserError, match=rf"^{tokens} is damaged \(it is not as long as its elements\); delete "):
            data.open(ByteTokenizer(), list)
    tokens.unlink()
    with pytest.raises(UserError, match=f"^{tokens} is missing; delete {tokens.parent} and run again, which makes it"):
        data.open(ByteTokenizer(), list)


def test_of_a_finished_store_nothing_is_looked_for_but_its_tokens(tmp_path, monkeypatch):
    """Nor by hosts and --finish, and keys that were deleted are not missed; a shard is, and is made again."""
    monkeypatch.setattr(parts, "LEAST", 1500)
    source, asked, is_done = tmp_path / "text.txt", [], Shards.is_done
    source.write_text("\n\n".join(f"document {number} " * 9 for number in range(300)))
    data = TextData(source=str(source), cache_dir=str(tmp_path / "cache"), deduplicate="exact")
    expected = contents(data.open(ByteTokenizer(), list).train)
    shutil.rmtree(tmp_path / "cache" / "keys")
    with monkeypatch.context() as patch:
        patch.setattr(Shards, "is_done", lambda self, part: asked.append(part) or is_done(self, part))
        assert contents(data.open(ByteTokenizer(), asked.append).train) == expected and len(asked) == 1  # the remark
        data.tokenize(ByteTokenizer(), 0, 2, asked.append)
        assert len(asked) == 1 and not data.missing(data.parts(), ByteTokenizer())
    assert not (tmp_path / "cache" / "keys").exists()
    shutil.rmtree(next((tmp_path / "cache").glob("shards/*")))
    assert len(data.missing(data.parts(), ByteTokenizer())) == len(data.parts()) > 5
    assert contents(data.open(ByteTokenizer(), list).train) == expected
