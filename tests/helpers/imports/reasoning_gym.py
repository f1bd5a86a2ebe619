"""Skips where reasoning_gym is missing, without importing it and matplotlib, for which its child has a stand-in."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def skip_without_reasoning_gym(*, allow_module_level: bool = False) -> None:
    """Skip a test, or all of a module."""
    if find_spec("reasoning_gym") is None:
        pytest.skip("needs reasoning-gym", allow_module_level=allow_module_level)
