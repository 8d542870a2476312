"""From a name to a folder: local, cached, or fetched from the hub by one process per host."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence
from typing import Protocol

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

from bmtrain.distributed.agreement import attempt, everyone
from bmtrain.runtime import world
from model_center.errors import IdentifierError
from model_center.hub.identifiers import repository_of

CACHE = pathlib.Path("~/.cache/model_center")
ANSWER = 2.0  # seconds that the hub has to answer
SAFETENSORS = ("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json")
PICKLED = (
    "pytorch_model.bin",
    "pytorch_model-*-of-*.bin",
    "pytorch_model.bin.index.json",
    "pytorch_model.pt",
)
# What each kind of loader reads: alternatives, of which the first that are there are taken.
FILES: dict[str, tuple[tuple[str, ...], ...]] = {
    "config": (("config.json",),),
    "model": (SAFETENSORS, PICKLED),
    "tokenizer": (
        (
            "vocab.json",
            "vocab.txt",
            "merges.txt",
            "tokenizer.json",
            "added_tokens.json",
            "special_tokens_map.json",
            "tokenizer_config.json",
            "spiece.model",
            "vocab.model",
            "tokenizer.model",
            "chat_template.jinja",
        ),
    ),
}
# What belongs to a model beside its weights and config.json.
ALONGSIDE = (
    *FILES["tokenizer"][0],
    "*.tiktoken",
    "chat_template.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "README.md",
    "LICENSE*",
)


class Client(Protocol):
    """What is asked of the hub."""

    def __call__(self, repository: str, patterns: Sequence[str], local_only: bool) -> str:
        """A folder with the repository's files of these patterns, cached or fetched.

        Raises OSError or ValueError where that cannot be done.
        """


def fetch(repository: str, patterns: Sequence[str], local_only: bool) -> str:
    """The hub's own client: its cache, its environment variables (HF_HUB_OFFLINE, HF_HOME).

    Where the hub does not answer within `ANSWER` seconds, what is cached is taken, or it is an
    error: the client itself would wait and try again for minutes.
    """
    silence = None if local_only else _silence(repository)
    try:
        folder: str = huggingface_hub.snapshot_download(
            repository,
            allow_patterns=list(patterns),
            local_files_only=local_only or silence is not None,
        )
    except OSError as error:
        if silence is None:
            raise
        raise ConnectionError(
            f"the hub does not answer ({type(silence).__name__}: {silence}), and nothing of it is "
            f"in the cache {huggingface_hub.constants.HF_HUB_CACHE}"
        ) from error
    return folder


def _silence(repository: str) -> Exception | None:
    """Why the hub does not answer; None if it does.

    Raises:
        OSError: if it answers that there is no such repository, or that one must log in.
    """
    try:
        huggingface_hub.HfApi().model_info(repository, timeout=ANSWER)
    except RepositoryNotFoundError:
        raise
    except HfHubHTTPError:
        return None  # it is busy: the client tries again
    except Exception as error:  # whatever its HTTP library raises
        return error
    return None


def resolve(
    name_or_path: str, kind: str, client: Client = fetch, cache: pathlib.Path = CACHE
) -> str:
    """The folder with the files of a name or path. Collective in a process group.

    A folder of that name wins; then a copy in `cache`/name; then the hub, from which the first
    process of every host fetches what is missing, while the others wait for it.

    Args:
        name_or_path: a folder, a name that the project knows ("gpt2-base"), or a repository of the
            hub ("org/name").
        kind: "config", "model" (safetensors, or pickled weights if there are none) or "tokenizer".
        client, cache: in place of the hub and of ~/.cache/model_center.

    Raises:
        IdentifierError: on every rank, with the nearest names, what the folder lacks, or why
            nothing could be fetched.
    """
    axis = everyone()
    # All ranks take the same steps, whatever each finds: a folder that only some of them see is an
    # error of the others.
    local = attempt(lambda: _local(name_or_path, kind, cache.expanduser()), axis, IdentifierError)
    is_first = not world.is_initialized() or world.current().local_rank == 0
    first = attempt(
        lambda: _fetched(name_or_path, kind, client, False) if is_first and not local else local,
        axis,
        IdentifierError,
    )
    return attempt(
        lambda: first or _fetched(name_or_path, kind, client, True), axis, IdentifierError
    )


def _local(name: str, kind: str, cache: pathlib.Path) -> str:
    """A folder of this name, or a cached one with files of this kind; empty for none."""
    if os.path.isdir(name):
        return name
    cached = cache / name
    return str(cached) if any(_holds(cached, patterns) for patterns in FILES[kind]) else ""


def _fetched(name: str, kind: str, client: Client, local_only: bool) -> str:
    """The folder of the hub's cache with the first alternative that the repository has."""
    repository = repository_of(name)
    always = ["config.json", *(ALONGSIDE if kind == "model" else ())]
    for patterns in FILES[kind]:
        try:
            folder = client(repository, [*patterns, *always], local_only)
        except (OSError, ValueError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise IdentifierError(
                f"{name!r} is not a folder here, and {repository} could not be fetched from the "
                f"Hugging Face hub: {type(error).__name__}: {reason}. Name a folder with its "
                "files, set HF_ENDPOINT to a mirror, or, for a gated repository, set HF_TOKEN."
            ) from error
        if _holds(pathlib.Path(folder), patterns):
            return folder
    expected = ", ".join(pattern for patterns in FILES[kind] for pattern in patterns)
    raise IdentifierError(
        f"{name!r}: the repository {repository} has no {kind} files: expected any of {expected}."
    )


def _holds(folder: pathlib.Path, patterns: Sequence[str]) -> bool:
    """Whether any file of these patterns is in the folder."""
    return folder.is_dir() and any(any(folder.glob(pattern)) for pattern in patterns)
