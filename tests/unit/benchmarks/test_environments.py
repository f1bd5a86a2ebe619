"""Environments of what is measured beside Penstock: made once, told apart from half-made ones, checked."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from benchmarks import environments
from benchmarks.environments import Environment

ENVIRONMENT = Environment(name="thing-1", installs=(("first",), ("second", "third")), check="import thing")


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What would be run; a venv appears as its folder."""
    seen: list[str] = []

    async def run(*command: str, **_settings: object) -> None:
        seen.append(" ".join(command[1:]))
        if "venv" in command:
            os.mkdir(command[-1])

    monkeypatch.setattr(environments, "run_child", run)
    return seen


async def test_it_is_made_once(tmp_path: Path, commands: list[str]) -> None:
    folder = tmp_path / "runs" / "thing-1"
    for _ in range(2):
        python = await ENVIRONMENT.python(cache_dir=tmp_path / "runs", progress=lambda text: None)
        assert python == folder / "bin" / "python"
    pip = "-m pip install --quiet"
    assert commands == [f"-m venv {folder}", f"{pip} first", f"{pip} second third", "-c import thing"]


async def test_an_unfinished_environment_is_recreated(tmp_path: Path, commands: list[str]) -> None:
    (tmp_path / "thing-1").mkdir()
    (tmp_path / "thing-1" / "left").touch()
    await ENVIRONMENT.python(cache_dir=tmp_path, progress=lambda text: None)
    assert commands
    assert not (tmp_path / "thing-1" / "left").exists()


async def test_a_python_that_lacks_it_is_refused() -> None:
    lacking = Environment(name="lacking", installs=(), check="import penstock_has_no_such_module")
    with pytest.raises(RuntimeError, match="penstock_has_no_such_module"):
        await lacking.check_with(Path(sys.executable))
