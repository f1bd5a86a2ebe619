"""Settings of a sandbox process."""

from __future__ import annotations

from penstock.config import MeasuredConfig
from services.reward.code.config import ProgramsConfig, SandboxName


class SandboxConfig(MeasuredConfig):
    """Runs the programs of completions for reward workers elsewhere."""

    listen: str = "127.0.0.1:7312"
    """Address of its SandboxService, host:port."""
    sandbox: SandboxName = "auto"
    """What confines programs; `auto` takes the first that works here, in this order."""
    programs: ProgramsConfig = ProgramsConfig()
    """What programs are run by, whatever a caller's own settings, and the most that a caller may let one use."""
