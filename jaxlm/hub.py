"""Models and tokenizers of the Hugging Face hub, named `hf:ORG/NAME[@REVISION]`.

They are downloaded into the cache of `huggingface_hub`. A run stores the name with the commit that its revision had,
as `hf:ORG/NAME[@REVISION]#COMMIT`, so that it is resumed with the same files after the revision has moved.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from jaxlm.errors import UserError
from jaxlm.paths import cause

PREFIX = "hf:"
NAME = re.compile(rf"{PREFIX}((?:[\w.-]+/)?[\w.-]+)(?:@([^#\s]+))?(?:#([0-9a-f]{{40}}))?", re.ASCII)
TOKENIZER = ("*.json", "*.txt", "*.model", "*.bpe", "*.jinja")
"""Files that define a configuration and a tokenizer."""
MODEL = (*TOKENIZER, "*.safetensors")
"""Files of a model. Weights in other formats can run code when they are opened."""


def pin(name: str, stored: object = None, files: Sequence[str] = MODEL) -> str:
    """Return the name of a model or tokenizer of the hub with its commit, and download it; other paths as they are.

    If `stored`, the name that a run stores, is `name` with a commit, that is the result.
    """
    if not name.startswith(PREFIX) or "#" in name:
        return name
    if isinstance(stored, str) and stored.partition("#")[0] == name:
        return stored
    return f"{name}#{download(name, files).name}"


def local(path: str | os.PathLike[str], files: Sequence[str] = MODEL) -> str | os.PathLike[str]:
    """Return the folder of a name of the hub, which is downloaded if need be; other paths as they are."""
    name = os.fspath(path)
    return download(name, files) if name.startswith(PREFIX) else path


def download(name: str, files: Sequence[str]) -> Path:
    """Download files of a repository, unless the cache has them; return their folder, whose name is the commit.

    Raises:
        UserError: The name is malformed, the hub has no such repository or revision or cannot be reached, or the
            repository has no weights in safetensors.
    """
    from huggingface_hub import snapshot_download  # imported late: most commands need no hub
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    parts = NAME.fullmatch(name)
    if parts is None:
        raise UserError(f"{name} is no name of the hub; write {PREFIX}ORG/NAME or {PREFIX}ORG/NAME@REVISION.")
    repository, revision, commit = parts.groups()
    try:
        folder = Path(snapshot_download(
            repository, revision=commit or revision, allow_patterns=[*files],
            ignore_patterns=["consolidated*"],  # Mistral's second copy of the weights
        ))
    except RepositoryNotFoundError as error:
        raise UserError(
            f"the hub has no repository {repository} that you can read; check its name, and log in if it is private or "
            "gated (`hf auth login`)."
        ) from error
    except RevisionNotFoundError as error:
        raise UserError(
            f"the repository {repository} has no revision {commit or revision}; give a branch, a tag or a commit."
        ) from error
    except Exception as error:  # of the connection, the server or the disk
        reason = cause(error.__cause__ or error).rstrip(".").partition(". ")[0]
        raise UserError(
            f"{name} needs the network, or a whole copy in the cache ({reason}); check the connection and "
            "HF_HUB_OFFLINE, or give a folder of this machine."
        ) from error
    if "*.safetensors" in files and not any(folder.rglob("*.safetensors")):
        raise UserError(
            f"{name} has no safetensors, and other weights (pytorch_model.bin) are never downloaded since they can run "
            f"code; try the hub's conversion, {PREFIX}{repository}@refs/pr/N for a pull request N, or another model."
        )
    return folder
