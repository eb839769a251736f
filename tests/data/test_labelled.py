"""Batches of labelled rows: every row once an epoch, similar lengths together, a function of (seed, step)."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxlm.data.base import RowFormat
from jaxlm.data.labelled import EncodedExample, LabelledData, Record
from jaxlm.errors import UserError
from tests.data.stand_ins import ByteTokenizer


@dataclasses.dataclass(frozen=True)
class Numbers(LabelledData):
    """Rows of given lengths: the source "3 1 2" has three rows."""

    def read(self, path):
        for number, size in enumerate(map(int, path.split())):
            yield Record(str(number), f"row {number}", {"size": size}, (str(size),))


@dataclasses.dataclass(frozen=True)
class Encoder:
    def encode(self, records, tokenizer, length):
        made = []
        for number, row in enumerate(records):
            size = min(row.values["size"], length)
            arrays = {"ids": np.arange(1, size + 1, dtype=np.int32), "label": np.int32(number)}
            made.append(EncodedExample(number, arrays))
        return made

    @property
    def padding(self):
        return {"ids": 0}


def opened(source, **options):
    return Numbers(source=source, length=64, held_out=0.0, **options).open(ByteTokenizer(), print)


def batches(source, rows, seed=0, **options):
    return opened(source, **options).batches("train", rows, RowFormat(Encoder(), 64), seed)


SOURCE = " ".join(str(1 + (i * 37) % 64) for i in range(100))


@pytest.mark.parametrize("buckets", [True, False])
def test_an_epoch_has_every_row_once(buckets):
    """An epoch may end within a batch, and batches may be read in any order."""
    found = batches(SOURCE, 8, buckets=buckets)
    steps = 32 * 25  # 64 epochs: whole pools
    rows = np.concatenate([found.batch(step)["label"] for step in range(steps)])
    assert (np.bincount(rows) == steps * 8 // 100).all()
    one = found.batch(17)
    again = batches(SOURCE, 8, buckets=buckets).batch(17)
    for name in one:
        np.testing.assert_array_equal(one[name], again[name])
    assert any((found.batch(k)["label"] != batches(SOURCE, 8, seed=1, buckets=buckets).batch(k)["label"]).any()
               for k in range(3))


@pytest.mark.parametrize(("rows", "batch", "epochs"), [(100, 8, 1), (100, 16, 3), (90, 4, 2), (25, 16, 3)])
def test_a_run_of_whole_epochs_reads_all_rows_as_often(rows, batch, epochs):
    """Only the last batch has rows of the next epoch, although epochs and runs end within pools of 32 batches."""
    found = batches(" ".join(SOURCE.split()[:rows]), batch)
    steps = -(-rows * epochs // batch)
    read = np.bincount(np.concatenate([found.batch(step)["row"] for step in range(steps)]), minlength=rows)
    assert read.min() == epochs and (read - epochs).sum() == steps * batch - rows * epochs < batch


def test_no_row_is_twice_in_a_batch():
    """A pool of batches has every row several times. Only a batch in which an epoch ends may repeat a row."""
    found = batches(" ".join(map(str, range(1, 41))), 8)
    twice = [len(set(found.batch(step)["label"])) < 8 for step in range(32)]
    assert sum(twice) == 0  # 40 rows are five batches


def test_rows_of_similar_length_are_padded_little():
    found = batches(SOURCE, 4)
    made = [found.batch(step) for step in range(64)]
    assert {batch["ids"].shape[1] for batch in made} == {8, 16, 24, 32, 48, 64}
    for batch in made:
        sizes = (batch["ids"] > 0).sum(1)
        width = batch["ids"].shape[1]
        assert sizes.max() <= width and (width == 8 or sizes.max() > width // 2)
        place = np.arange(width)
        np.testing.assert_array_equal(batch["ids"], np.where(place < sizes[:, None], place + 1, 0))
    shares = [(batch["ids"] > 0).mean() for batch in made]
    plain = [(batches(SOURCE, 4, buckets=False).batch(step)["ids"] > 0).mean() for step in range(64)]
    assert np.mean(shares) > 0.75 > 0.55 > np.mean(plain)


def test_a_host_reads_its_rows_of_the_same_batch():
    found = batches(SOURCE, 8)
    whole = found.batch(5)
    halves = [found.batch(5, slice(start, start + 4)) for start in (0, 4)]
    for name, array in whole.items():
        np.testing.assert_array_equal(array, np.concatenate([half[name] for half in halves]))


def test_evaluation_has_every_row_once_and_fills_up():
    found = list(batches("5 9 60 2 7", 4).evaluation(4, 100))
    rows = np.concatenate([batch["row"] for batch in found])
    assert sorted(rows) == [-1, -1, -1, 0, 1, 2, 3, 4]
    assert (found[-1]["ids"][found[-1]["row"] < 0] == 0).all()
    assert sum(len(batch["row"]) for batch in batches("5 9 60 2 7", 2).evaluation(2, 1)) == 2


def test_rows_of_one_group_are_held_out_together():
    source = Numbers(source="3 3 3 5 5 9 9 9 9 1", length=64, held_out=0.5).open(ByteTokenizer(), print)
    sizes = {split: {row.values["size"] for row in rows} for split, rows in source.records.items()}
    assert not sizes["train"] & sizes["held_out"] and sizes["train"] | sizes["held_out"] == {1, 3, 5, 9}
    assert "6 to train on, 4 held out (2 of 4 groups of rows that share texts" in source.summary


@pytest.mark.parametrize(("source", "share", "said"), [
    ("3 3 3", 0.1, "3 to train on, 0 held out (0 of 1 groups of rows that share texts, drawn whole, so not"),
    ("3 3 3 5 5", 0.2, "3 to train on, 2 held out (1 of 2 groups of rows that share texts, drawn whole, so not"),
])
def test_the_summary_names_groups_that_are_too_large(source, share, said):
    assert said in Numbers(source=source, length=64, held_out=share).open(ByteTokenizer(), print).summary


def test_the_fingerprint_depends_on_rows_and_tokenizer():
    assert opened("1 2").fingerprint == opened("1 2", buckets=False).fingerprint != opened("2 1").fingerprint


def test_bad_values():
    with pytest.raises(UserError, match="source is empty"):
        Numbers().open(ByteTokenizer(), print)
    with pytest.raises(UserError, match=r"data.held_out is 0.7; it must be in \[0, 0.5\]"):
        Numbers(source="1", held_out=0.7).open(ByteTokenizer(), print)
    with pytest.raises(UserError, match="--init-from"):
        Numbers(source="1").prepare_tokenizer()
