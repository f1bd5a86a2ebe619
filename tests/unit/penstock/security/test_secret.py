"""Secrets come from the environment or from files, and a wrong file is told in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config import ConfigError
from penstock.secret import read_secret
from penstock.security import Security
from services.broker.storage.redis.address import parse_redis_url, with_password


@pytest.fixture(autouse=True)
def _plain_text_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_INSECURE", "true")


def test_a_secret_is_read_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("long and secret\n")
    monkeypatch.setenv("PENSTOCK_TOKEN", "")
    monkeypatch.setenv("PENSTOCK_TOKEN_FILE", str(tmp_path / "token"))
    assert Security.from_environment().token == "long and secret"


def test_a_secret_may_be_in_the_environment_and_what_is_empty_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_TOKEN_FILE", "")
    monkeypatch.setenv("PENSTOCK_TOKEN", "t")
    assert Security.from_environment().token == "t"
    monkeypatch.setenv("PENSTOCK_TOKEN", "")
    assert Security.from_environment().token is None


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "cannot be read: .*No such file"), ("\n", "is empty"), ("x" * 70_000, "is too long")],
)
def test_a_file_that_holds_no_secret_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, problem: str
) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv("SOME_FILE", str(path))
    with pytest.raises(ConfigError, match=rf"^SOME_FILE: {path} {problem}"):
        read_secret("SOME")
    monkeypatch.setenv("SOME", "too")
    with pytest.raises(ConfigError, match="SOME and SOME_FILE are both set"):
        read_secret("SOME")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://redis:6379/0", "redis://:p%40s%2Fs@redis:6379/0"),
        ("rediss://alice@redis:6379/0", "rediss://alice:p%40s%2Fs@redis:6379/0"),
        ("redis://:own@redis:6379/0", "redis://:own@redis:6379/0"),
        ("unix:///run/redis.sock?db=0", "unix:///run/redis.sock?db=0"),
        ("memory://", "memory://"),
    ],
)
def test_a_password_goes_into_a_url_that_has_none(url: str, expected: str) -> None:
    assert with_password(url, "p@s/s") == expected
    assert with_password(url, None) == url


def test_a_password_reaches_the_nodes_behind_sentinels() -> None:
    address = parse_redis_url(with_password("redis+sentinel://a:1,b:2/mymaster", "p@s/s"))
    assert (address.password, address.hosts) == ("p@s/s", (("a", 1), ("b", 2)))
