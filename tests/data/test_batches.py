"""Windows and batches of a token store against their definition, and streams."""

import gc
import itertools
import threading
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlm.data import arrays, windows
from jaxlm.data.base import RowFormat
from jaxlm.errors import UserError
from tests.data.stand_ins import BEGIN, EOS, ByteTokenizer, store_of

PACKINGS = ("document", "packed", "packed-eos", "packed-room", "packed-text")
# Words of one letter each, so that every document can be told from its neighbours.
DOCUMENTS = ["a" * 1, "bc", "d" * 7 + "ef", "ghijklmnopqrstuvwxyz" * 3, "AB" * 5, "C", "D", "0123456789", "E" * 21]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return store_of(tmp_path_factory.mktemp("store") / "s", DOCUMENTS)


def rows_of(batches, epoch=0):
    """Return all windows of an epoch as tuples of (tokens, segment_ids)."""
    rows = []
    for place in range(epoch * batches.num_rows, (epoch + 1) * batches.num_rows):
        batch = batches.batch(place // batches.batch_size)
        row = place % batches.batch_size
        rows.append((tuple(batch.tokens[row]), tuple(batch.segment_ids[row])))
    return rows


def expected_windows(documents, length, packing, pad=0):
    """Return the windows by their definition, document by document."""
    ids = [[byte + 16 for byte in text.encode()] for text in documents]
    if packing == "document":
        found = []
        for document, tokens in enumerate(ids, 1):
            if len(tokens) < 2:
                continue
            if len(tokens) < length:
                fill = length - len(tokens)
                found.append((tuple(tokens + [pad] * fill), tuple([document] * len(tokens) + [0] * fill)))
                continue
            for number in range(-(-len(tokens) // length)):
                start = min(number * length, len(tokens) - length)
                found.append((tuple(tokens[start : start + length]), (document,) * length))
        return found
    stream = []
    for number, tokens in enumerate(ids):
        ends = {"packed-eos": [EOS], "packed-text": [EOS], "packed-room": [None, None]}.get(packing, [])
        stream += [(token, number) for token in [BEGIN] * (packing == "packed-text") + tokens + ends]
    found = []
    for start in range(0, len(stream) - length + 1, length) or [0]:
        part = [pair for pair in stream[start : start + length] if pair[0] is not None]
        tokens = [token for token, _ in part]
        segments = [number - part[0][1] + 1 for _, number in part]
        fill = length - len(part)
        found.append((tuple(tokens + [pad] * fill), tuple(segments + [0] * fill)))
    return found


def many_documents(folder, monkeypatch, stride, at_once):
    """Return the store as one of very many documents is read."""
    for room in (arrays, windows):
        monkeypatch.setattr(room, "STRIDE", stride)
    monkeypatch.setattr(arrays, "_RESIDENT", 0)
    monkeypatch.setattr(windows, "_AT_ONCE", at_once)
    return store_of(folder / "s", DOCUMENTS)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("length", [2, 3, 8, 20, 64, 500])
@pytest.mark.parametrize("resident", [True, False])
def test_an_epoch_is_every_window_once(store, tmp_path, monkeypatch, packing, length, resident):
    if not resident:
        store = many_documents(tmp_path, monkeypatch, 2, 4)
    batches = store.batches("train", 5, RowFormat(packing, length), 7)
    expected = expected_windows(DOCUMENTS, length, packing)
    assert batches.num_rows == len(expected)
    for epoch in (0, 1, 12):
        assert Counter(rows_of(batches, epoch)) == Counter(expected)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(2, 30), st.sampled_from(PACKINGS))
def test_windows_of_random_documents(tmp_path_factory, lengths, length, packing):
    documents = [chr(65 + number) * size for number, size in enumerate(lengths)]
    store = store_of(tmp_path_factory.mktemp("w") / "s", documents)
    expected = expected_windows(documents, length, packing)
    if not expected or sum(lengths) + len(lengths) * (packing in ("packed-eos", "packed-text")) < 2:
        return
    batches = store.batches("train", 3, RowFormat(packing, length), 0)
    assert Counter(rows_of(batches)) == Counter(expected)


def test_types_and_padding(store):
    for packing in PACKINGS:
        batch = store.batches("train", 6, RowFormat(packing, 30), 0).batch(3)
        assert batch.tokens.shape == batch.segment_ids.shape == (6, 30)
        assert batch.tokens.dtype == batch.segment_ids.dtype == np.int32
        assert ((batch.segment_ids == 0) <= (batch.tokens == 0)).all()
        assert (np.diff(batch.segment_ids == 0, axis=1) >= 0).all()  # padding only at the end


def test_epochs_and_seeds_differ(store):
    batches = store.batches("train", 4, RowFormat("document", 3), 0)
    assert rows_of(batches, 0) != rows_of(batches, 1)
    assert rows_of(batches, 0) != rows_of(store.batches("train", 4, RowFormat("document", 3), 1), 0)
    # Epoch 1 of seed 0 is not epoch 0 of seed 1.
    assert rows_of(batches, 1) != rows_of(store.batches("train", 4, RowFormat("document", 3), 1), 0)


@pytest.mark.parametrize("packing", PACKINGS)
def test_hosts_and_batches_only_divide_the_same_rows(store, packing):
    batches = store.batches("train", 8, RowFormat(packing, 5), 3)
    for step in (0, 1, 10**9):
        whole = batches.batch(step)
        parts = [batches.batch(step, slice(start, start + 2)) for start in range(0, 8, 2)]
        assert (np.concatenate([part.tokens for part in parts]) == whole.tokens).all()
        assert (np.concatenate([part.segment_ids for part in parts]) == whole.segment_ids).all()
    small = store.batches("train", 4, RowFormat(packing, 5), 3)
    assert (small.batch(7).tokens == batches.batch(3).tokens[4:]).all()


def test_a_stream_starts_anywhere(store):
    batches = store.batches("train", 4, RowFormat("packed", 6), 1)
    stream = batches.stream(1_000_000, slice(1, 3))
    for step, batch in zip(range(1_000_000, 1_000_010), stream, strict=False):
        assert (batch.tokens == batches.batch(step, slice(1, 3)).tokens).all()
    stream.close()


def test_a_closed_stream_ends_its_thread(store):
    def count():
        return sum(thread.name.startswith("jaxlm-batches") for thread in threading.enumerate())

    gc.collect()
    before = count()
    streams = [store.batches("train", 4, RowFormat("packed", 6), 1).stream() for _ in range(3)]
    for stream in streams:
        next(stream)
    assert count() == before + 3
    streams[0].close()
    assert count() == before + 2
    del streams, stream
    for _ in range(100):
        if count() == before:
            break
        time.sleep(0.05)
    assert count() == before


def test_errors_of_the_thread_are_raised_by_the_iterator(store, monkeypatch):
    batches = store.batches("train", 4, RowFormat("packed", 6), 1)
    right = batches.batch

    def failing(step, rows):
        if step == 2:
            raise UserError("the disk is gone")
        return right(step, rows)

    monkeypatch.setattr(batches, "batch", failing)
    stream = batches.stream()
    assert next(stream).tokens.shape == next(stream).tokens.shape == (4, 6)
    with pytest.raises(UserError, match="the disk is gone"):
        next(stream)


@pytest.mark.parametrize("packing", PACKINGS)
def test_evaluation_is_every_window_once_then_empty_rows(store, packing):
    batches = store.batches("train", 4, RowFormat(packing, 5), 3)
    found = list(batches.evaluation(4, 1000))
    assert len(found) == -(-batches.num_rows // 4)
    rows = [(tuple(t), tuple(s)) for batch in found for t, s in zip(*batch[:2], strict=True) if any(s)]
    assert Counter(rows) == Counter(expected_windows(DOCUMENTS, 5, packing))
    empty = sum(not any(segments) for batch in found for segments in batch.segment_ids)
    assert empty == 4 * len(found) - batches.num_rows
    assert all(batch.tokens.shape == (4, 5) for batch in found)
    # The same whatever the seed, and divided over hosts; fewer on request.
    other = store.batches("train", 9, RowFormat(packing, 5), 99)
    for one, left, right in zip(
        found, other.evaluation(4, 1000, slice(0, 2)), other.evaluation(4, 1000, slice(2, 4)), strict=True
    ):
        assert (one.tokens == np.concatenate([left.tokens, right.tokens])).all()
        assert (one.segment_ids == np.concatenate([left.segment_ids, right.segment_ids])).all()
    assert len(list(batches.evaluation(4, 2))) == 2


def test_nothing_held_out(store):
    batches = store.batches("held_out", 4, RowFormat("document", 5), 0)
    assert batches.num_rows == 0
    assert list(batches.evaluation(4, 10)) == []
    with pytest.raises(UserError, match="No text is held out"):
        batches.batch(0)


def test_the_order_of_windows_is_shuffled_over_the_whole_text(tmp_path):
    """The mean position of a batch's documents is that of uniform draws."""
    store = store_of(tmp_path / "s", [chr(0x4E00 + number) for number in range(3000)])
    batches = store.batches("train", 100, RowFormat("document", 3), 0)
    assert batches.num_rows == 3000
    order = [ByteTokenizer().encode_arrays([chr(0x4E00 + number)])[0].tobytes() for number in range(3000)]
    position = {tokens: number for number, tokens in enumerate(order)}
    for step in range(5):
        places = [position[tokens.tobytes()] for tokens in batches.batch(step).tokens]
        assert len(set(places)) == 100
        assert abs(np.mean(places) / 3000 - 0.5) < 5 * np.sqrt(1 / 12 / 100)


def test_too_little_text(tmp_path):
    with pytest.raises(UserError, match="2 tokens or more"):
        store_of(tmp_path / "s", ["a"]).batches("train", 4, RowFormat("document", 8), 0)


def test_packing_with_end_tokens_needs_an_end_token(tmp_path):
    class Endless(ByteTokenizer):
        vocabulary = ByteTokenizer.vocabulary.__class__(
            size=272, special=np.zeros(272, bool), word_start=np.zeros(272, bool), sentence_end=np.zeros(272, bool)
        )

    store = store_of(tmp_path / "s", ["abc", "def"], tokenizer=Endless())
    with pytest.raises(UserError, match="no end-of-sequence symbol"):
        store.batches("train", 4, RowFormat("packed-eos", 8), 0)
    batch = store.batches("train", 1, RowFormat("packed", 8), 0).batch(0)
    assert batch.segment_ids.tolist() == [[1, 1, 1, 2, 2, 2, 0, 0]]
    assert batch.tokens[0, 6:].tolist() == [0, 0]


def test_counting_documents_in_parts_agrees(tmp_path, monkeypatch):
    store = many_documents(tmp_path, monkeypatch, 1, 2)
    for packing, length in itertools.product(PACKINGS, (3, 20)):
        assert store.batches("train", 1, RowFormat(packing, length), 0).num_rows == len(
            expected_windows(DOCUMENTS, length, packing)
        )


def stream_of(documents):
    """Return all tokens with an end token after each document."""
    return np.concatenate([np.append([byte + 16 for byte in text.encode()], EOS) for text in documents])


@pytest.mark.parametrize(("length", "stride", "rows", "seed"), [(5, None, 3, 0), (6, 4, 3, 2), (7, 7, 1, 5)])
def test_rows_of_a_stream_continue_the_last_batch(store, length, stride, rows, seed):
    """Every row reads the text in order from a position of its own, and wraps around at the end."""
    expected, step = stream_of(DOCUMENTS), stride or length
    batches = store.batches("train", rows, RowFormat("stream", length, stride), seed)
    period = (1 + (len(expected) - length) // step) // rows
    starts = [[(r * period + k + seed) % (rows * period) * step for r in range(rows)] for k in range(3 * period)]
    for k, places in enumerate(starts):
        np.testing.assert_array_equal(batches.batch(k).tokens, [expected[i : i + length] for i in places])
        np.testing.assert_array_equal(batches.batch(k, slice(0, 2)).tokens, batches.batch(k).tokens[:2])
    # All but one of the steps of every row begin where the step before ended, and each batch reads other text.
    assert all((np.diff(np.array(starts)[:, r]) == step).mean() > 1 - 1.5 / period for r in range(rows))
    assert len({place for places in starts[:period] for place in places}) == rows * period


def test_a_stream_is_evaluated_from_its_beginning(store):
    batches = store.batches("train", 2, RowFormat("stream", 10), 7)
    found = list(batches.evaluation(2, 4))
    expected, half = stream_of(DOCUMENTS), batches.num_rows // 2
    for k, batch in enumerate(found):
        np.testing.assert_array_equal(batch.tokens[1], expected[(half + k) * 10 :][:10])
    assert len(found) == 4
    (only,) = batches.evaluation(100, 4)  # fewer windows than rows: one batch, filled up
    assert (only.segment_ids.max(axis=1) > 0).sum() == batches.num_rows


def test_a_stream_needs_a_window_for_every_row(store):
    with pytest.raises(UserError, match="give more text"):
        store.batches("train", 100, RowFormat("stream", 10), 0).batch(0)


@pytest.mark.parametrize(("rows", "seed"), [(2, 0), (4, 3)])
def test_the_odd_rows_of_a_bidirectional_stream_read_backward(store, rows, seed):
    """A backward row reads the windows of the row before it in reverse order, each followed by the one before it."""
    length, stride = 7, 5
    batches = store.batches("train", rows, RowFormat("stream-both-ways", length, stride), seed)
    steps = batches.num_rows // (rows // 2)
    read = np.stack([batches.batch(step).tokens for step in range(steps)])
    np.testing.assert_array_equal(read[:, 1::2], read[::-1, ::2])
    backward = read[:, 1::2, ::-1]
    for step, here in enumerate(backward[1:]):
        goes_on = (here[:, : length - stride] == backward[step][:, stride:]).all(axis=1)
        assert goes_on.sum() >= rows // 2 - 1  # but at the text's beginning, where one goes on at its end
    both = store.batches("train", rows, RowFormat("stream", length, stride), seed)
    assert {tuple(row) for row in read.reshape(-1, length)} <= {
        tuple(row) for step in range(both.num_rows) for row in both.batch(step).tokens
    }
    with pytest.raises(UserError, match="must be even"):
        store.batches("train", 3, RowFormat("stream-both-ways", length), seed)
