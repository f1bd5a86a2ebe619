"""System calls that no program needs: each is asked for in each kind of sandbox, and refused."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.rewards import RewardItem
from services.reward.code.code_reward import CodeReward
from tests.contract.reward.test_code_attacks import configured, reason_to_skip

PROGRAM = """
import ctypes, os, resource, socket, threading
library = ctypes.CDLL(None, use_errno=True)
done = []
def ask(name, what):
    try:
        if what() != -1:
            done.append(name)
    except OSError:
        pass
def grown():
    file = os.memfd_create("x")
    os.ftruncate(file, 1 << 30)
    for _ in range(1 << 9):
        os.write(file, bytes(1 << 20))
for name, arguments in {
    "tcp": (2, 1), "udp": (2, 2), "tcp by several paths": (2, 1, 262), "tcp over ip 6": (10, 1), "raw": (2, 3, 1),
    "netlink": (16, 3), "packet": (17, 3), "algorithms": (38, 5), "machines": (40, 1), "xdp": (44, 3),
}.items():
    ask("socket of " + name, lambda: socket.socket(*arguments).fileno())
for name, arguments in {
    "add_key": (248, b"user", b"x", b"y", 1, -3), "keyctl": (250, 0, -3, 1), "request_key": (249, b"user", b"x", 0, 0),
    "unshare": (272, 0x10000000), "clone of a user": (56, 0x10000011, 0, 0, 0, 0),
    "clone of a network": (56, 0x40000011, 0, 0, 0, 0), "setns": (308, 0, 0),
    "mount": (165, b"x", b"/", b"tmpfs", 0, 0),
    "io_uring_setup": (425, 1, ctypes.create_string_buffer(256)),
    "bpf": (321, 0, ctypes.create_string_buffer(128), 128),
    "perf_event_open": (298, ctypes.create_string_buffer(128), 0, -1, -1, 0), "userfaultfd": (323, 1),
    "process_vm_readv": (310, os.getppid(), 0, 0, 0, 0, 0), "ptrace": (101, 16, os.getppid(), 0, 0),
    "fsopen": (430, b"tmpfs", 0), "open_by_handle_at": (304, -100, 0, 0), "chroot": (161, b"/"),
    "shmget": (29, 0, 4096, 0o1600), "semget": (64, 0, 1, 0o1600), "msgget": (68, 0, 0o1600),
    "mq_open": (240, b"x", 0o102, 0o600, 0),
}.items():
    ask(name, lambda: library.syscall(*arguments))
for process in (os.getppid(), 1):
    if process != os.getpid() and process > 0:
        ask("prlimit", lambda: resource.prlimit(process, resource.RLIMIT_NOFILE))
        ask("setpriority", lambda: os.setpriority(os.PRIO_PROCESS, process, 19))
        ask("sched_setaffinity", lambda: os.sched_setaffinity(process, {0}))
ask("a file in memory", grown)
ask("a file in /dev", lambda: os.open("/dev/shm/x", os.O_CREAT | os.O_WRONLY))
rights = (ctypes.c_uint32 * 6)()
library.syscall(125, (ctypes.c_uint32 * 2)(0x20080522, 0), rights)
ask("rights of root", lambda: 0 if any(rights) else -1)
resource.getrlimit(resource.RLIMIT_NOFILE)
os.sched_setaffinity(0, os.sched_getaffinity(0))
socket.socketpair()
thread = threading.Thread(target=lambda: done.append("thread"))
thread.start()
thread.join()
if os.fork() == 0:
    os._exit(0)
os.wait()
print(done)
"""


KINDS = ["sandlock", "bubblewrap", pytest.param("runc", marks=pytest.mark.grid), "remote"]
"""An engine's containers have the engine's own list."""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the program asks by the numbers of x86_64")
@pytest.mark.parametrize("kind", KINDS)
async def test_calls_that_no_program_needs_are_refused_and_all_others_work(kind: str) -> None:
    if why := reason_to_skip(kind):
        pytest.skip(why)
    async with configured(kind) as config:
        reward = CodeReward(config.model_copy(update={"cpu_s": 10, "wall_s": 60}))
        suite = {"tests": [{"input": "", "output": "['thread']"}]}
        try:
            (result,) = await reward.score([RewardItem(completion=f"```python\n{PROGRAM}\n```", metadata=suite)])
        finally:
            await reward.close()
    assert (result.status, result.value) == ("ok", 1.0), result


def test_the_process_that_starts_scorers_of_reasoning_gym_has_the_filter_too() -> None:
    if why := reason_to_skip("sandlock"):
        pytest.skip(why)
    command = [sys.executable, "-m", "services.reward.reasoning_gym.cell", "sandlock"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as cell:
        assert cell.stdin is not None
        assert cell.stdout is not None
        cell.stdin.write(b"{}\n")
        cell.stdin.flush()
        json.loads(cell.stdout.readline())
        status = Path(f"/proc/{cell.pid}/status").read_text(encoding="utf-8")
        cell.stdin.close()
    assert "Seccomp:\t2\n" in status
