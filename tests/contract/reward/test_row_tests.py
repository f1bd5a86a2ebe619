"""The sandbox of rows' assertions is kept from one program to the next; none is scored by what another one left."""

import asyncio
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.rewards import RewardItem
from services.reward.code.cell import Job, run
from services.reward.code.code_reward import CodeReward
from services.reward.code.config import CodeConfig, ProgramsConfig
from services.reward.code.row_tests import RowTests
from services.reward.code.sandboxes.finding import find_sandbox
from services.reward.code.sandboxes.sandbox import Place, SandboxError
from services.reward.code.suites import Assertions

PROGRAMS = ProgramsConfig(cpu_s=2, wall_s=20, memory_mb=128)
ADD = "def add(a, b): return a + b"
PASSES = "assert add(1, 2) == 3"
OPEN_FILES = """
import os
def is_open(number):
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
def add(a, b):
    return [number for number in range(64) if is_open(number)]
"""


class Rows:
    """Runs programs one after another against tests of rows."""

    def __init__(self, kind):
        try:
            _, self.sandbox = find_sandbox(kind)
        except SandboxError as error:
            pytest.skip(str(error))
        self.num_started = 0
        self.row_tests = RowTests(self)

    def start(self, argv, *, place, limits):
        self.num_started += 1
        return self.sandbox.start(argv, place=place, limits=limits)

    def passed(self, program, *tests, stops_early=True, limits=PROGRAMS.limits):
        suite = Assertions(setup="", tests=list(tests), functions=["add"])
        job = Job(
            program=program,
            suite=suite,
            command=PROGRAMS.command,
            readable=[],
            limits=limits,
            stops_early=stops_early,
        )
        return run(job, self.sandbox, self.row_tests).num_passed


@pytest.fixture(params=["auto", pytest.param("runc", marks=pytest.mark.grid)])
def rows(request):
    found = Rows(request.param)
    yield found
    found.row_tests.close()


def test_one_sandbox_serves_rows_whose_tests_end(rows):
    left = "import os, builtins\nbuiltins.left = 1\nif os.fork() == 0:\n    import time\n    time.sleep(1000)"
    assert rows.passed(ADD, left, PASSES) == 2
    assert rows.passed(ADD, "import builtins\nassert not hasattr(builtins, 'left')", PASSES) == 2
    assert rows.passed("def add(a, b): return 3", PASSES, "assert add(1, 1) == 2", PASSES) == 1
    assert rows.passed("def add(a, b): return 3", PASSES, "assert add(1, 1) == 2", PASSES, stops_early=False) == 2
    assert rows.passed("import os\ndef add(a, b): os._exit(0)", PASSES) == 0
    assert rows.passed(ADD, *[PASSES] * 3) == 3
    assert rows.num_started == 1


@pytest.mark.parametrize(
    "ends",
    ["import os\nos._exit(5)", "import os\nos.kill(os.getpid(), 9)", "while True: pass", "add(print, print)"],
)
def test_the_sandbox_of_tests_that_end_it_is_not_kept(rows, ends):
    assert rows.passed(ADD, PASSES) == 1
    assert rows.passed(ADD, ends, PASSES) == 0
    assert rows.passed(ADD, PASSES) == 1
    assert rows.num_started == 2


def test_tests_that_leave_by_themselves_fail_and_cost_nothing_else(rows):
    assert rows.passed(ADD, PASSES, "import os\nos._exit(0)", PASSES, stops_early=False) == 1
    assert rows.passed(ADD, PASSES) == 1
    assert rows.num_started == 1


def test_a_row_is_not_scored_by_a_sandbox_that_has_died(rows):
    assert rows.passed(ADD, PASSES) == 1
    kept = rows.row_tests._kept
    kept.running = rows.sandbox.start(
        ["/bin/false"], place=Place(folder=Path("/usr"), readable=[]), limits=PROGRAMS.limits
    )
    kept.held.callback(kept.running.end)
    assert rows.passed(ADD, PASSES) == 1
    assert rows.num_started == 2


def test_a_sandbox_is_kept_for_a_while_and_for_the_same_limits(rows, monkeypatch):
    assert rows.passed(ADD, PASSES) == 1
    assert rows.passed(ADD, PASSES, limits=replace(PROGRAMS.limits, memory_bytes=2**26)) == 1
    assert rows.num_started == 2
    monkeypatch.setattr("services.reward.code.row_tests.MAX_AGE_S", 0.0)
    assert rows.passed(ADD, PASSES, limits=replace(PROGRAMS.limits, memory_bytes=2**26)) == 1
    assert rows.num_started == 3


def test_programs_have_nothing_of_the_sandbox_that_is_kept(rows):
    # Standard input, output and errors, what the harness reads and writes, and nothing.
    own = "assert add(1, 2) == [0, 1, 2, 3, 4, 5]"
    assert [rows.passed(OPEN_FILES, own) for _ in range(2)] == [1, 1]
    assert rows.num_started == 1


def test_tests_that_cannot_be_run_are_no_verdict_on_a_program(rows):
    class Nothing:
        def start(self, argv, *, place, limits):
            return rows.sandbox.start(["/bin/false"], place=place, limits=limits)

    rows.row_tests = RowTests(Nothing())
    with pytest.raises(SandboxError, match="did not become ready"):
        rows.passed(ADD, PASSES)


async def test_nothing_is_left_on_disk_by_processes_that_were_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    reward = CodeReward(CodeConfig(num_cells=1))
    scored = RewardItem(completion=ADD, metadata={"test_list": [PASSES]})
    endless = RewardItem(completion="def add(a, b):\n    while True: pass", metadata=scored.metadata)
    try:
        assert (await reward.score([scored]))[0].value == 1.0
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await reward.score([endless])
        assert (await reward.score([scored]))[0].value == 1.0
        [folder] = tmp_path.iterdir()
        shutil.rmtree(folder)
        assert (await reward.score([scored]))[0].value == 1.0
    finally:
        await reward.close()
    assert not list(tmp_path.iterdir())
