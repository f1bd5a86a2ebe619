"""Credentials for third parties come from variables of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config import ConfigError
from penstock.security import Security
from penstock.security.credentials import JUDGES


def test_what_judges_are_shown_is_never_the_clusters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "accepted").write_text("environment:0123456789abcdef\n")
    monkeypatch.setenv("PENSTOCK_TOKEN", "the-clusters")
    monkeypatch.setenv("PENSTOCK_ACCEPTED_TOKENS_FILE", str(tmp_path / "accepted"))
    for name in ("CA", "CERT", "KEY"):
        monkeypatch.setenv(f"PENSTOCK_TLS_{name}", f"cluster-{name}.pem")
    assert Security.from_environment(JUDGES) == Security()
    monkeypatch.setenv("PENSTOCK_JUDGE_TOKEN", "their:own")
    for name in ("CA", "CERT", "KEY"):
        monkeypatch.setenv(f"PENSTOCK_JUDGE_TLS_{name}", f"judge-{name}.pem")
    assert Security.from_environment(JUDGES) == Security(
        ca_file=Path("judge-CA.pem"),
        cert_file=Path("judge-CERT.pem"),
        key_file=Path("judge-KEY.pem"),
        token="their:own",
    )


def test_a_judges_token_that_no_header_can_carry_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_JUDGE_TOKEN", "two\nlines")
    with pytest.raises(ConfigError, match="PENSTOCK_JUDGE_TOKEN: has characters that a header cannot carry"):
        Security.from_environment(JUDGES)
