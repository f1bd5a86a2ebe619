"""The files of the page: its own, and the chart library out of the package that brings it."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

STATIC = Path(__file__).parent / "static"
INDEX = "index.html"
CHARTS = "lib/chart.js"
_CHART_PACKAGE, _CHART_FILE = "chartkick", "django/static/chartkick/Chart.bundle.js"
_OWN = re.compile(r"[a-z0-9_]+\.(css|js|svg)")
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def page_file(name: str) -> Path | None:
    """The file behind `/static/NAME`; None if there is none."""
    if name == CHARTS:
        # Found without importing it: the package belongs to web frameworks that are not here.
        spec = find_spec(_CHART_PACKAGE)
        path = None if spec is None or spec.origin is None else Path(spec.origin).parent / _CHART_FILE
    else:
        path = STATIC / name if _OWN.fullmatch(name) or name == INDEX else None
    return path if path is not None and path.is_file() else None
