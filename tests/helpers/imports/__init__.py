"""What tests need of other packages that have environments of their own, and programs that run in those."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

VENVS = Path(__file__).resolve().parents[3] / ".penstock" / "venvs"


def python_of(package: str) -> str:
    """The interpreter that has the package; skips the test where there is none."""
    python = VENVS / package / "bin" / "python"
    if not python.exists():
        pytest.skip(f"needs {package} in an environment of its own: make setup-imports")
    return str(python)


def path_with_uv() -> str:
    """PATH for harnesses of verifiers, which start their programs with uv; skips the test where there is none."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    if shutil.which("uv", path=path) is None:
        pytest.skip("verifiers' harnesses start their programs with uv, which is not installed")
    return path
