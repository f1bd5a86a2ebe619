"""Whether tests can start containers here."""

from __future__ import annotations

import os
import shutil
import subprocess


def reason_to_skip() -> str | None:
    """Why they cannot; None if they can."""
    if shutil.which("docker") is None or shutil.which("docker-compose") is None:
        return "docker and docker-compose are not installed"
    if subprocess.run(["docker", "info"], capture_output=True, check=False).returncode != 0:
        return "no Docker engine answers"
    return None if os.geteuid() == 0 else "containers' users and processes are changed from outside, which takes root"
