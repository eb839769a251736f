"""The lock of a run folder in a bucket, which has no file locks: an object with its owner and a time, renewed."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from typing import Any, Self

import tensorstore as ts

from jaxlm.errors import UserError
from jaxlm.parallel.hosts import log
from jaxlm.paths import cause

SECONDS = 120.0
"""Time without a renewal after which another process may take the lease."""
OLD = 3600.0
"""Age of a renewal after which a lease is not watched but taken."""
NAME = ".lock"


class Lease:
    """Exclusive right to write in a folder of a bucket, held for the duration of a `with` block.

    Every write is conditional on the generation of the object that was read before, so of several processes that find
    a lease expired only one gets it. A lease has expired if a watching process sees it unchanged for `SECONDS`, or if
    its timestamp is more than `OLD` seconds old, which exceeds any clock skew. A process that loses its
    lease exits at its next renewal, within `SECONDS` / 6.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Name the folder by its address; nothing is read or written yet."""
        self._folder = os.fspath(folder)
        began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        self._owner = {
            "owner": f"process {os.getpid()} on {socket.gethostname()}, since {began}", "id": uuid.uuid4().hex
        }
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew_until_the_end, name="jaxlm-lease", daemon=True)

    def __enter__(self) -> Self:
        """Take the lease; a valid one of another process is watched for up to `SECONDS`.

        Raises:
            UserError: Another process renews the lease, or the folder cannot be written.
        """
        try:
            self._store = ts.KvStore.open(self._folder.rstrip("/") + "/").result()
            self._acquire()
        except (ValueError, OSError) as error:
            raise UserError(
                f"cannot write in the run folder {self._folder} ({cause(error).partition(' [')[0]}); check the bucket, "
                "its permissions and your login."
            ) from error
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Give the lease up."""
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(ValueError, OSError):  # it expires anyway
            lease, generation = self._read()
            if lease.get("id") == self._owner["id"]:
                self._store.write(NAME, None, if_equal=generation).result(timeout=SECONDS / 6)

    def _acquire(self) -> None:
        watched, start = None, time.monotonic()
        while True:
            lease, generation = self._read()
            if lease.get("id") == self._owner["id"]:  # the answer to a write was lost
                return
            if lease and watched not in (None, generation):
                raise UserError(
                    f"{self._folder} is in use by another process ({lease.get('owner')}); wait for it or choose "
                    "another --run-dir."
                )
            has_expired = time.time() - lease.get("time", 0) > OLD or time.monotonic() - start > SECONDS
            if (not lease or has_expired) and self._write(generation):
                return
            if not lease:
                continue
            if watched is None:
                log(f"{self._folder} belongs to {lease.get('owner')}; waiting to see whether that is still running.")
            watched = generation
            time.sleep(min(1.0, SECONDS / 10))

    def _read(self) -> tuple[dict[str, Any], bytes]:
        """Return the lease, {} for none or a damaged one, and its generation."""
        found = self._store.read(NAME).result(timeout=SECONDS / 6)
        try:
            return dict(json.loads(found.value)), found.stamp.generation
        except (ValueError, TypeError):
            return {}, found.stamp.generation

    def _write(self, generation: bytes) -> bool:
        """Write the lease unless it has changed since `generation`; return whether it was written."""
        value = json.dumps(self._owner | {"time": time.time()}).encode()
        return bool(self._store.write(NAME, value, if_equal=generation).result(timeout=SECONDS / 6).generation)

    def _renew_until_the_end(self) -> None:
        renewed = time.monotonic()
        while not self._ended.wait(SECONDS / 6):
            try:
                lease, generation = self._read()
                if lease.get("id") != self._owner["id"]:
                    return _exit(f"{self._folder} now belongs to {lease.get('owner', 'no process')}.")
                now = time.monotonic()
                if self._write(generation):  # otherwise the next reading tells why
                    renewed = now
            except (ValueError, OSError) as error:
                if time.monotonic() - renewed > 0.75 * SECONDS:
                    return _exit(f"the lock of {self._folder} cannot be renewed ({cause(error)}).")


def _exit(sentence: str) -> None:
    log(f"{sentence} This process ends; run the same command to go on.")
    os._exit(1)  # at once: nothing more may be written
