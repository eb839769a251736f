"""Processes of this machine: the bytes of one, errors, kills and progress."""

import dataclasses
import gzip
import os
import re
import signal

import numpy as np
import pytest

from jaxlm.data import engine, parts
from jaxlm.data.engine import jobs_of, run_jobs
from jaxlm.data.text import TextData
from jaxlm.errors import UserError
from tests.data.stand_ins import ByteTokenizer, files_of


class OddTokenizer(ByteTokenizer):
    """It prints, and at certain words fails or dies."""

    def encode_arrays(self, texts):
        print("a line that is no answer", flush=True)
        for text in texts:
            if "fail" in text:
                raise ValueError("an error of a library")
            if "die" in text:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().encode_arrays(texts)


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A text of several parts, which processes read."""
    monkeypatch.setattr(engine, "_ALONE", 0)
    monkeypatch.setattr(parts, "LEAST", 2000)
    draw, source = np.random.default_rng(0), tmp_path / "text.txt"
    source.write_text("\n\n".join(" ".join(map(str, draw.integers(0, 999, 20))) for _ in range(200)))
    return TextData(source=str(source), cache_dir=str(tmp_path / "cache"), held_out=0.05, workers=2)


def test_processes_give_the_bytes_of_one(data, tmp_path):
    """Also keys of duplicates, and what a tokenizer prints does not disturb."""
    near, said = dataclasses.replace(data, deduplicate="near"), []
    near.open(OddTokenizer(), said.append)
    assert re.fullmatch(r"Tokenizing \S+ \(0\.0 MB in \d+ parts\)", said[0])
    alone = dataclasses.replace(near, cache_dir=str(tmp_path / "alone"), workers=1)
    alone.open(ByteTokenizer(), list)
    assert files_of(tmp_path / "cache") == files_of(tmp_path / "alone")


def test_shares_of_several_machines_give_the_bytes_of_one(data, tmp_path, monkeypatch):
    """In any order, and one that is done twice."""
    monkeypatch.setattr(engine, "_ALONE", 1 << 40)
    near = dataclasses.replace(data, deduplicate="near")
    for shard in (2, 0, 2, 1):
        near.tokenize(ByteTokenizer(), shard, 3, list)
    assert not near.missing(near.parts(), ByteTokenizer())
    near.open(ByteTokenizer(), lambda line: line.startswith("Tokenizing") and pytest.fail(line))
    alone = dataclasses.replace(near, cache_dir=str(tmp_path / "alone"))
    alone.open(ByteTokenizer(), list)
    assert files_of(tmp_path / "cache") == files_of(tmp_path / "alone")


@pytest.mark.parametrize(("text", "error", "message"), [
    (b"not UTF-8: \xff", UserError, r"text\.txt is not UTF-8 text.*; convert it"),
    pytest.param(b"fail", ValueError, r"^an error of a library$", marks=pytest.mark.slow),
])
def test_errors_of_processes_arrive(data, text, error, message):
    with open(data.source, "ab") as file:
        file.write(b"\n\n" + text)
    with pytest.raises(error, match=message):
        data.open(OddTokenizer(), list)


def test_a_process_that_is_killed(data, tmp_path):
    """The others finish what they have begun; the next start makes what is missing."""
    with open(data.source, "a") as file:
        file.write("\n\ndie")
    says = "ended with exit code -9, perhaps for lack of memory; run again, which goes on, with fewer --data.workers"
    with pytest.raises(UserError, match=says):
        data.open(OddTokenizer(), list)
    before = {path: path.stat().st_ino for path in (tmp_path / "cache" / "shards").iterdir() if path.name[0] != "."}
    assert not list((tmp_path / "cache").glob("stores/*"))
    data.open(ByteTokenizer(), list)
    assert before and {path: path.stat().st_ino for path in before} == before


@pytest.mark.parametrize("is_compressed", [False, True])
def test_progress_is_told(data, monkeypatch, tmp_path, is_compressed):
    """Done is at most the whole, also of a file that holds more text than the estimate."""
    monkeypatch.setattr(engine, "_MINUTE", 0.0)
    monkeypatch.setattr(engine, "_ALONE", 1 << 40)
    monkeypatch.setattr("sys.stderr.isatty", lambda: False, raising=False)
    source = tmp_path / "large.txt"
    source.write_text("\n\n".join(["words of a text " * 999] * 200))
    if is_compressed:
        (tmp_path / "large.txt.gz").write_bytes(gzip.compress(source.read_bytes()))
        source = tmp_path / "large.txt.gz"
    monkeypatch.setattr(parts, "LEAST", 1 << 20)
    data, said = dataclasses.replace(data, source=str(source)), []
    jobs = jobs_of(data.works(ByteTokenizer()), data.parts())
    run_jobs(jobs, 1, "Tokenizing it", said.append)
    size = sum(part.size for _, part in jobs) / 1e6
    assert said[0] == f"Tokenizing it ({size:,.1f} MB in {len(jobs):,} part{'s' * (len(jobs) > 1)})"
    told = [re.fullmatch(r"([\d,]+) of ([\d,]+) MB, [\d,.]+ MB/s, [\d,]+ min left", line) for line in said[1:]]
    assert len(told) > 2 and all(told)
    done = [float(match[1]) for match in told]
    assert done == sorted(done) and done[-1] == float(told[-1][2]) == round(size)
    said.clear()
    run_jobs(jobs, 1, "Tokenizing it", said.append)
    assert not said, "nothing is left to do"
