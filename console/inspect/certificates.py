"""Checks the certificates of a run, before it starts and for its status."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from console.config.config import RunConfig
from console.inspect.find_run import Target
from penstock.security import Security
from penstock.security.certificate_files import TlsFiles
from penstock.security.checks.diagnosis import Server, diagnose
from penstock.security.checks.inspection import LOOPBACK, Finding, date_problem, inspect, lateness


def certificate_findings(config: RunConfig, security: Security) -> list[Finding]:
    """Problems of this machine's certificates, if the run's services use them."""
    endpoints, listen = config.endpoints, config.listen
    elsewhere = (endpoints.broker, endpoints.scheduler, endpoints.reward, endpoints.trainer, endpoints.generators)
    is_served_here = security.serves_tls and None in elsewhere
    hosts = [LOOPBACK] if is_served_here else []
    if is_served_here and listen.public_host is not None:
        hosts.append(listen.public_host)
    # Health checks reach services here at loopback: without that name none would ever count as up.
    return [
        Finding(one.what, one.text, is_error=one.is_error or one.what == f"name {LOOPBACK}")
        for one in inspect(security.tls_files, hosts=hosts)
    ]


async def certificate_lines(target: Target, security: Security) -> list[str]:
    """Problems of this machine's certificates and of those that the run's services present; none without TLS."""
    if security.ca_file is None:
        return []
    found = await asyncio.gather(
        *(asyncio.to_thread(_server_line, *service, security.tls_files) for service in target.addresses())
    )
    return [*(one.text for one in inspect(security.tls_files)), *(line for line in found if line)]


def _server_line(name: str, address: str, files: TlsFiles) -> str:
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return ""
    found = diagnose(Server(host=host.strip("[]"), port=int(port)), files)
    if found.problem:
        return f"TLS with {name} {address} fails: {found.problem}"
    if found.certificate is None:
        return ""
    now = datetime.now(UTC)
    problem = date_problem(found.certificate, now) or lateness(found.certificate, now)
    return f"certificate of {name} {address} {problem}; issue it again there" if problem else ""
