"""Checkpoints in a repository of the Hugging Face Hub."""

from __future__ import annotations

import errno
import importlib.util
import logging
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final

from ._bucket import Bucket
from ._client import Client
from ._folder import is_own
from ._listing import Listing, is_content
from ._manifest import MANIFEST
from ._repository import Repository
from ._storage import FileInfo, without_secrets

logger = logging.getLogger(__name__)

_OPTIONS: Final = ("token", "endpoint", "private", "squash_every", "sleep")
_BUCKET_OPTIONS: Final = ("token", "endpoint", "sleep")
_OTHER_KINDS: Final = ("datasets", "spaces", "models")
_PART: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}")


@dataclass(frozen=True)
class Attempt:
    """A save that is not committed yet.

    Args:
        spool: Local folder for what goes up.
        listing: What was in the repository when it began.
        additions: The files so far.
    """

    spool: str
    listing: Listing
    additions: list[Any] = field(default_factory=list)


class Hub:
    """A repository of the Hub. A save is one commit: its files appear, and the expired ones go, together.

    Reading is pinned to the commit that was listed, so that nothing changes under it. An attempt is visible to nobody, so
    no note on its writer is needed, and a process that dies leaves nothing to clear away. Readers leave no notes on damage:
    what is stored is checked by the Hub as it comes in, and damage of a download is no damage of the checkpoint.

    Args:
        repository: Where.
        squash_every: The history is made one commit when it has this many; 0 for never.
    """

    is_remote = True

    def __init__(self, repository: Repository, *, squash_every: int = 0) -> None:
        self._repository = repository
        self._squash_every = squash_every
        self._listing: Listing | None = None
        self._attempts: dict[str, Attempt] = {}
        self._versions: int | None = None

    def __repr__(self) -> str:
        return f"Hub({self.place!r})"

    @property
    def place(self) -> str:
        return "/".join(filter(None, ("hf:/", self._repository.name, self._repository.prefix)))

    def check_writable(self) -> None:
        """Find out whether a save can succeed, before there is anything to lose.

        Raises:
            OSError: The token is missing, wrong or read-only, or the Hub cannot be asked.
        """
        if self._repository.check_writable():
            self._listing = None

    def folders(self) -> list[str]:
        return sorted(self._look().folders)

    def files(self, folder: str) -> dict[str, FileInfo]:
        entries = self._listed().folders.get(folder)
        if entries is None:
            raise FileNotFoundError(f"{self.place}: there is no {folder}")
        return {name: FileInfo(entry.size, None) for name, entry in entries.items()}

    def begin(self, folder: str, note: bytes) -> None:  # noqa: ARG002 - nobody sees an attempt
        self.check_writable()
        listing = self._listing or self._repository.ensure()
        if folder in listing.folders or folder in self._attempts:
            raise FileExistsError(f"{self.place}: there is a {folder} already")
        self._attempts[folder] = Attempt(tempfile.mkdtemp(prefix="efficio-"), listing)

    def write(self, folder: str, name: str, chunks: Iterable[memoryview]) -> None:
        attempt = self._attempts.get(folder)
        if attempt is None:
            raise PermissionError(f"{self.place}: {folder} is not being written, and is not changed")
        path = Path(attempt.spool, name)
        try:
            with open(path, "xb") as file:
                for chunk in chunks:
                    file.write(chunk)
        except OSError as error:
            raise OSError(
                error.errno,
                f"the disk for temporary files does not take {path}: {error.strerror}; set TMPDIR to a folder on another",
            ) from error
        addition = self._repository.addition(self._repository.path(folder, name), str(path))
        attempt.additions.append(addition)
        # The client has let go of what it has uploaded.
        if addition.path_or_fileobj == b"":
            path.unlink()

    def commit(self, folder: str, manifest: bytes, *, expired: Sequence[str]) -> None:
        attempt = self._attempts[folder]
        last = self._repository.addition(self._repository.path(folder, MANIFEST), manifest)
        self._listing = None
        self._repository.push(
            [*attempt.additions, last],
            listing=attempt.listing,
            title=f"save {folder}",
            deletions=lambda listing: self._own_files(listing, expired),
            landed=lambda listing: _holds(listing, folder, manifest),
        )
        self._forget(folder)
        if self._squash_every:
            self._squash_if_due(folder, manifest)

    def open(self, folder: str, name: str) -> BinaryIO:
        listing = self._listed()
        for again in (False, True):
            if again:
                # The history was squashed since; the file may be in the newest version still.
                listing = self._look()
            entry = listing.folders.get(folder, {}).get(name)
            if entry is None:
                raise FileNotFoundError(f"{self.place}: there is no {folder}/{name}")
            file = self._repository.fetch(listing, entry, self._repository.path(folder, name))
            if file is not None:
                return file
        raise OSError(errno.EIO, f"{self.place}: the Hub lists {folder}/{name} and does not have it")

    def remove(self, folder: str) -> None:
        if folder in self._attempts:
            # If the commit was carried out against all appearance, the checkpoint is whole, and may be the only one left.
            self._forget(folder)
            return
        listing = self._look()
        if folder not in listing.folders:
            raise FileNotFoundError(f"{self.place}: there is no {folder}")
        self._listing = None
        self._repository.push(
            [],
            listing=listing,
            title=f"remove {folder}",
            deletions=lambda listing: self._own_files(listing, [folder]),
            landed=lambda listing: not self._own_files(listing, [folder]),
        )

    def free_bytes(self) -> int | None:
        return None

    def squash(self) -> None:
        """Make the history of the whole repository one commit, and free what only older versions of checkpoints held.

        No version but the present one can be had back afterwards. Nobody else may be saving to the repository meanwhile.

        Raises:
            OSError: It failed; the present version stays.
        """
        self._listing = None
        self._repository.squash()
        self._versions = 1

    def _squash_if_due(self, folder: str, manifest: bytes) -> None:
        """Squash behind a new checkpoint once it is known to be there; what fails is no failure of the save."""
        try:
            if self._versions is None:
                self._versions = self._repository.count_versions()
            else:
                self._versions += 1
            if self._versions < self._squash_every or self._attempts:
                return
            if not _holds(self._repository.look(), folder, manifest):
                logger.warning("'%s': the history stays, since %s is not seen in it", self.place, folder)
                return
            self.squash()
        except OSError as error:
            logger.warning("could not squash the history of '%s': %s", self.place, error)

    def _listed(self) -> Listing:
        return self._listing or self._look()

    def _look(self) -> Listing:
        self._listing = None
        listing = self._repository.look()
        self._listing = listing
        return listing

    def _own_files(self, listing: Listing, folders: Sequence[str]) -> list[str]:
        return [
            self._repository.path(folder, name)
            for folder in folders
            for name in listing.folders.get(folder, {})
            if is_own(name)
        ]

    def _forget(self, folder: str) -> None:
        shutil.rmtree(self._attempts.pop(folder).spool, ignore_errors=True)


def open_hub(url: str, *, options: Mapping[str, Any]) -> Hub | Bucket:
    """Return the storage of an ``hf://`` URL; nothing is asked or made there yet.

    Args:
        url: ``hf://user/repository``, ``hf://user/repository/folder``, or the same of a bucket below ``hf://buckets/``.
        options: ``token`` (by default what the client finds: the variable HF_TOKEN, a stored login, a secret of Colab),
            ``endpoint``, ``private`` (True) for a repository that is made, ``squash_every`` (0: never), ``sleep``; of
            these ``token``, ``endpoint`` and ``sleep`` for a bucket.

    Raises:
        ValueError: The URL names no repository, an option is unknown, or the client is not installed.

    Example:
        >>> open_hub("hf://me/run/first", options={})
        Hub('hf://me/run/first')
        >>> open_hub("hf://buckets/me/run", options={})
        Bucket('hf://buckets/me/run')
    """
    shown = without_secrets(url)
    parts = url.partition("://")[2].rstrip("/").split("/")
    if parts[0] in _OTHER_KINDS:
        raise ValueError(
            f"storage='{shown}': hf://{parts[0]} is no place for checkpoints; give hf://user/repository"
        )
    is_bucket = parts[0] == "buckets"
    parts = parts[is_bucket:]
    if len(parts) < 2 or not all(map(_PART.fullmatch, parts)):
        raise ValueError(
            f"storage='{shown}' names no repository; give hf://user/repository or hf://user/repository/folder"
        )
    known = _BUCKET_OPTIONS if is_bucket else _OPTIONS
    unknown = sorted(options.keys() - set(known))
    if unknown:
        raise ValueError(f"storage='{shown}' has no option {', '.join(unknown)}; choose {', '.join(known)}")
    squash_every = options.get("squash_every", 0)
    if isinstance(squash_every, bool) or not isinstance(squash_every, int) or squash_every < 0:
        raise ValueError(f"squash_every={squash_every!r} is no count; give a number of saves, or 0 for never")
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ValueError(
            f"storage='{shown}' needs a package that is not installed: pip install \"efficio-ckpt[hub]\""
        )
    if is_bucket:
        name = "/".join(parts[:2])
        client = Client(
            name,
            token=options.get("token"),
            endpoint=options.get("endpoint"),
            sleep=options.get("sleep", time.sleep),
        )
        return Bucket(name, "/".join(parts[2:]), client)
    repository = Repository(
        "/".join(parts[:2]),
        "/".join(parts[2:]),
        token=options.get("token"),
        endpoint=options.get("endpoint"),
        private=options.get("private", True),
        sleep=options.get("sleep", time.sleep),
    )
    return Hub(repository, squash_every=squash_every)


def _holds(listing: Listing, folder: str, manifest: bytes) -> bool:
    entry = listing.folders.get(folder, {}).get(MANIFEST)
    return entry is not None and is_content(entry, manifest)
