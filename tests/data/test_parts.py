"""Parts of a text: the documents of all of them are those of the whole, and what a changed file costs."""

import json
import os
import re
import types

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlm.data import corpus, parts, readers
from jaxlm.data.corpus import open_corpus
from jaxlm.data.parts import Reader, parts_of_file, sample
from jaxlm.data.readers import NO_TEXT, Piece, boundary
from jaxlm.data.shards import Shards
from jaxlm.data.text import TextData
from jaxlm.paths import file_state
from tests.data.stand_ins import ByteTokenizer, contents, part_of, whole

FRAGMENTS = st.sampled_from([
    "a", "word", " ", "\n", "\n", "\n\n", "\r\n", "\r\n\r\n", "\r", "\n \t\r\x0c\n", "한글", "😀", "é" * 20, "x" * 90,
    "\ufeff", "\x00", "\u3000",
])
TEXT = st.lists(FRAGMENTS, max_size=50).map("".join)


def documents(pieces):
    found = []
    for piece in pieces:
        if piece != NO_TEXT:
            if piece.first:
                found.append("")
            found[-1] += piece.text
    return found


def parts_of(path):
    return list(parts_of_file(str(path), str(path), file_state(str(path)), Reader()))


def in_parts(path):
    """Return the documents of all parts, which cover the file."""
    found = parts_of(path)
    if found[0].end is not None:
        assert [part.start for part in found] == [0, *(part.end for part in found[:-1])]
        assert len({part.name for part in found}) == len(found)
    assert sum(part.size for part in found) <= path.stat().st_size
    return len(found), documents(piece for part in found for piece in part.pieces())


def made_small(patch, least, most, block=None, piece=None):
    patch.setattr(parts, "LEAST", least)
    patch.setattr(parts, "MOST", most)
    patch.setattr(readers, "BLOCK", block or readers.BLOCK)
    patch.setattr(readers, "PIECE", piece or readers.PIECE)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(TEXT, st.integers(1, 60), st.integers(1, 90), st.sampled_from([16, 64, None]), st.sampled_from([20, 100, None]))
def test_a_text_in_parts_has_all_of_its_words_once(tmp_path_factory, text, least, most, block, piece):
    path = tmp_path_factory.mktemp("t") / "a.txt"
    path.write_text(text, newline="")
    with pytest.MonkeyPatch.context() as patch:
        made_small(patch, least, max(least, most), block, piece)
        _, found = in_parts(path)
    assert "".join("".join(found).split()) == "".join(text.removeprefix("\ufeff").split())
    assert all(each.strip() for each in found)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(TEXT, st.integers(1, 60), st.integers(1, 90))
def test_parts_begin_with_a_document_where_there_are_blank_lines(tmp_path_factory, text, least, most):
    path = tmp_path_factory.mktemp("t") / "a.txt"
    path.write_text(text + "\n\n", newline="")
    with pytest.MonkeyPatch.context() as patch:
        made_small(patch, least, max(least, most))
        assert in_parts(path)[1] == documents(Reader().read(str(path)))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(TEXT, st.sampled_from(["text", "json"]), st.sampled_from([8, 64, None]))
def test_boundaries_follow_from_the_place(tmp_path_factory, text, kind, block):
    """They never go back, and divide no character and, of JSON lines, no line."""
    path = tmp_path_factory.mktemp("t") / "a.txt"
    path.write_text(text, newline="")
    data = path.read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        made_small(patch, 1, 1, block)
        found = [boundary(str(path), place, kind) for place in range(len(data) + 3)]
    assert found[0] == 0 and set(found[len(data) :]) == {len(data)}
    if block is None:
        assert found == sorted(found)
    for place, end in enumerate(found[:-3]):
        assert place <= end <= len(data)
        data[end:].decode()
        assert kind == "text" or end in (0, len(data)) or data[end - 1 : end] == b"\n"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(TEXT, max_size=12), st.data())
def test_json_lines_in_parts(tmp_path_factory, texts, data):
    path = tmp_path_factory.mktemp("t") / "a.jsonl"
    lines = [json.dumps({"text": text}, ensure_ascii=data.draw(st.booleans())) for text in texts]
    ends = [data.draw(st.sampled_from(["\n", "\r\n", "\n\n"])) for _ in texts[1:]]
    ends.append(data.draw(st.sampled_from(["\n", ""])))
    marked = data.draw(st.sampled_from(["", "\ufeff"]))
    path.write_text(marked + "".join(line + end for line, end in zip(lines, ends, strict=False)), newline="")
    with pytest.MonkeyPatch.context() as patch:
        made_small(patch, data.draw(st.integers(1, 60)), 1 << 20, data.draw(st.sampled_from([16, None])))
        count, found = in_parts(path)
    assert found == [text for text in texts if text.strip()]
    assert count > 1 or path.stat().st_size < 120


@pytest.mark.parametrize("rows", [1, 7, 40])
def test_parquet_in_parts(tmp_path, monkeypatch, rows):
    draw, path = np.random.default_rng(rows), tmp_path / "a.parquet"
    texts = [f"{number} " + "한x" * int(draw.integers(0, 50)) for number in range(40)]
    pyarrow.parquet.write_table(pyarrow.table({"text": [*texts, None]}), path, row_group_size=rows)
    made_small(monkeypatch, 100, 1 << 20)
    count, found = in_parts(path)
    assert found == texts and (count > 3) == (rows < 40)


def test_compressed_files_and_tables_are_one_part(tmp_path, monkeypatch):
    import gzip

    made_small(monkeypatch, 10, 10)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"some words\n\n" * 100))
    (tmp_path / "b.csv").write_text("text\n" + "words\n" * 100)
    assert [in_parts(tmp_path / name)[0] for name in ("a.txt.gz", "b.csv")] == [1, 1]


# What is tokenized again.


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "_SMALL", 1)
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(f"{name} one\n\n{name} two\n\n{name} three")
    return tmp_path


@pytest.fixture
def tokenized(monkeypatch):
    """The files of the parts that are tokenized."""
    found, make = [], Shards.make

    def count(self, part, *arguments, **named):
        found.append([file.rpartition("/")[2] for file in part.files])
        return make(self, part, *arguments, **named)

    monkeypatch.setattr(Shards, "make", count)
    return found


def opened(folder, source):
    data = TextData(source=str(source), cache_dir=str(folder / "cache"), held_out=0.0)
    store = data.open(ByteTokenizer(), list)
    found = ["".join(chr(token - 16) for token in tokens) for tokens in contents(store.train)]
    assert found == ["".join(text.split()) for text in documents(open_corpus(str(source)).pieces())]
    return store


def test_only_what_has_changed_is_tokenized(folder, tokenized):
    """A file that is added, changed, removed, renamed, or touched."""
    def changed(*names):
        tokenized.clear()
        opened(folder, folder / "*.txt")
        assert tokenized == [[f"{name}.txt"] for name in names]

    changed("a", "b", "c")
    changed()
    (folder / "aa.txt").write_text("in between")
    changed("aa")
    (folder / "b.txt").write_text((folder / "b.txt").read_text().replace("two", "TWO"))
    changed("b")
    (folder / "a.txt").unlink()
    changed()
    (folder / "c.txt").rename(folder / "d.txt")
    changed("d")


def test_two_texts_share_the_shard_of_a_file(folder, tokenized):
    opened(folder, f"{folder / 'a.txt'},{folder / 'b.txt'}")
    assert tokenized == [["a.txt"], ["b.txt"]]
    store = opened(folder, f"{folder / 'c.txt'},{folder / 'b.txt'}")
    assert tokenized[2:] == [["c.txt"]]
    assert opened(folder, f"{folder / 'b.txt'},{folder / 'c.txt'}").fingerprint != store.fingerprint
    assert len(tokenized) == 3


def test_a_range_of_a_file_that_grows_is_read_again(folder, tokenized, monkeypatch):
    """The name of a part has the state of the file, so no range of a changed file is taken for the old one."""
    made_small(monkeypatch, 20, 20)
    (folder / "a.txt").write_text("\n\n".join(f"document {number}" for number in range(10)))
    opened(folder, folder / "a.txt")
    count = len(tokenized)
    with (folder / "a.txt").open("a") as file:
        file.write("\n\none more")
    opened(folder, folder / "a.txt")
    assert count > 4 and len(tokenized) > 2 * count - 1


@pytest.mark.parametrize("name", ["{}.txt", "{}/text.txt"])
def test_many_small_files_are_few_parts(tmp_path, monkeypatch, name):
    """One more file changes the part that it is in, and by its name may end that part."""
    monkeypatch.setattr(parts, "_TOGETHER", 16)
    for number in range(120):
        path = tmp_path / name.format(f"{number:04}")
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"file {number}")
    before = open_corpus(str(tmp_path)).parts
    assert 2 <= len(before) <= 20 and sum(len(part.files) for part in before) == 120
    assert documents(open_corpus(str(tmp_path)).pieces()) == [f"file {number}" for number in range(120)]
    names = {part.name for part in before}
    for number in range(0, 120, 11):
        extra = tmp_path / name.format(f"{number:04}a")
        extra.parent.mkdir(exist_ok=True)
        extra.write_text("one more")
        after = open_corpus(str(tmp_path)).parts
        new = [part for part in after if part.name not in names]
        assert len(new) <= 2 and len(after) <= len(before) + 1 and any(str(extra) in part.files for part in new)
        extra.unlink()
    assert {part.name for part in open_corpus(str(tmp_path)).parts} == names


def test_large_files_are_parts_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "_SMALL", 50)
    monkeypatch.setattr(parts, "_TOGETHER", 1 << 40)
    for name in "abcde":
        (tmp_path / f"{name}.txt").write_text("x" * (60 if name == "c" else 10))
    found = [[file[-5] for file in part.files] for part in open_corpus(str(tmp_path)).parts]
    assert found == [["a", "b"], ["c"], ["d", "e"]]


def test_names_of_parts_differ_by_the_reader(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a", "body": "b"}')
    names = [open_corpus(str(tmp_path), Reader(field)).parts[0].name for field in ("text", "body", "text")]
    assert names[0] == names[2] != names[1]


# Samples.


def test_an_even_sample():
    pieces = whole(f"{number:05d}" + "x" * 95 for number in range(10_000))
    drawn = [int(text[:5]) for text in sample([part_of(pieces)], 100_000)]
    assert len(drawn) == pytest.approx(1000, abs=2)
    assert np.abs(np.diff(drawn) - 10).max() <= 1
    halves = [part_of(pieces[:300]), part_of(pieces[300:])]
    assert list(sample(halves, 2_000_000)) == [piece.text for piece in pieces]
    book = Piece("word " * 20_000, True, True)
    taken = list(sample([part_of([book] * 10)], 200_000))
    assert len(taken) == 10 and sum(map(len, taken)) == pytest.approx(200_000, rel=0.01)


@pytest.mark.parametrize("kind", ["one.txt", "hindi.txt", "many.txt", "long.txt", "rows.jsonl", "packed.txt.gz"])
def test_a_sample_of_a_large_text_reads_little(tmp_path, monkeypatch, kind):
    """It comes from everywhere, and at most ten times as many bytes as wanted are read."""
    import gzip

    made_small(monkeypatch, 20_000, 20_000)
    monkeypatch.setattr(parts, "_PLACES", 20)
    monkeypatch.setattr(parts, "_SMALL", 1)
    size, word = 40 if kind == "many.txt" else 1, "हिन्दी " if kind == "hindi.txt" else "words "
    for file in range(size):
        texts = [f"{file}/{number} " + word * 12 for number in range(10_000 // size)]
        if kind == "rows.jsonl":
            text = "".join(json.dumps({"text": each}) + "\n" for each in texts)
        else:
            text = ("\n" if kind == "long.txt" else "\n\n").join(texts)
        name = kind.replace("many", f"many{file}")
        (tmp_path / name).write_bytes(gzip.compress(text.encode()) if kind.endswith("gz") else text.encode())
    read, pieces = [], Reader.read

    def counting(self, *arguments):
        for piece in pieces(self, *arguments):
            read.append(len(piece.text.encode()))
            yield piece

    monkeypatch.setattr(Reader, "read", counting)
    found = list(sample(open_corpus(str(tmp_path)).parts, 20_000))
    assert sum(len(text.encode()) for text in found) == pytest.approx(20_000, rel=1 if kind == "packed.txt.gz" else 0.1)
    if kind != "long.txt":  # whose lines are documents of 65,536 characters
        assert sum(read) <= 10 * 20_000 + 1000
    if kind != "packed.txt.gz":
        where = [int(re.search(r"/(\d+) ", text)[1]) + int(re.search(r"(\d+)/", text)[1]) * 10_000 // size
                 for text in found if re.search(r"\d/\d+ ", text)]
        assert min(where) < 1000 and max(where) > 9000 and len({place // 1000 for place in where}) >= 9


def test_groups_of_rows_without_a_size_are_read(monkeypatch, tmp_path):
    """Some writers leave total_byte_size 0; then all groups ended in the first part, which had one."""
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["one", "two", "three"]}), path, row_group_size=1)
    monkeypatch.setattr(parts, "LEAST", 16)

    class Sizeless:
        def __init__(self, raw):
            self.metadata = types.SimpleNamespace(
                num_row_groups=3, row_group=lambda number: types.SimpleNamespace(total_byte_size=0))

    with monkeypatch.context() as patch:
        patch.setattr(pyarrow.parquet, "ParquetFile", Sizeless)
        found = parts_of(path)
    assert (found[0].start, found[-1].end) == (0, 3)
    assert documents(piece for part in found for piece in part.pieces()) == ["one", "two", "three"]


def test_the_states_of_a_dataset_of_the_hub_are_those_of_any_machine(monkeypatch, tmp_path):
    file = tmp_path / "data.arrow"
    file.write_bytes(b"rows")
    monkeypatch.setattr(corpus.arrow_source, "open_dataset", lambda source, columns: Rows([{"filename": str(file)}]))
    (tmp_path / "raw").mkdir()  # whose rows are converted into each machine's own cache
    for source, is_same in (("hf:ORG/NAME", True), (f"hf:{tmp_path}", False), (f"hf:{tmp_path / 'raw'}", True)):
        os.utime(file, (1, 1))
        before = corpus._dataset_state(source, None)
        os.utime(file, (2, 2))
        assert (corpus._dataset_state(source, None) == before) == is_same


class Rows(list):
    @property
    def cache_files(self):
        return list(self)
