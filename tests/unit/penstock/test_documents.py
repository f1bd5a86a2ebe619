"""What docs say of the code is so: the files and names that they mention exist, and their lists are short."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.headings import anchors_of

ROOT = Path(__file__).parents[3]
MAX_STATIONS = 12
MAX_TERMS = 52
PLACEHOLDER = "NAME"
"""Stands in a path for that of a file to be written."""
EXTENSIONS = ("an algorithm", "a staleness policy", "a solver", "an engine", "a reward model", "a store")
MAX_TOUCHED = 3
_PATH = re.compile(r"`((?:[\w.-]+/)+[\w.-]*)`")
_NAMED = re.compile(r"`((?:[\w-]+/)+\w+\.py)`:\s+((?:`\w+`(?:,? (?:and )?)?)+)")


def read(page):
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


@cache
def names_in(path):
    """Classes, functions, methods and module-level names of a file."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    defined = {
        node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    }
    targets = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    targets += [node.target for node in tree.body if isinstance(node, ast.AnnAssign)]
    return defined | {target.id for target in targets if isinstance(target, ast.Name)}


def walks():
    """The stations of each walk, by its title."""
    text = read("architecture.md").partition("\n## Four walks\n")[2]
    found = {}
    for part in text.split("\n### ")[1:]:
        title, _, body = part.partition("\n")
        found[title] = re.findall(r"^\d+\. ", body, flags=re.MULTILINE)
    return found


@pytest.mark.parametrize("page", ["architecture.md", "glossary.md", "development.md"])
def test_every_path_exists(page):
    paths = _PATH.findall(read(page))
    assert paths
    assert not [path for path in paths if PLACEHOLDER not in path and not (ROOT / path).exists()]


def test_every_file_has_the_names_that_are_said_of_it():
    named = _NAMED.findall(read("architecture.md") + read("development.md"))
    assert len(named) > 40
    missing = [
        (path, name) for path, names in named for name in re.findall(r"`(\w+)`", names) if name not in names_in(path)
    ]
    assert not missing


def test_there_are_four_walks_of_a_dozen_stations_at_most():
    assert len(walks()) == 4
    for title, stations in walks().items():
        assert 1 <= len(stations) <= MAX_STATIONS, title


def test_the_glossary_is_short_and_names_each_term_once():
    rows = [line for line in read("glossary.md").splitlines() if re.match(r"\| [^|]+ \| [^|]+ \| [^|]+ \|$", line)]
    terms = [row.split("|")[1].strip() for row in rows if not row.startswith("| term |")]
    assert len(set(terms)) == len(terms) <= MAX_TERMS


def test_an_extension_touches_three_files_at_most_and_has_a_toy_one():
    table = read("development.md").partition("| to add |")[2]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| a")]
    assert tuple(row[0] for row in rows) == EXTENSIONS
    for name, written, registered, toy in rows:
        touched = [path for path in _PATH.findall(registered)] + [
            path for path in _PATH.findall(written) if PLACEHOLDER in path
        ]
        assert len(touched) <= MAX_TOUCHED, name
        assert (ROOT / toy.strip("`")).is_file(), name


def test_every_link_leads_somewhere():
    pages = [ROOT / "README.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    broken = []
    for page in pages:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            name, _, anchor = target.partition("#")
            path = (page.parent / name).resolve() if name else page
            if not path.is_file() or (anchor and anchor not in anchors_of(path)):
                broken.append((page.name, target))
    assert not broken
