"""Serves `console/page/static` with invented answers, as the page's server would: one origin, a strict policy."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import console
from tests.helpers.page.answers import COST, METRICS, InventedRun, problems, weights

STATIC = Path(console.__file__).parent / "page" / "static"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_TYPES = {".html": "text/html; charset=utf-8", ".css": "text/css", ".js": "text/javascript"}


@dataclass
class FixtureServer:
    """A page server on a free port of 127.0.0.1."""

    runs: list[InventedRun]
    is_live: bool = False
    asked: list[str] = field(default_factory=list)
    """Paths of data asked for so far."""
    url: str = ""

    def answer(self, path: str) -> Any:
        """What `path` with its query answers; KeyError where the real server has no such path."""
        parts = urlsplit(path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        run = self.runs[int(query.get("run", 0))]
        step = int(query["step"]) if "step" in query else None
        begin, end = (float(query[name]) if name in query else None for name in ("from", "to"))
        names = query.get("names", "").split(",")
        answers = {
            "/api/runs": lambda: {"runs": [each.described() for each in self.runs], "live": self.is_live},
            "/api/metrics": lambda: {"names": list(METRICS)},
            "/api/series": lambda: run.series(names, query.get("x", "step"), int(query.get("points", 600))),
            "/api/samples": lambda: run.sample_list(
                step,
                sort=query.get("sort", "order"),
                search=query.get("search", ""),
                offset=int(query.get("offset", 0)),
                limit=int(query.get("limit", 50)),
            ),
            "/api/sample": lambda: run.sample(step, query["key"]),
            "/api/lanes": lambda: run.lanes(begin, end),
            "/api/problems": lambda: problems(self.is_live),
            "/api/cost": lambda: COST,
            "/api/weights": lambda: weights(run),
        }
        return answers[parts.path]()


@contextmanager
def served(server: FixtureServer) -> Iterator[FixtureServer]:
    """`server` while it answers, with its address in `url`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.startswith("/api/"):
                server.asked.append(self.path)
                self._send(json.dumps(server.answer(self.path)).encode(), "application/json")
                return
            name = self.path.split("?")[0].removeprefix("/static/").strip("/") or "index.html"
            source = chart_library() if name == "lib/chart.js" else (STATIC / name).read_bytes()
            self._send(source, _TYPES[Path(name).suffix])

        def _send(self, body: bytes, content_type: str) -> None:
            self.send_response(200)
            for header, value in (
                ("Content-Type", content_type),
                ("Content-Length", str(len(body))),
                ("Content-Security-Policy", POLICY),
            ):
                self.send_header(header, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.url = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def chart_library() -> bytes:
    """The chart library out of its installed package."""
    return (files("chartkick") / "django/static/chartkick/Chart.bundle.js").read_bytes()
