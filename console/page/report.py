"""Writes report.html: the page of a run as one file, with its data and its scripts inside, for any browser offline.

What does not fit into MAX_BYTES is left out, samples first; the page says so where it is asked for. It can be written
at any time (`penstock report RUN_DIR`), even for a run that is under way or was cut short.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Iterator, Mapping
from urllib.parse import quote

from console.config.run_folder import RunFolder
from console.page.files.values import Answer, BadQuestionError
from console.page.page_files import CHARTS, INDEX, page_file
from console.page.run_data import RunData
from console.view.outcome import read_lines, read_summary
from console.view.result_tables import results_html
from penstock.config import ConfigError
from penstock.process.durable_files import replace_file

MAX_BYTES = 5_000_000
SERIES_BYTES = 1_200_000
"""Of the curves over all three axes; beyond it they are drawn from fewer points."""
MAX_STEPS, LISTED = 20, 64
"""Steps whose samples are embedded, and samples of each."""
INDEX_S, LIST_S = 10.0, 5.0
"""Longest time to read a recording's index, and to list its steps: a run that ends does not wait for more."""
_MAX_REFUSED = 8
"""Answers in a row that do not fit, after which no more are tried."""
_AXES = ("step", "tokens", "hours")
_IMPORT = re.compile(r"^import\s*\{[^}]*\}\s*from\s*\"\./(\w+\.js)\";\n?", re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(async )?(function|const|let|class)\b)", re.MULTILINE)
_STYLE_LINE, _CHART_LINE, _MAIN_LINE = (
    re.compile(rf"^.*/static/{name}.*\n", re.MULTILINE) for name in (r"page\.css", r"lib/chart\.js", r"main\.js")
)


def write_report(folder: RunFolder) -> bool:
    """Write report.html; returns whether there was anything to report. Raises OSError, ConfigError."""
    steps, summary = read_lines(folder.metrics), read_summary(folder.summary) or {}
    if not steps and not summary:
        return False
    results = results_html(folder, steps, read_lines(folder.path / "evaluations.jsonl"), summary)
    replace_file(folder.report, page_html(RunData(folder), results))
    return True


def page_html(data: RunData, results: str) -> str:
    """The page as one file. Raises ConfigError if the page's files are not installed.

    Args:
        data: The run.
        results: Markup below the page, without scripts and styles.
    """
    charts, style, modules = _text(CHARTS), _text("page.css"), joined_modules()
    scripts = [_inline(charts), _inline(modules)]
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    index = _text(INDEX).replace("</body>", f'<section id="results">{results}</section>\n</body>')
    fixed = len("".join((index, style, policy, *scripts)).encode()) + 1000
    embedded = json.dumps(answers(data, MAX_BYTES - fixed), separators=(",", ":")).replace("<", "\\u003c")
    parts = (
        (_STYLE_LINE, f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>\n'),
        (_CHART_LINE, f"<script>{scripts[0]}</script>\n"),
        (
            _MAIN_LINE,
            f'<script type="application/json" id="embedded">{embedded}</script>\n'
            f'<script type="module">{scripts[1]}</script>\n',
        ),
    )
    # The marks are looked for before anything is put in: what is put in may say anything.
    found = sorted(
        (match.start(), match.end(), text) for mark, text in parts for match in [mark.search(index)] if match
    )
    if len(found) != len(parts):
        raise ConfigError(f"{INDEX}: does not refer to page.css, {CHARTS} and main.js on a line each")
    pieces, end = [], 0
    for begin, stop, text in found:
        pieces += [index[end:begin], text]
        end = stop
    return "".join((*pieces, index[end:]))


def joined_modules() -> str:
    """The page's modules as one script: each once, after those that it imports. Raises ConfigError."""
    joined: dict[str, str] = {}

    def add(name: str) -> None:
        text = _text(name)
        joined[name] = ""
        for imported in _IMPORT.findall(text):
            if imported not in joined:
                add(imported)
        del joined[name]
        joined[name] = _EXPORT.sub("", _IMPORT.sub("", text))

    add("main.js")
    return "\n".join(joined.values())


def answers(data: RunData, max_bytes: int) -> Answer:
    """Answers by the paths that the page asks for, the most useful first, as long as they fit."""
    found: Answer = {}
    left, num_refused = max_bytes, 0
    for path, answer in _wanted(data):
        size = len(path) + 8 + len(json.dumps(answer, separators=(",", ":")).replace("<", "\\u003c"))
        if size <= left:
            found[path] = answer
            left, num_refused = left - size, 0
        else:
            num_refused += 1
        if num_refused >= _MAX_REFUSED:
            break
    return found


def _wanted(data: RunData) -> Iterator[tuple[str, Answer]]:
    yield "/api/runs", {"runs": [{"index": 0, **data.facts()}], "live": False}
    yield "/api/metrics?run=0", data.answer("metrics", {})
    yield from _series(data)
    for what in ("cost", "problems", "weights", "lanes"):
        yield f"/api/{what}?run=0", data.answer(what, {})
    newest = _newest(data)
    yield "/api/samples?run=0", newest
    steps = newest["steps"]
    # The newest and the first step, then those in between.
    stride = max(1, len(steps) // MAX_STEPS)
    listed: dict[int, Answer] = {}
    until_s = time.monotonic() + LIST_S
    for step in dict.fromkeys([*steps[-1:], *steps[:1], *steps[stride::stride][:MAX_STEPS]]):
        if time.monotonic() < until_s:
            listed[step] = data.answer("samples", {"step": str(step), "limit": str(LISTED)})
            yield f"/api/samples?run=0&step={step}", listed[step]
    yield from _single(data, listed)


def _single(data: RunData, listed: Mapping[int, Answer]) -> Iterator[tuple[str, Answer]]:
    """Single samples, the first ones of every step before the second ones."""
    rows = [[(step, each["key"]) for each in answer["samples"]] for step, answer in listed.items()]
    for index in range(max(map(len, rows), default=0)):
        for step, key in (row[index] for row in rows if index < len(row)):
            try:
                answer = data.answer("sample", {"step": str(step), "key": key})
            except BadQuestionError:
                continue
            yield f"/api/sample?run=0&step={step}&key={quote(key, safe=_SAFE)}", answer


_SAFE = "!~*'()"
"""What encodeURIComponent leaves besides letters, digits and -_.~"""


def _newest(data: RunData) -> Answer:
    """The samples of the newest step, once the recording is indexed."""
    until_s = time.monotonic() + INDEX_S
    answer = data.answer("samples", {"limit": str(LISTED)})
    while answer["indexed"] < 1.0 and time.monotonic() < until_s:
        answer = data.answer("samples", {"limit": str(LISTED)})
    return answer


def _series(data: RunData) -> Iterator[tuple[str, Answer]]:
    points = 600
    whole = data.answer("series", {"points": str(points)})
    size = len(json.dumps(whole)) * len(_AXES)
    if size > SERIES_BYTES:
        points = max(10, len(whole["x"]) * SERIES_BYTES // size)
    for axis in _AXES:
        yield f"/api/series?run=0&x={axis}", data.answer("series", {"x": axis, "points": str(points)})


def _inline(script: str) -> str:
    """A script in which nothing ends its element, or begins a comment of HTML; its texts say the same."""
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _text(name: str) -> str:
    path = page_file(name)
    if path is None:
        raise ConfigError(f"{name}: the page's file is missing; install Penstock and its requirements again")
    return path.read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
