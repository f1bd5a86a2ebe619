"""`penstock bench NAME`: every suite can be reached, with options and exit status of its own."""

from __future__ import annotations

import signal
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from setuptools import find_packages
from typer.testing import CliRunner

from benchmarks import SUITES
from console.cli import app
from console.subcommands import cli_bench
from tests.helpers.console import ROOT

PARSERS = ("ArgumentParser(", "suite_parser(__doc__)")


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A suite takes over the process; what it changes there is put back."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A checkout with one suite; what it was called with."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").write_text("SUITES = {'toy.one': 'plays'}")
    calls: list[list[str]] = []

    def main() -> int | None:
        calls.append(list(sys.argv))
        return 3 if "--fails" in sys.argv else None

    monkeypatch.setattr(cli_bench, "_SOURCE", tmp_path)
    monkeypatch.setitem(sys.modules, "benchmarks.toy.one", SimpleNamespace(main=main))
    return calls


@pytest.mark.parametrize("name", SUITES)
def test_a_suite_explains_its_own_options(name: str) -> None:
    result = CliRunner().invoke(app, ["bench", name, "--help"])
    assert result.exit_code == 0, result.output
    assert result.output.startswith(f"usage: penstock bench {name} ")


def test_every_module_with_options_is_a_suite_and_is_listed() -> None:
    folder = ROOT / "benchmarks"
    found = {
        ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__main__")
        for path in folder.rglob("*.py")
        if any(word in path.read_text() for word in PARSERS) and path != folder / "command.py"
    }
    assert found == set(SUITES)
    listed = CliRunner().invoke(app, ["bench", "--help"]).output.splitlines()
    for name, what in SUITES.items():
        assert any(line.split(maxsplit=1) == [name, what] for line in listed), name


@pytest.mark.parametrize("words", [["toy.one", "--json", "x"], ["--json", "toy.one", "x"]])
def test_a_suite_gets_its_options_before_and_after_its_name(toy: list[list[str]], words: list[str]) -> None:
    assert CliRunner().invoke(app, ["bench", *words]).exit_code == 0
    assert toy == [["penstock bench toy.one", "--json", "x"]]


def test_the_status_of_a_suite_is_that_of_the_command(toy: list[list[str]]) -> None:
    assert CliRunner().invoke(app, ["bench", "toy.one", "--fails"]).exit_code == 3
    assert len(toy) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["broker", "--engine", "vllm"], "unrecognized arguments: --engine vllm"),
        (["weights", "--engine", "none"], "choose from 'transformers', 'vllm'"),
        (["generator", "--only", "nothing"], "choose from 'updates', 'pressure', 'concurrency'"),
    ],
)
def test_an_option_that_a_suite_does_not_have_is_a_mistake(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


def test_a_word_in_the_name_of_no_scenario_is_a_mistake_that_lists_the_words() -> None:
    result = CliRunner().invoke(app, ["bench", "dispatch", "--only", "nothing"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("penstock: --only 'nothing': no scenario's name contains it; known words: 8 alike,")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [(["nothing"], "'nothing' is not known; suites: toy.one"), (["--json"], "name a suite; suites: toy.one")],
)
def test_an_unknown_suite_is_a_mistake_that_lists_the_names(
    toy: list[list[str]], capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        app(["bench", *words])
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"penstock: bench: {message}\n"
    assert toy == []


def test_an_installation_without_suites_says_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli_bench, "_SOURCE", tmp_path)
    with pytest.raises(SystemExit) as caught:
        app(["bench", "broker"])
    assert caught.value.code == 2
    assert "from a source checkout" in capsys.readouterr().err


def test_the_package_holds_the_product_and_no_suite() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    packages = {name.partition(".")[0] for name in find_packages(str(ROOT), **settings)}
    assert packages == {"penstock", "services", "simulator", "console", "quickstart"}
