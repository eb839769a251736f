"""Atomic writes."""

from __future__ import annotations

import os

from etils import epath

from jaxlm.paths import write_whole


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """After a power cut, a renamed file that is only in memory would be empty."""
    path, synced, fsync = epath.Path(tmp_path) / "config.json", [], os.fsync

    def watched(descriptor: int) -> None:
        fsync(descriptor)
        synced.append((os.fstat(descriptor).st_size, path.exists()))

    monkeypatch.setattr(os, "fsync", watched)
    write_whole(path, b"four")
    assert synced == [(4, False)] and path.read_bytes() == b"four" and len(list(path.parent.iterdir())) == 1
