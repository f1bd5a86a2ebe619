"""Reports problems of a running process's certificates: at once, and repeatedly while they last."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from penstock.process.logger import get_logger
from penstock.security.certificate_files import TlsFiles
from penstock.security.checks.inspection import LOOPBACK, Finding, inspect

LOOK_EVERY_S = 5.0
SAY_AGAIN_S = 60.0

_log = get_logger()


def hosts_of(listen: str) -> list[str]:
    """Where processes of this machine, such as health checks, reach a server that listens there."""
    host = listen.rpartition(":")[0].strip("[]")
    return [LOOPBACK] if host in ("", "0.0.0.0", "::", LOOPBACK) else []


class CertificateWatch:
    """Looks at the files every LOOK_EVERY_S.

    Args:
        files: Of this process.
        hosts: Names and addresses under which others reach its servers.
    """

    def __init__(self, files: TlsFiles, *, hosts: Sequence[str]) -> None:
        self._files, self._hosts = files, hosts
        self._said_s: dict[Finding, float] = {}
        self.findings: list[Finding] = []
        """The problems found at the last look."""

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_EVERY_S)

    def look(self) -> list[Finding]:
        """The problems found now; logs those not logged for a while."""
        now_s = asyncio.get_running_loop().time()
        findings = self.findings = inspect(self._files, hosts=self._hosts)
        self._said_s = {one: said_s for one, said_s in self._said_s.items() if one in findings}
        for finding in findings:
            if now_s - self._said_s.get(finding, -SAY_AGAIN_S) >= SAY_AGAIN_S:
                self._said_s[finding] = now_s
                log = _log.error if finding.is_error else _log.warning
                log("certificates of this process", problem=finding.text)
        return findings
