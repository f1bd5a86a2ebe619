"""Children that end with their parent, also when that is killed."""

import asyncio
import signal
import subprocess
import sys

import pytest

from tests.helpers.console import ROOT
from tests.helpers.processes import is_running
from tests.helpers.waiting import until

PARENT = """
import multiprocessing, time
from penstock.process.bound_child import end_with_parent

def child(pipe):
    end_with_parent()
    pipe.send(multiprocessing.current_process().pid)
    while True:
        time.sleep(60)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    context.Process(target=child, args=(far,)).start()
    print(near.recv(), flush=True)
    while True:
        time.sleep(60)
"""


LEADER = """
import os, pathlib, signal, subprocess, sys, time
from penstock.process.bound_child import end_group_with_parent

signal.signal(signal.SIGTERM, lambda *_: pathlib.Path(sys.argv[1]).touch())
end_group_with_parent(os.getppid(), grace_s=float(sys.argv[2]))
print(os.getpid(), subprocess.Popen(["sleep", "600"]).pid, flush=True)
while True:
    time.sleep(60)
"""
STARTER = """
import subprocess, sys
subprocess.run([sys.executable, *sys.argv[1:]], start_new_session=True)
"""


def test_a_child_of_multiprocessing_ends_when_its_parent_was_killed(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environment = {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_running(child)
        parent.send_signal(signal.SIGKILL)
    wait_until_gone(child)


@pytest.mark.parametrize("grace_s", [0, 1])
def test_a_leader_and_all_that_it_started_end_when_its_parent_was_killed(tmp_path, grace_s):
    leader, starter, warned = tmp_path / "leader.py", tmp_path / "starter.py", tmp_path / "warned"
    leader.write_text(LEADER)
    starter.write_text(STARTER)
    command = [sys.executable, str(starter), str(leader), str(warned), str(grace_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": str(ROOT)}) as parent:
        assert parent.stdout is not None
        pids = list(map(int, parent.stdout.readline().split()))
        assert all(map(is_running, pids))
        parent.send_signal(signal.SIGKILL)
    for pid in pids:
        wait_until_gone(pid)
    assert warned.exists() == (grace_s > 0)


def wait_until_gone(pid):
    asyncio.run(until(lambda: not is_running(pid), timeout_s=20))
