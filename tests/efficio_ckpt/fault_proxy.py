"""A proxy in front of an HTTP server, which does to requests what networks and services do to them.

It knows nothing of what is spoken through it: the same faults are met by every client and service. The kind of a fault is a status or
``page``, a page of HTML with status 200, of which the service never hears; or ``reset`` before it is sent on, ``cut`` in the middle of
what the client sends, ``lost`` after the service has done it, ``late`` by ``seconds``; and for an answer with a body ``truncated`` and
``flipped`` by a bit.
"""

import http.client
import socket
import struct
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from faults import Fault

PAGE = b"<html><head><title>Sign in</title></head><body>Welcome to the airport.</body></html>"
_HOP_BY_HOP = {"connection", "transfer-encoding", "keep-alive", "content-length", "server", "date"}


class FaultProxy(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, upstream=""):
        super().__init__(("127.0.0.1", 0), Handler)
        self.upstream = upstream  # "http://host:port"
        self.lock = threading.RLock()
        self.faults: list[Fault] = []
        self.log: list[str] = []
        self.suffered = 0

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def fail(self, kind, **options):
        self.faults.append(Fault(kind, **options))
        return self.faults[-1]

    def heal(self):
        """Begin anew: no faults, and nothing in the log."""
        self.faults.clear()
        self.log.clear()
        self.suffered = 0

    def handle_error(self, request, client_address):
        pass  # a client that hangs up is part of the tests


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1

    def log_message(self, *arguments):
        pass

    def handle_request(self):
        server = self.server
        with server.lock:
            server.log.append(f"{self.command} {self.path}")
            fault = next((fault for fault in server.faults if fault.takes(self.command, self.path)), None)
            if fault:
                server.suffered += 1
                server.faults += fault.then
        kind = fault.kind if fault else None
        if "100-continue" in (self.headers.get("Expect") or "").lower():
            self.send_response_only(100)
            self.end_headers()
            self.wfile.flush()
        if kind == "cut":
            self.rfile.read(int(self.headers.get("Content-Length") or 0) // 2)
            self.reset()
            return
        body = self.read_body()
        if kind == "reset":
            self.reset()
            return
        if isinstance(kind, int):
            self.reply(kind, fault.headers, fault.body)
            return
        if kind == "late":
            time.sleep(fault.seconds)
        if kind == "page":
            self.reply(200, {"Content-Type": "text/html"}, PAGE)
            return
        status, headers, answer = self.forward(body)
        if kind == "lost":
            self.reset()
            return
        if kind == "flipped" and answer:
            middle = len(answer) // 2
            answer = answer[:middle] + bytes([answer[middle] ^ 4]) + answer[middle + 1 :]
        self.reply(status, headers, answer, cut=kind == "truncated")

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_PATCH = handle_request

    def read_body(self):
        if "chunked" in (self.headers.get("Transfer-Encoding") or "").lower():
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def forward(self, body):
        connection = http.client.HTTPConnection(urlsplit(self.server.upstream).netloc, timeout=30)
        headers = {
            name: value
            for name, value in self.headers.items()
            if name.lower() not in {*_HOP_BY_HOP, "expect", "accept-encoding"}
        }
        try:
            # The Host that the client has signed stays.
            connection.request(self.command, self.path, body=body, headers=headers)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def reply(self, status, headers, body, *, cut=False):
        self.send_response(status)
        length = None
        for name, value in headers.items():
            if name.lower() == "content-length":
                length = value
            elif name.lower() not in _HOP_BY_HOP:
                self.send_header(name, value)
        # That of HEAD speaks of a body that does not come.
        self.send_header("Content-Length", length if self.command == "HEAD" and length else str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.wfile.flush()
            self.reset()

    def reset(self):
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def fault_proxy(upstream=""):
    server = FaultProxy(upstream)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
