"""Implements `penstock certs init`, `issue`, `revoke` and `list`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from console.certs.atomic_files import named_errors
from console.certs.authority import CERTIFICATE_FILE, PUBLIC, Authority, make_authority, read_certificate
from console.certs.index import Index, Issued
from console.certs.issuing import ENVIRONMENT, issue
from console.certs.request import Request
from console.view.formats import plain_console, plain_table
from penstock.config import ConfigError
from penstock.process.durable_files import replace_file
from penstock.security.revocations import REVOKED_FILE


def init_command(folder: Path, *, name: str, days: int) -> int:
    """Make an authority; returns the exit status. Raises ConfigError."""
    authority = make_authority(folder, name=name, days=days, now=datetime.now(UTC))
    print(f"{folder}: an authority, until {authority.certificate.not_valid_after_utc:%Y-%m-%d}")
    print("Keep its ca-key.pem to yourself: it can sign for any identity. Give machines their own certificates with:")
    print(f"  penstock certs issue ROLE --run RUN --site SITE --name NAME --host HOST --dir {folder}")
    return 0


def issue_command(request: Request, *, validity: timedelta, directory: Path, out: Path | None, at: Path | None) -> int:
    """Issue or renew a certificate; returns the exit status. Raises ConfigError."""
    issued = issue(Authority.load(directory), request, validity=validity, now=datetime.now(UTC), out=out, at=at)
    print(f"{issued.folder}: a certificate for {issued.name} ({'+'.join(issued.roles)}), until {_moment(issued)}")
    print(f"Use it there with: . {at or issued.folder}/{ENVIRONMENT}")
    _note_shared_ids(issued, directory)
    return 0


def revoke_command(name: str, *, directory: Path) -> int:
    """Revoke all valid certificates of a holder; returns the exit status. Raises ConfigError."""
    index, now = Index(directory), datetime.now(UTC)
    read_certificate(directory)
    path = directory / REVOKED_FILE
    with index.locked():
        found = [issued for issued in index.read().issued if issued.name == name and issued.left_s(now) > 0]
        if not found:
            raise ConfigError(
                f"{name!r}: {directory} has issued it no certificate that is valid; see penstock certs list"
            )
        with named_errors(path, "written"):
            before = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
            added = [f"{issued.serial} {issued.name}" for issued in found]
            replace_file(path, "".join(f"{line}\n" for line in dict.fromkeys((*before, *added))), mode=PUBLIC)
    print(f"{path}: {len(found)} of {name} revoked")
    print(f"Copy it beside the {CERTIFICATE_FILE} of every machine: its services refuse them from then on.")
    return 0


def list_command(directory: Path, *, is_all: bool, as_json: bool) -> int:
    """Print what was issued, oldest first; returns the exit status. Raises ConfigError."""
    certificate, listing, now = read_certificate(directory), Index(directory).read(), datetime.now(UTC)
    chosen = listing.issued if is_all else tuple(_current(listing.issued, now))
    if listing.num_unreadable:
        print(f"penstock: {directory}: lines that cannot be read, left out: {listing.num_unreadable}", file=sys.stderr)
    own_left_s = (certificate.not_valid_after_utc - now).total_seconds()
    if as_json:
        authority = {"folder": str(directory), "not_after": certificate.not_valid_after_utc.isoformat()}
        print(json.dumps({"authority": authority, "certificates": [_document(issued, now) for issued in chosen]}))
        return 0
    print(f"{directory}: the authority {_remaining(own_left_s)}")
    rows = []
    for issued in chosen:
        roles, hosts, left = "+".join(issued.roles), ", ".join(issued.hosts) or "-", _remaining(issued.left_s(now))
        rows.append((issued.name, roles, issued.run, issued.site, hosts, _moment(issued), left, issued.folder))
    if rows:
        names = ("name", "roles", "run", "site", "hosts", "until", "", "folder")
        plain_console().print(plain_table(names, rows))
    return 0


def _current(issued: Sequence[Issued], now: datetime) -> Iterable[Issued]:
    """The valid certificates, and the newest one of every folder."""
    newest = {item.folder: item.serial for item in issued}
    return (item for item in issued if item.left_s(now) > 0 or newest[item.folder] == item.serial)


def _note_shared_ids(issued: Issued, directory: Path) -> None:
    """Warn where one certificate's holder may use the ids of another's."""
    now, name = datetime.now(UTC), issued.name
    others = sorted({item.name for item in Index(directory).read().issued if item.left_s(now) > 0})
    for short, long in [(other, name) for other in others] + [(name, other) for other in others]:
        if long.startswith(f"{short}-"):
            print(f"penstock: --name: the holder of {short!r} may use the ids of {long!r} too", file=sys.stderr)


def _document(issued: Issued, now: datetime) -> dict[str, object]:
    left_s = issued.left_s(now)
    return {**issued.model_dump(mode="json"), "is_expired": left_s <= 0, "expires_in_s": round(left_s)}


def _moment(issued: Issued) -> str:
    return f"{issued.not_after:%Y-%m-%d %H:%M} UTC"


def _remaining(left_s: float) -> str:
    if left_s <= 0:
        return "expired"
    for unit, seconds in (("days", 86400), ("h", 3600), ("min", 60)):
        if left_s >= 2 * seconds:
            return f"expires in {left_s // seconds:,.0f} {unit}"
    return f"expires in {left_s:.0f} s"
