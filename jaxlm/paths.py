"""Paths from the user: folders of this machine, or addresses in a bucket.

`etils.epath` reads and writes both; behind it gcsfs and s3fs do so in buckets. What an object store cannot do stands
here (`write_whole`), in `jaxlm.training.metrics` (appended files) and in `jaxlm.runs.lease` (locks).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import fsspec
from etils import epath

from jaxlm.errors import UserError, install, outage

DEFAULT_CACHE = "~/.cache/jaxlm"
"""Cache folder without $JAXLM_CACHE."""
JSON_TYPES = {dict: "an object", list: "a list", str: "text", int: "an integer", float: "a number", bool: "a boolean"}
"""Names of JSON types in error messages."""
TEXT = (str, int, float)
"""Form of a text in `check_form`, which may be written as a number."""

_ABANDONED = 24 * 3600  # seconds; longer than a part takes, whose keys are written at its end
_AT_ONCE = 32  # requests to a bucket

# The same clients on every machine: TensorFlow's, where it is installed, would read no S3.
os.environ.setdefault("EPATH_USE_TF", "false")
# gcsfs would ask another service for the kind of each bucket, and warn where it has no permission to.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
for _protocol in ("gs", "gcs", "s3"):  # a cached listing would hide what other processes have written
    fsspec.config.conf.setdefault(_protocol, {}).setdefault("use_listings_cache", False)


def in_bucket(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is an address in a bucket, such as gs://bucket/run."""
    return "://" in os.fspath(path)


def local_folder(path: str | os.PathLike[str], what: str) -> Path:
    """Return the path of a folder on a disk.

    Messages name its contents `what`, such as "runs".

    Raises:
        UserError: The path is an address such as gs://bucket/run, which `Path` would take as a folder below the working
            directory, or is not UTF-8, which Orbax needs.
    """
    if in_bucket(path):
        raise UserError(
            f"{path} is not a local folder; {what} are read and written locally, so give a folder of this machine and "
            "copy it."
        )
    if (name := os.fspath(path)).encode("utf-8", "ignore").decode() != name:
        raise UserError(f"the name {path} is not UTF-8, which {what} need; choose another folder.")
    return Path(path)


def run_path(path: str | os.PathLike[str]) -> epath.Path:
    """Return the path of a run folder, on a disk or in Google Cloud Storage.

    Raises:
        UserError: Orbax has no checkpoints there, or the path is not UTF-8, or as `any_path`.
    """
    if not in_bucket(path):
        local_folder(path, "runs")
    elif not os.fspath(path).startswith("gs://"):
        raise UserError(f"{path} cannot hold a run: Orbax keeps checkpoints only on disks and in gs:// buckets.")
    return any_path(path)


def absolute(path: epath.Path) -> epath.Path:
    """Return the path independent of the working directory, which `epath` would put before an address."""
    return path if in_bucket(path) else path.absolute()


def real_path(path: str | os.PathLike[str]) -> str:
    """Return the absolute path without symbolic links and "~"; an address as it is."""
    return os.fspath(path).rstrip("/") if in_bucket(path) else os.path.realpath(os.path.expanduser(path))


def any_path(path: str | os.PathLike[str]) -> epath.Path:
    """Return a path on a disk or in a bucket.

    Raises:
        UserError: No installed package reads the address, or the path is a device or a pipe.
    """
    if os.fspath(path).startswith(("http://", "https://")):
        raise UserError(f"{without_queries(os.fspath(path))} is a web address; download it, or name a bucket (gs://…).")
    with reading(path):
        found = epath.Path(path).expanduser()
        if in_bucket(found):
            if not os.fspath(found).partition("://")[2].strip("/"):  # which its client would ask for a minute
                raise UserError(f"{path} names no bucket.")
            limit_waiting()
            found.exists()
    if not in_bucket(found) and os.path.exists(found) and not (os.path.isfile(found) or os.path.isdir(found)):
        raise UserError(f"{path} is neither a file nor a folder; write what it gives to a file.")
    return found


def limit_waiting() -> None:
    """Have gcsfs ask again where a server says nothing for a minute; without this it waits forever."""
    with contextlib.suppress(ImportError):  # of other buckets only
        from aiohttp import ClientTimeout

        for protocol in ("gs", "gcs"):
            limit = ClientTimeout(total=None, sock_connect=30, sock_read=60)
            fsspec.config.conf[protocol].setdefault("requests_timeout", limit)


def file_state(path: str | os.PathLike[str]) -> list[int | str]:
    """Return the size and the times of a file. One with an equal state need not be read again.

    An edit that keeps size and modification time changes the change time. The state of a file in a bucket is its size
    and the server's tag of its contents.
    """
    if in_bucket(path):
        store, name = fsspec.core.url_to_fs(path)
        info = store.info(name)
        # Google Cloud Storage's etag changes with an object's permissions and labels too.
        return [info["size"], info.get("crc32c") or info.get("etag") or info["ETag"]]  # the last one of S3
    stat = os.stat(path)
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def at_once(ask: Callable[[Any], Any], paths: Sequence[Any]) -> Iterator[Any]:
    """Yield ask(path) of each path, some at a time: a bucket takes long to answer, and all answers fill the memory."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for start in range(0, len(paths), _AT_ONCE):
            yield from pool.map(ask, paths[start : start + _AT_ONCE])


def is_run_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a run folder and not a preset: whether it has a config.json."""
    return (any_path(path) / "config.json").is_file()


def check_output(
    path: str | os.PathLike[str] | None, flag: str, overwrite: bool = True, inputs: Iterable[str] = ()
) -> None:
    """Raise UserError if a command cannot write the file of a flag, or would replace a file that it must keep.

    Files of a run folder and the `inputs` of the command are never replaced, others with `overwrite`.
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


def write_whole(path: epath.Path, data: bytes) -> None:
    """Write a file atomically, and create its folder. A bucket has no folders, and its objects are written whole.

    In a bucket it is tried for about 15 seconds: gcsfs gives up at once if it loses the answer to an upload.
    """
    with writing(path):
        if not in_bucket(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with new_file(path) as file:
                file.write(data)
            return
        for pause in (1, 2, 4, 8):
            with contextlib.suppress(Exception):
                path.write_bytes(data)
                return
            time.sleep(pause)
        path.write_bytes(data)


@contextlib.contextmanager
def new_file(path: Path | epath.Path) -> Iterator[IO[bytes]]:
    """Write a file atomically: what is written to the yielded file is at `path` afterwards, or nothing.

    A device, a pipe or a link, such as /dev/stdout, is written in place.
    """
    if os.path.islink(path) or (path.exists() and not path.is_file()):
        with path.open("wb") as file:
            yield file
        return
    partial = path.parent / f".{path.name}.{secrets.token_hex(8)}.partial"
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # after a power cut the new name would otherwise hold an empty file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def new_folder(path: epath.Path, last: str) -> Iterator[epath.Path]:
    """Write a folder atomically: what is written in the folder that this gives is at `path` afterwards, or nothing.

    A folder that is there stays, since another process has written it meanwhile, unless it lacks the file `last`. What
    a process that was killed has left of it is removed. In a bucket, which has no renaming, the files are written in
    place, so `last` is to be the last one.
    """
    if in_bucket(path):
        yield path
        return
    partial = path.parent / f".{path.name}.{secrets.token_hex(8)}.partial"
    with writing(path):
        if path.exists() and not (path / last).exists():  # damaged: no folder comes there without it
            path.rmtree()
        partial.mkdir(parents=True)
        for other in _partials(path.parent):
            if other.name.startswith(f".{path.name}."):
                _remove_abandoned(other)
    try:
        yield partial
        with writing(path):
            try:
                partial.rename(path)
            except OSError:
                if not (path / last).exists():  # another process has not written it
                    raise
    finally:
        partial.rmtree(missing_ok=True)


@functools.cache  # with a listing for each of them, n new folders would take n² time
def _partials(parent: epath.Path) -> list[epath.Path]:
    """Return the unfinished folders that were there when this process began to write into `parent`."""
    return list(parent.glob(".*.partial"))


def _remove_abandoned(folder: epath.Path) -> None:
    """Remove a folder in which nothing was written for `_ABANDONED` seconds."""
    with contextlib.suppress(OSError):  # another process has removed or renamed it
        newest = max(file.stat().st_mtime for file in (Path(folder), *Path(folder).rglob("*")))
        if newest < time.time() - _ABANDONED:
            folder.rmtree()


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn every exception of a library that writes `path` into a UserError: each library has exceptions of its own."""
    try:
        yield
    except Exception as error:
        if is_outage(error, path):
            raise outage(path, cause(error), "written") from error
        raise UserError(f"{path} cannot be written ({cause(error)}); {remedy(error, path)}.") from error


def is_outage(error: Exception, path: str | os.PathLike[str]) -> bool:
    """Return whether a bucket or the way to it fails, which passes, after all that its client has tried again."""
    if type(error) is Exception and error.__cause__:  # Orbax's, around a failed read
        error = error.__cause__
    status = str(getattr(error, "code", ""))  # of gcsfs's HttpError
    names = {cls.__name__ for cls in type(error).__mro__}  # of botocore, requests and google.auth
    is_clients = bool(names & {"ConnectionError", "HTTPClientError", "RequestException", "TransportError"})
    is_clients |= status in ("408", "429")
    is_clients |= type(error).__module__.partition(".")[0] == "aiohttp"
    is_clients |= str(error).startswith(("ABORTED", "UNAVAILABLE", "DEADLINE_EXCEEDED"))  # of TensorStore
    is_systems = isinstance(error, OSError) and (
        isinstance(error, (ConnectionError, TimeoutError)) or error.errno in (errno.EIO, errno.EREMOTEIO, errno.EBUSY)
    )
    return in_bucket(path) and (is_clients or is_systems or status.startswith("5"))


def remedy(error: Exception, path: str | os.PathLike[str]) -> str:
    """Return what to do about a file that cannot be written, for one sentence."""
    advice = "choose another folder"
    if os.fspath(path).startswith(os.path.expanduser(os.environ.get("JAXLM_CACHE") or DEFAULT_CACHE)):
        advice = "set the variable JAXLM_CACHE to another folder"
    return f"free some space, or {advice}" if re.search("no space|quota", str(error), re.IGNORECASE) else advice


def refuse_links(folder: epath.Path) -> None:
    """Raise UserError for a symbolic link at any depth of a run folder; buckets have none.

    By such links a run folder from elsewhere could make jaxlm read or write files outside it.
    """
    for path in [] if in_bucket(folder) else Path(folder).rglob("*"):  # does not follow links
        if path.is_symlink():
            raise UserError(f"{path} is a symbolic link, which a run folder must not hold; put the file in its place.")


@contextlib.contextmanager
def without_empty_folders(folder: Path) -> Iterator[None]:
    """Remove `folder` and its parents at the end if they are new and still empty, as after a refusal."""
    parents = [] if in_bucket(folder) else [folder.absolute(), *folder.absolute().parents]
    new = [path for path in parents if not path.exists()]
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # a folder is not empty
            for path in new:
                os.rmdir(path)


@contextlib.contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn every exception of a library that reads `path` into a UserError: each library has exceptions of its own."""
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        is_panic = type(error).__name__ == "PanicException"  # of a library in Rust, such as tokenizers
        if not isinstance(error, Exception) and not is_panic:
            raise
        if is_outage(error, path):
            raise outage(path, cause(error)) from error
        name = getattr(error, "filename", None) or path
        if isinstance(error, FileNotFoundError):
            raise UserError(f"{name} does not exist.") from error
        if isinstance(error, OSError):
            raise UserError(f"{name} cannot be read ({cause(error)}); check its permissions.") from error
        hint, what = "is it whole, and what it should be?", cause(error)
        of_code = (AttributeError, Exception, IndexError, KeyError, TypeError)  # their texts are about code
        if is_panic or type(error) in of_code:
            what = f"it lacks {error}" if type(error) is KeyError else "its form is unknown"
        if in_bucket(path):
            is_missing = isinstance(error, ImportError)
            hint = f"{install('buckets')}." if is_missing else "check the bucket, its permissions and your login."
        raise UserError(f"{path} cannot be read ({what}); {hint}") from error


def read_json(file: Path | epath.Path, form: Any, content: bytes | None = None) -> Any:
    """Return the value of a JSON file, or of its `content` where it is compressed; UserError if it has another form."""
    with reading(file):
        try:
            value = json.loads(content or file.read_bytes())
        except ValueError as error:  # of JSON, or of UTF-8, which names no line
            place = f"line {getattr(error, 'lineno', 1)}"
            raise UserError(f"{file} is no JSON from {place} on: it is cut off or damaged; copy it again.") from error
    check_form(value, form, file)
    return value


def check_form(value: Any, form: Any, place: str | os.PathLike[str], key: str = "") -> None:
    """Raise UserError unless a JSON value, which is `key` of a file or row, has a form.

    A form is a type, a list with the form of all items, a dict with the forms of keys, of which those with "?" may be
    missing or null and "*" stands for all, or a tuple of such forms.
    """
    forms = {f if isinstance(f, type) else type(f): f for f in (form if isinstance(form, tuple) else (form,))}
    if type(value) not in forms:
        found = "missing" if value is None else json.dumps(value, default=str)[:80]
        wanted = "text" if form == TEXT else " or ".join(map(JSON_TYPES.get, forms))
        raise UserError(f"{place}: {key or 'it'} is {found}; it must be {wanted}; mend it or copy the file again.")
    form = forms[type(value)]
    items = {str(i): item for i, item in enumerate(value)} if isinstance(form, list) else value
    fields = {"*": form[0]} if isinstance(form, list) else form if isinstance(form, dict) else {}
    for name, part in (dict.fromkeys(items, fields["*"]) if "*" in fields else fields).items():
        item = items.get(name.removesuffix("?"))
        if item is not None or not name.endswith("?"):
            check_form(item, part, place, f"{key}.{name}".strip(".?"))


def cause(error: Exception) -> str:
    """Return the cause of a failure, for one sentence."""
    what = " ".join((getattr(error, "strerror", None) or str(error)).split())
    return without_queries(what)[:300] or type(error).__name__


def without_queries(text: str) -> str:
    """Return a text without the queries of its web addresses, which may authorize whoever reads them."""
    return re.sub(r"(https?://[^\s?]+)\?[^\s'\")]*", r"\1", text)
