"""Atomic writes."""

from __future__ import annotations

import errno
import gzip
import os
import stat
import time

import pytest
from etils import epath

from jaxlm.data.arrays import damaged
from jaxlm.errors import UserError
from jaxlm.paths import any_path, at_once, new_file, new_folder, reading, real_path, write_whole, writing


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """After a power cut, a renamed file that is only in memory would be empty."""
    path, synced, fsync = epath.Path(tmp_path) / "config.json", [], os.fsync

    def watched(descriptor: int) -> None:
        fsync(descriptor)
        synced.append((os.fstat(descriptor).st_size, path.exists()))

    monkeypatch.setattr(os, "fsync", watched)
    write_whole(path, b"four")
    assert synced == [(4, False)] and path.read_bytes() == b"four" and len(list(path.parent.iterdir())) == 1


def test_the_home_folder_is_found_as_by_a_shell():
    """`--init-from=~/model` comes as it is."""
    assert real_path("~/model") == os.path.realpath(os.path.join(os.path.expanduser("~"), "model"))


def test_a_folder_that_cannot_get_its_name_is_refused(tmp_path):
    """Unless another process has written it meanwhile."""
    path = epath.Path(tmp_path) / "shard"
    with pytest.raises(UserError, match=f"{path} cannot be written"), new_folder(path, "facts.json"):
        path.write_text("a file")
    path.unlink()
    with new_folder(path, "facts.json") as new:
        (new / "tokens").write_text("of this process")
        path.mkdir()
        (path / "facts.json").write_text("of the other")
    assert [file.name for file in path.iterdir()] == ["facts.json"] and len(list(path.parent.iterdir())) == 1


def test_what_a_killed_process_has_left_is_removed(tmp_path):
    """But not what another one has written within a day, nor another folder's."""
    path, old, new = epath.Path(tmp_path) / "shard", time.time() - 90_000, time.time() - 80_000
    made = {"shard.1": (old, old), "shard.2": (old, new), "shard.3": (new, old), "other.4": (old, old)}
    for name, times in made.items():
        folder = tmp_path / f".{name}.partial"
        folder.mkdir()
        (folder / "tokens").touch()
        for file, changed in zip((folder, folder / "tokens"), times, strict=True):
            os.utime(file, (changed, changed))
    with new_folder(path, "facts.json") as new:
        (new / "facts.json").touch()
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        ".other.4.partial", ".shard.2.partial", ".shard.3.partial", "shard"]


def test_a_folder_of_many_is_listed_once(tmp_path, monkeypatch):
    listed, glob = [], type(epath.Path(tmp_path)).glob
    monkeypatch.setattr(type(epath.Path(tmp_path)), "glob", lambda self, of: listed.append(self) or glob(self, of))
    for number in range(20):
        with new_folder(epath.Path(tmp_path) / "shards" / str(number), "facts.json") as new:
            (new / "facts.json").touch()
    assert len(listed) == 1 and len(list((tmp_path / "shards").iterdir())) == 20


def test_answers_that_nobody_has_taken_do_not_fill_the_memory():
    asked = []
    answers = at_once(lambda number: asked.append(number) or -number, range(1000))
    assert next(answers) == 0 and len(asked) < 100
    assert list(answers) == [-number for number in range(1, 1000)]


def test_a_failure_of_a_bucket_may_pass_and_a_damaged_file_does_not():
    """Exit code 1 makes a launcher start again, 2 does not."""
    def wrapped(cause: Exception) -> Exception:
        error = Exception("while reading an array")
        error.__cause__ = cause
        return error

    http, aiohttp = pytest.importorskip("gcsfs.retry").HttpError, pytest.importorskip("aiohttp")
    cases = (
        (http({"code": 503, "message": "busy"}), 1), (http({"code": 429, "message": "slow down"}), 1),
        (http({"code": 412, "message": "no"}), 2), (aiohttp.ServerDisconnectedError(), 1), (TimeoutError(), 1),
        (OSError(errno.EIO, "internal error"), 1), (gzip.BadGzipFile("no gzip"), 2), (PermissionError("forbidden"), 2),
        (ValueError("cut off"), 2), (ValueError("ABORTED: all 32 retry attempts failed"), 1),
        (wrapped(OSError(errno.EIO, "internal error")), 1),
    )
    path = "gs://bucket/shards/name/train/tokens"
    for error, code in cases:
        for block in (reading, writing):
            with pytest.raises(UserError) as caught, block(path):
                raise error
            assert caught.value.exit_code == code, error
        found = damaged(path, error)
        is_damage = code == 2 and not isinstance(error, PermissionError)
        assert found.exit_code == code and ("delete" in str(found)) == is_damage
    assert damaged("/disk/shards/name/train/tokens", TimeoutError()).exit_code == 2


def test_a_file_that_the_system_cannot_read_now_is_not_to_be_deleted():
    for number in (errno.EACCES, errno.EMFILE, errno.ENFILE, errno.ESTALE):
        found = damaged("/disk/shards/name/tokens", OSError(number, os.strerror(number)))
        assert str(found).startswith(f"/disk/shards/name/tokens cannot be read ({os.strerror(number)}), but may be")
        assert "delete" not in str(found) and found.exit_code == (1 if number == errno.ESTALE else 2)
    for number in (errno.ENOENT, errno.ENOTDIR, errno.EIO):
        assert "delete /disk/shards/name and" in str(damaged("/disk/shards/name/tokens", OSError(number, "…")))


def test_a_file_is_replaced_whole_and_a_pipe_or_link_written_in_place(tmp_path):
    path, link, pipe = tmp_path / "a", tmp_path / "link", tmp_path / "pipe"
    path.write_text("before")
    with pytest.raises(ZeroDivisionError), new_file(path) as file:
        file.write(b"part")
        raise ZeroDivisionError
    assert path.read_text() == "before" and len(list(tmp_path.iterdir())) == 1
    link.symlink_to(path)
    with new_file(link) as file:
        file.write(b"after")
    assert link.is_symlink() and path.read_text() == "after"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with new_file(pipe) as file:
        file.write(b"piped")
    assert os.read(reader, 9) == b"piped" and stat.S_ISFIFO(pipe.stat().st_mode)
    os.close(reader)


def test_a_bucket_that_says_nothing_is_asked_again(monkeypatch):
    """Without a limit gcsfs waits forever; aiohttp's errors of a socket are among those after which it tries again."""
    gcsfs, aiohttp = pytest.importorskip("gcsfs"), pytest.importorskip("aiohttp")
    monkeypatch.setattr(type(epath.Path("gs://bucket/run")), "exists", lambda self: True)
    any_path("gs://bucket/run")
    limit = gcsfs.GCSFileSystem(token="anon", skip_instance_cache=True).requests_timeout
    assert (limit.total, limit.sock_read) == (None, 60) and issubclass(aiohttp.SocketTimeoutError, aiohttp.ClientError)
