"""Children that end with their parent, also when that is killed."""

import signal
import subprocess
import sys
import time

from tests.helpers.console import ROOT
from tests.helpers.processes import is_running

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


def test_a_child_of_multiprocessing_ends_when_its_parent_was_killed(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environment = {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_running(child)
        parent.send_signal(signal.SIGKILL)
    deadline_s = time.monotonic() + 20
    while is_running(child):
        assert time.monotonic() < deadline_s, "the child outlived its parent"
        time.sleep(0.05)
