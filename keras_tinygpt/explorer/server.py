"""The page and its questions over HTTP, on the loopback interface alone.

A few fixed paths and nothing that names a file; JSON of bounded size in, JSON out. A
request must name this server as its host and origin, so that no page from elsewhere can
ask through the reader's browser.
"""

import contextlib
import json
import socketserver
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from keras_tinygpt.explorer.answers import Explorer
from keras_tinygpt.explorer.pages import page_files

ADDRESS = "127.0.0.1"
MOST_BYTES = 64 * 1024  # of a request
DRAINED_BYTES = 1024 * 1024  # of a request that is too large
TIMEOUT_SECONDS = 30
MOST_MESSAGE = 300  # characters
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
# What each question may say; the answers are the methods of `Explorer` of that name.
QUESTIONS = {
    "/api/read": {"text", "ids", "without"},
    "/api/position": {
        *("ids", "position", "without", "temperature", "top_k", "top_p"),
    },
    "/api/write": {
        *("ids", "count", "seed", "without", "temperature", "top_k", "top_p"),
    },
}
REQUIRED = {
    "/api/read": set(),
    "/api/position": {"ids", "position"},
    "/api/write": {"ids"},
}


class Refused(Exception):
    """A request that is answered with an HTTP status and one line."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class ExplorerServer(ThreadingHTTPServer):
    """Serves one `Explorer`; `serve_forever` runs it.

    Args:
        explorer: what answers.
        port: 0 takes a free one; `address` tells which.
    """

    daemon_threads = True

    def __init__(self, explorer: Explorer, port: int = 0):
        self.explorer = explorer
        self.files = page_files()
        super().__init__((ADDRESS, port), _Handler)

    def server_bind(self):
        """As in the base class, without looking a name up in the network."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = ADDRESS, self.server_address[1]

    @property
    def address(self) -> str:
        """Where the page is."""
        return f"http://{ADDRESS}:{self.server_port}"

    def handle_error(self, request, client_address):
        """A reader who has gone is no error; others were answered."""


class _Handler(BaseHTTPRequestHandler):
    server: ExplorerServer
    timeout = TIMEOUT_SECONDS

    def do_GET(self):
        with self._refusals():
            self._check_host()
            if self.path == "/api/model":
                self._send_json(200, self.server.explorer.describe())
                return
            if self.path not in self.server.files:
                raise Refused(404, f"there is no {self.path:.80}")
            content, kind = self.server.files[self.path]
            self._send(200, content, kind)

    def do_POST(self):
        with self._refusals():
            self._check_host()
            if self.path not in QUESTIONS:
                raise Refused(404, f"there is no {self.path:.80}")
            question = self._question()
            method = getattr(self.server.explorer, self.path.removeprefix("/api/"))
            answer = method(**question)
            if isinstance(answer, Iterator):
                self._send_lines(answer)
            else:
                self._send_json(200, answer)

    @contextlib.contextmanager
    def _refusals(self):
        """Answers errors; what the reader sent wrongly is told, the rest named."""
        try:
            yield
        except Refused as error:
            self._send_json(error.status, {"error": str(error)})
        except ValueError as error:
            self._send_json(400, {"error": _one_line(error)})
        except (ConnectionError, TimeoutError):
            self.close_connection = True
        except Exception as error:
            self._send_json(500, {"error": f"the model failed: {error!r:.200}"})

    def _check_host(self) -> None:
        port = self.server.server_port
        names = (ADDRESS, "localhost")
        hosts = {f"{name}:{port}" for name in names}
        if port == 80:  # which browsers leave out
            hosts.update(names)
        host = self.headers.get("Host")
        if host not in hosts:
            raise Refused(403, "the host must be this machine")
        origin = self.headers.get("Origin")
        if origin is not None and origin != f"http://{host}":
            raise Refused(403, "the origin must be this page")

    def _question(self) -> dict[str, Any]:
        """The JSON object that was sent, with the fields the path takes."""
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            raise Refused(411, "the request must say its length")
        if len(length) > 9 or int(length) > MOST_BYTES:
            # What is not read may keep the answer from arriving.
            self.rfile.read(min(int(length), DRAINED_BYTES))
            raise Refused(413, f"the request must have at most {MOST_BYTES} bytes")
        kind = self.headers.get("Content-Type", "").split(";")[0].strip().lower()
        if kind != "application/json":
            raise Refused(415, "the request must be application/json")
        try:
            question = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the request is not JSON: {error}") from error
        if not isinstance(question, dict):
            kind = type(question).__name__
            raise ValueError(f"the request must be an object, got {kind}")
        fields = QUESTIONS[self.path]
        unknown = sorted(question.keys() - fields)
        if unknown:
            known = ", ".join(sorted(fields))
            raise ValueError(f"the request may say {known}, got {unknown[0]!r:.80}")
        missing = sorted(REQUIRED[self.path] - question.keys())
        if missing:
            raise ValueError(f"the request must say {missing[0]}")
        return question

    def _send_json(self, status: int, answer: dict[str, Any]) -> None:
        text = json.dumps(answer, allow_nan=False, separators=(",", ":"))
        self._send(status, text.encode(), "application/json")

    def _send(self, status: int, content: bytes, kind: str) -> None:
        self._send_head(status, kind, len(content))
        self.wfile.write(content)

    def _send_head(self, status: int, kind: str, length: int | None = None) -> None:
        self.send_response_only(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def _send_lines(self, answers: Iterator[dict[str, Any]]) -> None:
        """A line of JSON for each answer as it comes, then {} or what went wrong."""
        self._send_head(200, "application/x-ndjson")
        try:
            for answer in answers:
                self.wfile.write(json.dumps(answer).encode() + b"\n")
            last = {}
        except ValueError as error:
            last = {"error": _one_line(error)}
        self.wfile.write(json.dumps(last).encode() + b"\n")

    def log_message(self, format, *args):
        """Requests are not logged."""


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:MOST_MESSAGE]
