"""The sandbox of containers, by the commands that it gives an engine; a stand-in takes them and confines nothing."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from services.reward.code.exchange import converse
from services.reward.code.sandboxes.containers import ENGINES, IMAGE, Container, ContainerSandbox
from services.reward.code.sandboxes.finding import find_sandbox
from services.reward.code.sandboxes.sandbox import Ended, Limits, Place, SandboxError
from tests.helpers.processes import is_running
from tests.helpers.waiting import until

STAND_IN = Path(__file__).parents[2] / "helpers" / "rewards" / "stand_in_engine.sh"
LIMITS = Limits(cpu_s=5, wall_s=20, memory_bytes=64 * 1024**2, max_processes=4000, output_bytes=1024, life_s=90)
"""Without a container the processes of this user are counted, all of them."""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the stand-in, with what was asked of it."""
    folder = tmp_path / "engine"
    folder.mkdir()
    shutil.copy(STAND_IN, folder / "docker")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def asked(engine: Path, command: str) -> list[str]:
    return (engine / f"{command}.log").read_text().splitlines()


def started(*argv: str, folder: Path) -> Container:
    return ContainerSandbox().start(argv, place=Place(folder=folder, readable=["/opt"]), limits=LIMITS)


def outcome(*argv: str, folder: Path, given: bytes = b"") -> tuple[bytes, Ended]:
    running = started(*argv, folder=folder)
    try:
        printed = converse(running.stdin, running.stdout, given, deadline_s=time.monotonic() + 20, max_bytes=1000)
        return printed, running.wait(20)
    finally:
        running.end()


def test_a_program_gets_a_container_of_its_own_with_every_bound(engine: Path, tmp_path: Path) -> None:
    assert outcome("/bin/cat", folder=tmp_path, given=b"hello") == (b"hello", Ended(succeeded=True))
    assert asked(engine, "import") == ["import", "-", IMAGE]
    command = " ".join(asked(engine, "run"))
    for bound in (
        "--rm --name penstock-code-",
        "--network none --ipc none",
        "--cpus 1 --read-only --cap-drop ALL --security-opt no-new-privileges --pids-limit 64 --user ",
        "--memory 67108864 --memory-swap 67108864",
        "--mount type=bind,source=/usr,target=/usr,readonly",
        "--mount type=bind,source=/opt,target=/opt,readonly",
        f"--mount type=bind,source={tmp_path},target={tmp_path},readonly --workdir {tmp_path} {IMAGE}",
        "timeout -k 0.1 -s KILL 90 /bin/sh",
        "prlimit --cpu=5:6 --core=0 --fsize=0 --nofile=64 --nproc=4001 -- /bin/cat",
    ):
        assert bound in command
    assert "privileged" not in command.replace("no-new-privileges", "")
    assert outcome("/bin/cat", folder=tmp_path)[0] == b""
    commands = asked(engine, "run")
    assert len({each for each in commands if each.startswith("penstock-code-")}) == 2
    users = {after for each, after in pairwise(commands) if each == "--user"}
    assert len(users) == 2, "a container's processes are counted by its user"
    assert all(int(user.partition(":")[0]) >= 2**28 for user in users)
    assert len(asked(engine, "import")) == 3, "the image is made once"


def test_endings_of_programs_are_distinguished_from_errors_of_the_engine(engine: Path, tmp_path: Path) -> None:
    def ending(script: str) -> Ended:
        return outcome("/bin/sh", "-c", script, folder=tmp_path)[1]

    # What an engine's own command line says of itself, a program may do as well.
    assert ending("echo 'docker: Error response from daemon' >&2; exit 125") == Ended()
    assert ending("kill -KILL $$") == Ended("its memory or CPU time")
    (engine / "broken").touch()
    with pytest.raises(SandboxError, match=r"did not start: docker: Error response from daemon: out of everything"):
        ending("exit 0")


def test_an_engine_that_confines_nothing_is_refused(engine: Path) -> None:
    with pytest.raises(SandboxError, match="a program that should print"):
        find_sandbox("container")


def test_without_an_engine_it_says_so(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENGINES:
        (engine / name).write_text("#!/bin/sh\necho 'Cannot connect to the daemon' >&2; exit 1\n")
        (engine / name).chmod(0o755)
    with pytest.raises(SandboxError, match=r"docker: Cannot connect to the daemon"):
        ContainerSandbox()


@pytest.fixture
def endless(tmp_path: Path) -> tuple[str, Path]:
    """A program that heeds no signal, and the file that it writes its process id to."""
    file = tmp_path / "pid"
    return f"trap '' TERM; ln -s $$ {file}; while :; do sleep 0.05; done", file


def test_a_container_is_ended_with_all_its_processes(engine: Path, tmp_path: Path, endless: tuple[str, Path]) -> None:
    running = started("/bin/sh", "-c", endless[0], folder=tmp_path)
    assert running.wait(0.01) == Ended("its time")
    running.end()
    assert asked(engine, "kill")[0] == "kill"
    assert not (endless[1].is_symlink() and is_running(int(endless[1].readlink().name)))


async def test_a_container_ends_when_what_started_it_dies(
    engine: Path, tmp_path: Path, endless: tuple[str, Path]
) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.unit.reward.test_containers import started;"
        "one = started('/bin/sh', '-c', sys.argv[1], folder=Path(sys.argv[2])); sys.stdin.read()"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, endless[0], str(tmp_path), stdin=asyncio.subprocess.PIPE
    )
    await until(endless[1].is_symlink)
    program = int(endless[1].readlink().name)
    assert is_running(program)
    parent.kill()
    await parent.wait()
    await until(lambda: not is_running(program))
