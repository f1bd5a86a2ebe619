"""`penstock plan --deploy`: the compose files of two sites as two projects on one engine, with mutual TLS.

Containers are of a bare Python image with this checkout and this environment mounted: what is tried are the files.
"""

from __future__ import annotations

import os
import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from console.deploy.description import USER_ID
from tests.helpers.console import ROOT
from tests.helpers.docker import reason_to_skip
from tests.helpers.plans.two_sites import MACHINES, deploy, issue_certificates, make_data, run_document

IMAGE = "penstock-mounted"
DOCKERFILE = f"""
FROM python:3.11-slim-bookworm
RUN useradd --uid {USER_ID} penstock && mkdir /data /runs && \\
    printf '#!/bin/sh\\nexec python -m console "$@"\\n' >/usr/local/bin/penstock && chmod +x /usr/local/bin/penstock
ENV PYTHONPATH=/opt/site:/opt/penstock PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1
WORKDIR /data
USER penstock
ENTRYPOINT ["penstock"]
"""
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.docker,
    pytest.mark.flaky(reruns=0),
    pytest.mark.timeout(1200),
    pytest.mark.skipif(reason_to_skip() is not None, reason=str(reason_to_skip())),
]


class Site:
    """A site's compose file as a project of its own, on the one machine of the site."""

    def __init__(self, folder: Path, name: str, machine: str, settings: dict[str, str]) -> None:
        self.name, self.machine = f"penstock{name}{os.getpid()}", machine
        path = folder / name / "docker-compose.yml"
        services = yaml.safe_load(path.read_text())["services"]
        mounted = {
            "image": IMAGE,
            # Both machines are this one.
            "extra_hosts": [f"{each}:127.0.0.1" for each in MACHINES],
            "volumes": [f"{ROOT}:/opt/penstock:ro", f"{sysconfig.get_path('purelib')}:/opt/site:ro"],
        }
        override = folder / f"{name}.yml"
        override.write_text(yaml.safe_dump({"services": {key: mounted for key in services if key != "redis"}}))
        self._command = ("docker-compose", "-p", self.name, "-f", str(path), "-f", str(override))
        self._settings = {**os.environ, **settings}

    def __call__(self, *arguments: str, timeout_s: float = 300.0) -> subprocess.CompletedProcess[str]:
        """Runs docker-compose with the machine's profile."""
        command = (*self._command, "--profile", self.machine, *arguments)
        return subprocess.run(
            command, env=self._settings, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def logs(self, service: str) -> str:
        """What a service printed."""
        return self("logs", "--no-color", service).stdout

    def containers(self, status: str) -> set[str]:
        """Names of services in that status."""
        mine = ("--filter", f"label=com.docker.compose.project={self.name}", "--filter", f"status={status}")
        shown = ("--all", "--format", '{{.Label "com.docker.compose.service"}}')
        return set(subprocess.run(["docker", "ps", *mine, *shown], capture_output=True, text=True).stdout.split())


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[tuple[Site, Site]]:
    (tmp_path / "image").mkdir()
    (tmp_path / "image" / "Dockerfile").write_text(DOCKERFILE)
    subprocess.run(["docker", "build", "-q", "-t", IMAGE, str(tmp_path / "image")], check=True, capture_output=True)
    data = make_data(tmp_path / "data")
    folder = deploy(tmp_path / "out", "compose", run_document("/data", num_steps=6))
    found = []
    for name, machine in (("home", "head-0"), ("far", "l4-0")):
        runs = tmp_path / "runs" / machine
        runs.mkdir(parents=True)
        os.chown(runs, USER_ID, -1)
        certificates = tmp_path / "certificates" / machine
        settings = {"PENSTOCK_DATA": data, "PENSTOCK_RUNS": runs, "PENSTOCK_SECRETS": certificates}
        found.append(Site(folder, name, machine, {key: str(value) for key, value in settings.items()}))
    for path in (tmp_path, *tmp_path.parents[:2], *data.rglob("*"), data, *folder.rglob("*"), folder):
        path.chmod(path.stat().st_mode | (0o055 if path.is_dir() else 0o044))
    try:
        yield found[0], found[1]
    finally:
        for site in found:
            site("down", "--volumes", "--timeout", "20")


def wait(what: str, condition: Callable[[], bool], said: Callable[[], str], *, timeout_s: float = 300.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"no {what} in {timeout_s:g} s:\n{said()}"
        time.sleep(0.5)


def test_two_sites_train_over_mutual_tls_and_a_wrong_certificate_starts_nothing(
    sites: tuple[Site, Site], tmp_path: Path
) -> None:
    home, far = sites
    issue_certificates(tmp_path, run_id="another", owner=USER_ID)
    assert far("up", "-d").returncode != 0
    assert "not of run deployed; issue the one for l4-0 of run deployed" in far.logs("check-l4-0")
    assert "node-l4-0" not in far.containers("running")

    issue_certificates(tmp_path, owner=USER_ID)
    for site in (far, home):
        told = site("up", "-d", timeout_s=600)
        assert told.returncode == 0, told.stdout + told.stderr
    wait("end of the run", lambda: "run" in home.containers("exited"), lambda: home.logs("run") + far.logs("node-l4-0"))
    assert "in flight 0: balanced" in home.logs("run"), home.logs("run")
    assert home.containers("running") >= {"redis", "broker", "scheduler", "reward", "trainer"}
