"""Readers of text and JSON lines: documents, compression, and damaged files."""

import gzip
import io
import json
import lzma
import os

import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxlm.data import readers
from jaxlm.data.corpus import open_corpus
from jaxlm.data.parts import Reader
from jaxlm.data.readers import NO_TEXT, PIECE, Columns, Cutter
from jaxlm.data.rows import kind_of
from jaxlm.errors import UserError
from jaxlm.tasks.tables import read_table


def documents(path, field="text"):
    found, parts = [], []
    for piece in Reader(field).read(str(path)):
        if piece == NO_TEXT:
            continue
        assert piece.first == (not parts)
        assert len(piece.text) <= PIECE
        parts.append(piece.text)
        if piece.last:
            found.append("".join(parts))
            parts = []
    assert not parts
    return found


def write(path, data):
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def test_blank_lines_separate_documents(tmp_path):
    text = "\n\none\ntwo\r\n \t \n\n\nthree \x0c and\x00more\n  \n  \n\n"
    assert documents(write(tmp_path / "a.txt", text)) == ["one\ntwo", "three \x0c and\x00more"]
    assert documents(write(tmp_path / "b.txt", "no newline at the end")) == ["no newline at the end"]
    assert documents(write(tmp_path / "c.txt", "")) == []
    assert documents(write(tmp_path / "d.txt", "\ufeffmark\n\n\ufeffkept")) == ["mark", "\ufeffkept"]


def test_text_without_blank_lines_is_split_at_line_ends(tmp_path):
    lines = [f"line {number} " + "x" * 1000 for number in range(200)]
    found = documents(write(tmp_path / "a.txt", "\n".join(lines)))
    assert "\n".join(found).split("\n") == lines and len(found) == 4
    assert all(PIECE <= len(text) < PIECE + 1100 for text in found[:-1])
    assert documents(write(tmp_path / "a.jsonl", json.dumps({"text": "\n".join(lines)}))) == ["\n".join(lines)]
    one = "word " * 40_000
    assert documents(write(tmp_path / "b.txt", one)) == [one]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.text(st.sampled_from("ab \té한😀\x00"), min_size=1, max_size=30).filter(str.strip), max_size=6),
    st.sampled_from([1, 2, 3, 7, 64]),
)
def test_the_size_of_blocks_does_not_matter(tmp_path_factory, lines, block):
    path = write(tmp_path_factory.mktemp("t") / "a.txt", "\n\n".join(lines))
    before = readers.BLOCK
    readers.BLOCK = block
    try:
        found = documents(path)
    finally:
        readers.BLOCK = before
    assert found == lines


@settings(max_examples=40, deadline=None)
@example(5 * " ", [], 4)
@given(st.text(st.sampled_from("ab \n한"), max_size=200), st.lists(st.integers(1, 50), max_size=20), st.integers(4, 40))
def test_the_cuts_of_a_document_depend_only_on_its_text(text, chunks, size):
    before = readers.PIECE
    readers.PIECE = size
    try:
        cutter = Cutter()
        at_once = [piece for piece in cutter.document(text) if piece != NO_TEXT]
        pieces, start = [], 0
        for chunk in chunks:
            pieces += cutter.add(text[start : start + chunk])
            start += chunk
        pieces += [*cutter.add(text[start:]), *cutter.end()]
    finally:
        readers.PIECE = before
    assert pieces == at_once
    if text.strip():
        assert "".join(piece.text for piece in pieces) == text
        assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_documents_are_cut_before_white_space():
    pieces = list(Cutter().document("word " * 40_000))
    assert len(pieces) > 2
    assert all(piece.text.startswith(" word") for piece in pieces[1:])


def zstandard_with_long_window(data: bytes) -> bytes:
    """Compress as `zstd --long=28`, beyond the decoder's own limit."""
    params = zstandard.ZstdCompressionParameters(window_log=28, hash_log=12, chain_log=12)
    packer = zstandard.ZstdCompressor(compression_params=params).compressobj()
    return packer.compress(data) + packer.flush()


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz", ".zst"])
def test_compressed_files_give_the_same_text(tmp_path, suffix):
    lines = [f"line {i} é" for i in range(5000)]
    data = "\n".join(json.dumps({"text": line}) for line in lines).encode()
    half = len(data) // 2  # two members, as `cat a.gz b.gz` makes them
    pack = {
        "": lambda d: d,
        ".gz": gzip.compress,
        ".xz": lzma.compress,
        ".zst": zstandard_with_long_window,
    }[suffix]
    path = write(tmp_path / f"a.jsonl{suffix}", pack(data[:half]) + pack(data[half:]))
    assert documents(path) == lines
    if suffix:  # zeros between streams and after them
        assert documents(write(path, pack(data[:half]) + bytes(8) + pack(data[half:]) + bytes(512))) == lines
        assert documents(write(path, b"")) == []


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
@pytest.mark.parametrize("damage", ["truncated", "garbled", "second truncated", "second garbled", "followed"])
def test_damaged_archives_are_refused(tmp_path, suffix, damage):
    data = os.urandom(200_000).hex().encode()
    packed = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.ZstdCompressor().compress}[suffix](data)
    half, garbled = packed[: len(packed) // 2], b"this is no archive at all" + packed
    packed = {
        "truncated": half, "garbled": garbled, "second truncated": packed + half, "second garbled": packed + garbled,
        "followed": packed + b"\n",
    }[damage]
    path = write(tmp_path / f"a.txt{suffix}", packed)
    with pytest.raises(UserError, match=rf"a\.txt\{suffix} is truncated or damaged"):
        documents(path)


@pytest.mark.parametrize(("name", "data"), [
    ("a.txt", "one\n\ntwo é\nthree ".encode() + b"\xff\xfe rest\n"),
    ("b.txt", b"first\nx\xe9"),  # a sequence that the end of the file truncates
    ("a.jsonl", b'{"text": "ok"}\n{"text": "\xe9"}\n'),
])
def test_bytes_that_are_not_utf8_are_refused(name, data, tmp_path):
    with pytest.raises(UserError, match=f"{name} is not UTF-8 text.*; convert it"):
        documents(write(tmp_path / name, data))


@pytest.mark.parametrize(("text", "encoding", "likely"), [
    ("Der Hund läuft über die große Straße.", "cp1252", "CP1252"), ("kühl – 5 €", "cp1252", "CP1252"),
    ("Le café est à côté, très bon.", "cp1252", "CP1252"),
    ("W Szczebrzeszynie chrząszcz brzmi w trzcinie, żółw też.", "cp1250", "CP1250"),
    ("Bu çok güzel bir şey, ağaçların altında ışık var.", "cp1254", "CP1254"),
    ("Это очень хороший фильм", "cp1251", "CP1251"), ("Αυτή είναι μια ελληνική πρόταση", "cp1253", "CP1253"),
    ("정말 좋아요, 느려요", "cp949", "CP949"), ("これは日本語のテキストです", "cp932", "CP932"),
    ("这部电影很好看，我看了两遍。演员们也很好，音乐很美。", "gb18030", "GB18030"), ("plain text", "utf-16", "UTF-16"),
    ("זה סרט טוב מאוד, ראיתי אותו פעמיים. השחקנים היו נהדרים והמוזיקה יפה מאוד." * 3, "cp1255", "CP1255"),
    ("هذا فيلم جيد جدا وقد شاهدته مرتين", "cp1256", "CP1256"),
    ("หนังเรื่องนี้ดีมาก ฉันดูสองครั้ง", "tis_620", "TIS-620"),
    ("Это очень хороший фильм, я смотрел его два раза. Актёры играли прекрасно." * 3, "koi8_r", "KOI8-R"),
])
def test_the_likely_encoding_is_named_in_a_command(text, encoding, likely, tmp_path):
    """The command gives the text; it is the same for pretraining text and for tables of tasks."""
    path = write(tmp_path / "a.csv", f"text;label\n{text};x\n".encode(encoding))
    for read in (documents, lambda path: list(read_table(str(path), Columns(["text", "label"], "")))):
        with pytest.raises(UserError, match=f"a.csv is not UTF-8 text .*iconv -f {likely} -t UTF-8"):
            read(path)
    write(path, path.read_bytes().decode(likely))
    assert documents(path) == [text]


def test_json_lines(tmp_path):
    rows = [{"id": 1, "text": "a\nb\u0000é"}, {"text": "   "}, {"text": ""}, {"text": "pair \ud83d\ude00"}]
    data = "\ufeff" + "\n\n".join(json.dumps(row) for row in rows) + '\n{"text": "lone \\ud800!"}'
    assert documents(write(tmp_path / "a.jsonl", data)) == ["a\nb\x00é", "pair 😀", "lone \ufffd!"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"body": "x", "id": 3}', r"line 2: there is no column 'text'; it has 'body', 'id'\..* --data\.text-field\."),
        ('{"Text": "x"}', "line 2: there is no column 'text'; perhaps 'Text' is meant; it has 'Text'"),
        ('{"text": 3}', "line 2: the field 'text' is .*not text"),
        ('["text"]', "line 2: expected a JSON object, found list"),
        ('{"text": "x"', "line 2: this is not JSON"),
        ("plain text", "line 2: this is not JSON"),
    ],
)
def test_bad_json_lines_are_refused_with_their_place(tmp_path, line, message):
    path = write(tmp_path / "a.jsonl", '{"text": "fine"}\n' + line + "\n")
    with pytest.raises(UserError, match=message):
        documents(path)


def test_a_line_of_json_that_is_too_long(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", '{"text": "fine"}\n' + json.dumps({"text": "x" * (1 << 20)}))
    assert list(map(len, documents(path))) == [4, 1 << 20]
    monkeypatch.setattr(readers, "LONGEST_LINE", 1 << 20)
    with pytest.raises(UserError, match=r"a\.jsonl, line 2 is longer than 1 MB; split it"):
        documents(path)


def test_files_that_cannot_be_opened(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="does not exist"):
        documents(tmp_path / "none.txt")
    with pytest.raises(UserError, match="cannot be read"):
        documents(tmp_path.rename(tmp_path.with_suffix(".txt")))
    secret = write(tmp_path.with_suffix(".txt") / "a.txt", "x")

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(readers.epath.Path(secret)), "open", refuse)
    with pytest.raises(UserError, match="Permission denied"):
        documents(secret)


def test_a_text_of_a_document_a_line_is_hinted_at(tmp_path):
    file = tmp_path / "x.txt"
    texts = {"a document\n" * 100: True, "a line\n" * 99: False, "a line\n" * 60 + "\n" + "b\n" * 60: False}
    for text, is_hinted in texts.items():
        file.write_text(text)
        remark = open_corpus(str(file)).remark
        assert remark.startswith(f"{file} has no blank line in its first 100, ") == is_hinted == bool(remark)


def test_kinds():
    names = ("A.TXT.GZ", "x.jsonl.zst", "a.csv.xz", "a.tsv", "a.parquet", "model.bin", "README.gz")
    kinds = ["text", "json", "table", "table", "parquet", None, None]
    assert [kind_of(name) for name in names] == kinds


def test_a_stream_without_readline_is_buffered(tmp_path, monkeypatch):
    """Some file systems return raw streams."""
    path = write(tmp_path / "a.txt", "one\n\ntwo")
    monkeypatch.setattr(type(readers.epath.Path(path)), "open", lambda self, mode: io.FileIO(str(self)))
    assert documents(path) == ["one", "two"]
