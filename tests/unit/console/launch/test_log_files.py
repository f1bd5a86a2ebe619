"""Logs of supervised processes: rotated without losing a line, and never a reason for the process to stop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import sys
from pathlib import Path

import pytest

from console.launch.log_files import RotatedLog
from console.launch.supervisor import ServiceSpec, SupervisedProcess
from tests.helpers.waiting import until


def lines_of(folder: Path, num_files: int) -> list[str]:
    names = [f"toy.log.{index}" for index in range(num_files - 1, 0, -1)] + ["toy.log"]
    lines: list[str] = []
    for name in names:
        # Missing, too, between a rotation and the line after it.
        with contextlib.suppress(FileNotFoundError):
            lines += (folder / name).read_text().splitlines()
    return lines


def largest_of(folder: Path) -> int:
    return max(path.stat().st_size for path in folder.glob("toy.log*"))


def spec(folder: Path, code: str, *, log_bytes: int, log_files: int) -> ServiceSpec:
    async def yes() -> bool:
        return True

    return ServiceSpec(
        name="toy",
        argv=(sys.executable, "-S", "-c", code),
        address="",
        env={"PATH": os.environ["PATH"]},
        log_path=folder / "toy.log",
        is_ready=yes,
        log_bytes=log_bytes,
        log_files=log_files,
    )


async def test_a_log_is_rotated_while_its_process_writes_and_no_line_is_lost(tmp_path: Path) -> None:
    code = "for n in range(20000): print('line', n)\nimport time; print('end', flush=True); time.sleep(60)"
    process = SupervisedProcess(spec(tmp_path, code, log_bytes=50_000, log_files=9), on_change=lambda record: None)
    task = asyncio.create_task(process.run())
    await until(lambda: lines_of(tmp_path, 9)[-1:] == ["end"])
    await process.stop()
    await task
    assert lines_of(tmp_path, 9) == [*(f"line {n}" for n in range(20_000)), "end"]
    assert largest_of(tmp_path) <= 50_000


def test_what_is_older_than_the_kept_files_is_deleted(tmp_path: Path) -> None:
    log = RotatedLog(tmp_path / "toy.log", max_bytes=20, num_files=3)
    for n in range(100, 200):
        log.write(f"line {n}\n".encode())
    log.close()
    assert lines_of(tmp_path, 3) == [f"line {n}" for n in range(194, 200)]
    assert len(list(tmp_path.iterdir())) == 3


def test_a_line_that_comes_in_pieces_or_is_too_long_stays_whole(tmp_path: Path) -> None:
    log = RotatedLog(tmp_path / "toy.log", max_bytes=10, num_files=3)
    for piece in (b"begins ", b"and ends here\nnext\n", b"another one\n"):
        log.write(piece)
    log.close()
    assert lines_of(tmp_path, 3) == ["begins and ends here", "next", "another one"]


async def test_a_disk_that_refuses_the_log_costs_lines_and_not_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals: list[OSError] = []
    is_full = True
    original = RotatedLog.write

    def write(self: RotatedLog, data: bytes) -> None:
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(self, data)

    monkeypatch.setattr(RotatedLog, "write", write)
    go = tmp_path / "go"
    code = (
        "import os, time\nfor n in range(40000): print('a line that is lost')\nprint('lost', flush=True)\n"
        f"while not os.path.exists({str(go)!r}): time.sleep(0.01)\nprint('kept', flush=True); time.sleep(60)"
    )
    process = SupervisedProcess(
        spec(tmp_path, code, log_bytes=2**20, log_files=2),
        on_change=lambda record: None,
        on_refused_write=refusals.append,
    )
    task = asyncio.create_task(process.run())
    await until(lambda: bool(refusals))
    is_full = False
    go.touch()
    await until(lambda: lines_of(tmp_path, 2)[-1:] == ["kept"])
    assert process.num_restarts == 0
    assert any("bytes of this log were lost" in line for line in lines_of(tmp_path, 2))
    await process.stop()
    await task
