"""The client of the Hub, asked with patience, and its errors in plain words."""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from ._fault import Fault, explained, fault_of, next_wait

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Client:
    """What asks the Hub, on behalf of one repository.

    Args:
        repo: ``"user/name"``, for messages.
        token: None for what the client finds, False for none.
        endpoint: Address of the Hub; None for what the client has.
        sleep: Waits for so many seconds.
    """

    def __init__(
        self,
        repo: str,
        *,
        token: str | bool | None,
        endpoint: str | None,
        sleep: Callable[[float], None],
    ) -> None:
        self._repo = repo
        self._token = token
        self._endpoint = endpoint
        self._sleep = sleep
        self._api: Any = None

    @property
    def api(self) -> Any:
        """The client's own object; its package is imported here."""
        if self._api is None:
            import huggingface_hub

            self._api = huggingface_hub.HfApi(
                endpoint=self._endpoint, token=self._token, library_name="efficio-ckpt"
            )
        return self._api

    def is_signed_in(self) -> bool:
        """Tell whether there is a token."""
        if self._token is None or self._token is True:
            import huggingface_hub

            return bool(huggingface_hub.get_token())
        return bool(self._token)

    def ask(self, request: Callable[[], T]) -> T:
        """Make a request of which it does no harm to make it twice.

        Args:
            request: Calls the client.

        Raises:
            OSError: It failed, or went on failing.
        """
        result = self.persist(request)
        if isinstance(result, Fault):
            raise self.problem(result)
        return result

    def persist(self, request: Callable[[], T]) -> T | Fault:
        """Make a request again while it fails for reasons that pass, and return what came of it.

        Args:
            request: Calls the client.
        """
        tries, spent = 0, 0.0
        while True:
            result = self.attempt(request)
            if not isinstance(result, Fault):
                return result
            tries += 1
            wait = next_wait(result, tries=tries, spent=spent)
            if wait is None:
                return result
            spent += self.pause(result, wait)

    def attempt(self, request: Callable[[], T]) -> T | Fault:
        """Make a request once.

        Args:
            request: Calls the client.
        """
        try:
            with _without_bars():
                return request()
        except Exception as error:  # noqa: BLE001 - the client raises errors of many libraries
            secrets = [self._token] if isinstance(self._token, str) else []
            return fault_of(error, secrets=secrets)

    def pause(self, fault: Fault, wait: float) -> float:
        """Wait, and return for how long.

        Args:
            fault: The reason.
            wait: Seconds.
        """
        what = fault.kind if fault.status is None else f"{fault.kind} ({fault.status})"
        logger.info("'%s': %s: %s; asking again in %.0f s", self._repo, what, fault.text, wait)
        self._sleep(wait)
        return wait

    def problem(self, fault: Fault) -> OSError:
        """Return the error for a fault; nothing of the client's own error is behind it.

        Args:
            fault: What happened.
        """
        return explained(fault, repo=self._repo, signed_in=self.is_signed_in())


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """Keep the client from drawing progress bars into a training, unless the user has asked for them."""
    constants: Any = importlib.import_module("huggingface_hub.constants")
    bars: Any = importlib.import_module("huggingface_hub.utils")
    if constants.HF_HUB_DISABLE_PROGRESS_BARS is not None or bars.are_progress_bars_disabled():
        yield
        return
    bars.disable_progress_bars()
    try:
        yield
    finally:
        bars.enable_progress_bars()
