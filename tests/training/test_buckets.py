"""Runs, token stores and text in buckets: of a Google Cloud Storage emulator and of an S3-compatible server."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from etils import epath

from jaxlm.cli import main
from jaxlm.data.corpus import open_corpus
from jaxlm.data.store import Store
from jaxlm.data.text import TextData
from jaxlm.errors import UserError
from jaxlm.paths import cause
from jaxlm.runs import lease
from jaxlm.runs.lease import Lease
from jaxlm.runs.load import load_run
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.trees import path_string
from tests.parallel.test_processes import processes
from tests.training.servers import free_port, serve, serve_gcs
from tests.training.support import Command, metadata, metrics, saved_steps, stopped_after, write_text


@pytest.fixture(scope="session")
def _gcs(tmp_path_factory) -> Iterator[str]:
    for address in serve_gcs(tmp_path_factory.mktemp("gcs"), free_port()):
        os.environ["TENSORSTORE_GCS_HTTP_URL"] = address  # TensorStore reads it once
        yield address


@pytest.fixture
def gcs(_gcs, monkeypatch, request) -> epath.Path:
    """A folder of a bucket, empty for each test."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", _gcs)
    monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "secret-token")
    return epath.Path("gs://bucket") / request.node.originalname


@pytest.fixture(scope="session")
def _s3() -> Iterator[str]:
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    port = free_port()
    yield from serve([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], port)


@pytest.fixture
def s3(_s3, monkeypatch, request) -> epath.Path:
    """A folder of a bucket, empty for each test."""
    for name, value in (("ENDPOINT_URL", _s3), ("ACCESS_KEY_ID", "key"), ("SECRET_ACCESS_KEY", "secret-token"),
                        ("REGION", "us-east-1"), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    urllib.request.urlopen(urllib.request.Request(f"{_s3}/bucket", method="PUT")).close()
    return epath.Path("s3://bucket") / request.node.originalname


@pytest.mark.slow
def test_a_run_in_a_bucket_is_the_run_on_a_disk(gcs, finished, preset, tmp_path, capsys):
    """Stopped by a signal, left with half a checkpoint, resumed: parameters, metrics and answers are the same."""
    run, flags = gcs / "run", ["--train.eval-every", "4", "--train.tracker", "tensorboard"]
    arguments = ["pretrain", str(preset), "--run-dir", str(run), *flags]
    assert stopped_after(7, arguments) == 128 + signal.SIGTERM
    assert not (run / ".lock").exists(), "the lease is given up"
    (run / "checkpoints" / "7" / "commit_success.txt").unlink()  # as if killed during the save
    capsys.readouterr()
    assert main(arguments) == 0
    assert "resumed at step 4" in capsys.readouterr().out
    assert saved_steps(run) == [4, 8, 12] and metadata(run, 12) == metadata(finished, 12)
    assert metrics(run) == metrics(finished)
    names = {path.name for path in run.iterdir()}
    assert {"config.json", "data.json", "tokenizer", "checkpoints", "metrics.jsonl"} < names and ".lock" not in names
    assert sum(name.startswith("events.out") for name in names) == 2
    written = [path.read_bytes() for path in run.glob("*") if path.is_file()]
    assert len(written) >= 5 and not any(b"secret-token" in content for content in written)

    said = []
    for folder in (run, finished):
        capsys.readouterr()
        assert main(["fill-mask", str(folder), "a [MASK] b"]) == 0
        assert main(["show", str(folder), "--examples", "2"]) == 0
        assert main(["export", str(folder), str(tmp_path / f"out-{len(said)}")]) == 0
        said.append(capsys.readouterr().out.replace(f"out-{len(said)}", "out"))
    assert said[0] == said[1]
    ours, theirs = ((tmp_path / f"out-{number}" / "model.safetensors").read_bytes() for number in (0, 1))
    assert ours == theirs
    more = ["--init-from", str(run), "--run-dir", str(gcs / "more"), "--train.steps", "1"]
    assert main(["pretrain", str(run), *more]) == 0
    assert saved_steps(gcs / "more") == [0, 1]


def test_a_lease(gcs, monkeypatch, capsys):
    monkeypatch.setattr(lease, "SECONDS", 3.0)
    monkeypatch.setattr(lease, "OLD", 60.0)
    with Lease(gcs):
        first = json.loads((gcs / ".lock").read_bytes())
        with pytest.raises(UserError, match=rf"is in use by another process \(process {os.getpid()} on"), Lease(gcs):
            pass
        assert json.loads((gcs / ".lock").read_bytes())["time"] > first["time"], "it is renewed"
    assert not (gcs / ".lock").exists()
    # Left by a process that was killed, long ago, and just now by clocks that differ.
    for seconds, wait in ((-100, (0, 2)), (-20, (3, 8)), (1000, (3, 8))):
        (gcs / ".lock").write_text(json.dumps({"owner": "process 1", "time": time.time() + seconds}))
        start = time.monotonic()
        with Lease(gcs):
            assert wait[0] <= time.monotonic() - start < wait[1]
    assert capsys.readouterr().err.count("belongs to process 1; waiting") == 2


def test_a_process_ends_that_has_lost_its_lease(gcs, monkeypatch):
    monkeypatch.setattr(lease, "SECONDS", 1.0)
    ends, said = threading.Event(), []
    monkeypatch.setattr(lease, "_exit", lambda sentence: (said.append(sentence), ends.set()))
    with Lease(gcs) as held:
        (gcs / ".lock").write_text(json.dumps({"owner": "process 1", "time": time.time()}))
        assert ends.wait(30) and said[0] == f"{gcs} now belongs to process 1."
        held._ended.set()
    assert (gcs / ".lock").exists(), "it is the other's"


def test_a_lease_that_is_renewed_at_the_last_moment_is_not_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "SECONDS", 0.5)
    sleep = time.sleep

    def renew(_):
        sleep(1)
        (tmp_path / ".lock").write_text(json.dumps({"owner": "process 1", "time": time.time()}))

    renew(0)
    monkeypatch.setattr(lease.time, "sleep", renew)
    with pytest.raises(UserError, match="in use by another process"), Lease(f"file://{tmp_path}"):
        pass


def test_only_one_process_takes_an_expired_lease(tmp_path, monkeypatch):
    """On a disk, whose TensorStore driver compares generations; the emulator ignores them."""
    monkeypatch.setattr(lease, "SECONDS", 3.0)
    (tmp_path / ".lock").write_text(json.dumps({"owner": "process 1", "time": 0}))
    both = threading.Barrier(2)
    read = Lease._read

    def read_together(self):
        found = read(self)
        if found[0].get("owner") == "process 1":
            both.wait(10)
        return found

    monkeypatch.setattr(Lease, "_read", read_together)

    def take(_):
        try:
            with Lease(f"file://{tmp_path}"):
                time.sleep(3)
                return True
        except UserError:
            return False

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(take, range(2))) == [False, True]


@pytest.mark.parametrize("store", ["gcs", pytest.param("s3", marks=pytest.mark.slow)])
def test_text_and_token_stores(store, request, tmp_path, monkeypatch):
    """The store of a text in a bucket, in a bucket, is the store of its file on a disk."""
    bucket = request.getfixturevalue(store)
    text = write_text(tmp_path / "text.txt")
    (bucket / "texts" / "a.txt").write_bytes(text.read_bytes())
    stores = []
    for source, cache in ((text, tmp_path / "cache"), (bucket / "texts" / "*.txt", bucket / "cache")):
        data = TextData(source=str(source), length=32, vocab_size=512, held_out=0.1, cache_dir=str(cache))
        stores.append(data.open(data.prepare_tokenizer()))
    assert list(open_corpus(str(bucket / "texts")).parts) == data.parts()
    ours, theirs = stores
    assert theirs.folder.startswith(str(bucket / "cache" / "stores")) and ours.fingerprint == theirs.fingerprint
    for split in ("train", "held_out"):
        one, other = getattr(ours, split), getattr(theirs, split)
        assert one.num_tokens == other.num_tokens
        assert (one.tokens.read(0, one.num_tokens) == other.tokens.read(0, one.num_tokens)).all()
    # Another build, which is killed, changes nothing of the finished store.
    again = Store(theirs.folder, str(bucket / "cache" / "shards"))
    with monkeypatch.context() as patch, pytest.raises(InterruptedError):
        for room in ("store", "text"):
            patch.setattr(f"jaxlm.data.{room}.is_finished", lambda folder: False)
        patch.setattr("jaxlm.data.store.read_facts", lambda *_: (_ for _ in ()).throw(UserError("not seen")))
        patch.setattr("jaxlm.data.splits._SplitWriter.add", lambda *_: (_ for _ in ()).throw(InterruptedError))
        data.open(data.prepare_tokenizer())
    assert (again.train.tokens.read(0, 100) == ours.train.tokens.read(0, 100)).all()
    # Found again, until the text changes.
    said = []
    assert data.open(data.prepare_tokenizer(), said.append).fingerprint == ours.fingerprint and not said
    (bucket / "texts" / "a.txt").write_bytes(text.read_bytes().swapcase())
    data = dataclasses.replace(data)  # an object lists its files once
    assert data.open(data.prepare_tokenizer(), said.append).fingerprint != ours.fingerprint


def refused(capsys, *arguments) -> str:
    assert main([str(argument) for argument in arguments]) == 2
    said = capsys.readouterr().err
    assert said.count("jaxlm: ") == 1 and "Traceback" not in said
    return said


def test_mistakes(gcs, preset, capsys):
    assert "cannot write in the run folder gs://no-bucket/run (NOT_FOUND" in refused(
        capsys, "pretrain", preset, "--run-dir", "gs://no-bucket/run")
    assert "gs://no-bucket/run is not a folder" in refused(capsys, "fill-mask", "gs://no-bucket/run", "[MASK]")
    assert "s3://bucket/run cannot hold a run: Orbax" in refused(
        capsys, "pretrain", preset, "--run-dir", "s3://bucket/run")
    error = OSError("503 of https://storage/upload/bucket?upload_id=secret, again")
    assert cause(error) == "503 of https://storage/upload/bucket again"
    (gcs / "notes.txt").write_text("mine")
    assert "holds other files (notes.txt" in refused(capsys, "pretrain", preset, "--run-dir", gcs)


@pytest.mark.slow
def test_a_missing_package():
    code = "import sys; sys.modules['gcsfs'] = None; from jaxlm.paths import any_path; any_path('gs://bucket/run')"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "cannot be read (Please install gcsfs to access Google Storage); in the clone, run `pip" in found.stderr


def params_of(run) -> dict[str, np.ndarray]:
    found = load_run(run).params
    return {path_string(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(found)[0]}


@pytest.mark.slow
def test_a_run_of_two_processes_is_killed_twice_and_ends_on_four(gcs, preset, tmp_path):
    """Killed while both tokenize and after a checkpoint: the parameters are those of one process left alone."""
    text = write_text(tmp_path / "text.txt").read_text()
    data = TextData(source=str(tmp_path / "text.txt"), vocab_size=512, cache_dir=str(tmp_path / "small"))
    data.prepare_tokenizer().save(tmp_path / "tokenizer")
    (gcs / "text.txt").write_text("\n\n".join(f"{number} {text}" for number in range(40_000_000 // len(text))))
    flags = ["--data.source", gcs / "text.txt", "--data.tokenizer", tmp_path / "tokenizer",
             "--train.steps", 100, "--train.checkpoint-every", 25, "--train.log-every", 25,
             # Adam multiplies rounding by the rate: at the preset's 1e-2, one process and four differ by 5e-6.
             "--optimizer.learning-rate", 1e-3]
    arguments = ["pretrain", preset, *flags, "--data.cache-dir", gcs / "cache", "--run-dir", gcs / "run"]

    def shards() -> list[str]:
        return [path.parent.name for path in (gcs / "cache").glob("shards/*/facts.json")]

    def kill_both_when(condition, folder) -> None:
        both = processes(folder, arguments, arguments)
        both[0].wait_until(condition)
        for process in both:
            process.kill()
        for process in both:
            assert process.wait() == -signal.SIGKILL, process.output
        (gcs / "run" / ".lock").unlink()  # rather than wait until it expires

    kill_both_when(shards, tmp_path / "1")
    own = TextData(source=str(gcs / "text.txt"), cache_dir=str(gcs / "cache"))
    parts, tokenizer = own.parts(), Tokenizer.load(tmp_path / "tokenizer")
    left = len(own.missing(parts[::2], tokenizer))  # of those that process 0 tokenizes
    assert len(parts) == 3 and 0 < len(shards()) < 3
    kill_both_when(lambda: any((gcs / "run" / "checkpoints").glob("*/commit_success.txt")), tmp_path / "2")
    output = (tmp_path / "2" / "process0.log").read_text()
    assert f"MB in {left} part" in output if left else "Tokenizing" not in output
    assert saved_steps(gcs / "run")[-1] < 100
    four = processes(tmp_path / "4", *[arguments] * 4)
    for process in four:
        assert process.wait() == 0, process.output
    assert "4 cpu devices" in four[0].output and "resumed at step" in four[0].output

    alone = Command(["pretrain", preset, *flags, "--data.cache-dir", tmp_path / "cache", "--run-dir",
                     tmp_path / "alone"], tmp_path / "alone.log")
    assert alone.wait() == 0, alone.output
    ours, theirs = (Store(str(next(folder.glob("stores/*"))), str(folder / "shards"))
                    for folder in (gcs / "cache", tmp_path / "cache"))
    for split in ("train", "held_out"):
        one, other = getattr(ours, split), getattr(theirs, split)
        assert one.documents == other.documents and (ours.counts(split) == theirs.counts(split)).all()
        for name, size in (("tokens", one.num_tokens), ("offsets", one.documents + 1)):
            assert (getattr(one, name).read(0, size) == getattr(other, name).read(0, size)).all()
    found, expected = params_of(gcs / "run"), params_of(tmp_path / "alone")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-6, err_msg=name)
    assert main(["export", str(gcs / "run"), str(tmp_path / "out")]) == 0
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out")
    assert model.config.vocab_size == len(transformers.AutoTokenizer.from_pretrained(tmp_path / "out"))
