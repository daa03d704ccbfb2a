"""A repository of the Hub: what is in it, and how files go up, come down and go."""

from __future__ import annotations

import copy
import functools
import io
import logging
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

from ._client import Client
from ._fault import Fault, fault_of, next_wait
from ._identity import Identity, identity_of, may_write, sees_all_of
from ._listing import Entry, Listing, is_whole, listing_of, sha256_of

logger = logging.getLogger(__name__)

_BRANCH: Final = "main"
_DOWNLOADS: Final = 3
_LOOKS: Final = 3
_MARK: Final = ".efficio"
_MARK_TEXT: Final = b"efficio keeps checkpoints here.\n"


class Repository:
    """A model repository and the client that speaks for it.

    Args:
        name: ``"user/name"``.
        prefix: Folder in it below which checkpoints lie; "" for none.
        token: None for what the client finds, False for none.
        endpoint: Address of the Hub; None for what the client has.
        private: How it is made if it does not exist.
        sleep: Waits for so many seconds.
    """

    def __init__(
        self,
        name: str,
        prefix: str,
        *,
        token: str | bool | None,
        endpoint: str | None,
        private: bool,
        sleep: Callable[[float], None],
    ) -> None:
        self.name = name
        self.prefix = prefix
        self._private = private
        self._client = Client(name, token=token, endpoint=endpoint, sleep=sleep)
        self._identity: Identity | None = None
        self._is_writable = False

    def path(self, *names: str) -> str:
        """Return the path in the repository of something below the prefix."""
        return "/".join((self.prefix, *names) if self.prefix else names)

    def look(self) -> Listing:
        """Return what is there now.

        Raises:
            FileNotFoundError: There is no repository of the name, for certain.
            OSError: The Hub cannot be asked, or does not show it.
        """
        result = self._client.persist(self._look)
        if not isinstance(result, Fault):
            return result
        if result.kind == "no repository" and self._is_absent():
            raise FileNotFoundError(f"there is no repository '{self.name}' yet")
        raise self._client.problem(result)

    def check_writable(self) -> bool:
        """Find out, once, whether the token can write: by what the Hub says about it, else by a small commit.

        Returns:
            Whether that commit was made.

        Raises:
            OSError: It cannot, or the Hub cannot be asked.
        """
        if self._is_writable:
            return False
        if not self._client.is_signed_in():
            raise self._client.problem(Fault("no token"))
        fault = self._ask_identity()
        if fault is not None and fault.kind not in {"busy", "forbidden", "refused"}:
            raise self._client.problem(fault)
        allowed = None if self._identity is None else may_write(self._identity, self.name)
        if allowed is False:
            raise PermissionError(
                "the token is read-only: a save would fail; make one with write access at "
                "huggingface.co/settings/tokens and give it as the secret HF_TOKEN"
            )
        if allowed is None:
            self.ensure()
            mark = self.path(_MARK)
            self.push(
                [self.addition(mark, _MARK_TEXT)],
                listing=self.look(),
                title="check write access",
                landed=lambda listing: self._client.ask(
                    lambda: self._client.api.file_exists(self.name, mark, revision=listing.head)
                ),
            )
        self._is_writable = True
        return allowed is None

    def ensure(self) -> Listing:
        """Return what is there, in a repository that is made if there is none."""
        try:
            return self.look()
        except FileNotFoundError:
            make = self._client.api.create_repo
            self._client.ask(lambda: make(self.name, repo_type="model", private=self._private, exist_ok=True))
            return self.look()

    def addition(self, path: str, content: str | bytes) -> Any:
        """Upload a file, if it is of the large kind, so that a later commit can name it; nothing is visible before that.

        Args:
            path: In the repository.
            content: Path of a local file, or bytes. A small file is uploaded with the commit, and must be there until then.
        """
        import huggingface_hub

        addition = huggingface_hub.CommitOperationAdd(path_in_repo=path, path_or_fileobj=content)
        # Without rules of its own the Hub takes those of a .gitignore in the repository, and leaves files out in silence.
        self._client.ask(
            lambda: self._client.api.preupload_lfs_files(
                self.name, additions=[addition], gitignore_content=""
            )
        )
        return addition

    def push(
        self,
        additions: Sequence[Any],
        *,
        listing: Listing,
        title: str,
        landed: Callable[[Listing], bool],
        deletions: Callable[[Listing], Sequence[str]] = lambda _: (),
    ) -> None:
        """Make one commit on the head that was read.

        A commit whose answer is lost may have been carried out: before it is made again, the head is read again.

        Args:
            additions: What `addition` returned.
            listing: What is there.
            title: Of the commit.
            landed: Tells whether the commit was carried out, from what is there now.
            deletions: Paths to delete, for what is there.

        Raises:
            OSError: It is not known to have been carried out.
        """
        import huggingface_hub

        tries, spent = 0, 0.0
        while True:
            gone = [
                huggingface_hub.CommitOperationDelete(path, is_folder=False) for path in deletions(listing)
            ]
            # The client marks what it has sent, and older ones do so before they have read the answer.
            operations = [*map(copy.copy, additions), *gone]
            if not operations:
                return
            commit = functools.partial(
                self._client.api.create_commit,
                self.name,
                operations,
                commit_message=title,
                revision=_BRANCH,
                parent_commit=listing.head,
            )
            fault = self._client.attempt(commit)
            if not isinstance(fault, Fault):
                return
            if fault.was_refused:
                raise self._client.problem(fault)
            tries += 1
            moved = fault.kind == "moved"
            wait = next_wait(replace(fault, kind="busy") if moved else fault, tries=tries, spent=spent)
            if wait is not None and not moved:
                spent += self._client.pause(fault, wait)
            listing = self.look()
            if landed(listing):
                return
            if wait is None:
                raise self._client.problem(fault)
            if moved:
                logger.warning("somebody else has just committed to '%s'; trying on top of that", self.name)

    def fetch(self, listing: Listing, entry: Entry, path: str) -> BinaryIO | None:
        """Download a file and open it; None if it is not there any more at that commit.

        What arrives damaged is downloaded again. If it stays so it is returned as it is, for the reader's own checks.

        Args:
            listing: Of the commit.
            entry: The file in it.
            path: In the repository.

        Raises:
            OSError: It cannot be downloaded.
        """
        folder = tempfile.mkdtemp(prefix="efficio-")
        try:
            for left in reversed(range(_DOWNLOADS)):
                result = self._client.persist(lambda: self._download(path, listing.head, folder))
                if isinstance(result, Fault):
                    if result.kind in {"no file", "no version"}:
                        break
                    raise self._client.problem(result)
                if not left or is_whole(entry, result):
                    return cast(BinaryIO, Temporary(result, folder))
                logger.warning("'%s': %s arrived damaged; downloading it again", self.name, path)
                _clear(folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)
        return None

    def count_versions(self) -> int:
        """Return the number of commits in the history."""
        return self._client.ask(lambda: len(self._client.api.list_repo_commits(self.name, revision=_BRANCH)))

    def squash(self) -> None:
        """Make the history of the whole repository one commit, and free what only older ones held below the prefix.

        Raises:
            OSError: It failed; what is there now stays.
        """
        self._client.ask(lambda: self._client.api.super_squash_history(self.name, branch=_BRANCH))
        refs = self._client.ask(
            lambda: self._client.api.list_repo_refs(self.name, include_pull_requests=True)
        )
        tips = [*refs.branches, *refs.tags, *refs.converts, *(refs.pull_requests or ())]
        used: set[str | None] = set()
        for tip in [_BRANCH, *(tip.target_commit for tip in tips)]:
            files = self._client.ask(functools.partial(self._tree, tip))
            used |= set(map(sha256_of, files))
        stale = [
            file
            for file in self._client.ask(lambda: list(self._client.api.list_lfs_files(self.name)))
            if file.filename.startswith(self.path("step-")) and file.file_oid not in used
        ]
        if stale:
            # Nothing in the history names them any more, so there is none to rewrite.
            self._client.ask(
                lambda: self._client.api.permanently_delete_lfs_files(self.name, stale, rewrite_history=False)
            )

    def _look(self) -> Listing:
        for left in reversed(range(_LOOKS)):
            head = self._client.api.repo_info(self.name, revision=_BRANCH).sha
            try:
                files = self._tree(head, self.prefix)
            except Exception as error:
                # The history was squashed between the two requests.
                if left and head is not None and fault_of(error).kind == "no version":
                    continue
                raise
            break
        return listing_of(head, files, prefix=self.prefix)

    def _tree(self, revision: str | None, path: str = "") -> list[Any]:
        tree = self._client.api.list_repo_tree(
            self.name, path_in_repo=path or None, recursive=True, revision=revision
        )
        try:
            return list(tree)
        except Exception as error:
            # A folder, or an empty repository, that holds nothing yet
            if fault_of(error).kind == "no file":
                return []
            raise

    def _download(self, path: str, revision: str | None, folder: str) -> Path:
        try:
            return Path(
                self._client.api.hf_hub_download(
                    self.name,
                    path,
                    revision=revision,
                    local_dir=folder,
                    # One that others share could answer with what it holds.
                    cache_dir=folder,
                )
            )
        except Exception as error:
            # The client would continue what it has of a page of some proxy.
            if fault_of(error).kind == "corrupt":
                _clear(folder)
            raise

    def _ask_identity(self) -> Fault | None:
        if self._identity is None:
            result = self._client.persist(lambda: identity_of(self._client.api.whoami()))
            if isinstance(result, Fault):
                return result
            self._identity = result
        return None

    def _is_absent(self) -> bool:
        """Tell whether a repository that is not shown does not exist, rather than being hidden."""
        if not self._client.is_signed_in() or self._ask_identity() is not None or self._identity is None:
            return False
        return sees_all_of(self._identity, self.name.partition("/")[0])


class Temporary(io.FileIO):
    """A downloaded file, which goes with its folder when it is closed."""

    def __init__(self, path: Path, folder: str) -> None:
        super().__init__(path, "rb")
        self._folder = folder

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _clear(folder: str) -> None:
    for path in Path(folder).iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
