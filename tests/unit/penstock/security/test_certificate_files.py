"""Certificate files are read again when they change, and only where they fit each other."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from penstock.config import ConfigError
from penstock.security import certificate_files as files_module
from penstock.security.certificate_files import Followed, Loaded, TlsFiles, load
from tests.helpers.certificates import issue, make_authority


@pytest.fixture(autouse=True)
def _looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "LOOK_EVERY_S", 0.0)


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    return make_authority(tmp_path / "authority")


def replace(source: Path | None, target: Path | None) -> None:
    """As a careful writer does: nobody sees half a file."""
    assert source is not None
    assert target is not None
    beside = target.with_suffix(".new")
    shutil.copy(source, beside)
    beside.replace(target)


def held(_files: TlsFiles, loaded: Loaded) -> Loaded:
    return loaded


def serial(loaded: Loaded) -> int:
    return loaded.chain[0].serial_number


def test_a_pair_that_is_just_being_replaced_is_taken_once_it_is_whole(authority: Path) -> None:
    first, second = issue(authority, name="first"), issue(authority, name="second")
    followed = Followed(first.tls_files, held)
    before = serial(followed.current())
    replace(second.key_file, first.key_file)
    with capture_logs() as logs:
        assert serial(followed.current()) == before
        assert serial(followed.current()) == before
    assert [entry["log_level"] for entry in logs] == ["warning"]
    assert f"{first.key_file} is not the key of the certificate in {first.cert_file}" in logs[0]["error"]
    replace(second.cert_file, first.cert_file)
    assert serial(followed.current()) == serial(load(second.tls_files)) != before


def test_what_begins_to_follow_in_the_midst_of_a_replacement_takes_what_was_read_before(authority: Path) -> None:
    first, second = issue(authority, name="first"), issue(authority, name="second")
    before = serial(load(first.tls_files))
    replace(second.key_file, first.key_file)
    late = Followed(first.tls_files, held)
    assert serial(late.current()) == before
    replace(second.cert_file, first.cert_file)
    assert serial(late.current()) == serial(load(second.tls_files)) != before


def test_a_file_that_is_away_for_a_moment_leaves_what_was_there(authority: Path) -> None:
    security = issue(authority)
    followed = Followed(security.tls_files, held)
    before = followed.current()
    assert security.cert_file is not None
    aside = security.cert_file.rename(security.cert_file.with_suffix(".aside"))
    assert followed.current() is before
    aside.rename(security.cert_file)
    assert serial(followed.current()) == serial(before)


def test_another_authority_is_trusted_as_soon_as_its_file_has_it(authority: Path, tmp_path: Path) -> None:
    security, other = issue(authority), make_authority(tmp_path / "other")
    followed = Followed(security.tls_files, held)
    assert len(followed.current().authorities) == 1
    assert security.ca_file is not None
    with security.ca_file.open("ab") as file:
        file.write((other / "ca.pem").read_bytes())
    assert len(followed.current().authorities) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file or directory; name an existing file"),
        (b"", "is empty"),
        (b"nonsense", "no certificate in PEM form"),
    ],
)
def test_files_that_cannot_be_used_are_named_at_first(authority: Path, content: bytes | None, message: str) -> None:
    security = issue(authority)
    assert security.cert_file is not None
    security.cert_file.unlink()
    if content is not None:
        security.cert_file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"^PENSTOCK_TLS_CERT: {security.cert_file} .*{message}"):
        Followed(security.tls_files, held)


def test_a_key_with_a_password_is_reported_as_such(authority: Path) -> None:
    security = issue(authority)
    assert security.key_file is not None
    security.key_file.write_text(security.key_file.read_text().replace("PRIVATE", "ENCRYPTED PRIVATE"))
    with pytest.raises(ConfigError, match=f"^PENSTOCK_TLS_KEY: {security.key_file} "):
        load(TlsFiles(None, security.cert_file, security.key_file))
