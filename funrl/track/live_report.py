"""The report of a run that is still under way, served over HTTP: `funrl watch RUN`.

The page asks for news with one request that the server answers when the run's files have changed, or after half a
minute; so a page costs a look at a few file sizes a second, and nothing is sent while nothing happens.
"""

from __future__ import annotations

import http.server
import ipaddress
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from funrl.track.report import escaped, render, whole_page
from funrl.track.run_directory import RunDirectory
from funrl.track.run_files import ReportError, read_run
from funrl.track.run_lock import is_owned

LOOK_S = 1.0  # between two looks at the files
NEWS_S = 25.0  # until a page that waits for news is told that there are none
PAUSE_MS = 2000  # of a page between two of its requests
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'self'; connect-src 'self'",
    "X-Content-Type-Options": "nosniff",
}
SCRIPT = """
const pause = ms => new Promise(done => setTimeout(done, ms));
let tag = document.querySelector('main').dataset.tag;
for (;;) {
  await pause(PAUSE_MS);
  try {
    const answer = await fetch('/news?since=' + encodeURIComponent(tag));
    document.title = document.title.replace(/^\\(no answer\\) /, '');
    if (answer.status !== 200) continue;
    const page = new DOMParser().parseFromString(await answer.text(), 'text/html');
    const open = [...document.querySelectorAll('details')].map(x => x.open);
    document.querySelector('main').replaceWith(page.querySelector('main'));
    document.querySelectorAll('details').forEach((x, i) => { x.open = open[i] ?? false; });
    document.title = page.title;
    tag = document.querySelector('main').dataset.tag;
  } catch {
    if (!document.title.startsWith('(no answer) ')) document.title = '(no answer) ' + document.title;
    await pause(5 * PAUSE_MS);
  }
}
""".replace("PAUSE_MS", str(PAUSE_MS))


class Page(NamedTuple):
    """The page as it is now.

    Attributes:
      tag: differs whenever the page does.
      text: HTML.
    """

    tag: str
    text: str


class LivePage:
    """The page of a run directory, made anew when its files change; for any number of readers at once.

    A directory that is not there yet, or has no step, gives a page that says so; one that is gone, the last page and a
    line above it.

    Args:
      run_dir: of the run.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.run = RunDirectory(Path(run_dir))
        self.lock = threading.Lock()
        self.page: Page | None = None
        self.body = ""  # of the last page that had a step

    def now(self) -> Page:
        """The page of the files as they are."""
        with self.lock:
            tag = self.tag()
            if self.page is None or self.page.tag != tag:
                self.page = Page(tag, self._made(tag))
            return self.page

    def news(self, since: str) -> Page | None:
        """The page as soon as it has another tag than `since`; None: it has not after half a minute."""
        deadline = time.monotonic() + NEWS_S
        while self.tag() == since:
            if time.monotonic() >= deadline:
                return None
            time.sleep(min(LOOK_S, NEWS_S))
        return self.now()

    def tag(self) -> str:
        """Sizes and times of the files that the page is made of, and whether the run goes on."""
        run, parts = self.run, []
        for path in (run.config, run.metrics, run.samples, run.eval_samples):
            try:
                found = path.stat()
                parts.append(f"{found.st_ino:x}.{found.st_size:x}.{found.st_mtime_ns:x}")
            except OSError:
                parts.append("-")
        return "_".join(parts) + f"_{self.run.path.is_dir():d}{is_owned(self.run.path):d}"

    def _made(self, tag: str) -> str:
        try:
            page, notice = render(read_run(self.run)), ""
            self.body = page
        except (ReportError, OSError) as error:
            notice = f"{error}; this page follows when there is more"
            page = self.body or whole_page(f"{self.run.path.name}: waiting", "")
        banner = f'<p class="lead"><mark>{escaped(notice)}</mark></p>' if notice else ""
        page = page.replace("<main>", f'<main data-tag="{tag}">{banner}', 1)
        return page.replace("</body>", '<script type="module" src="/watch.js"></script></body>', 1)


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a reader has closed its page."""


def open_server(run_dir: str | Path, host: str, port: int) -> http.server.ThreadingHTTPServer:
    """A server of a run's page; `serve_forever` serves it.

    Args:
      host: to listen at; of loopback, requests under other names are refused, as a foreign page might make them.
      port: 0: any that is free.

    Raises:
      ReportError: it cannot listen there.
    """
    page, loopback = LivePage(run_dir), is_loopback(host)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer()

        def do_HEAD(self) -> None:
            self._answer()

        def _answer(self) -> None:
            where = urllib.parse.urlsplit(self.path)
            if loopback and not is_loopback(_name(self.headers.get("Host", ""))):
                self._send(403, "text/plain", "this page is for this machine")
            elif where.path == "/":
                self._send(200, "text/html", page.now().text)
            elif where.path == "/news":
                since = urllib.parse.parse_qs(where.query).get("since", [""])[0]
                news = page.news(since)
                self._send(304, "", "") if news is None else self._send(200, "text/html", news.text)
            elif where.path == "/watch.js":
                self._send(200, "text/javascript", SCRIPT)
            else:
                self._send(404, "text/plain", "there is nothing here but /")

        def _send(self, status: int, kind: str, text: str) -> None:
            body = text.encode("utf-8", "replace")
            self.send_response(status)
            for name, value in HEADERS.items():
                self.send_header(name, value)
            if status != 304:
                self.send_header("Content-Type", f"{kind}; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET" and status != 304:
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Print no line a request."""

    try:
        _Server.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return _Server((host, port), Handler)
    except (OSError, OverflowError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise ReportError(f"--host={host} --port={port}: {reason}; give another one, or --port=0 for any") from None


def serve_report(run_dir: str | Path, host: str, port: int, tell: Callable[[str], None]) -> None:
    """Serve the page of a run until it is interrupted.

    Args:
      tell: is told where the page is.

    Raises:
      ReportError: it cannot listen there.
    """
    with open_server(run_dir, host, port) as server:
        shown = f"[{host}]" if ":" in host else host
        tell(f"open http://{shown}:{server.server_address[1]}/ ; Ctrl-C ends it")
        if not Path(run_dir).is_dir():
            tell(f"{run_dir} is not there yet; the page waits for it")
        if not is_loopback(host):
            tell(f"anyone who reaches {host} can read it; without --host only this machine can")
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            tell("ended")


def is_loopback(host: str) -> bool:
    """True for a name or an address that only this machine reaches."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _name(header: str) -> str:
    """The host in a Host header, without its port."""
    return header.rpartition("]")[0].removeprefix("[") if header.startswith("[") else header.partition(":")[0]
