"""`penstock run --resume-or-start`: begun once, resumed as often as it takes, left alone when it has completed."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import pytest

from tests.helpers.brokers.scripted_run import ScriptedRunBroker, ScriptedTrainer
from tests.helpers.console import penstock
from tests.helpers.waiting import until
from tests.integration.console.test_run_command import attached, ended, started

# Each starts several processes: what they share the machine with decides how long that takes.
pytestmark = pytest.mark.timeout(240)
OPTION = "--resume-or-start"


async def test_a_run_is_begun_resumed_and_then_left_alone(tmp_path: Path) -> None:
    trainer = ScriptedTrainer()
    run_dir = tmp_path / "runs" / "r1"
    async with attached(tmp_path, trainer, ScriptedRunBroker()) as arguments:
        process = await started([*arguments, OPTION], tmp_path)
        await until(lambda: len(trainer.starts) == 1, timeout_s=60)
        process.kill()
        await process.wait()

        process = await started([*arguments, OPTION], tmp_path)
        await until(lambda: len(trainer.starts) == 2, timeout_s=60)
        process.send_signal(signal.SIGTERM)
        assert (await ended(process))[0] == 130
        trainer.forget()
        trainer.stopped.clear()
        (run_dir / "summary.json").write_text(json.dumps({"outcome": "stopped"}))

        for _ in range(3):
            trainer.pace.release()
        status, out, err = await ended(await started([*arguments, OPTION], tmp_path))
        assert (status, err) == (0, "")
        assert f"resumes {run_dir}" in out
        assert [request.resume for request in trainer.starts] == [False, True, True]

        (run_dir / "summary.json").write_text(json.dumps({"outcome": "completed"}))
        status, out, err = await ended(await started([*arguments, OPTION], tmp_path))
        assert (status, err) == (0, "")
        assert "completed before" in out
        assert "run.id" in out
        assert len(trainer.starts) == 3


async def test_a_run_without_a_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("model: {path: m}\ndata: {train: t}\n")
    told = await asyncio.to_thread(penstock, "run", str(path), OPTION, cwd=tmp_path)
    assert (told.returncode, told.stderr.count("\n")) == (2, 1)
    assert "run.id: required with --resume-or-start" in told.stderr
