"""Credentials for third parties come from variables of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config import ConfigError
from penstock.security import Security
from penstock.security.credentials import JUDGES
from tests.helpers.certificates import make_security


def test_what_judges_are_shown_is_never_the_clusters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "accepted").write_text("environment:0123456789abcdef\n")
    monkeypatch.setenv("PENSTOCK_TOKEN", "the-clusters")
    monkeypatch.setenv("PENSTOCK_ACCEPTED_TOKENS_FILE", str(tmp_path / "accepted"))
    clusters = make_security(tmp_path)
    for name, path in (("CA", clusters.ca_file), ("CERT", clusters.cert_file), ("KEY", clusters.key_file)):
        monkeypatch.setenv(f"PENSTOCK_TLS_{name}", str(path))
    assert Security.from_environment(JUDGES) == Security()
    monkeypatch.setenv("PENSTOCK_JUDGE_TOKEN", "their:own")
    (tmp_path / "judge").mkdir()
    judges = make_security(tmp_path / "judge", token="their:own")
    for name, path in (("CA", judges.ca_file), ("CERT", judges.cert_file), ("KEY", judges.key_file)):
        monkeypatch.setenv(f"PENSTOCK_JUDGE_TLS_{name}", str(path))
    assert Security.from_environment(JUDGES) == judges


def test_files_that_cannot_be_used_are_reported_with_the_variable_that_names_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = make_security(tmp_path)
    monkeypatch.setenv("PENSTOCK_JUDGE_TLS_CA", str(made.ca_file))
    monkeypatch.setenv("PENSTOCK_JUDGE_TLS_CERT", str(tmp_path / "none.pem"))
    monkeypatch.setenv("PENSTOCK_JUDGE_TLS_KEY", str(made.key_file))
    with pytest.raises(ConfigError, match=r"^PENSTOCK_JUDGE_TLS_CERT: .*none.pem cannot be read: No such file"):
        Security.from_environment(JUDGES)


def test_a_judges_token_that_no_header_can_carry_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_JUDGE_TOKEN", "two\nlines")
    with pytest.raises(ConfigError, match="PENSTOCK_JUDGE_TOKEN: has characters that a header cannot carry"):
        Security.from_environment(JUDGES)
