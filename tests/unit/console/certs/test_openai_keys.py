"""`penstock openai key`: keys made without any service."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from console.cli import app
from penstock.security.session_keys import Opens, SessionKeys

SECRET = "s" * 32


@pytest.fixture(autouse=True)
def _secret(monkeypatch):
    monkeypatch.setenv("PENSTOCK_OPENAI_SECRET", SECRET)


def made(*arguments, expected=0):
    result = CliRunner().invoke(app, ["openai", "key", "--run", "r", "--session", "task7", *arguments])
    assert result.exit_code == expected, result.output
    return result.output.strip()


def test_a_key_is_what_generators_with_the_secret_take():
    key = SessionKeys("r", SECRET).read(made("--group", "t", "--valid", "1m"), now_s=0)
    assert (key.run_id, key.session, key.group, set(key.opens)) == ("r", "task7", "t", {Opens.COMPLETE})
    assert set(SessionKeys("r", SECRET).read(made("--reward"), now_s=0).opens) == set(Opens)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--session", "a b"), "--session 'a b': must be"),
        (("--group", "a b"), "--group 'a b': must be"),
        (("--valid", "31d"), "--valid 31d: must be at most 30d"),
        (("--valid", "soon"), "--valid 'soon'"),
    ],
)
def test_mistakes_are_reported_in_one_line(arguments, problem):
    text = made(*arguments, expected=2)
    assert text.startswith(f"penstock: {problem}")
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize(("secret", "problem"), [("", "not set; set it to"), ("short", "has 5 characters")])
def test_without_a_good_secret_there_is_no_key(monkeypatch, secret, problem):
    monkeypatch.setenv("PENSTOCK_OPENAI_SECRET", secret)
    assert f"PENSTOCK_OPENAI_SECRET: {problem}" in made(expected=2)
