"""Moves a deployment that is tried on this machine to free ports: the planned ones are the same for all deployments."""

from __future__ import annotations

import re
from pathlib import Path

from console.launch.ports import free_block

_PORT = re.compile(r"(?<=127\.0\.0\.1:)[1-9]\d*\b|(?<=rendezvous_port: )\d+\b")
"""But for 0, which is any free port."""
_MORE_PORTS = 32
"""Above the highest port that the files state: generators take two for each GPU from a machine's first one on."""


def move_ports(folder: Path) -> None:
    """Add the same number to every port in a deployment's files, so that all of them are free."""
    texts = {path: path.read_text() for path in folder.rglob("*.yaml")}
    ports = {int(port) for text in texts.values() for port in _PORT.findall(text)}
    shift = free_block(max(ports) - min(ports) + _MORE_PORTS) - min(ports)
    for path, text in texts.items():
        path.write_text(_PORT.sub(lambda port: str(int(port[0]) + shift), text))
