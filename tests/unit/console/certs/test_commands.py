"""`penstock certs` as a person uses it."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from console.certs.request import ROLES
from console.cli import app
from tests.helpers.certificates import issue, make_authority
from tests.helpers.full_disk import largest_file

Run = Callable[..., Result]
WHO = ("--run", "math-7b", "--site", "waw", "--name", "waw-0")


@pytest.fixture
def certs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command, in an empty folder and as wide as a pipe."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(app, ["certs", *arguments])


def refused(result: Result) -> str:
    """What a refusal says."""
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Traceback" not in result.stderr
    return result.stderr


def test_from_nothing_to_a_sites_folder_in_two_commands(certs: Run, tmp_path: Path) -> None:
    assert "Keep its ca-key.pem to yourself" in certs("init").stdout
    result = certs("issue", "generator", "environment", *WHO, "--host", "10.0.0.7", "--host", "gpu-1", "--valid", "1m")
    assert result.exit_code == 0
    folder = tmp_path / "authority/issued/waw-0"
    assert f"Use it there with: . {folder}/env\n" in result.stdout
    [entry] = json.loads(certs("list", "--json").stdout)["certificates"]
    assert entry["roles"] == ["generator", "environment"]
    assert entry["hosts"] == ["10.0.0.7", "gpu-1"]
    assert (entry["run"], entry["site"], entry["name"], entry["folder"]) == ("math-7b", "waw", "waw-0", str(folder))
    assert 0 < entry["expires_in_s"] <= 60
    assert not entry["is_expired"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("issue", "root", *WHO), "penstock: ROLE 'root': no such role; known are operator, trainer"),
        (("issue", "trainer", *WHO, "--host", "a:1"), "penstock: --host 'a:1': must be a DNS name or an IP address"),
        (("issue", "trainer", *WHO, "--valid", "soon"), "penstock: --valid 'soon': must be a number and one of"),
        (("issue", "trainer", *WHO, "--days", "400"), "penstock: --days 400: must be 1 s to 366 days"),
        (("issue", "trainer", *WHO, "--days", "9"), "penstock: authority/ca.pem: the authority itself ends on"),
        (("issue", "trainer", *WHO, "--dir", "no"), "penstock: no: no authority here; make one with: penstock certs"),
        (("list", "--dir", "no"), "penstock: no: no authority here; make one with: penstock certs init no"),
        (("init",), "penstock: authority: already holds an authority"),
        (("init", "b", "--days", "0"), "penstock: --days 0: must be 1 to 36500"),
        (("init", "b", "--name", "a\nb"), "penstock: --name 'a\\nb': must be 1 to 64 printable characters"),
        (("init", "file"), "penstock: file: cannot be made: File exists"),
    ],
)
def test_mistakes_are_one_line_with_the_fix(certs: Run, tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    (tmp_path / "file").touch()
    assert certs("init", "--days", "1").exit_code == 0
    said = refused(certs(*arguments))
    assert said.startswith(words)
    assert said.count("\n") == 1


def test_help_names_every_role(certs: Run) -> None:
    words = certs("issue", "--help").stdout.replace(",", " ").replace(".", " ").split()
    assert set(ROLES) <= set(words)


@pytest.mark.parametrize("names", [("waw", "waw-0"), ("waw-0", "waw")])
def test_it_is_said_where_one_may_use_the_ids_of_another(certs: Run, names: tuple[str, str]) -> None:
    certs("init")
    who = ("--run", "*", "--site", "*", "--name")
    assert certs("issue", "generator", *who, "waw0").stderr == ""
    assert certs("issue", "generator", *who, names[0]).stderr == ""
    said = certs("issue", "generator", *who, names[1]).stderr
    assert said == "penstock: --name: the holder of 'waw' may use the ids of 'waw-0' too\n"


def test_a_full_disk_is_one_line(certs: Run) -> None:
    with largest_file(100):
        said = refused(certs("init"))
    assert said == "penstock: authority/ca-key.pem: the disk is full; free some space, then repeat the command\n"
    assert certs("init").exit_code == 0
    with largest_file(100):
        said = refused(certs("issue", "trainer", *WHO))
    assert said.endswith("waw-0/ca.pem: the disk is full; free some space, then repeat the command\n")


def rows(certs: Run, *arguments: str) -> list[Any]:
    return [
        (row["name"], row["is_expired"])
        for row in json.loads(certs("list", "--json", *arguments).stdout)["certificates"]
    ]


def test_the_list_says_what_counts_still_and_what_has_ended(certs: Run, tmp_path: Path) -> None:
    hour, folder = timedelta(hours=1), make_authority(tmp_path / "authority")
    issue(folder, name="renewed", validity=hour, ago=2 * hour)
    issue(folder, name="renewed", validity=timedelta(days=3, minutes=1))
    issue(folder, name="replaced-early", validity=2 * hour + timedelta(minutes=1))
    issue(folder, name="replaced-early", validity=timedelta(minutes=3, seconds=30))
    issue(folder, name="forgotten", validity=hour, ago=2 * hour)
    current = [("renewed", False), ("replaced-early", False), ("replaced-early", False), ("forgotten", True)]
    assert rows(certs) == current
    assert rows(certs, "--all") == [("renewed", True), *current]
    first, _, *lines = certs("list").stdout.splitlines()
    assert first == "authority: the authority expires in 3,649 days"
    for line, words in zip(lines, ["expires in 3 days", "expires in 2 h", "expires in 3 min", "expired"], strict=True):
        assert words in line


@pytest.mark.parametrize("torn", [b'{"serial": "12', b"\0" * 40, b"\xff\xfe", b'{"serial": "12", "name": 3}'])
def test_a_torn_last_line_costs_that_line_only(certs: Run, tmp_path: Path, torn: bytes) -> None:
    folder = make_authority(tmp_path / "authority")
    issue(folder, name="first")
    with (folder / "issued.jsonl").open("ab") as file:
        file.write(torn)
    assert rows(certs) == [("first", False)]
    assert certs("list").stderr == "penstock: authority: lines that cannot be read, left out: 1\n"
    issue(folder, name="second")
    assert rows(certs) == [("first", False), ("second", False)]


def test_an_authority_that_has_issued_nothing_lists_nothing(certs: Run) -> None:
    certs("init")
    assert certs("list").stdout.count("\n") == 1
    assert rows(certs) == []
