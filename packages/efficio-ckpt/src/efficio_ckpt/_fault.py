"""What can go wrong at the Hub: errors of its client told apart, and how long to wait before asking again."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal[
    "no token",
    "bad token",
    "forbidden",
    "full",
    "no repository",
    "no file",
    "no version",
    "moved",
    "busy",
    "unreachable",
    "corrupt",
    "offline",
    "local",
    "refused",
]

_PASSING: Final = frozenset({"busy", "unreachable", "corrupt"})
_SETTINGS: Final = "huggingface.co/settings/tokens"
_ATTACH: Final = (
    "attach it to this session as the secret HF_TOKEN (Colab: the key at the left; Kaggle: Add-ons, Secrets) or set the "
    "environment variable HF_TOKEN"
)

_MAX_TRIES: Final = 6
_MAX_UNSTATED_SECONDS: Final = 30.0
# The Hub counts requests in windows of five minutes.
_MAX_SECONDS: Final = 330.0

_TOKEN: Final = re.compile(
    r"\b(?:hf|api)_[A-Za-z0-9_]{3,}|\bya29\.[\w.-]{3,}|(?<=Bearer )\S+|(?<=Signature=)[\w%+/=-]+"
)
_QUERY: Final = re.compile(r"(https?://[^\s?'\"]+)\?[^\s'\"]*")
_RATE_LIMIT: Final = re.compile(r";\s*r\s*=\s*0\b.*;\s*t\s*=\s*(\d+)")
_TRANSPORTS: Final = frozenset({"httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3", "ssl"})
_MAX_LINKS: Final = 10


@dataclass(frozen=True)
class Fault:
    """One failure of a request.

    Args:
        kind: What it means.
        text: What was said, without secrets.
        status: HTTP status, None if there was no answer.
        wait: Seconds that the server asks to wait.
        number: Error number of the system, for a local one.
    """

    kind: Kind
    text: str = ""
    status: int | None = None
    wait: float | None = None
    number: int | None = None

    @property
    def was_refused(self) -> bool:
        """Whether it is certain that the request did nothing, and that it would do nothing another time."""
        refused = self.status is not None and 400 <= self.status < 500
        return refused and self.kind not in {"busy", "moved"}


def next_wait(fault: Fault, *, tries: int, spent: float) -> float | None:
    """Return the seconds to wait before a request is made again; None if it is not worth while.

    Args:
        fault: Of the last try.
        tries: How many there were.
        spent: Seconds that were waited between them.

    Example:
        >>> [next_wait(Fault("busy"), tries=tries, spent=0.0) for tries in (1, 2, 3, 6)]
        [1.0, 2.0, 4.0, None]
        >>> next_wait(Fault("busy", wait=280.0), tries=1, spent=0.0)
        281.0
        >>> next_wait(Fault("forbidden"), tries=1, spent=0.0) is None
        True
    """
    if fault.kind not in _PASSING or tries >= _MAX_TRIES:
        return None
    # A second more, since the server rounds.
    wait = min(2.0 ** (tries - 1), _MAX_UNSTATED_SECONDS) if fault.wait is None else fault.wait + 1.0
    return wait if spent + wait <= _MAX_SECONDS else None


def stated_wait(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that an answer asks to wait, None if it does not say.

    Args:
        headers: Of the answer; names in lower case, or a mapping that does not tell cases apart.

    Source: RFC 9110, Retry-After (as seconds); the RateLimit header as the Hub sends it.

    Example:
        >>> stated_wait({"retry-after": "7"}), stated_wait({"ratelimit": '"api";r=0;t=55'}), stated_wait({})
        (7.0, 55.0, None)
    """
    text = (headers.get("retry-after") or "").strip()
    if text.isdecimal():
        return float(text)
    match = _RATE_LIMIT.search(headers.get("ratelimit") or "")
    return float(match[1]) if match else None


def without_tokens(text: str, secrets: Collection[str] = ()) -> str:
    """Return a message on one line, without tokens and without the signatures in its addresses.

    Args:
        text: Any.
        secrets: Texts to take out.

    Example:
        >>> without_tokens("at https://host/x?sig=1 with hf_abcdef")
        'at https://host/x with ***'
    """
    for secret in secrets:
        text = text.replace(secret, "***")
    text = _TOKEN.sub("***", _QUERY.sub(r"\1", text))
    return " ".join(text.split())[:300]


def fault_of(error: BaseException, *, secrets: Collection[str] = ()) -> Fault:
    """Return what an error of the Hub's client means.

    Its classes are known by name: they moved and changed their parents between versions, as did the library that speaks
    HTTP.

    Args:
        error: As it was raised.
        secrets: Texts that must not appear.

    Example:
        >>> fault_of(TimeoutError("slow")).kind, fault_of(OSError(28, "full")).kind
        ('unreachable', 'local')
    """
    links = _links(error)
    names = {base.__name__ for link in links for base in type(link).__mro__}
    answer = next((found for link in links if (found := getattr(link, "response", None)) is not None), None)
    said = next((found for link in links if (found := getattr(link, "server_message", None))), None)
    # What an upload raises names only the file; the reason is behind it.
    text = without_tokens(str(said or (links[-1] if isinstance(error, RuntimeError) else error)), secrets)
    if answer is not None:
        status, code = int(answer.status_code), answer.headers.get("x-error-code") or ""
        missing = code == "RepoNotFound" or "RepositoryNotFoundError" in names
        kind = "no repository" if missing and status in {401, 403, 404} else _kind_of(status, code, text)
        return Fault(kind, text, status, stated_wait(answer.headers))
    if "OfflineModeIsEnabled" in names:
        return Fault("offline", text)
    if "LocalTokenNotFoundError" in names:
        return Fault("no token", text)
    if isinstance(error, OSError) and error.errno and not isinstance(error, (ConnectionError, TimeoutError)):
        return Fault("local", text, number=error.errno)
    unread = (json.JSONDecodeError, UnicodeDecodeError)
    if "FileMetadataError" in names or "Consistency check" in text or isinstance(error, unread):
        return Fault("corrupt", text)
    roots = {base.__module__.partition(".")[0] for link in links for base in type(link).__mro__}
    # The client for Xet knows no class but RuntimeError.
    alone = isinstance(error, RuntimeError) and len(links) == 1
    is_network = alone or any(isinstance(link, OSError) for link in links)
    if roots & _TRANSPORTS or is_network:
        return Fault("unreachable", text or type(error).__name__)
    return Fault("refused", f"{type(links[-1]).__name__}: {text}")


def _links(error: BaseException) -> list[BaseException]:
    links: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and len(links) < _MAX_LINKS:
        links.append(link)
        link = link.__cause__ or link.__context__
    return links


def _kind_of(status: int, code: str, text: str) -> Kind:
    if status in {408, 409, 429} or status >= 500:
        return "busy"
    if status == 403 and re.search(r"(?i)storage|quota", text):
        return "full"
    # A bare 404 may come from anything on the way, and says nothing about what the Hub holds.
    codes: dict[tuple[int, str], Kind] = {
        (404, "EntryNotFound"): "no file",
        (404, "RevisionNotFound"): "no version",
    }
    kinds: dict[int, Kind] = {401: "bad token", 403: "forbidden", 412: "moved", 416: "corrupt"}
    return codes.get((status, code)) or kinds.get(status, "refused")


def explained(fault: Fault, *, repo: str, signed_in: bool) -> OSError:
    """Return the error that tells a user what to do.

    Args:
        fault: What happened.
        repo: Name of the repository.
        signed_in: Whether there was a token.

    Example:
        >>> explained(Fault("busy", status=503), repo="me/run", signed_in=True)
        OSError('the Hub answered 503 each time it was asked')
    """
    if fault.kind in {"no token", "bad token", "forbidden", "no repository"}:
        return PermissionError(_no_access(fault, repo, signed_in=signed_in))
    if fault.kind == "full":
        return OSError(
            errno.ENOSPC,
            f"the storage of '{repo}' at the Hub is full ({fault.text}); remove files and old versions at its settings "
            "page, or open the storage with squash_every=1",
        )
    if fault.kind == "no version":
        return OSError(f"the Hub shows no branch 'main' in '{repo}'; give another repository")
    if fault.kind == "corrupt":
        return OSError(errno.EIO, f"what the Hub sent is not what was asked for: {fault.text}")
    if fault.kind == "unreachable":
        return ConnectionError(f"the Hub cannot be reached: {fault.text}")
    if fault.kind == "local":
        return OSError(fault.number or 0, fault.text)
    if fault.kind == "offline":
        return ConnectionError("HF_HUB_OFFLINE is set, so the Hub is not asked; unset it")
    if fault.kind == "moved":
        return OSError(f"somebody else committed to '{repo}' each time at the same moment")
    if fault.status == 429:
        asked = "" if fault.wait is None else f" and asks to wait {fault.wait:.0f} s more"
        return OSError(f"the Hub limits the number of requests (429){asked}; save less often")
    if fault.kind == "busy":
        return OSError(f"the Hub answered {fault.status} each time it was asked")
    return OSError(f"the Hub refuses the request ({fault.status or 'no answer'}): {fault.text}")


def _no_access(fault: Fault, repo: str, *, signed_in: bool) -> str:
    if fault.kind == "no token" or not signed_in:
        looks = "" if fault.kind == "no token" else f"the Hub shows no repository '{repo}', and "
        return f"{looks}there is no token: make one with write access at {_SETTINGS} and {_ATTACH}"
    if fault.kind == "bad token":
        return f"the Hub does not accept the token (401): make one with write access at {_SETTINGS} and {_ATTACH}"
    if fault.kind == "forbidden":
        return (
            f"the token has no write access to '{repo}' (403: {fault.text}): make one with write access at {_SETTINGS} "
            f"and {_ATTACH}"
        )
    return (
        f"the Hub shows no repository '{repo}' to this token ({fault.status}): the token has no access to it, or it does "
        "not exist; check its name and the token, or make the repository at huggingface.co/new"
    )
