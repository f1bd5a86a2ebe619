"""A Python with TRL: a virtual environment of its own, since what TRL needs would change Penstock's packages.

pip is told where to look by its own environment variables and configuration only. The environment is made once: a
marker that is written last says that it is whole.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.e2e.children import run_child

TRL_VERSION = "1.16.0"
TORCH_VERSION = "2.13.0"
"""Penstock's own; the CPU build, where pip is shown one."""
INSTALL_TIMEOUT_S = 1800.0
_CHECK = "import trl, datasets; print(trl.__version__)"


async def trl_python(given: Path | None, *, cache_dir: Path, progress: Callable[[str], None]) -> Path:
    """The Python to run TRL with: the given one, or that of an environment in `cache_dir`, made if it is not there.

    Raises:
        RuntimeError: It has no TRL, or none could be installed.
    """
    if given is not None:
        await run_child(str(given), "-c", _CHECK, timeout_s=120.0, what=f"{given}: importing trl")
        return given
    folder = cache_dir / f"trl-{TRL_VERSION}-torch-{TORCH_VERSION}"
    python, marker = folder / "bin" / "python", folder / "complete"
    if marker.is_file():
        return python
    progress(f"making an environment with TRL {TRL_VERSION} in {folder}; it is kept")
    await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    await run_child(sys.executable, "-m", "venv", str(folder), timeout_s=INSTALL_TIMEOUT_S, what="making a venv")
    # torch first and alone: what comes after is then resolved against this build of it.
    for packages in ((f"torch=={TORCH_VERSION}",), (f"trl=={TRL_VERSION}", f"torch=={TORCH_VERSION}", "numpy")):
        pip = (str(python), "-m", "pip", "install", "--quiet", *packages)
        what = f"installing {packages[0]} (--trl-python takes a Python that has it)"
        await run_child(*pip, timeout_s=INSTALL_TIMEOUT_S, what=what, log=folder / "install.log")
    await run_child(str(python), "-c", _CHECK, timeout_s=120.0, what="importing trl")
    marker.touch()
    return python
