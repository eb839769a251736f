"""HTTP proxy between a run and the emulator of its bucket, which gives errors and slow answers when it is told to."""

from __future__ import annotations

import contextlib
import http.client
import random
import socket
import struct
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Proxy(ThreadingHTTPServer):
    """Proxy that forwards requests to 127.0.0.1:target.

    A `share` of them is disturbed in the way of `fault`:

    * "error": answered with 503, and not forwarded.
    * "lost": forwarded, and the connection reset in place of the answer.
    * "slow": forwarded after up to `delay` seconds.
    """

    daemon_threads = True

    def __init__(self, port: int, target: int) -> None:
        """Listen, and forward in threads."""
        super().__init__(("127.0.0.1", port), _Handler)
        self.target = target
        self.fault, self.share, self.delay = "", 0.0, 1.0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, *_: object) -> None:
        """Say nothing of connections that end early: clients are killed."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def _forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.server.fault if random.random() < self.server.share else ""
        if fault == "error":
            return self._answer(503, {"Content-Type": "application/json"}, b'{"error": {"message": "try again"}}')
        if fault == "slow":
            time.sleep(random.uniform(0, self.server.delay))
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.server.target)) as connection:
            connection.request(self.command, self.path, body or None, dict(self.headers))
            answer = connection.getresponse()
            content = answer.read()
        if fault == "lost":
            reset = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            self.close_connection = True
            return self.connection.close()
        return self._answer(answer.status, dict(answer.getheaders()), content)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = _forward

    def _answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        length = headers.get("Content-Length", len(content)) if self.command == "HEAD" else len(content)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Print nothing."""
