"""The Redis that a run starts for itself answers wherever the run's folder and TMPDIR are."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path

import pytest

from console.config.run_folder import RunFolder
from console.launch.embedded_redis import redis_spec, socket_path
from tests.helpers.waiting import until


@pytest.mark.parametrize("has_short_tmpdir", [True, False])
async def test_it_answers_under_folders_whose_paths_no_socket_may_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_short_tmpdir: bool
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    with tempfile.TemporaryDirectory(prefix="p-", dir="/tmp") as short:
        monkeypatch.setattr(tempfile, "tempdir", short if has_short_tmpdir else str(deep))
        folder = RunFolder(deep / "run")
        folder.create()
        path = socket_path(folder)
        assert len(os.fsencode(path)) < 108
        spec = redis_spec(folder, env=dict(os.environ))
        process = await asyncio.create_subprocess_exec(*spec.argv, env=os.environ | spec.env)
        try:
            async with asyncio.timeout(20):
                while not await spec.is_ready():
                    assert process.returncode is None
                    await asyncio.sleep(0.02)
        finally:
            process.terminate()
            await process.wait()
            await until(lambda: not path.exists())
            if not has_short_tmpdir:
                path.parent.rmdir()
