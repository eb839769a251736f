"""The engines of tokenization: whoever makes the parts, the files are the same, byte for byte.

The pipeline of Beam needs the extra [beam], without which its tests are skipped.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import pickle
import random
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxlm.cli import main
from jaxlm.data import engine, parts, shards, text
from jaxlm.data.corpus import open_corpus
from jaxlm.data.text import TextData
from jaxlm.parallel.mesh import MeshConfig, make_mesh
from jaxlm.runs.load import load_model
from jaxlm.runs.resolve import resolve
from jaxlm.runs.session import Session, set_up
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.training.program import Program
from tests.parallel.test_processes import processes
from tests.training.support import Command, assert_same_arrays

LEAST, PARTS = 1 << 14, 8


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Parts of 16 KB, and processes for a text of any size."""
    monkeypatch.setattr(parts, "LEAST", LEAST)
    monkeypatch.setattr(engine, "_ALONE", 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A text of three files, whose documents have exact and near duplicates in other parts, and a tokenizer."""
    folder, draw = tmp_path_factory.mktemp("text"), random.Random(0)
    words = ["".join(draw.choice("bdfgklmnprst") + draw.choice("aeiou") for _ in range(draw.randint(1, 3)))
             for _ in range(400)]
    documents = [" ".join(draw.choice(words) for _ in range(draw.randint(20, 80))) for _ in range(450)]
    documents += [*documents[5:25], *(f"{text} bada" for text in documents[40:80])]
    draw.shuffle(documents)
    lines = [json.dumps({"text": text}) for text in documents]
    (folder / "a.txt").write_text("\n\n".join(documents[:220]) + "\n")
    (folder / "b.jsonl").write_text("\n".join(lines[220:400]) + "\n")
    (folder / "c.jsonl.gz").write_bytes(gzip.compress("\n".join(lines[400:]).encode()))
    data = TextData(source=str(folder / "*"), vocab_size=512, tokenizer_kind="byte-bpe", cache_dir=str(folder / "x"))
    data.prepare_tokenizer(list).save(folder / "tokenizer")
    shutil.rmtree(folder / "x")
    return folder


def flags(folder: Path, cache: Path, kind: str, *more: object) -> list[str]:
    own = {"source": folder / "*.*", "tokenizer": folder / "tokenizer", "cache-dir": cache, "deduplicate": kind}
    return [*itertools.chain(*((f"--data.{name}", str(value)) for name, value in own.items())), *map(str, more)]


def files(cache: Path) -> dict[str, bytes]:
    """The files of all shards, keys, duplicates and stores, without the remains of a process that was killed."""
    found = [path for path in cache.rglob("*") if path.is_file() and ".partial" not in str(path)]
    return {str(path.relative_to(cache)): path.read_bytes() for path in found}


class Engine:
    """Each method makes a cache of the text."""

    def __init__(self, folder: Path, cache: Path, kind: str) -> None:
        self.folder, self.cache, self.kind = folder, cache, kind

    def run(self, *more: object, code: int = 0) -> None:
        words = ["tokenize", "word2vec_tiny", *flags(self.folder, self.cache, self.kind, *more)]
        assert main(words) == code

    def one_process(self) -> None:
        self.run("--data.workers", 1)

    def two_processes(self) -> None:
        self.run("--data.workers", 2)

    def shares(self) -> None:
        for number in (2, 0, 1):
            self.run("--shard", f"{number}/3", "--data.workers", 1)
        self.run("--finish")

    def beam(self) -> None:
        pytest.importorskip("apache_beam")
        self.run("--beam")


def session_of(made: Engine) -> Session:
    return set_up(resolve("word2vec_tiny", flags(made.folder, made.cache, made.kind)), load_model).open_data(list)


@pytest.fixture(scope="module", params=["off", "near"])
def reference(folder, tmp_path_factory, request) -> Iterator[tuple[Engine, Program, object]]:
    """The cache of one process, a program that trains on it, and the state after three steps."""
    made = Engine(folder, tmp_path_factory.mktemp("reference") / "cache", request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "LEAST", LEAST)
        made.one_process()
        session = session_of(made)
        program = session.program(make_mesh(MeshConfig(), jax.devices()[:1]))
        yield made, program, three_steps(program, session)


def three_steps(program: Program, session: Session) -> object:
    state, source = program.init_state(program.init_params(0)), session.feed(program.mesh).after(0)
    for batch in itertools.islice(source, 3):
        state, _ = program.train_step(state, batch, program.constants)
    source.close()
    return jax.device_get(state)


@pytest.mark.parametrize("name", ["two_processes", "shares", "beam"])
def test_all_engines_write_the_same_bytes(name, reference, tmp_path):
    one, program, state = reference
    other = Engine(one.folder, tmp_path / "cache", one.kind)
    getattr(other, name)()
    expected, found = files(one.cache), files(other.cache)
    assert sorted(found) == sorted(expected)
    assert not [path for path, content in expected.items() if found[path] != content]
    folders = [path.partition("/")[0] for path in expected if path.endswith("facts.json")]
    counts = [folders.count(each) for each in ("shards", "keys", "duplicates")]
    assert counts == ([PARTS, PARTS, 1] if one.kind == "near" else [PARTS, 0, 0])
    if one.kind == "near":
        left_out = sum(np.frombuffer(expected[path], np.uint8)[:4088].sum() for path in expected if "repeats" in path)
        assert left_out == 60
    assert_same_arrays(three_steps(program, session_of(other)), state)


only_near = pytest.mark.parametrize("reference", ["near"], indirect=True)


class Small(Command):
    """A `Command` with small parts."""

    @staticmethod
    def target(arguments: list[str], environment: dict[str, str], log: str) -> None:
        parts.LEAST = LEAST
        Command.target(arguments, environment, log)


class Killed(Command):
    """A `Small` that is killed before its second shard is whole."""

    @staticmethod
    def target(arguments: list[str], environment: dict[str, str], log: str) -> None:
        real, numbers = shards._ShardWriter.close, itertools.count()

        def close(self):
            if next(numbers) == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            real(self)

        shards._ShardWriter.close = close
        Small.target(arguments, environment, log)


@only_near
def test_a_share_that_was_killed_is_repeated(reference, tmp_path, capsys, monkeypatch):
    """And --finish names what is missing as long as something is."""
    one, *_ = reference
    other = Engine(one.folder, tmp_path / "cache", one.kind)
    words = flags(one.folder, other.cache, one.kind, "--shard", "0/2", "--data.workers", 1)
    killed = Killed(["tokenize", "word2vec_tiny", *words], tmp_path / "log")
    assert killed.wait() == -signal.SIGKILL, killed.output
    other.run("--finish", code=2)
    said = capsys.readouterr().err.splitlines()[-1]
    # All parts are tokenized before the first keys are computed.
    flag, done = ("", 1) if one.kind == "off" else (f" with --data.deduplicate {one.kind}", 0)
    first = f"{done} ({one.folder / 'a.txt'} from {done * 16_384:,} to {(done + 1) * 16_384:,}), {done + 1} ("
    assert f"missing parts: {PARTS - done} of {PARTS}: {first}" in said
    assert f"…; repeat their --shard I/N{flag}, where" in said
    before = {path: os.stat(other.cache / path).st_mtime_ns for path in files(other.cache)}
    other.run("--shard", "0/2", "--data.workers", 1)
    half = PARTS // 2
    said = capsys.readouterr().out
    assert f"Shard 0/2 is stored; it has {half} parts. Missing parts: {half} of {PARTS}." in said
    assert before and before == {path: os.stat(other.cache / path).st_mtime_ns for path in before}, "made again"
    other.run("--shard", "1/2", "--data.workers", 1)
    assert f"Missing parts: 0 of {PARTS}: --finish writes the token store." in capsys.readouterr().out
    assert not (other.cache / "stores").exists()
    listed = []
    monkeypatch.setattr(text, "open_corpus", lambda *given: listed.append(given) or open_corpus(*given))
    other.run("--finish")
    assert files(other.cache) == files(one.cache) and len(listed) == 1


@pytest.mark.slow
@only_near
def test_the_hosts_of_a_run_take_shares(reference, tmp_path):
    one, *_ = reference
    words = ["pretrain", "word2vec_tiny", "--run-dir", tmp_path / "run", "--train.steps", 3, "--train.eval-every", 0]
    words = [*map(str, words), *flags(one.folder, tmp_path / "cache", one.kind)]
    both = processes(tmp_path / "logs", words, words, command=Small)
    for command in both:
        assert command.wait() == 0, command.output
    assert files(tmp_path / "cache") == files(one.cache)


@pytest.mark.parametrize("more, sentence", [
    (["--shard", "0/2", "--finish"], "--shard and --finish exclude each other; choose one."),
    (["--beam", "--shard", "0/2", "--", "--runner=X"], "--shard and --beam exclude each other"),
    (["--shard", "0/2", "--report"], "--report describes the whole text; give it with --finish"),
    (["--finish", "--", "--runner=DataflowRunner"], "what follows -- are pipeline options of Beam; add --beam"),
])
def test_options_that_exclude_each_other(more, sentence, capsys):
    assert main(["tokenize", "word2vec_tiny", *more]) == 2
    assert sentence in capsys.readouterr().err


def test_a_worker_of_beam_hands_back_its_sentence(folder, tmp_path, capsys):
    pytest.importorskip("apache_beam")
    shutil.copytree(folder, tmp_path / "text")
    # A small file is in one part with c.jsonl.gz.
    (tmp_path / "text" / "d.jsonl.gz").write_bytes(gzip.compress(b'{"text": 1'))
    here, local = (Engine(tmp_path / "text", tmp_path / name, "near") for name in ("here", "local"))
    here.run("--beam", code=2)
    said = capsys.readouterr().err
    local.run("--data.workers", 1, code=2)
    assert said.splitlines()[-1] == capsys.readouterr().err.splitlines()[-1] and "d.jsonl.gz, line 1" in said
    assert "Traceback" not in said and not list((here.cache / "failures").iterdir())
    assert not (here.cache / "duplicates").exists(), "the keys of a part were missing"
    assert sum(path.endswith("facts.json") for path in files(here.cache)) == 2 * (PARTS - 1), "the others are done"
    here.run("--beam", "--", "--runner=Nonsense", code=2)
    assert "Beam refuses the options after -- (Unexpected pipeline runner: Nonsense." in capsys.readouterr().err


def test_a_pipeline_that_fails_is_a_sentence(folder, tmp_path, capsys, monkeypatch):
    beam = pytest.importorskip("apache_beam")

    def run(self):
        raise RuntimeError("a worker was lost\nTraceback: many lines")

    monkeypatch.setattr(beam.Pipeline, "run", run)
    Engine(folder, tmp_path / "cache", "off").run("--beam", code=2)
    said = capsys.readouterr().err
    assert "the pipeline of Beam has failed (a worker was lost Traceback: many lines); run the command again" in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("text", ["", "\n\n"])
@pytest.mark.parametrize("more", [[], ["--finish"], ["--beam"]])
def test_no_text(text, more, folder, tmp_path, capsys):
    if more == ["--beam"]:
        pytest.importorskip("apache_beam")
    (tmp_path / "empty.txt").write_text(text)
    own = flags(folder, tmp_path / "cache", "near", "--data.source", tmp_path / "empty.txt", *more)
    assert main(["tokenize", "word2vec_tiny", *own]) == 2
    assert re.search("holds no text|has no text to tokenize|missing parts: ", capsys.readouterr().err)


@pytest.mark.parametrize("kind", ["unigram", "byte-bpe", "words"])
def test_a_tokenizer_is_pickled_by_its_definition(kind, folder, tmp_path):
    source, cache = str(folder / "a.txt"), str(tmp_path / "cache")
    tokenizer = TextData(source=source, vocab_size=512, tokenizer_kind=kind, cache_dir=cache).prepare_tokenizer(list)
    tokenizer.encode("bada")  # its caches stay here
    first, second = (pickle.loads(pickle.dumps(tokenizer)) for _ in range(2))
    assert first == tokenizer and first is second and first is not tokenizer
    assert first.encode("bada kilo [MASK]") == tokenizer.encode("bada kilo [MASK]")
    assert isinstance(first, Tokenizer) and first.vocabulary.pieces == tokenizer.vocabulary.pieces
