"""What a process that trains with others sets for itself."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from services.trainer.distributed.process_group import RankGroup, _return_large_blocks

MIB = 2**20
COUNTS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
NUM_BLOCKS = 3


class Mallinfo2(ctypes.Structure):
    """Of glibc; `hblks` are the blocks that the system gets back when they are freed."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in COUNTS.split())


@pytest.mark.slow
def test_large_blocks_go_back_to_the_system():
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        pytest.skip("the C library is not glibc")
    # In a process of its own: this one may have as much free already, and goes on with the settings it has.
    command = [sys.executable, "-c", f"import {__name__} as test; print(test.num_given_back())"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) == NUM_BLOCKS


def num_given_back() -> int:
    """How many of the blocks that are allocated from now on the system would get back."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Mallinfo2
    # Freed once, such a block makes glibc keep blocks up to its size.
    torch.empty(24 * MIB, dtype=torch.uint8)
    _return_large_blocks()
    before = libc.mallinfo2().hblks
    blocks = [torch.empty(12 * MIB, dtype=torch.uint8) for _ in range(NUM_BLOCKS)]
    found = int(libc.mallinfo2().hblks - before)
    del blocks
    return found


def test_a_process_that_serves_one_run_after_the_other_computes_on_the_mesh_of_each():
    for _run in range(2):
        group = RankGroup(dist.HashStore(), rank=0, num_ranks=1, local_rank=0, device="cpu")
        try:
            parts = DTensor.from_local(torch.ones(2), group._mesh, [Shard(0)])
            assert (parts + parts).device_mesh is group._mesh
        finally:
            group.close()
