"""Processes whose certificates fail: one line with file, name and fix, never a traceback, never silence."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import yaml
from cryptography import x509

from console.certs.commands import revoke_command
from penstock.security import Security
from penstock.security.revocations import REVOKED_FILE
from tests.helpers.certificates import issue, make_authority, make_security
from tests.helpers.ports import free_addresses

COMMAND = (sys.executable, "-m", "console")
DAY = timedelta(days=1)


def environment(security: Security) -> dict[str, str]:
    named = zip(("CA", "CERT", "KEY"), security.tls_files.paths, strict=True)
    return {**os.environ, **{f"PENSTOCK_TLS_{name}": str(path) for name, path in named}}


@contextmanager
def started(*arguments: str, security: Security) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        (*COMMAND, *arguments),
        env=environment(security),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def line_with(process: subprocess.Popen[str], text: str) -> str:
    """The first line that says it; fails with what was said where the process ends before."""
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if text in line:
            return line
    raise AssertionError("".join(said))


def unreadable(security: Security) -> str:
    assert security.cert_file is not None
    security.cert_file.unlink()
    return f"penstock: PENSTOCK_TLS_CERT: {security.cert_file} cannot be read: No such file"


def another_key(security: Security) -> str:
    assert security.key_file is not None
    other = issue(security.key_file.parents[2], name="other")
    assert other.key_file is not None
    security.key_file.write_bytes(other.key_file.read_bytes())
    return f"penstock: PENSTOCK_TLS_KEY: {security.key_file} is not the key of the certificate in {security.cert_file}"


def no_authority(security: Security) -> str:
    assert security.ca_file is not None
    security.ca_file.write_bytes(b"")
    return f"penstock: PENSTOCK_TLS_CA: {security.ca_file} is empty"


@pytest.mark.parametrize("spoil", [unreadable, another_key, no_authority])
@pytest.mark.parametrize("command", [("serve", "broker", "redis_url=memory://"), ("status", "r", "--broker", "b:1")])
def test_files_that_cannot_be_used_end_a_command_with_one_line(
    tmp_path: Path, spoil: Callable[[Security], str], command: tuple[str, ...]
) -> None:
    security = issue(make_authority(tmp_path / "authority"))
    told = spoil(security)
    ended = subprocess.run(
        (*COMMAND, *command), env=environment(security), capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith(told)
    assert len(ended.stderr.splitlines()) == 1


def test_a_service_says_at_its_start_that_its_certificate_has_expired(tmp_path: Path) -> None:
    security = issue(make_authority(tmp_path / "authority"), ago=2 * DAY, validity=DAY)
    listen = free_addresses(1)[0]
    with started("serve", "broker", "redis_url=memory://", "--listen", listen, security=security) as broker:
        line = line_with(broker, "expired at")
        assert "[error" in line
        assert str(security.cert_file) in line
        assert "issue it again" in line


def test_a_service_says_which_peer_its_certificate_fails_at(tmp_path: Path) -> None:
    good, other = issue(make_authority(tmp_path / "good")), issue(make_authority(tmp_path / "other"))
    listen = free_addresses(1)[0]
    with started("serve", "broker", "redis_url=memory://", "--listen", listen, security=good) as broker:
        line_with(broker, "broker serves")
        with started(*reward_worker(listen), security=other) as worker:
            line = line_with(worker, "was signed by")
    assert "[error" in line
    assert listen in line
    assert f"which {other.ca_file} (PENSTOCK_TLS_CA) does not hold" in line
    assert "put the authority that signed it into that file" in line


def reward_worker(broker: str) -> tuple[str, ...]:
    model = ("reward.model=numeric", "reward.trusts_generator_text=true")
    return ("serve", "reward", "run_id=r", f"broker={broker}", *model, "--listen", free_addresses(1)[0])


def test_a_service_whose_certificate_is_anothers_runs_or_was_revoked_ends_with_one_line(tmp_path: Path) -> None:
    authority = make_authority(tmp_path / "authority")
    own = issue(authority, roles=["broker"], name="center")
    strange, good = (issue(authority, roles=["reward"], run=run, name=f"of-{run}") for run in ("other", "r"))
    listen = free_addresses(1)[0]
    with started("serve", "broker", "redis_url=memory://", "--listen", listen, security=own) as broker:
        line_with(broker, "broker serves")
        for security, text in (
            (strange, "run_id: 'r' is not open to of-other, reward of run other; that takes a credential of the run: "),
            (good, "the certificate of 'of-r' (serial "),
        ):
            with started(*reward_worker(listen), security=security) as worker:
                if security is good:
                    line_with(worker, "waiting for broker and run")
                    assert own.ca_file is not None
                    revoke_command("of-r", directory=authority)
                    shutil.copy(authority / REVOKED_FILE, own.ca_file.with_name(REVOKED_FILE))
                line = line_with(worker, "penstock: ")
                assert line.startswith(f"penstock: broker {listen}: {text}")
                assert "penstock certs issue" in line
                assert worker.stdout is not None
                assert worker.stdout.read() == ""
                assert worker.wait(timeout=30) == 2


def test_a_run_whose_services_could_not_be_reached_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = x509.SubjectAlternativeName
    monkeypatch.setattr(x509, "SubjectAlternativeName", lambda _names: names([x509.DNSName("trainer.example")]))
    security = make_security(tmp_path)
    monkeypatch.undo()
    config = tmp_path / "run.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "run": {"dir": str(tmp_path / "runs")},
                "model": {"path": str(tmp_path / "none")},
                "data": {"train": str(tmp_path / "none.jsonl")},
                "reward": {"model": "numeric"},
            }
        )
    )
    ended = subprocess.run(
        (*COMMAND, "run", str(config)),
        env=environment(security),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.returncode == 2, ended
    wanted = f"PENSTOCK_TLS_CERT: {security.cert_file} does not name 127.0.0.1, where health checks"
    assert any(wanted in line for line in ended.stderr.splitlines()), ended.stderr
    assert "Traceback" not in ended.stderr
