"""What goes wrong with the requests that a server of the tests gets."""

import re
from dataclasses import dataclass, field


@dataclass
class Fault:
    """What goes wrong with requests that match.

    Args:
        kind: A status to answer with, or a word that the server knows.
        method: Of the requests; any by default.
        path: Regular expression that is found in their path.
        skip: So many of them pass first.
        times: So many of them suffer it.
        headers: Of the answer, for a status.
        body: Of the answer, for a status.
        seconds: For what takes time.
        then: Faults that begin when this one was suffered.
    """

    kind: int | str
    method: str = ""
    path: str = ""
    skip: int = 0
    times: int = 1
    headers: dict = field(default_factory=dict)
    body: bytes = b'{"error": "something went wrong"}'
    seconds: float = 0.0
    then: list = field(default_factory=list)

    def takes(self, method, path):
        if (self.method and self.method != method) or not re.search(self.path, path) or self.times <= 0:
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        self.times -= 1
        return True
