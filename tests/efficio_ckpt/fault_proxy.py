"""A proxy in front of an emulator of an object store, which answers some of the requests wrongly."""

import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KINDS = ("drop request", "drop response", "truncate", "flip")
_OWN_HEADERS = {"connection", "transfer-encoding", "content-length", "keep-alive"}


@dataclass
class Fault:
    """What goes wrong, at which requests, and how often.

    Args:
        kind: A status to answer with, or one of KINDS: the request never arrives; it is carried out and not answered; the answer
            ends early; one bit of it is flipped.
        method: Of the requests it is for.
        path: Regular expression that is found in the path and query.
        times: How often; None for ever.
        headers: Of the answer, for a status.
    """

    kind: object
    method: str = ""
    path: str = ""
    times: int | None = 1
    headers: tuple = ()
    hits: int = 0

    def takes(self, method, path):
        if self.times is not None and self.hits >= self.times:
            return False
        return self.method in ("", method) and re.search(self.path, path) is not None


class Proxy(ThreadingHTTPServer):
    """Forwards to one upstream address; `requests` has what came in."""

    daemon_threads = True

    def __init__(self, upstream):
        super().__init__(("127.0.0.1", 0), Handler)
        self.upstream = upstream
        self.faults = []
        self.requests = []
        self.lock = threading.Lock()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def fail(self, kind, **options):
        fault = Fault(kind, **options)
        self.faults.append(fault)
        return fault

    def heal(self):
        self.faults.clear()
        self.requests.clear()

    def handle_error(self, request, client_address):
        """A client that hangs up is no news."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def handle_one_request(self):
        self.close_connection = True
        self.raw_requestline = self.rfile.readline(65537)
        if self.raw_requestline and self.parse_request():
            self.forward()

    def body(self):
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            data = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def forward(self):
        server = self.server
        if self.headers.get("Expect") == "100-continue":
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = self.body()
        with server.lock:
            server.requests.append((self.command, self.path))
            fault = next((f for f in server.faults if f.takes(self.command, self.path)), None)
            if fault is not None:
                fault.hits += 1
        kind = None if fault is None else fault.kind
        if isinstance(kind, int):
            self.reply(kind, "refused", [("Content-Type", "text/plain"), *fault.headers], b"no")
            return
        if kind == "drop request":
            return
        status, reason, headers, answer = self.ask(body)
        if kind == "drop response":
            return
        if kind == "flip" and answer:
            middle = len(answer) // 2
            answer = answer[:middle] + bytes([answer[middle] ^ 16]) + answer[middle + 1 :]
        self.reply(status, reason, headers, answer, cut=kind == "truncate")

    def ask(self, body):
        headers = {k: v for k, v in self.headers.items() if k.lower() not in {*_OWN_HEADERS, "expect"}}
        connection = HTTPConnection(*self.server.upstream, timeout=30)
        try:
            connection.request(self.command, self.path, body=body, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.reason, answer.getheaders(), answer.read()
        except (OSError, HTTPException):
            return 502, "no upstream", [], b""
        finally:
            connection.close()

    def reply(self, status, reason, headers, answer, *, cut=False):
        self.send_response_only(status, reason)
        length = len(answer)
        for name, value in headers:
            if name.lower() == "content-length" and self.command == "HEAD":
                length = int(value)
            elif name.lower() not in _OWN_HEADERS:
                self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(length))
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer[: len(answer) // 2] if cut else answer)


@contextmanager
def fault_proxy(upstream):
    """A proxy in front of (host, port), until the block ends."""
    server = Proxy(upstream)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
