"""A slow link between two sites: every packet waits for its turn at a rate, and then for the distance.

Each end is a TUN device that becomes the default route of a site's gateway. Neither needs a module of the kernel for
delays, so it works where netem does not. Into the far site only connections that it opened itself are let through: a
packet that would open one is dropped and noted, as by a firewall.
"""

from __future__ import annotations

import fcntl
import os
import selectors
import struct
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_TCP, _SYN, _ACK = 6, 0x02, 0x10
_MAX_PACKET_BYTES = 65_535
_MAX_QUEUED_BYTES = 4 * 1024**2
"""Of one direction; what comes on top is lost, as in a router."""
_LOOK_EVERY_S = 0.1


def open_tun(name: str) -> int:
    """A file whose reads and writes are the packets of a new TUN device; the device ends with it. Raises OSError."""
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    try:
        fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    except OSError:
        os.close(tun)
        raise
    return tun


@dataclass(slots=True)
class _Direction:
    source: int
    target: int
    is_inbound: bool
    """Whether it leads into the far site."""
    free_s: float = 0.0
    """When the last packet has been sent."""
    queue: deque[tuple[float, bytes]] = field(default_factory=deque)
    queued_bytes: int = 0


class Link:
    """Forwards between two TUN devices in a thread of its own.

    Args:
        near, far: Files of the devices (`open_tun`); closed by `close`.
        bits_per_second: Rate of each direction.
        delay_s: Time of a packet from one end to the other.
    """

    def __init__(self, near: int, far: int, *, bits_per_second: float, delay_s: float) -> None:
        self.is_cut = False
        """Whether every packet is lost; may change at any moment."""
        self.inbound_bytes: Counter[tuple[str, int]] = Counter()
        """Bytes that went into the far site, by receiving address and sending port."""
        self.outbound_bytes = 0
        """Bytes that came out of it."""
        self.refused: set[tuple[str, int]] = set()
        """Addresses and ports of the far site to which somebody tried to connect from outside."""
        self._bytes_per_second = bits_per_second / 8
        self._delay_s = delay_s
        self._directions = (_Direction(near, far, is_inbound=True), _Direction(far, near, is_inbound=False))
        self._is_closing = False
        self._thread = threading.Thread(target=self._forward, name="link", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it, and the devices."""
        self._is_closing = True
        self._thread.join(timeout=10)
        for direction in self._directions:
            os.close(direction.source)

    def _forward(self) -> None:
        with selectors.DefaultSelector() as selector:
            for direction in self._directions:
                selector.register(direction.source, selectors.EVENT_READ, direction)
            while not self._is_closing:
                due_s = min((one.queue[0][0] for one in self._directions if one.queue), default=None)
                wait_s = _LOOK_EVERY_S if due_s is None else max(0.0, due_s - time.monotonic())
                for key, _ in selector.select(min(wait_s, _LOOK_EVERY_S)):
                    self._take(key.data)
                for direction in self._directions:
                    self._deliver(direction)

    def _take(self, direction: _Direction) -> None:
        while True:
            try:
                packet = os.read(direction.source, _MAX_PACKET_BYTES)
            except OSError:
                # Nothing more is there, or the device is down.
                return
            if self.is_cut or not self._admits(packet, direction) or direction.queued_bytes > _MAX_QUEUED_BYTES:
                continue
            now_s = time.monotonic()
            direction.free_s = max(now_s, direction.free_s) + len(packet) / self._bytes_per_second
            direction.queue.append((direction.free_s + self._delay_s, packet))
            direction.queued_bytes += len(packet)

    def _admits(self, packet: bytes, direction: _Direction) -> bool:
        if packet[0] >> 4 != 4 or packet[9] != _TCP:
            return False
        tcp = (packet[0] & 0x0F) * 4
        from_port, to_port = struct.unpack_from("!HH", packet, tcp)
        if not direction.is_inbound:
            self.outbound_bytes += len(packet)
            return True
        to = ".".join(map(str, packet[16:20]))
        if packet[tcp + 13] & (_SYN | _ACK) == _SYN:
            self.refused.add((to, to_port))
            return False
        self.inbound_bytes[to, from_port] += len(packet)
        return True

    def _deliver(self, direction: _Direction) -> None:
        now_s = time.monotonic()
        while direction.queue and direction.queue[0][0] <= now_s:
            packet = direction.queue.popleft()[1]
            direction.queued_bytes -= len(packet)
            if self.is_cut:
                continue
            try:
                os.write(direction.target, packet)
            except OSError:
                # The device is down, or takes no more: the packet is lost, as on any link.
                continue
