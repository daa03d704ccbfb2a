"""Texts that must appear in no message, and errors of foreign clients without them."""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote

from ._fault import without_tokens
from ._storage import without_secrets

_MIN_CHARACTERS: Final = 4
_VARIABLES: Final = (
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_CONNECTION_STRING",
    "AZURE_STORAGE_SAS_TOKEN",
    "GOOGLE_SERVICE_ACCOUNT",
)
_ATTRIBUTES: Final = ("token", "refresh_token", "client_secret")
_NO_ACCESS: Final = frozenset({401, 403})


def secrets_of(url: str, *, options: Mapping[str, Any], environ: Mapping[str, str]) -> frozenset[str]:
    """Return the texts that must be taken out of messages of a client.

    Args:
        url: With any user, password and query.
        options: For the client; every text in them counts, as nobody can tell which are secret.
        environ: Environment variables, of which those that hold credentials count.

    Example:
        >>> sorted(secrets_of("s3://bucket/run", options={"key": ["k/1234", 5]}, environ={}))
        ['k%2F1234', 'k/1234']
    """
    texts = {url.partition("://")[2]} if without_secrets(url) != url else set()
    texts |= {*_credentials(url), *_texts(options), *(environ.get(name, "") for name in _VARIABLES)}
    texts = {text for text in texts if len(text) >= _MIN_CHARACTERS}
    return frozenset(texts | {quote(text, safe="") for text in texts})


def problem_of(error: BaseException, *, place: str, secrets: Collection[str]) -> OSError:
    """Return the OSError that a foreign error is told as; nothing of the foreign one is behind it.

    Args:
        error: Of a client.
        place: What the storage is called.
        secrets: Texts that must not appear.

    Example:
        >>> problem_of(ValueError("bad key s3cret"), place="s3://b/run", secrets=["s3cret"])
        OSError('s3://b/run: ValueError: bad key ***')
        >>> problem_of(PermissionError("Access Denied"), place="s3://b/run", secrets=[]).errno == errno.EACCES
        True
    """
    # The longest first: one may be a part of another.
    text = f"{type(error).__name__}: {error}"
    text = without_tokens(text, sorted(secrets, key=len, reverse=True))
    number = getattr(error, "errno", None)
    if isinstance(error, PermissionError) or _is_refused(error):
        return PermissionError(
            errno.EACCES,
            f"{text}; check the credentials, and that they may list, read, write and delete",
            place,
        )
    if "Checksum" in type(error).__name__:
        return OSError(errno.EIO, f"it was spoiled on the way: {text}", place)
    # A client says EIO for what it does not know; here that would mean a file that is bad.
    if isinstance(number, int) and number != errno.EIO:
        return OSError(number, text, place)
    return OSError(f"{place}: {text}")


def _is_refused(error: BaseException) -> bool:
    return (
        _status(error) in _NO_ACCESS
        or type(error).__name__ in {"NoCredentialsError", "DefaultCredentialsError", "RefreshError"}
        or str(error).startswith("Forbidden: ")
    )


def _status(error: BaseException) -> int | None:
    """The HTTP status behind an error of gcsfs, or of s3fs."""
    code = str(getattr(error, "code", ""))
    if code.isdecimal():
        return int(code)
    answer = getattr(error.__cause__, "response", None)
    metadata = answer.get("ResponseMetadata") if isinstance(answer, Mapping) else None
    return metadata.get("HTTPStatusCode") if isinstance(metadata, Mapping) else None


def _credentials(url: str) -> list[str]:
    host, _, query = url.partition("://")[2].partition("?")
    user = host.partition("/")[0].rpartition("@")[0]
    return [*user.split(":"), *(pair.partition("=")[2] for pair in query.split("&"))]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)
    else:  # an object with credentials
        for name in _ATTRIBUTES:
            if isinstance(text := getattr(value, name, None), str):
                yield text
