"""A site's folder: what lies in it, and how it is renewed while others read it."""

from __future__ import annotations

import os
import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from console.certs.authority import Authority
from console.certs.index import Index, Issued
from console.certs.issuing import issue
from console.certs.request import checked_request
from penstock.config import ConfigError
from tests.helpers.certificates import make_authority
from tests.helpers.full_disk import largest_file

NOW = datetime.now(UTC)


def give(authority: Path, out: Path | None = None, *, name: str = "waw-0", at: Path | None = None) -> Issued:
    request = checked_request(["generator"], run="math-7b", site="waw", name=name, hosts=["10.0.0.7"])
    return issue(Authority.load(authority), request, validity=timedelta(hours=12), now=NOW, out=out, at=at)


def is_pair(folder: Path) -> bool:
    key = serialization.load_pem_private_key((folder / "key.pem").read_bytes(), password=None)
    certificate = x509.load_pem_x509_certificate((folder / "cert.pem").read_bytes())
    return key.public_key() == certificate.public_key()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    return make_authority(tmp_path / "authority")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return tmp_path / "a site's"


def test_a_site_gets_what_it_needs_in_one_folder(authority: Path, site: Path) -> None:
    give(authority, site)
    assert sorted(contents(site)) == ["ca.pem", "cert.pem", "env", "key.pem"]
    assert is_pair(site)
    assert (site / "ca.pem").read_bytes() == (authority / "ca.pem").read_bytes()
    assert stat.S_IMODE((site / "key.pem").stat().st_mode) == 0o600


def test_env_can_be_sourced_and_says_who_it_is_for(
    authority: Path, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    issued = give(authority, Path(site.name))
    # By a shell of its own and seen in its child: what is not exported would leave services without TLS.
    shown = subprocess.run(
        ["sh", "-ec", '. "./$0/env"; env', site.name],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": os.environ["PATH"]},
    ).stdout.splitlines()
    for variable, file in (("CA", "ca.pem"), ("CERT", "cert.pem"), ("KEY", "key.pem")):
        assert f"PENSTOCK_TLS_{variable}={site}/{file}" in shown
    comment = (site / "env").read_text().splitlines()[0]
    until = f"{issued.not_after:%Y-%m-%d %H:%M:%S} UTC"
    assert comment == f"# waw-0: role generator, run math-7b, site waw; expires {until}"


def test_env_names_the_files_where_they_will_lie(authority: Path, site: Path) -> None:
    give(authority, site, at=Path("/etc/penstock"))
    assert "export PENSTOCK_TLS_KEY=/etc/penstock/key.pem\n" in (site / "env").read_text()
    with pytest.raises(ConfigError, match="--at 'etc': must be an absolute path"):
        give(authority, site, at=Path("etc"))


def test_issued_again_it_is_renewed_with_another_key(authority: Path, site: Path) -> None:
    first = give(authority, site)
    before = contents(site)
    second = give(authority, site)
    after = contents(site)
    assert is_pair(site)
    assert {name for name in after if after[name] != before[name]} == {"cert.pem", "key.pem"}
    assert first.serial != second.serial


def test_a_renewal_is_on_disk_before_it_shows_and_the_certificate_comes_right_after_its_key(
    authority: Path, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(authority, site)
    seen: list[tuple[str, bool]] = []
    num_synced = 0
    fsync, replace = os.fsync, os.replace

    def counted_fsync(descriptor: int) -> None:
        nonlocal num_synced
        num_synced += 1
        fsync(descriptor)

    def seen_replace(source: Path, target: Path) -> None:
        assert num_synced >= 4, "a file takes its place before all of them, and the list, are on disk"
        replace(source, target)
        seen.append((target.name, is_pair(site)))

    monkeypatch.setattr(os, "fsync", counted_fsync)
    monkeypatch.setattr(os, "replace", seen_replace)
    give(authority, site)
    assert seen == [("env", True), ("key.pem", False), ("cert.pem", True)]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_who_was_given_the_files_can_read_them_after_a_renewal(authority: Path, site: Path) -> None:
    give(authority, site)
    os.chown(site / "key.pem", 10001, 10001)
    give(authority, site)
    assert is_pair(site)
    assert ((site / "key.pem").stat().st_uid, (site / "cert.pem").stat().st_uid) == (10001, 0)
    assert stat.S_IMODE((site / "key.pem").stat().st_mode) == 0o600


def test_at_once_they_take_turns(authority: Path, site: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        issued = list(pool.map(lambda _: give(authority, site), range(24)))
    assert is_pair(site)
    listing = Index(authority).read()
    assert {item.serial for item in listing.issued} == {item.serial for item in issued}
    assert listing.num_unreadable == 0
    newest = x509.load_pem_x509_certificate((site / "cert.pem").read_bytes())
    assert listing.issued[-1].serial == f"{newest.serial_number:x}"


@pytest.mark.parametrize("what", ["a file", "the list"])
def test_a_full_disk_is_one_line_and_changes_nothing(authority: Path, site: Path, what: str) -> None:
    for _ in range(4):
        give(authority, site, at=Path("/etc"))
    before, listed = contents(site), contents(authority)
    # Room for half of a certificate, or for half of a line of the list but for each file of the site.
    room = 400 if what == "a file" else (authority / "issued.jsonl").stat().st_size + 100
    with largest_file(room), pytest.raises(ConfigError) as raised:
        give(authority, site, at=Path("/etc"))
    path = site / "cert.pem" if what == "a file" else authority / "issued.jsonl"
    assert str(raised.value) == f"{path}: the disk is full; free some space, then repeat the command"
    assert (contents(site), contents(authority)) == (before, listed)
    give(authority, site)
    assert is_pair(site)


def test_a_folder_that_cannot_be_made_is_one_line(authority: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/waw: cannot be made: Not a directory$"):
        give(authority, tmp_path / "file/waw")
    with pytest.raises(ConfigError, match=r"--out .*: must hold no control characters"):
        give(authority, tmp_path / "a\nb")


def test_the_authoritys_own_folder_is_no_sites(authority: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(authority)
    before = contents(authority)
    for folder in (authority, tmp_path / "link"):
        with pytest.raises(ConfigError, match="is the authority's folder, whose key goes to no site"):
            give(authority, folder)
    assert contents(authority) == before


def test_anothers_folder_is_not_written_over(authority: Path, site: Path, tmp_path: Path) -> None:
    give(authority, site)
    before = contents(site)
    with pytest.raises(ConfigError, match=r"cert\.pem: is the certificate of 'waw-0', not of 'waw-1'; name another"):
        give(authority, site, name="waw-1")
    with pytest.raises(ConfigError, match=r"ca\.pem: is not the authority in .*other; name another --out"):
        give(make_authority(tmp_path / "other"), site)
    assert contents(site) == before


def test_authorities_that_a_site_trusts_beside_this_one_stay(authority: Path, site: Path, tmp_path: Path) -> None:
    give(authority, site)
    both = (site / "ca.pem").read_bytes() + (make_authority(tmp_path / "other") / "ca.pem").read_bytes()
    (site / "ca.pem").write_bytes(both)
    give(authority, site)
    assert (site / "ca.pem").read_bytes() == both
