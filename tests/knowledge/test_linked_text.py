"""Text with mentions: reading, cutting, tokenizing and storing them, windows, fingerprints, and the linker."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from jaxlm.data import parts
from jaxlm.data.base import RowFormat
from jaxlm.data.mentions import Mention, first_tokens
from jaxlm.data.readers import PIECE, Cutter, Piece
from jaxlm.data.text import TextData
from jaxlm.errors import UserError
from jaxlm.knowledge.knowledge_graph import Vectors, write_vectors
from jaxlm.knowledge.linked_text import LinkedText, read_mentions
from jaxlm.knowledge.linker import Linker
from jaxlm.tokenizers.tokenizer import Tokenizer
from tests.data.stand_ins import EOS, OffsetTokenizer, build_store

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "par", "##is", "is", "in", "france", "new", "york", "and", "."]


def quiet(line: str) -> None:
    pass


@pytest.fixture
def graph(tmp_path) -> Path:
    (tmp_path / "graph").mkdir()
    write_vectors(tmp_path / "graph", "entity", Vectors(("Q0", "Q142", "Q90"), np.zeros((3, 4), np.float32)))
    return tmp_path / "graph"


@pytest.fixture
def source(tmp_path) -> Path:
    """Rows with mentions, without, and with one of an entity that the graph lacks."""
    text = "Paris is in France . "
    paris, france = {"start": 0, "end": 5, "id": "Q90"}, {"start": 12, "end": 18, "id": "Q142"}
    rows = [{"text": text, "entities": [paris, france]}, {"text": text}, {"text": text, "entities": None},
            {"text": text, "entities": [{"start": 0, "end": 18, "id": "Q1"}, paris, france]}]
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def opened(source: Path, tmp_path: Path, cls: type = LinkedText, **options):
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    data = cls(source=str(source), tokenizer=str(tmp_path / "vocab.txt"), cache_dir=str(tmp_path / "cache"), held_out=0,
               **options)
    return data.open(Tokenizer.load(tmp_path / "vocab.txt"), quiet)


def test_a_mention_is_at_its_first_token(source, graph, tmp_path):
    store = opened(source, tmp_path)
    tokens = [5, 6, 7, 8, 9, 13]
    windows = store.batches("train", 4, RowFormat("document", 7, entities=str(graph)), 0)
    found = sorted((*map(tuple, row),) for row in zip(*(x.tolist() for x in windows.batch(0)), strict=True))
    assert {row[0] for row in found} == {(*tokens, 0)}
    # [par, ##is, is, in, france, .]: the first of two mentions at one token counts, and Q1 is not in the graph.
    assert sorted(row[2] for row in found) == [
        *[(-1,) * 7] * 2, (-1, -1, -1, -1, 1, -1, -1), (2, -1, -1, -1, 1, -1, -1),
    ]
    assert store.summary.endswith(f"; 4 mentions of 3 entities, 2 of them in {graph}")
    assert store.batches("train", 4, RowFormat("document", 7), 0).batch(0).entities is None
    (tmp_path / "other").mkdir()
    write_vectors(tmp_path / "other", "entity", Vectors(("Q7",), np.zeros((1, 4), np.float32)))
    with pytest.raises(UserError, match="has none of the 3 entities that the text mentions, such as 'Q90'"):
        store.batches("train", 4, RowFormat("document", 7, entities=str(tmp_path / "other")), 0)


def test_the_store_of_plain_text_stays_as_it_is(source, graph, tmp_path):
    plain, linked = opened(source, tmp_path, TextData), opened(source, tmp_path)
    assert plain.fingerprint != linked.fingerprint and plain.folder != linked.folder
    has_entities = [Path(shard, "entities").exists() for store in (plain, linked) for shard in store._shards]
    assert has_entities == [False, True] and not plain.has_entities and plain.train.entities is None
    np.testing.assert_array_equal(plain.counts("train"), linked.counts("train"))
    with pytest.raises(UserError, match=r"was read as text without entities"):
        plain.batches("train", 1, RowFormat("document", 7, entities=str(graph)), 0)


def test_the_fingerprint_covers_mentions_and_their_entities(source, tmp_path):
    rows, prints = source.read_text(), set()
    for old, new in (("Q90", "Q90"), ("Q142", "Q143"), ('"start": 12', '"start": 13')):
        source.write_text(rows.replace(old, new))
        prints.add(opened(source, tmp_path).fingerprint)
    prints.add(opened(source, tmp_path, entity_names=str(table(tmp_path, "Q90\tParis\n"))).fingerprint)
    prints.add(opened(source, tmp_path, entity_names=str(table(tmp_path, "Q90\tFrance\n"))).fingerprint)
    assert len(prints) == 5


def test_a_file_without_a_mention_among_others(source, graph, tmp_path, monkeypatch):
    """Each file is a part of its own, and one is a table, which has no mentions."""
    monkeypatch.setattr(parts, "_SMALL", 1)
    (folder := tmp_path / "texts").mkdir()
    source.rename(folder / "b.jsonl")
    (folder / "a.jsonl").write_text('{"text": "Paris . "}')
    (folder / "c.csv").write_text("text,entities\nParis . ,none\n")
    store = opened(folder, tmp_path)
    assert store.train.entities.read(0, store.train.num_tokens).astype(bool).sum() == 4
    assert store.train.entities.read(0, 3).tolist() == [0, 0, 0]
    store.batches("train", 6, RowFormat("document", 7, entities=str(graph)), 0).batch(0)


@pytest.mark.parametrize("packing", ["document", "packed", "packed-eos"])
@pytest.mark.parametrize("length", [5, 16, 64])
def test_windows_have_the_entities_of_their_tokens(tmp_path, packing, length):
    """Every capital letter is a mention of itself."""
    rng = np.random.default_rng(length)
    documents = ["".join(rng.choice(list("abcdeXYZ "), size)) + "q" for size in (1, 3, 40, 200, 7, 0, 90)]
    pieces = [
        Piece(text, True, True, tuple(Mention(i, i + 1, c) for i, c in enumerate(text) if c.isupper()))
        for text in documents
    ]
    store = build_store(tmp_path / "s", pieces, OffsetTokenizer(), 0.2)
    write_vectors(tmp_path, "entity", Vectors(("Z", "Y", "W"), np.zeros((3, 4), np.float32)))  # without X
    for split in ("train", "held_out"):
        windows = store.batches(split, 3, RowFormat(packing, length, entities=str(tmp_path)), 0)
        for step in range(-(-windows.num_rows // 3)):
            tokens, segments, entities = windows.batch(step)
            expected = np.select([tokens == 16 + ord("Z"), tokens == 16 + ord("Y")], [0, 1], -1)
            np.testing.assert_array_equal(entities, expected)
            assert entities.dtype == np.int32 and (entities[(segments == 0) | (tokens == EOS)] == -1).all()
    empty = next(store.batches("train", 64, RowFormat(packing, length, entities=str(tmp_path)), 0).evaluation(64, 1))
    assert (empty.entities[empty.segment_ids == 0] == -1).all()


def test_pieces_keep_their_mentions():
    text = "word " * 30_000 + "end"
    starts = [*range(0, 150_000, 5)]
    pieces = list(Cutter().document(text, tuple(Mention(s, s + 4, str(s)) for s in starts)))
    assert len(pieces) == 3 and "".join(piece.text for piece in pieces) == text
    for piece in pieces:
        assert {piece.text[m.start : m.end] for m in piece.mentions} == {"word"}
    assert [m.entity for piece in pieces for m in piece.mentions] == [str(s) for s in starts]
    across = list(Cutter().document(text, (Mention(0, 4, "a"), Mention(PIECE - 9, PIECE + 9, "b"))))
    assert [piece.mentions for piece in across] == [(Mention(0, 4, "a"),), (), ()]


def test_a_tail_that_is_held_out_keeps_its_mentions(tmp_path):
    text = "Xab cde fgh Yij " * 50
    mentions = tuple(Mention(i, i + 3, text[i : i + 3]) for i in range(0, 800, 4))
    pieces = [Piece(text, True, True, mentions)]
    store = build_store(tmp_path / "s", pieces, OffsetTokenizer(), 0.1)
    names = ("", *store._entity_names)
    for split in (store.train, store.held_out):
        tokens, entities = (array.read(0, split.num_tokens) for array in (split.tokens, split.entities))
        text = "".join(chr(token - 16) for token in tokens)
        assert [names[i] or None for i in entities] == [
            text[i : i + 3] if i % 3 == 0 else None for i in range(len(text))
        ]
    assert store.held_out.num_tokens > 30


def test_offsets_of_tokens_that_begin_before_a_mention_or_have_no_characters():
    offsets = np.array([(0, 3), (3, 3), (4, 9), (9, 12)], np.int32)
    mentions = (Mention(4, 6, "a"), Mention(5, 9, "same token"), Mention(3, 4, "space"), Mention(10, 11, "b"),
                Mention(12, 14, "past the end"))
    assert list(first_tokens(offsets, mentions)) == [(2, "a"), (3, "b")]
    assert list(first_tokens(np.zeros((0, 2), np.int32), mentions)) == []


@pytest.mark.parametrize("value", [
    "Q1", {"start": 0}, [3], [{"start": 0, "end": 2}], [{"start": 2, "end": 2, "id": "Q"}],
    [{"start": 0, "end": 6, "id": "Q"}], [{"start": -1, "end": 2, "id": "Q"}], [{"start": "0", "end": 2, "id": "Q"}],
])
def test_bad_mentions_are_refused_with_their_place(value):
    with pytest.raises(UserError, match=r"text\.jsonl, line 7: the field 'links' "):
        read_mentions(value, "hello", "text.jsonl, line 7", "links")


# The linker.


def table(folder: Path, lines: str) -> Path:
    (folder / "names.tsv").write_text(lines)
    return folder / "names.tsv"


def test_the_longest_name_at_each_word(tmp_path):
    names = "Q60\tNew York\tNYC\nQ1384\tNew York State\nQ30\tU.S.\tUSA\nQ2\tnew\n\nQ9\tNYC\n"
    linker = Linker(str(table(tmp_path, names)))
    text = "new  york state, NYC; the U.S. and U S of New-York. Newer USAs, new New\nYork"
    found = [(text[m.start : m.end], m.entity) for m in linker.link(text)]
    assert found == [
        ("new  york state", "Q1384"), ("NYC", "Q60"), ("U.S.", "Q30"), ("New", "Q2"), ("new", "Q2"),
        ("New\nYork", "Q60"),
    ]
    assert list(linker.link("")) == []


def test_text_is_linked_by_a_table(source, graph, tmp_path):
    store = opened(source, tmp_path, entity_names=str(table(tmp_path, "Q142\tfrance\n")))
    batch = store.batches("train", 4, RowFormat("document", 7, entities=str(graph)), 0).batch(0)
    assert batch.entities.tolist() == [[-1, -1, -1, -1, 1, -1, -1]] * 4


@pytest.mark.parametrize(("lines", "message"), [
    ("", "holds no names"), ("Q1\n", "line 1 is 'Q1'; it must be an entity, a tab and a name"), ("\tParis\n", "line 1"),
])
def test_bad_tables_are_refused(tmp_path, lines, message):
    with pytest.raises(UserError, match=message):
        Linker(str(table(tmp_path, lines)))


def test_text_without_a_mention_is_refused(source, tmp_path):
    with pytest.raises(UserError, match=r"has no mention of an entity; give \.jsonl with a field 'links', or a table"):
        opened(source, tmp_path, entities_field="links")
    with pytest.raises(UserError, match=r"has no mention of an entity; .*a table of names that occur in it"):
        opened(source, tmp_path, entity_names=str(table(tmp_path, "Q1\tBerlin\n")))
