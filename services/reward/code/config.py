"""Settings of the reward `code`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from penstock.config import StrictModel, Targets
from services.reward.code.sandboxes.sandbox import Limits

SandboxName = Literal["auto", "sandlock", "bubblewrap", "runc", "container"]


def own_python() -> list[str]:
    """This Python without any installed packages."""
    return [os.path.realpath(sys.executable), "-I", "-S"]


class ProgramsConfig(StrictModel):
    """What candidates' programs are run by, and what they may use."""

    command: list[str] = Field(default_factory=own_python, min_length=1, max_length=32)
    """Runs a program whose path is appended: by default this Python without installed packages."""
    readable: list[Path] = Field(default_factory=list, max_length=64)
    """Further folders that programs may read, such as the installed packages of `command`."""
    cpu_s: float = Field(default=4.0, gt=0, le=600)
    """CPU seconds of each process of a program."""
    wall_s: float = Field(default=10.0, gt=0, le=600)
    """Seconds until a program is ended: for all calls of a function, or for one standard input."""
    memory_mb: int = Field(default=512, ge=16, le=65536)
    """Memory of all processes of a program."""
    max_processes: int = Field(default=8, ge=1, le=256)
    """Processes of a program at once."""
    output_kb: int = Field(default=256, ge=1, le=16384)
    """Most that a program may print or return for one test."""
    num_cells: int = Field(default=2, ge=1, le=256)
    """Programs run at once."""

    @property
    def limits(self) -> Limits:
        """What a program may use."""
        return Limits(
            cpu_s=self.cpu_s,
            wall_s=self.wall_s,
            memory_bytes=self.memory_mb * 1024**2,
            max_processes=self.max_processes,
            output_bytes=self.output_kb * 1024,
        )


class CodeConfig(ProgramsConfig):
    """How the reward `code` runs programs, and what it gives for them."""

    credit: Literal["all", "share"] = "all"
    """1 for a program that passes all tests, else 0; or the share of tests passed."""
    sandbox: SandboxName | Literal["remote"] = "auto"
    """What confines programs; `auto` takes the first that works here, in this order; `remote` is `sandbox_service`."""
    sandbox_service: Targets | None = None
    """host:port of `penstock serve sandbox`, several separated by commas: programs run there, by its command, which
    allows at least what is stated here."""

    @model_validator(mode="after")
    def _remote_is_somewhere(self) -> Self:
        if (self.sandbox == "remote") != (self.sandbox_service is not None):
            raise ValueError(
                "sandbox_service: required with sandbox: remote, and has no effect without; set both, or neither"
            )
        return self
