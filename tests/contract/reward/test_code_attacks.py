"""No program leaves its sandbox, and none is rewarded for anything but the right answer."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest

from penstock.rewards import RewardItem
from services.reward.code.code_reward import CodeReward
from services.reward.code.config import CodeConfig, ProgramsConfig
from services.reward.code.sandboxes.finding import find_sandbox
from services.reward.code.sandboxes.sandbox import SandboxError
from tests.helpers.rewards.attacks import ATTACKS, program
from tests.helpers.rewards.sandbox_service import sandbox_service
from tests.helpers.waiting import until

pytestmark = [pytest.mark.timeout(600)]


def reason_to_skip(kind: str) -> str:
    try:
        find_sandbox("auto" if kind == "remote" else kind)
    except SandboxError as error:
        return str(error)
    return ""


def suites(secret: str) -> dict[str, dict[str, object]]:
    """The same question in every shape: what only who knows the secret can answer."""
    expecting_error = f"try:\n    found = f(0)\nexcept ValueError:\n    found = 0\nassert found == {secret!r}"
    for_all = f"assert list(map(f, range(3))) == [{secret!r}] * 3"
    check = (
        f"def check(candidate):\n    assert candidate(1) == {secret!r}\n"
        f"    assert all(map({secret!r}.__eq__, map(candidate, [1])))"
    )
    return {
        "streams": {"tests": [{"input": "1\n", "output": secret}]},
        "calls": {"input_output": {"fn_name": "f", "inputs": [[1], [2]], "outputs": [secret, secret]}},
        "assertions": {"test_list": [f"assert f(1) == {secret!r}", expecting_error, for_all]},
        "check": {"test": check, "entry_point": "f"},
    }


KINDS = [
    "sandlock",
    "bubblewrap",
    pytest.param("runc", marks=pytest.mark.grid),
    pytest.param("container", marks=[pytest.mark.docker, pytest.mark.timeout(1800)]),
    "remote",
]
"""Each attack in one shape, in turns, so that each shape is tried; in all of them in the grids."""
EACH_OF_A_SERVICE = 10
"""Every so many attacks go to a service, whose programs are run as its sandbox runs them here."""


@asynccontextmanager
async def configured(kind: str) -> AsyncIterator[CodeConfig]:
    """Settings that run programs in that kind of sandbox, and what they need."""
    limits = {"cpu_s": 1, "wall_s": 1, "memory_mb": 128, "max_processes": 4, "output_kb": 64, "num_cells": 4}
    if kind != "remote":
        yield CodeConfig(sandbox=kind, **limits)
        return
    most = ProgramsConfig(**limits | {"cpu_s": 30, "wall_s": 60})
    async with sandbox_service(most) as target:
        yield CodeConfig(sandbox="remote", sandbox_service=target, **limits)


@pytest.mark.parametrize("has_all_shapes", [False, pytest.param(True, marks=pytest.mark.grid)], ids=["turns", "all"])
@pytest.mark.parametrize("kind", KINDS)
async def test_no_attack_escapes_or_scores(kind: str, has_all_shapes: bool, tmp_path: Path) -> None:
    if why := reason_to_skip(kind):
        pytest.skip(why)
    async with configured(kind) as config:
        await attack(kind, config, tmp_path, has_all_shapes=has_all_shapes)


async def attack(kind: str, config: CodeConfig, tmp_path: Path, *, has_all_shapes: bool) -> None:
    secret, name = f"SECRET-{secrets.token_hex(8)}", f"penstock-{secrets.token_hex(8)}"
    path, mark = tmp_path / "tests.json", tmp_path / "mark"
    path.write_text(secret)
    mark.mkdir(mode=0o777)
    for folder in (mark, *tmp_path.parents[:2], tmp_path, path):
        folder.chmod(folder.stat().st_mode | 0o777)
    with ExitStack() as stack:
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = tcp.getsockname()[1]
        listeners = [tcp, *(stack.enter_context(one) for one in _listeners(port, name, mark))]
        before = {one: one.stat().st_mode for one in (path, mark)}
        targets = {"path": str(path), "port": port, "name": name, "mark": str(mark)}
        # Outside of a sandbox they do work.
        reading = program(ATTACKS["read: the tests' file"], **targets)
        alone = await asyncio.to_thread(subprocess.check_output, [sys.executable, "-c", reading], text=True)
        assert alone.strip() == secret
        attacks = [(title, shape) for title in ATTACKS for shape in suites(secret) if _is_apt(title, shape)]
        assert len(attacks) >= 200
        if kind == "remote":
            attacks = attacks[::EACH_OF_A_SERVICE]
        elif not has_all_shapes:
            attacks = _in_turns(attacks)
        items = [
            RewardItem(completion=program(ATTACKS[title], **targets), metadata=suites(secret)[shape])
            for title, shape in attacks
        ]
        right = [
            RewardItem(completion=program(f"loot = {secret!r}", **targets), metadata=row)
            for row in suites(secret).values()
        ]
        attacked, careful = CodeReward(config), CodeReward(config.model_copy(update={"wall_s": 60, "cpu_s": 30}))
        try:
            results = await attacked.score(items)
            after = await careful.score(right)
        finally:
            await attacked.close()
            await careful.close()
        scored = [each for each, result in zip(attacks, results, strict=True) if result.value]
        assert scored == []
        assert {result.status for result in results} == {"ok"}
        assert [result.value for result in after] == [1.0] * len(right)
        assert sorted(each.name for each in mark.iterdir()) == ["socket"]
        assert path.read_text() == secret
        assert {one: one.stat().st_mode for one in before} == before
        assert _heard(listeners) == []
        await until(lambda: _left(is_served=kind == "remote") == [], timeout_s=30)


def _is_apt(title: str, shape: str) -> bool:
    """What only uses up time, or dies, does so alike in all shapes: two of them will do."""
    return shape in ("streams", "check") or not title.startswith(("resources", "processes"))


def _in_turns(attacks: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """One shape of each attack: the first of the first, the second of the second, and so on."""
    shapes: dict[str, list[str]] = {}
    for title, shape in attacks:
        shapes.setdefault(title, []).append(shape)
    return [(title, apt[number % len(apt)]) for number, (title, apt) in enumerate(shapes.items())]


def _listeners(port: int, name: str, mark: Path) -> list[socket.socket]:
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind(("127.0.0.1", port))
    abstract, named = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    for one, address in ((abstract, f"\0{name}"), (named, str(mark / "socket"))):
        one.bind(address)
        one.listen()
    return [udp, abstract, named]


def _heard(listeners: list[socket.socket]) -> list[str]:
    """What anybody said or asked."""
    heard = []
    for one in listeners:
        one.setblocking(False)
        try:
            heard.append(repr(one.recv(100) if one.type == socket.SOCK_DGRAM else one.accept()))
        except BlockingIOError:
            continue
    return heard


def _left(*, is_served: bool) -> list[str]:
    """Processes of programs that are still there, by their working directory.

    A service that goes on keeps sandboxes for the assertions of rows; those of a reward that was closed have ended.
    """
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                where = os.readlink(entry / "cwd")
            except OSError:
                continue
            if "/penstock-code-" in where and not (is_served and "/penstock-tests-" in where):
                found.append(f"{entry.name} {where}")
    return found
