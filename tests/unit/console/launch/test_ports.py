"""Ports of services that are started some time after their ports are chosen."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from console.launch import ports
from console.launch.ports import free_addresses, free_block


def test_no_connection_can_take_a_chosen_port() -> None:
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if first_ephemeral < ports._RUN_PORTS.stop:
        pytest.skip(f"connections of this machine have ports from {first_ephemeral} on (net.ipv4.ip_local_port_range)")
    chosen = [int(address.rpartition(":")[2]) for address in free_addresses(20)]
    assert len(set(chosen)) == 20
    assert all(port < first_ephemeral for port in [*chosen, free_block(2) + 1])


def test_ports_in_use_are_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    first = free_block(5)
    monkeypatch.setattr(ports, "_RUN_PORTS", range(first, first + 5))
    with ExitStack() as stack:
        for port in (first, first + 3):
            listener = stack.enter_context(socket.socket())
            listener.bind(("127.0.0.1", port))
            listener.listen()
        assert set(free_addresses(3)) == {f"127.0.0.1:{first + shift}" for shift in (1, 2, 4)}
        with pytest.raises(OSError, match=f"no 4 free ports between {first} and {first + 5}"):
            free_addresses(4)
        with pytest.raises(OSError, match="no 3 free ports in a row"):
            free_block(3)
