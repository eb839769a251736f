"""Triples and vectors of knowledge graphs."""

import gzip

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxlm.errors import UserError
from jaxlm.knowledge.knowledge_graph import VECTORS, Vectors, read_triples, read_vectors, write_vectors

ENTITIES = Vectors(("pet store", "ferret", "été"), np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32))
RELATIONS = Vectors(("AtLocation",), np.array([[1e-30, -0.1, 3.0, 1 / 3]], np.float32))


@pytest.fixture
def folder(tmp_path):
    write_vectors(tmp_path, "entity", ENTITIES)
    write_vectors(tmp_path, "relation", RELATIONS)
    return tmp_path


def same(found, expected):
    assert found.names == expected.names and found.vectors.dtype == np.float32
    np.testing.assert_array_equal(found.vectors, expected.vectors)


def test_vectors_are_read_back_exactly(folder):
    assert (folder / "entity2id.txt").read_text(encoding="utf-8") == "3\npet store\t0\nferret\t1\nété\t2\n"
    assert set(load_file(folder / VECTORS)) == {"entity", "relation"}
    for _ in ("safetensors", "text"):
        same(read_vectors(folder), ENTITIES)
        same(read_vectors(folder, "relation"), RELATIONS)
        (folder / VECTORS).unlink(missing_ok=True)


def test_published_text_may_end_its_lines_with_a_tab(tmp_path):
    (tmp_path / "entity2id.txt").write_bytes(b"2\r\nQ1\t0\r\nQ2\t1\r\n")
    (tmp_path / "entity2vec.vec").write_text("0.5\t-1.000000\t\n0\t2e-1\t\n")
    same(read_vectors(tmp_path), Vectors(("Q1", "Q2"), np.array([[0.5, -1], [0, 0.2]], np.float32)))


@pytest.mark.parametrize(("file", "text", "message"), [
    ("entity2id.txt", "pet store\t0\n", "line 1 is 'pet store.*number of names"),
    ("entity2id.txt", "3\npet store\t0\nferret\t1\n", "promises 3 names in line 1 and has 2"),
    ("entity2id.txt", "2\nferret\t1\npet store\t0\n", "line 2 is 'ferret.*a new name, a tab and the id 0"),
    ("entity2id.txt", "2\nferret\t0\nferret\t1\n", "line 3 is 'ferret.*a new name, a tab and the id 1"),
    ("entity2id.txt", "1\nferret 0\n", "line 2 is 'ferret 0'"),
    ("entity2id.txt", "1\nferret\t0\n", r"shape \[3, 4\] for the 1 names"),
    ("entity2vec.vec", "1\t2\n1\t2\t3\n1\t2\n", "entity2vec.vec cannot be read .*columns changed from 2 to 3"),
    ("entity2vec.vec", "1\tx\n", "entity2vec.vec cannot be read .*could not convert string"),
    (VECTORS, "no tensors", "cannot be read"),
])
def test_damaged_files_are_refused(folder, file, text, message):
    if file.endswith(".vec"):
        (folder / VECTORS).unlink()
    (folder / file).write_text(text)
    with pytest.raises(UserError, match=message):
        read_vectors(folder)


def test_triples(tmp_path):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress("ferret\tAtLocation\tpet store\n\nété\tIsA\tseason\r\n".encode()))
    assert list(read_triples(path)) == [("ferret", "AtLocation", "pet store"), ("été", "IsA", "season")]
    for line in ("a\tb", "a\tb\tc\td", "a\t\tc"):
        (tmp_path / "b.tsv").write_text(f"a\tb\tc\n{line}\n")
        with pytest.raises(UserError, match=r"b.tsv, line 2 is .*head, relation and tail"):
            list(read_triples(tmp_path / "b.tsv"))
