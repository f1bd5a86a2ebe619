"""What tests need of other packages that have environments of their own, and programs that run in those."""

from __future__ import annotations

from pathlib import Path

import pytest

VENVS = Path(__file__).resolve().parents[3] / ".penstock" / "venvs"


def python_of(package: str) -> str:
    """The interpreter that has the package; skips the test where there is none."""
    python = VENVS / package / "bin" / "python"
    if not python.exists():
        pytest.skip(f"needs {package} in an environment of its own: make setup-imports")
    return str(python)
