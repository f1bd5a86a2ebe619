"""Provides the Python that runs TRL."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.environments import Environment

TRL_VERSION = "1.16.0"
TORCH_VERSION = "2.13.0"
"""Penstock's own version; the CPU build, if pip is configured for one."""
TRL = Environment(
    name=f"trl-{TRL_VERSION}-torch-{TORCH_VERSION}",
    # torch first and alone: later packages are then resolved against this build.
    installs=((f"torch=={TORCH_VERSION}",), (f"trl=={TRL_VERSION}", f"torch=={TORCH_VERSION}", "numpy")),
    check="import trl, datasets",
)


async def trl_python(given: Path | None, *, cache_dir: Path, progress: Callable[[str], None]) -> Path:
    """The given Python, or that of an environment in `cache_dir`, created if missing.

    Raises:
        RuntimeError: It has no TRL, or none could be installed.
    """
    if given is not None:
        await TRL.check_with(given)
        return given
    return await TRL.python(cache_dir=cache_dir, progress=progress, hint="(--trl-python takes a Python that has it)")
