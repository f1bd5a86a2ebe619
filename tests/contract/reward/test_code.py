"""Programs run in a real sandbox: what passes, what does not, and what is not the fault of a program."""

import os
import shutil
from dataclasses import replace

import pytest

from penstock.rewards import RewardItem, RewardLoadError, ScoreStatus
from services.reward.code.code_reward import CodeReward
from services.reward.code.config import CodeConfig
from services.reward.code.sandboxes import finding
from services.reward.code.sandboxes.finding import find_sandbox
from services.reward.code.sandboxes.sandbox import SandboxError
from services.reward.config import RewardModelConfig
from services.reward.models.build import build_model
from services.reward.models.child import Child

try:
    SANDBOX, _ = find_sandbox("auto")
except SandboxError as error:
    pytest.skip(f"no sandbox works here: {error}", allow_module_level=True)

IN_CONTAINERS = (
    pytest.param("runc", marks=pytest.mark.grid),
    pytest.param("container", marks=[pytest.mark.docker, pytest.mark.timeout(300)]),
)
STREAMS = {"tests": [{"input": "2 3\n", "output": "5"}, {"input": "1 1", "output": "2\n"}]}
CALLS = {"input_output": {"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [3, [1, 2]]}}
ASSERTIONS = {"test_list": ["assert add(1, 2) == 3", "assert add([1], [2]) == [1, 2]"]}
CHECK = {
    "test": (
        "def check(candidate):\n    assert candidate(1, 2) == 3\n    try:\n        candidate(1, 'a')\n"
        "    except TypeError:\n        pass\n    else:\n        raise AssertionError\n"
    ),
    "entry_point": "add",
}
RAISES = "try:\n    add(1, 2)\nexcept Exception:\n    pass\nelse:\n    raise AssertionError"
ADD, SCRIPT = "def add(a, b):\n    return a + b", "a, b = map(int, input().split())\nprint(a + b)"
ODD = "def add(a, b): return Odd()"
PASSED, WRONG = (ScoreStatus.OK, 1.0), (ScoreStatus.OK, 0.0)


def skip_without(kind):
    try:
        find_sandbox(kind)
    except SandboxError as error:
        pytest.skip(str(error))


async def scores(*cases, drops_at_limit=False, **settings):
    reward = CodeReward(CodeConfig(**settings), drops_at_limit=drops_at_limit)
    try:
        items = [RewardItem(completion=f"Well:\n```python\n{body}\n```", metadata=row) for body, row in cases]
        results = await reward.score(items)
    finally:
        await reward.close()
    return [(result.status, result.value) for result in results], results


@pytest.mark.parametrize("kind", [SANDBOX, "runc", IN_CONTAINERS[1]])
async def test_right_programs_pass_in_every_shape_of_tests_and_wrong_ones_do_not(kind):
    skip_without(kind)
    method = "class Solution:\n    def add(self, a, b):\n        return a + b"
    sets = (
        "def join(a, b):\n    return a | b",
        {"test_list": ["assert join(set(), set()) == set() != join({1}, b={2})"]},
    )
    right = [(SCRIPT, STREAMS), (ADD, CALLS), (method, CALLS), (ADD, ASSERTIONS), (ADD, CHECK), sets]
    wrong = [
        ("print(5)", STREAMS),
        ("print(5)\nprint(2)", STREAMS),
        (f"{SCRIPT}\nraise SystemExit(1)", STREAMS),
        ("def add(a, b):\n    return 3", CALLS),
        ("def plus(a, b):\n    return a + b", CALLS),
        ("def add(a, b):\n    return 3", ASSERTIONS),
        ("def add(a, b):\n    return int(a) + int(b) if b != 'a' else 0", CHECK),
        ("import os\ndef add(a, b):\n    if b == 'a': os._exit(0)\n    return a + b", CHECK),
        ("def add(a, b): (", ASSERTIONS),
        # A result that is no data is no error that a test may wait for.
        ("def add(a, b): return object()", {"test_list": [RAISES]}),
        ("def add(a, b): return 1e999", {"test_list": [RAISES]}),
        (f"class Odd:\n    def __repr__(self): return '1e999'\n{ODD}", {"test_list": [RAISES]}),
        (f"class Odd:\n    def __repr__(self): return 'int.__add__(1, 2)'\n{ODD}", ASSERTIONS),
        ("", CHECK),
    ]
    found, _ = await scores(*right, *wrong, sandbox=kind)
    assert found == [PASSED] * len(right) + [WRONG] * len(wrong)


@pytest.mark.timeout(300)
async def test_without_docker_podman_runs_programs(tmp_path, monkeypatch):
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed")
    (tmp_path / "docker").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    if os.geteuid() != 0:
        with pytest.raises(SandboxError, match="podman without root"):
            find_sandbox("container")
        return
    found, _ = await scores((SCRIPT, STREAMS), ("print(5)", STREAMS), (ADD, ASSERTIONS), sandbox="container")
    assert found == [PASSED, WRONG, PASSED]


async def test_an_empty_output_is_no_pass_for_a_program_that_fails():
    nothing = {"tests": [{"input": "", "output": ""}]}
    found, _ = await scores(("pass", nothing), ("raise ValueError", nothing))
    assert found == [PASSED, WRONG]


async def test_credit_may_be_the_share_of_tests_passed():
    found, results = await scores(("print(5)", STREAMS), ("def add(a, b): return 3", ASSERTIONS), credit="share")
    assert found == [(ScoreStatus.OK, 0.5)] * 2
    assert results[0].components == {"passed": 0.5, "exceeded_limit": 0.0}


LIMITS = {
    "time": "import time\ntime.sleep(60)",
    "CPU time": "while True: pass",
    "memory": "x = [bytearray(1 << 24) for _ in range(1000)]",
    "output": "while True: print('x' * 1000)",
}


@pytest.mark.parametrize("kind", [SANDBOX, *IN_CONTAINERS])
async def test_a_program_that_exceeds_a_limit_is_wrong_or_dropped_as_configured(kind):
    skip_without(kind)
    bounds = {"cpu_s": 1, "wall_s": 3, "memory_mb": 128, "output_kb": 16, "num_cells": 4, "sandbox": kind}
    cases = [(body, STREAMS) for body in LIMITS.values()]
    found, results = await scores(*cases, **bounds)
    assert found == [WRONG] * 4
    if kind != "bubblewrap":
        assert [result.components["exceeded_limit"] for result in results] == [1.0] * 4
        dropped, _ = await scores(*cases, **bounds, drops_at_limit=True)
        assert dropped == [(ScoreStatus.CANDIDATE_LIMIT, None)] * 4


async def test_a_row_whose_tests_cannot_be_run_is_invalid():
    found, results = await scores((ADD, {}), (ADD, {"test_list": ["assert add(print, print)"]}))
    assert found == [(ScoreStatus.INVALID, None)] * 2
    assert "no tests" in results[0].message
    assert "which is no data" in results[1].message


async def test_a_process_that_ends_is_a_sandbox_error_and_the_next_one_is_new(monkeypatch):
    reward = CodeReward(CodeConfig(num_cells=1))
    item = RewardItem(completion=SCRIPT, metadata=STREAMS)
    ask, fails = Child.ask, [True]

    async def dying(self, request, **limits):
        return await ask(self, {"program": 5} if fails and fails.pop() else request, **limits)

    monkeypatch.setattr(Child, "ask", dying)
    try:
        first, second = await reward.score([item]), await reward.score([item])
    finally:
        await reward.close()
    assert first[0].status is ScoreStatus.SANDBOX_ERROR
    assert (second[0].status, second[0].value) == PASSED


async def test_the_reward_is_built_by_name_with_its_settings():
    config = RewardModelConfig.model_validate({"model": "code", "code": {"credit": "share"}})
    model = build_model(config)
    assert model.name == "code"
    await model.close()


def test_without_a_sandbox_the_reward_refuses_to_start(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RewardLoadError) as caught:
        CodeReward(CodeConfig())
    assert "bubblewrap: there is no bwrap here: apt-get install bubblewrap" in str(caught.value)
    assert "sandlock: " in str(caught.value)


def test_a_sandbox_that_does_not_bound_processes_is_refused(monkeypatch):
    _, bounded = find_sandbox(SANDBOX)

    class Unbounded:
        def start(self, argv, *, place, limits):
            return bounded.start(argv, place=place, limits=replace(limits, max_processes=64))

    monkeypatch.setattr(finding, "KINDS", {"unbounded": Unbounded})
    with pytest.raises(SandboxError, match="could start more processes in it than it may"):
        find_sandbox("unbounded")
