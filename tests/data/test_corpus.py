"""Sources of text: files, folders, globs, links, Python's documentation and TFDS."""

import csv
import errno
import io
import json
import os
import sys
import textwrap
import time

import pyarrow.parquet
import pytest
from etils import epath

from jaxlm.data import tfds_source
from jaxlm.data.corpus import open_corpus
from jaxlm.data.parts import Reader
from jaxlm.data.python_docs import documents as python_documents
from jaxlm.data.readers import NO_TEXT, Columns
from jaxlm.errors import UserError
from jaxlm.knowledge.linked_text import EntityReader
from jaxlm.tasks.tables import read_table


def texts(source, field="text"):
    return [piece.text for piece in open_corpus(str(source), Reader(field)).pieces() if piece.text]


def names(source, reader=Reader()):  # noqa: B008
    """Return the names of the parts, which change with the text."""
    return [part.name for part in open_corpus(str(source), reader).parts]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("b one\n\nb two")
    (tmp_path / "a.jsonl").write_text('{"text": "a one"}\n{"text": "a two"}\n')
    (tmp_path / "sub" / "c.txt").write_text("c")
    (tmp_path / "notes.md").write_text("left out")
    return tmp_path


def test_files_folders_globs_and_lists(folder):
    assert texts(folder) == ["a one", "a two", "b one", "b two", "c"]
    assert texts(folder / "b.txt") == ["b one", "b two"]
    assert texts(folder / "*.txt") == ["b one", "b two"]
    assert texts(folder / "**/*.txt") == ["b one", "b two", "c"]
    assert texts(folder / "[ab].*") == ["a one", "a two", "b one", "b two"]
    assert texts(f"{folder / 'sub'}, {folder / 'b.txt'}") == ["c", "b one", "b two"]
    comma = folder / "x,y.txt"
    comma.write_text("comma")
    assert texts(comma) == ["comma"]


def test_links_do_not_repeat_a_file(folder):
    """There are links to the folder itself, to its parent, and to a file."""
    before = texts(folder)
    (folder / "sub" / "self").symlink_to(folder / "sub")
    (folder / "sub" / "up").symlink_to("..")
    (folder / "again").symlink_to("sub")
    (folder / "z.txt").symlink_to("b.txt")
    assert sorted(texts(folder)) == sorted(before)
    assert sorted(texts(folder / "*" / "c.txt")) == ["c"]
    assert texts(folder / "*.txt") == ["b one", "b two"]


def test_files_are_read_once_and_the_others_are_named(folder, monkeypatch):
    monkeypatch.chdir(folder)
    for name in ("x.pdf", "y.pdf", "README"):
        (folder / name).write_text("left out")
    (folder / "e.txt").touch()
    for source in ("b.txt,*.txt,.", "b.txt, b.txt,.,b.txt"):
        corpus = open_corpus(source)
        assert sorted(piece.text for piece in corpus.pieces()) == ["a one", "a two", "b one", "b two", "c"]
        assert corpus.remark.startswith("Files of text: 3; left out: ")
        for reason in ("read already (", "1 empty (e.txt)", "1 .md (notes.md)", "2 .pdf (x.pdf, y.pdf)",
                       "1 without a suffix (README)"):
            assert reason in corpus.remark
    (folder / ".ipynb_checkpoints").mkdir()
    (folder / ".ipynb_checkpoints" / "b.txt").write_text("hidden")
    assert sorted(open_corpus(".").files) == sorted(corpus.files)
    assert "1 folder (sub)" in open_corpus("*").remark
    assert "folder" not in open_corpus("**/*.*").remark
    assert open_corpus("sub").remark == open_corpus("b.txt").remark == ""
    assert open_corpus("[ab].*").remark == "Files of text: 2"
    before = names("*.txt")
    (folder / "e.txt").write_text("no longer empty")
    assert names("*.txt") != before


def test_only_regular_files_are_text(folder):
    os.mkfifo(folder / "pipe.txt")
    (folder / "device.jsonl").symlink_to("/dev/zero")
    told = r"(pipe\.txt|device\.jsonl) is neither a file nor a folder"
    for source in (folder / "pipe.txt", folder / "device.jsonl"):
        with pytest.raises(UserError, match=told):
            open_corpus(str(source))
    assert "left out: 2 no regular file (device.jsonl, pipe.txt)" in open_corpus(str(folder / "*[lt]")).remark


def test_relative_paths(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert texts("sub") == ["c"]
    assert texts("*.jsonl") == ["a one", "a two"]


def test_a_file_ends_its_last_document(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").write_text("two")
    assert [(piece.text, piece.last) for piece in open_corpus(str(tmp_path)).pieces()] == [("one", True), ("two", True)]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("none.txt", "does not exist"),
        ("*.text", "names no .txt, .jsonl, .csv"),
        ("nowhere/*.txt", "names no .txt, .jsonl, .csv"),
        ("empty", "names no .txt, .jsonl, .csv"),
        ("notes.md", "names no .txt, .jsonl, .csv"),
        ("b.txt,,c", "names no text"),
        ("", "names no text"),
    ],
)
def test_missing_sources_are_refused(folder, monkeypatch, source, message):
    (folder / "empty").mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match=message):
        open_corpus(source)


@pytest.mark.parametrize("source", ["sub", ".", "sub,sub/c.txt"])
def test_a_folder_that_may_not_be_read(folder, monkeypatch, source):
    """Root may read everything, so the refusal is simulated."""
    listed = type(epath.Path()).iterdir

    def iterdir(path):
        if path.name == "sub":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(type(epath.Path()), "iterdir", iterdir)
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match=r"^sub cannot be read \(Permission denied\); check its permissions\.$"):
        open_corpus(source)


def test_names_of_parts_detect_changed_files(folder):
    before = names(folder)
    assert names(folder) == before and names(folder, Reader("body")) != before
    os.utime(folder / "b.txt", ns=(1, 1))
    assert names(folder) != before


def test_names_of_parts_detect_an_edit_that_keeps_size_and_modification_time(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"x" * 100_000)
    before, times = names(file), (file.stat().st_atime_ns, file.stat().st_mtime_ns)
    time.sleep(0.02)  # more than a tick of the file system's clock
    with file.open("r+b") as edited:
        edited.seek(20_000)
        edited.write(b"y")
    os.utime(file, ns=times)
    assert names(file) != before


@pytest.mark.slow
def test_python_docs():
    documents = python_documents()
    assert 1_000_000 < sum(map(len, documents)) < 6_000_000
    assert len(documents) > 300
    text = "\n".join(documents)
    assert "Read a comma-separated" not in documents  # each document is a module or a topic, not a line
    assert json.dumps.__doc__.strip()[:40] in text  # a function's docstring
    assert "The `assert` statement" in text or 'The "assert" statement' in text  # a topic
    assert sum(piece.last for piece in open_corpus("python-docs").pieces()) == len(documents)
    assert not any("unittest.mock" in text and "Test the" in text[:20] for text in documents)


BUILDER = '''
    import numpy as np
    import tensorflow_datasets as tfds


    class Builder(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            fields = {"text": tfds.features.Text(), "label": tfds.features.Scalar(np.int64)}
            features = tfds.features.FeaturesDict(fields)
            return tfds.core.DatasetInfo(builder=self, description="few words", features=features)

        def _split_generators(self, manager):
            return {"train": self._generate_examples(150), "test": self._generate_examples(3)}

        def _generate_examples(self, count):
            for number in range(count):
                yield number, {"text": f"document {number} é\\n한국어", "label": number}
'''


ROWS = ["One\nline.\n\nAnd another, with a comma", "x" * 200_000, "", "a; b", '"quoted"', "한국어"]


@pytest.fixture
def tables(tmp_path):
    """The same texts as .jsonl and .parquet with a null, .csv with semicolons, and a dataset on a disk."""
    datasets = pytest.importorskip("datasets")
    line = io.StringIO()
    csv.writer(line, delimiter=";").writerows([["id", "text"], *enumerate(ROWS)])
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": row or None}) + "\n" for row in ROWS))
    (tmp_path / "t.csv").write_text(line.getvalue(), newline="")
    data = datasets.Dataset.from_dict({"id": list(range(6)), "text": [row or None for row in ROWS]})
    data.to_parquet(tmp_path / "t.parquet")
    datasets.DatasetDict({"train": data}).save_to_disk(tmp_path / "saved")
    return tmp_path


def test_tables_and_datasets_are_the_same_text(tables, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    corpora = {name: open_corpus(name) for name in [
        *(str(tables / f"t.{kind}") for kind in ("jsonl", "csv", "parquet")), f"hf:{tables / 'saved'}",
        f"hf:{tables / 'saved'}:train",
    ]}
    (pieces,) = {tuple(corpus.pieces()) for corpus in corpora.values()}
    assert sum(piece.last and piece != NO_TEXT for piece in pieces) == len(ROWS) - 1 and pieces.count(NO_TEXT) == 1
    assert len({part.name for corpus in corpora.values() for part in corpus.parts}) == len(corpora)
    rows = {name: [row.text("text") for row in read_table(name, Columns(["text"], ""))] for name in corpora}
    assert all(found == ROWS for found in rows.values())  # a task reads the same rows


def test_a_row_without_a_value(tmp_path):
    """As pandas writes a missing one."""
    (tmp_path / "a.jsonl").write_text('{"text": NaN}\n{"text": "one"}\n')
    assert [piece.text for piece in open_corpus(str(tmp_path)).pieces() if piece != NO_TEXT] == ["one"]


def test_columns_of_tables_and_datasets(tables):
    parquet, saved = str(tables / "t.parquet"), f"hf:{tables / 'saved'}"
    for source in (parquet, saved):
        with pytest.raises(UserError, match=r"no column 'body'; it has 'id', 'text'.*--data.text-field"):
            texts(source, "body")
        with pytest.raises(UserError, match=r"row 0: the field 'id' is an integer, not text"):
            texts(source, "id")
    with pytest.raises(UserError, match=r"saved:nowhere cannot be read .*nowhere"):
        open_corpus(f"{saved}:nowhere")
    with pytest.raises(UserError, match="hf:NAME:CONFIG:SPLIT"):
        open_corpus("hf:a:b:c:d")
    (tables / "bad.csv").write_text("text,id\na,1\nb\n")
    with pytest.raises(UserError, match=r"bad.csv, line 3 has 1 column instead of 2"):
        texts(tables / "bad.csv")
    (tables / "twice.csv").write_text("text,id,text\na,1,b\n")
    pyarrow.parquet.write_table(pyarrow.table([["a"], ["b"]], names=["text", "text"]), tables / "twice.parquet")
    for name in ("twice.csv, line 1", "twice.parquet"):
        with pytest.raises(UserError, match=rf"{name}: there are 2 columns 'text'; rename or remove all but one"):
            texts(tables / name.partition(",")[0])
    assert texts(tables / "twice.csv", "id") == ["1"]
    for source in (tables / "saved", tables / "saved" / "train"):
        for read in (texts, lambda path: list(read_table(str(path), Columns(["text"], "")))):
            with pytest.raises(UserError, match=f"^{source} is a folder of .*save_to_disk.; write hf:{source}[.]$"):
                read(source)
    (tables / "bad.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"bad.parquet cannot be read"):
        texts(tables / "bad.parquet")


def test_mentions_are_an_optional_column(tables):
    """Other columns are not read, and a table has no mentions."""
    datasets = pytest.importorskip("datasets")
    mentions = [{"start": 0, "end": 1, "id": "Q1"}]
    data = datasets.Dataset.from_dict({"text": ["a", "b"], "entities": [mentions, None], "image": [b"", b""]})
    data.to_parquet(tables / "m.parquet")
    data.save_to_disk(tables / "mentions")
    rows = [{"doc": {"text": "a"}, "entities": mentions}, {"doc": {"text": "b"}}]
    (tables / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tables / "m.csv").write_text("text,entities\na,none\nb,none\n")
    (tables / "n.csv").write_text("1,a\n2,b\n")
    for source, field, found in [
        (f"hf:{tables / 'mentions'}", "text", ["Q1"]), (tables / "m.parquet", "text", ["Q1"]),
        (tables / "m.jsonl", "doc.text", ["Q1"]), (tables / "m.csv", "text", []), (tables / "n.csv", "2", []),
    ]:
        pieces = list(open_corpus(str(source), EntityReader(field, "entities")).pieces())
        assert [piece.text for piece in pieces] == ["a", "b"]
        assert [mention.entity for piece in pieces for mention in piece.mentions] == found
        assert names(source, EntityReader(field, "entities")) != names(source, Reader(field))


def test_datasets_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="pip install datasets"):
        open_corpus("hf:imdb")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Return a dataset that a builder, unknown afterwards, prepared as array_record."""
    root = tmp_path_factory.mktemp("tfds")
    package = root / "few_words"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "few_words_dataset_builder.py").write_text(textwrap.dedent(BUILDER))
    sys.path.insert(0, str(root))
    try:
        from few_words.few_words_dataset_builder import Builder

        Builder(data_dir=str(root / "data"), file_format="array_record").download_and_prepare()
    finally:
        sys.path.remove(str(root))
    return root / "data"


def test_tfds(prepared, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(prepared))
    everything = texts("tfds:few_words")
    assert sorted(everything) == sorted(f"document {number} é\n한국어" for number in range(150))
    assert texts("tfds:few_words") == everything
    assert len(texts("tfds:few_words:test")) == 3
    assert texts("tfds:few_words:train[:20]") == everything[:20]
    assert names("tfds:few_words") != names("tfds:few_words:test")

    def prepared_by_another(self):
        raise FileExistsError

    builder = type(tfds_source.open_dataset("tfds:few_words")[0])
    monkeypatch.setattr(builder, "download_and_prepare", prepared_by_another)
    tfds_source.open_dataset.cache_clear()
    assert texts("tfds:few_words") == everything
    with pytest.raises(UserError, match=r"few_words:nowhere cannot be read .*nowhere"):
        open_corpus("tfds:few_words:nowhere")
    with pytest.raises(UserError, match=r"no column 'body'.*'text'"):
        open_corpus("tfds:few_words", Reader("body"))
    with pytest.raises(UserError, match=r"'label' is .*, not text"):
        texts("tfds:few_words", "label")
    with pytest.raises(UserError, match="tfds:no_such_words cannot be read"):
        open_corpus("tfds:no_such_words")
