"""Paths from the user: folders of this machine, or addresses in a bucket."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from etils import epath

from jaxlm.errors import UserError


def local_folder(path: str | os.PathLike[str], what: str) -> Path:
    """Return the path of a folder on a disk.

    Args:
        path: The folder.
        what: Its contents in the message, such as "runs".

    Raises:
        UserError: The path is an address such as gs://bucket/run, which `Path` would take as a folder below the working
            directory, or is not UTF-8, which Orbax needs.
    """
    name = os.fspath(path)
    if "://" in name:
        raise UserError(
            f"{path} is not a local folder; {what} are read and written locally, so give a folder of this machine and "
            "copy it."
        )
    if name.encode("utf-8", "ignore").decode() != name:
        raise UserError(f"the name {path} is not UTF-8, which {what} need; choose another folder.")
    return Path(path)


def any_path(path: str | os.PathLike[str]) -> epath.Path:
    """Return a path on a disk or in a bucket.

    Raises:
        UserError: No installed package reads the address, or the path is a device or a pipe.
    """
    with reading(path):
        found = epath.Path(path).expanduser()
        if "://" in str(found):
            found.exists()
    if "://" not in str(found) and os.path.exists(found) and not (os.path.isfile(found) or os.path.isdir(found)):
        raise UserError(f"{path} is neither a file nor a folder; write what it gives to a file.")
    return found


def check_output(
    path: str | os.PathLike[str] | None, flag: str, overwrite: bool = True, inputs: Iterable[str] = ()
) -> None:
    """Raise UserError if a command cannot write the file of a flag, or would replace a file that it must keep.

    Args:
        path: The file; None or "" for none.
        flag: The flag, for messages.
        overwrite: Whether the user lets the command replace a file. Files of a run folder are never replaced.
        inputs: Files that the command reads, and never replaces.
    """
    if not path:
        return
    file = Path(path)
    if file.is_dir():
        raise UserError(f"{path} is a folder; {flag} names a file.")
    if not file.absolute().parent.is_dir():
        raise UserError(f"{flag} {path} cannot be written: there is no folder {file.absolute().parent}.")
    if not file.is_file():  # a new file, or a device such as /dev/null
        return
    if any(file.resolve() == Path(name).resolve() for name in inputs if name):
        raise UserError(f"{flag} {path} would replace the file that is read; choose another.")
    for folder in file.resolve().parents:
        if (folder / "config.json").is_file() and (folder / "checkpoints").is_dir():
            raise UserError(f"{flag} {path} would replace a file of the run {folder}; choose another.")
    if not overwrite:
        raise UserError(f"{flag} {path} is there already; pass --overwrite to replace it, or choose another.")


def refuse_links(folder: Path) -> None:
    """Raise UserError for a symbolic link at any depth of a run folder.

    By such links a run folder from elsewhere could make jaxlm read or write files outside it.
    """
    for path in folder.rglob("*"):  # does not follow links
        if path.is_symlink():
            raise UserError(f"{path} is a symbolic link, which a run folder must not hold; put the file in its place.")


@contextlib.contextmanager
def without_empty_folders(folder: Path) -> Iterator[None]:
    """Remove `folder` and its parents at the end if they are new and still empty, as after a refusal."""
    new = [path for path in (folder.absolute(), *folder.absolute().parents) if not path.exists()]
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # a folder is not empty
            for path in new:
                path.rmdir()


@contextlib.contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn every exception of a library that reads `path` into a UserError: each library has exceptions of its own."""
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError as error:
        raise UserError(f"{error.filename or path} does not exist.") from error
    except OSError as error:
        what = error.strerror or error
        raise UserError(f"{error.filename or path} cannot be read ({what}); check its permissions.") from error
    except Exception as error:
        what = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(f"{path} cannot be read ({what}); is it whole, and what it should be?") from error
