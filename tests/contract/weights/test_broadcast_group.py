"""One sender and one receiver, two processes, over every library: the same bytes, and deadlines that hold."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
import time

import pytest

from penstock.collective.broadcast_backend import Transport
from penstock.collective.group import Rendezvous
from penstock.collective.place import BroadcastError, GroupPlace

torch = pytest.importorskip("torch")
TIMEOUT_S = 60.0
STALL_S = 30.0
PIECE_BYTES = 64 * 1024
RECEIVER = """
import hashlib, sys
from penstock.collective.broadcast_backend import Transport
from penstock.collective.group import Rendezvous
from penstock.collective.place import GroupPlace
address, backend, stall_s, piece_bytes, *sizes = sys.argv[1:]
place = GroupPlace(group_id="g", rank=1, num_ranks=2, backend=Transport(backend), stall_s=float(stall_s),
                   piece_bytes=int(piece_bytes))
group = Rendezvous.connect(address, stall_s=place.stall_s).form(place, bind_host="127.0.0.1")
for size in map(int, sizes):
    print(hashlib.sha256(b"".join(map(bytes, group.receive(size)))).hexdigest(), flush=True)
group.abort()
"""


def place(backend: Transport, *, stall_s: float) -> GroupPlace:
    return GroupPlace(group_id="g", rank=0, num_ranks=2, backend=backend, stall_s=stall_s, piece_bytes=PIECE_BYTES)


def serve(stall_s: float) -> Rendezvous:
    return Rendezvous.serve(socket.create_server(("127.0.0.1", 0)), public_host="127.0.0.1", stall_s=stall_s)


def send_to_another_process(backend: Transport, tmp_path, **environment: str) -> None:
    contents = [os.urandom(3 * PIECE_BYTES + 123), os.urandom(5)]
    rendezvous = serve(STALL_S)
    numbers = map(str, (STALL_S, PIECE_BYTES, *map(len, contents)))
    receiver = subprocess.Popen(
        [sys.executable, "-c", RECEIVER, rendezvous.address, backend, *numbers],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )
    try:
        group = rendezvous.form(place(backend, stall_s=STALL_S), bind_host="127.0.0.1")
        for content in contents:
            (tmp_path / "content").write_bytes(content)
            with (tmp_path / "content").open("rb", buffering=0) as file:
                group.send(file, len(content))
        output, _ = receiver.communicate(timeout=TIMEOUT_S)
        group.abort()
    finally:
        receiver.kill()
        receiver.wait()
    assert output.split() == [hashlib.sha256(content).hexdigest() for content in contents]


@pytest.mark.slow
def test_a_content_reaches_another_process_over_gloo(tmp_path):
    send_to_another_process(Transport.GLOO, tmp_path)


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a GPU for the trainer and one for the generator")
def test_a_content_reaches_another_process_over_nccl(tmp_path):
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    send_to_another_process(Transport.NCCL, tmp_path, CUDA_VISIBLE_DEVICES=visible[1])


@pytest.mark.parametrize(
    "backend",
    [
        Transport.GLOO,
        pytest.param(
            Transport.NCCL,
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")],
        ),
    ],
)
def test_a_group_without_its_receiver_is_given_up(backend):
    begun_s = time.monotonic()
    with pytest.raises(BroadcastError):
        serve(TIMEOUT_S).form(place(backend, stall_s=0.5), bind_host="127.0.0.1")
    # The deadline holds, not the store's own of TIMEOUT_S.
    assert time.monotonic() - begun_s < TIMEOUT_S / 2
