"""Folders that are written and read with the system's own calls."""

from __future__ import annotations

import os
from pathlib import Path

from jaxlm.errors import UserError


def local_folder(path: str | os.PathLike[str], what: str) -> Path:
    """The path of a folder on a disk. UserError for an address such as gs://bucket/run, of which `Path` would make
    gs:/bucket/run below the working directory. what: "runs", ..., for the message."""
    if "://" in os.fspath(path):
        raise UserError(
            f"{path} is not a local folder; {what} are read and written locally, so give a folder of this machine and "
            "copy it."
        )
    return Path(path)
