"""PageServer: serves the live page on the loopback interface, to whoever has the token.

The standard library's server is enough: a handful of browsers, a few small files, and one stream of
server-sent events for each. The address holds a token of 128 bits; every other path answers 403. The page may
load nothing from elsewhere, and another page cannot read it.
"""

from __future__ import annotations

import hmac
import queue
import secrets
import socket
import threading
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any

from shoal.report.scripts import UPLOT, source, uplot_style
from shoal.report.style import CSS
from shoal.watch.feed import Feed

HOST = "127.0.0.1"
LOCAL_NAMES = ("127.0.0.1", "localhost", "[::1]")
IDLE_SECONDS = 15.0  # after which a comment is sent, to notice browsers that are gone
SLOW_SECONDS = 30.0  # for a request, or for a browser to take what is sent

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",  # the address holds the token
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@cache
def page_files() -> dict[str, tuple[str, bytes]]:
    """What the page consists of: path, type and content."""
    own = files("shoal.watch")

    def text(name: str) -> str:
        return own.joinpath(name).read_text(encoding="utf-8")

    licence = f"/*! {UPLOT}\n{source('uplot_license.txt')} */\n"
    parts = {
        "": ("text/html", text("watch.html")),
        "style.css": ("text/css", f"{CSS}\n{uplot_style()}\n{text('watch.css')}"),
        "uplot.js": ("text/javascript", licence + source("uplot.js")),
        "charts.js": ("text/javascript", source("charts.js")),
        "watch.js": ("text/javascript", text("watch.js")),
    }
    return {name: (f"{kind}; charset=utf-8", body.encode()) for name, (kind, body) in parts.items()}


class PageServer:
    """Listens on a free port of the loopback interface, or on `port`, until `close`."""

    def __init__(self, feed: Feed, port: int = 0) -> None:
        self.token = secrets.token_urlsafe(16)
        handler = type("Handler", (_Handler,), {"feed": feed, "token": self.token})
        try:
            self._server = _Server((HOST, port), handler)
        except OSError as error:
            why = f"cannot serve the page on port {port}: {error.strerror}. Name another with --port."
            raise OSError(error.errno, why) from error
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="page", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Where to point a browser."""
        return f"http://{HOST}:{self.port}/{self.token}/"

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True  # a browser that does not answer cannot keep the run from ending
    allow_reuse_address = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a browser that goes away in the middle is no news."""


class _Handler(BaseHTTPRequestHandler):
    feed: Feed
    token: str
    timeout = SLOW_SECONDS
    server_version = "shoal"
    sys_version = ""

    def do_GET(self) -> None:
        name = self._asked_for()
        if name is None:
            self._answer(403, "text/plain; charset=utf-8", b"This address lacks the token of the run.\n")
        elif name == "events":
            self._stream()
        elif name in page_files():
            self._answer(200, *page_files()[name])
        else:
            self._answer(404, "text/plain; charset=utf-8", b"There is no such page.\n")

    def _asked_for(self) -> str | None:
        """The file that is asked for; None without the token, or by a name that is not this host's.

        A page of another site that has its name lead here is told apart by that name.
        """
        _, _, rest = self.path.partition("?")[0].partition("/")
        token, slash, name = rest.partition("/")
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        given = token.encode("utf-8", "surrogateescape")
        right = hmac.compare_digest(given, self.token.encode()) and bool(slash)
        return name if right and host in LOCAL_NAMES else None

    def _answer(self, code: int, kind: str, body: bytes) -> None:
        self._begin(code, kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _begin(self, code: int, kind: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Connection", "close")
        for name, value in HEADERS.items():
            self.send_header(name, value)

    def _stream(self) -> None:
        """Send everything so far, then each change, until the run or the browser ends."""
        subscriber = self.feed.subscribe()
        if subscriber is None:
            self._answer(503, "text/plain; charset=utf-8", b"Too many browsers follow this run.\n")
            return
        try:
            self._begin(200, "text/event-stream")
            self.end_headers()
            self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.wfile.write(subscriber.first)
            while not subscriber.is_slow:
                try:
                    change = subscriber.next(IDLE_SECONDS)
                except queue.Empty:
                    change = b": still here\n\n"
                if change is None:
                    self.wfile.write(b"event: end\ndata: {}\n\n")
                    return
                self.wfile.write(change)
        except OSError:  # the browser has gone
            return
        finally:
            self.feed.unsubscribe(subscriber)

    def log_message(self, format: str, *args: Any) -> None:
        """Write no log: the terminal belongs to the run."""
