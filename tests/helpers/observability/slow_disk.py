"""A disk that is slow while a file is there, for one process and all it starts, by a library loaded before libc."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")


def slow_disk(folder: Path) -> tuple[Path, dict[str, str]]:
    """The file that makes it slow while it is there, and the variables of the process that is to have that disk."""
    library, flag = folder / "slow_disk.so", folder / "disk-is-slow"
    compiler = shutil.which("cc") or "cc"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"], check=True)
    return flag, {"LD_PRELOAD": str(library), "SLOW_DISK": str(flag)}
