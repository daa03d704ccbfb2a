"""Errors of the Hub's client are told apart whatever its version, and none shows a secret."""

import errno
import json

import pytest

from efficio_ckpt._fault import Fault, explained, fault_of, next_wait, stated_wait, without_tokens


class Answer:
    def __init__(self, status, **headers):
        self.status_code = status
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class HTTPError(OSError):
    """As the client's: it carries the answer, and its parent classes differ from version to version."""

    def __init__(self, status, text="", **headers):
        super().__init__(f"{status} for url: https://host/x?X-Signature=s1gned")
        self.response = Answer(status, **headers)
        self.server_message = text


class RepositoryNotFoundError(HTTPError):
    pass


class LocalEntryNotFoundError(FileNotFoundError):
    pass


class OfflineModeIsEnabled(ConnectionError):
    pass


class FileMetadataError(OSError):
    pass


def behind(outer, inner):
    outer.__cause__ = inner
    return outer


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (HTTPError(401), "bad token"),
        (RepositoryNotFoundError(401), "no repository"),
        (RepositoryNotFoundError(404), "no repository"),
        (HTTPError(404, x_error_code="RepoNotFound"), "no repository"),
        (HTTPError(404, x_error_code="EntryNotFound"), "no file"),
        (HTTPError(404, x_error_code="RevisionNotFound"), "no version"),
        (HTTPError(404), "refused"),
        (HTTPError(403, "Forbidden: write token needed"), "forbidden"),
        (HTTPError(403, "Private repository storage limit reached"), "full"),
        (HTTPError(412), "moved"),
        (HTTPError(416), "corrupt"),
        (HTTPError(409), "busy"),
        (HTTPError(429), "busy"),
        (HTTPError(500), "busy"),
        (HTTPError(504), "busy"),
        (HTTPError(400), "refused"),
        (behind(LocalEntryNotFoundError("not in the cache"), HTTPError(500)), "busy"),
        (behind(LocalEntryNotFoundError("not in the cache"), TimeoutError()), "unreachable"),
        (LocalEntryNotFoundError("not in the cache"), "unreachable"),
        (behind(RuntimeError("while uploading"), HTTPError(503)), "busy"),
        (behind(RuntimeError("while uploading"), ConnectionResetError(104, "reset")), "unreachable"),
        (behind(RuntimeError("while uploading"), TypeError("a bug")), "refused"),
        (RuntimeError("xet: connection closed"), "unreachable"),
        (ConnectionResetError(104, "reset"), "unreachable"),
        (OSError("Consistency check failed: file should be of size 9"), "corrupt"),
        (FileMetadataError("no ETag"), "corrupt"),
        (json.JSONDecodeError("Expecting value", "<html>", 0), "corrupt"),
        (OfflineModeIsEnabled("offline"), "offline"),
        (OSError(errno.ENOSPC, "full"), "local"),
        (KeyError("url"), "refused"),
    ],
    ids=lambda value: value if isinstance(value, str) else repr(value)[:40],
)
def test_errors_are_told_apart(error, kind):
    assert fault_of(error).kind == kind


@pytest.mark.parametrize(
    "kind", ["no file", "no version", "no repository", "busy", "refused", "corrupt", "unreachable"]
)
@pytest.mark.parametrize("signed_in", [True, False])
def test_no_fault_is_taken_for_nothing_being_there(kind, signed_in):
    # FileNotFoundError means a fresh start.
    error = explained(Fault(kind, "text", 404), repo="me/run", signed_in=signed_in)
    assert not isinstance(error, FileNotFoundError)
    assert isinstance(error, OSError)


@pytest.mark.parametrize("kind", ["no token", "bad token", "forbidden", "no repository"])
def test_a_matter_of_tokens_says_what_to_do(kind):
    message = str(explained(Fault(kind, "", 403), repo="me/run", signed_in=kind != "no token"))
    assert "token" in message
    assert "huggingface.co" in message
    assert "\n" not in message


def test_a_full_account_is_a_full_disk_for_the_caller():
    assert explained(Fault("full"), repo="me/run", signed_in=True).errno == errno.ENOSPC


def test_a_request_that_goes_on_failing_is_given_up_within_six_minutes():
    for wait in (None, 2.0, 60.0, 300.0, 10**9):
        tries, spent = 1, 0.0
        while (pause := next_wait(Fault("busy", wait=wait), tries=tries, spent=spent)) is not None:
            assert pause >= (wait or 1.0)
            tries, spent = tries + 1, spent + pause
        assert tries <= 6
        assert spent <= 330


@pytest.mark.parametrize(
    "kind", ["bad token", "forbidden", "full", "no repository", "local", "offline", "refused"]
)
def test_what_does_not_pass_is_not_tried_again(kind):
    assert next_wait(Fault(kind), tries=1, spent=0.0) is None


@pytest.mark.parametrize(
    ("headers", "wait"),
    [
        ({"retry-after": "12"}, 12.0),
        ({"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, None),
        ({"retry-after": "-3"}, None),
        ({"ratelimit": '"api";r=0;t=55'}, 55.0),
        ({"ratelimit": '"api";r=10;t=55'}, None),
        ({"ratelimit": "nonsense"}, None),
        ({}, None),
    ],
    ids=str,
)
def test_the_stated_wait_is_read(headers, wait):
    assert stated_wait(headers) == wait


def test_messages_are_one_short_line_without_secrets():
    error = HTTPError(
        400, "bad hf_abcDEF123\n at https://host/y?X-Signature=s1gned&b=c and pa55word " + "x" * 999
    )
    text = fault_of(error, secrets=["pa55word"]).text
    assert "hf_abc" not in text
    assert "s1gned" not in text
    assert "pa55word" not in text
    assert "\n" not in text
    assert len(text) <= 300
    assert "s1gned" not in fault_of(HTTPError(500)).text
    assert without_tokens("plain") == "plain"
