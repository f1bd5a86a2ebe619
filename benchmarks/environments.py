"""Creates Python environments for peer systems, whose requirements would change Penstock's packages.

pip uses only its own environment variables and configuration. An environment is made once: a marker that is written
last marks it as complete.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.children import run_child

INSTALL_TIMEOUT_S = 1800.0
CHECK_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Requirements of a Python."""

    name: str
    """Name of its folder, versions included."""
    installs: Sequence[Sequence[str]]
    """Packages of each call of pip, in order."""
    check: str
    """A program that fails if the packages do not work."""

    async def check_with(self, python: Path) -> None:
        """Check a Python. Raises RuntimeError if it will not do."""
        await run_child(str(python), "-c", self.check, timeout_s=CHECK_TIMEOUT_S, what=f"{python}: {self.check}")

    async def python(self, *, cache_dir: Path, progress: Callable[[str], None], hint: str = "") -> Path:
        """Its Python, in a folder of `cache_dir`; created if missing.

        Raises:
            RuntimeError: It could not be made; includes `hint` if pip failed.
        """
        folder = cache_dir / self.name
        python, marker = folder / "bin" / "python", folder / "complete"
        if marker.is_file():
            return python
        progress(f"making the environment {folder}; it is kept")
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        await run_child(sys.executable, "-m", "venv", str(folder), timeout_s=INSTALL_TIMEOUT_S, what="making a venv")
        for packages in self.installs:
            pip = (str(python), "-m", "pip", "install", "--quiet", *packages)
            what = " ".join(filter(None, (f"installing {packages[0]}", hint)))
            await run_child(*pip, timeout_s=INSTALL_TIMEOUT_S, what=what, log=folder / "install.log")
        await self.check_with(python)
        marker.touch()
        return python
