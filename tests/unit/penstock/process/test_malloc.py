"""What a process gives back to its system."""

from __future__ import annotations

import subprocess
import sys

import pytest

PIECES = """
import sys
from benchmarks.resident import resident_mb
from penstock.memory.malloc import return_buffers

if int(sys.argv[1]):
    assert return_buffers(from_bytes=256 << 10)
bytearray(16 << 20)
pieces = [(bytearray(b"x" * (512 << 10)), bytearray(b"x" * (16 << 10))) for _ in range(128)]
before = resident_mb()
kept = [small for _, small in pieces]
del pieces
print(before - resident_mb())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc alone")
@pytest.mark.parametrize("returns", [True, False])
def test_buffers_between_others_return_to_the_system_on_request(returns):
    command = [sys.executable, "-c", PIECES, str(int(returns))]
    found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    assert (float(found) > 60) == returns
