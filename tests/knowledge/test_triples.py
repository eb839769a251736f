"""Triples: names, splits, batches by number, and the known entities of held-out triples."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from jaxlm.data.base import RowFormat
from jaxlm.data.cache import cached_arrays
from jaxlm.errors import UserError
from jaxlm.knowledge.graph_tokenizer import GraphSize, graph_names, graph_tokenizer
from jaxlm.knowledge.triples import TripleData
from jaxlm.tokenizers.tokenizer import Tokenizer

FORMAT = RowFormat(GraphSize(40, 3), 3)


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    """Some 600 different triples of 40 names of two words, and 60 others."""
    folder, rng = tmp_path_factory.mktemp("triples"), np.random.default_rng(0)
    drawn = np.unique(rng.integers(0, [40, 3, 40], (700, 3)), axis=0)
    lines = [f"name {h}\tr{r}\tname {t}" for h, r, t in rng.permutation(drawn)]
    (folder / "train.tsv").write_text("\n".join(lines[60:]))
    (folder / "dev.tsv").write_text("\n".join(lines[:60]))
    return folder


def opened(graph, **changes):
    data = TripleData(**{"source": str(graph / "train.tsv"), "cache_dir": str(graph / "cache"), **changes})
    tokenizer = data.prepare_tokenizer(lambda _: None)
    return data.open(tokenizer, lambda _: None), tokenizer


def lines_of(file):
    return [tuple(line.split("\t")) for line in file.read_text().splitlines()]


def names_of(ids, tokenizer):
    entities, relations = graph_names(tokenizer.vocabulary)
    return [(entities[h], relations[r], entities[t]) for h, r, t in ids.tolist()]


def test_names_are_whole_pieces(graph, tmp_path):
    tokenizer = opened(graph, dev=str(graph / "dev.tsv"))[1]
    vocabulary = tokenizer.vocabulary
    assert GraphSize.of(vocabulary) == (40, 3) and vocabulary.size == 44 and vocabulary.unk == 43
    assert tokenizer.encode("name 7") == [vocabulary.pieces.index("name 7")] and tokenizer.encode("name") == [43]
    assert sorted(graph_names(vocabulary)[1]) == ["r0", "r1", "r2"] and "<r1>" in tokenizer.pieces([40, 41, 42])
    tokenizer.save(tmp_path)
    assert Tokenizer.load(tmp_path) == tokenizer
    with pytest.raises(UserError, match="'<a>' stands for two things"):
        graph_tokenizer(["<a>"], ["a"])


def test_an_epoch_reads_each_triple_once_and_a_batch_is_a_function_of_its_number(graph):
    source, tokenizer = opened(graph, dev=str(graph / "dev.tsv"))
    batches = source.batches("train", 16, FORMAT, 5)
    assert batches.num_rows == len(lines_of(graph / "train.tsv"))
    count = -(-batches.num_rows // 16)
    read = [batches.batch(step) for step in range(count)]
    rows = names_of(np.concatenate([batch.triples for batch in read])[: batches.num_rows], tokenizer)
    assert sorted(rows) == sorted(lines_of(graph / "train.tsv")) and rows != sorted(rows)
    assert all(batch.known is None and batch.triples.dtype == np.int32 for batch in read)
    again = opened(graph, dev=str(graph / "dev.tsv"))[0].batches("train", 16, FORMAT, 5)
    np.testing.assert_array_equal(again.batch(7, slice(4, 9)).triples, read[7].triples[4:9])
    assert (source.batches("train", 16, FORMAT, 6).batch(7).triples != read[7].triples).any()


def test_held_out_triples_carry_the_known_entities_of_both_ends(graph):
    source, tokenizer = opened(graph, dev=str(graph / "dev.tsv"))
    every = {*lines_of(graph / "train.tsv"), *lines_of(graph / "dev.tsv")}
    entities, _ = graph_names(tokenizer.vocabulary)
    batches = list(source.batches("held_out", 32, FORMAT, 0).evaluation(32, 10))
    assert len(batches) == 2 and (batches[1].triples[28:] == -1).all() and (batches[1].known[28:] == -1).all()
    found = []
    for triples, known in batches:
        assert known.dtype == np.int32
        for ids, (heads, tails) in zip(triples, known, strict=True):
            if ids[0] < 0:
                continue
            found += names_of(ids[None], tokenizer)
            head, relation, tail = found[-1]
            assert {entities[i] for i in heads if i >= 0} == {h for h in entities if (h, relation, tail) in every}
            assert {entities[i] for i in tails if i >= 0} == {t for t in entities if (head, relation, t) in every}
    assert sorted(found) == sorted(lines_of(graph / "dev.tsv"))


def test_ends_with_too_many_known_entities_are_not_ranked(graph):
    whole = next(opened(graph, dev=str(graph / "dev.tsv"))[0].batches("held_out", 60, FORMAT, 0).evaluation(60, 1))
    source = opened(graph, dev=str(graph / "dev.tsv"), max_known=5)[0]
    part = next(source.batches("held_out", 60, FORMAT, 0).evaluation(60, 1))
    few = (whole.known >= 0).sum(axis=-1, keepdims=True) <= 5
    assert part.known.shape == (60, 2, 5) and 0 < few.sum() < 120
    np.testing.assert_array_equal(part.known, np.where(few, whole.known[..., :5], -1))
    assert f"({120 - few.sum()} of their ends have more than 5 known entities" in source.summary


def test_a_share_is_held_out_by_the_text_of_a_triple(graph):
    source, tokenizer = opened(graph, held_out=0.2)
    train, held_out = (
        {*names_of(np.concatenate([b.triples for b in source.batches(split, 1, FORMAT, 0).evaluation(1, 10**6)]),
                   tokenizer)}
        for split in ("train", "held_out")
    )
    every = {*lines_of(graph / "train.tsv")}
    assert train | held_out == every and not train & held_out and 0.12 < len(held_out) / len(every) < 0.28
    (graph / "reversed.tsv").write_text("\n".join(reversed((graph / "train.tsv").read_text().splitlines())))
    other, names = opened(graph, source=str(graph / "reversed.tsv"), held_out=0.2)
    batches = other.batches("held_out", 1, FORMAT, 0).evaluation(1, 10**6)
    assert {*names_of(np.concatenate([b.triples for b in batches]), names)} == held_out


def test_how_often_heads_are_replaced(tmp_path):
    triples = ("a many b", "a many c", "a many d", "d many b", "b one c")
    (tmp_path / "a.tsv").write_text("\n".join(triples).replace(" ", "\t"))
    data = TripleData(source=str(tmp_path / "a.tsv"), held_out=0.0, cache_dir=str(tmp_path))
    source = data.open(data.prepare_tokenizer(lambda _: None), lambda _: None)
    # Four triples of 2 heads and 3 tails: 2 tails per head, 4 / 3 heads per tail.
    np.testing.assert_allclose(source.statistics.head_share, [2 / (2 + 4 / 3), 0.5])
    assert source.statistics.token_counts.tolist() == [3, 3, 2, 2, 4, 1, 0]  # a, b, c, d, the relations, [UNK]


def test_changed_triples_are_read_again_and_equal_ones_have_the_same_fingerprint(tmp_path):
    fingerprints = []
    for name, text in itertools.product("ab", ["x\tr\ty\ny\tr\tx\n", "x\tr\ty\ny\tr\ty\n"]):
        (tmp_path / f"{name}.tsv").write_text(text)
        data = TripleData(source=str(tmp_path / f"{name}.tsv"), held_out=0.0, cache_dir=str(tmp_path))
        fingerprints.append(data.open(data.prepare_tokenizer(lambda _: None), lambda _: None).fingerprint)
    assert fingerprints[:2] == fingerprints[2:] and fingerprints[0] != fingerprints[1]


def test_cached_arrays_are_mapped_into_memory(tmp_path):
    arrays = {"a": np.arange(6, dtype=np.int32).reshape(2, 3), "none": np.zeros((0, 3), np.int64), "one": np.float32(2)}
    calls = []
    for _ in range(2):
        found = cached_arrays("kind", ["facts"], lambda: calls.append(1) or dict(arrays), str(tmp_path))
        assert list(found) == list(arrays) and type(found["a"]) is np.ndarray
        assert isinstance(found["a"].base, np.memmap)
        for name, array in arrays.items():
            assert found[name].dtype == array.dtype
            np.testing.assert_array_equal(found[name], array)
    assert len(calls) == 1


@pytest.mark.parametrize(("text", "message"), [
    (None, "does not exist"), ("", "no|there are none"), ("a\tb\n", "line 1 is 'a.*with tabs between"),
])
def test_mistakes_are_named(tmp_path, text, message):
    if text is not None:
        (tmp_path / "a.tsv").write_text(text)
    with pytest.raises(UserError, match=message):
        opened(tmp_path, source=str(tmp_path / "a.tsv"))
    with pytest.raises(UserError, match=r"--data.source is empty"):
        TripleData().prepare_tokenizer()
