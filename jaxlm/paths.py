"""What a user may give as a path: one of this machine, or an address in a bucket."""

from __future__ import annotations

import os
from pathlib import Path

from etils import epath

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


def any_path(path: str | os.PathLike[str]) -> epath.Path:
    """A path on a disk or in a bucket. UserError for an address that no installed package reads."""
    try:
        found = epath.Path(path).expanduser()
        if "://" in str(found):
            found.exists()
    except Exception as error:  # each package has its own
        raise UserError(
            f"{path} cannot be opened ({error}); give a path of this machine, or install what reads it."
        ) from error
    return found
