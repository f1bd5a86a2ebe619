"""The page's scripts keep what the report relies on when it joins them into one, and what the page's policy demands."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import console

STATIC = Path(console.__file__).parent / "page" / "static"
SCRIPTS = {path.name: path.read_text(encoding="utf-8") for path in sorted(STATIC.glob("*.js"))}
_IMPORT = re.compile(r'^import \{[\w\s,]+\} from "\./(\w+\.js)";$', re.MULTILINE)
_DECLARATION = re.compile(r"^(?:export )?(?:async )?(?:function|const|let|class) (\w+)", re.MULTILINE)


def test_imports_are_of_the_one_form_and_reach_every_script_without_a_cycle() -> None:
    seen: list[str] = []

    def follow(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, f"{name} imports itself by {above}"
        imports = _IMPORT.findall(SCRIPTS[name])
        assert len(imports) == len(re.findall(r"^import\b", SCRIPTS[name], re.MULTILINE)), name
        for each in imports:
            follow(each, (*above, name))
        seen.append(name)

    follow("main.js", ())
    assert set(seen) == set(SCRIPTS)


def test_names_are_unique_over_all_scripts_and_exports_stand_before_declarations() -> None:
    names = Counter(name for text in SCRIPTS.values() for name in _DECLARATION.findall(text))
    assert [name for name, count in names.items() if count > 1] == []
    for name, text in SCRIPTS.items():
        exports = re.findall(r"^.*\bexport\b.*$", re.sub(r"/\*.*?\*/|//.*", "", text, flags=re.DOTALL), re.MULTILINE)
        assert [line for line in exports if not re.match(r"export (async )?(function|const|class) ", line)] == [], name


def test_no_script_makes_html_or_code_out_of_text() -> None:
    forbidden = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|https?://(?!report\.invalid)"
    )
    assert {name: forbidden.findall(text) for name, text in SCRIPTS.items() if forbidden.search(text)} == {}


def test_the_page_refers_to_its_own_files_only_each_on_a_line_of_its_own() -> None:
    lines = [line.strip() for line in (STATIC / "index.html").read_text(encoding="utf-8").splitlines()]
    references = [line for line in lines if "/static/" in line]
    assert references == [
        '<link rel="stylesheet" href="/static/page.css">',
        '<script src="/static/lib/chart.js" defer></script>',
        '<script src="/static/main.js" type="module"></script>',
    ]
    assert not any("http" in line or "style=" in line or " on" in line.split(">")[0] for line in lines)
