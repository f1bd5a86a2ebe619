"""Touching free memory before a measurement."""

import json
import subprocess
import sys

MIB = 1 << 20
PROBE = """
import json, resource, re
from benchmarks import free_memory
free_memory._available_bytes = lambda: {available}
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
before = resident()
free_memory.touch_free_memory(512 << 20)
most = int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
print(json.dumps([before, most, resident()]))
"""


def touched(available: int) -> tuple[int, int, int]:
    """Resident bytes before, at most, and after, in a process of its own."""
    shown = subprocess.run(
        [sys.executable, "-c", PROBE.format(available=available)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    before, most, after = json.loads(shown.stdout)
    return before, most, after


def test_half_of_what_is_available_is_written_to_and_freed() -> None:
    before, most, after = touched(256 * MIB)
    assert before + 120 * MIB <= most <= before + 140 * MIB
    assert after <= before + 16 * MIB


def test_nothing_is_touched_where_nothing_is_known() -> None:
    before, most, _ = touched(0)
    assert most <= before + 16 * MIB
