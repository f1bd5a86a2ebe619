"""Where the services of a folder serve their metrics, as a file that Prometheus' `file_sd_configs` read.

Prometheus allows a * in the last part of a path alone. So the file of a run lies beside its folder, where one pattern
finds those of all runs; a machine of a plan has its own inside its folder, or where the run that started it says.

Invariants:
- A service keeps its address until it is stopped, also while it is restarted: nobody else is given its port.
- The file names those that are to be up, and is gone when there are none: whoever is missing is down.
"""

from __future__ import annotations

import json
import os
import socket
import weakref
from collections.abc import Iterable
from itertools import count
from pathlib import Path

from console.config.derive import local_endpoint
from console.config.run_folder import RunFolder
from console.launch.ports import held_port
from penstock.process.durable_files import replace_file

TARGETS_VARIABLE = "PENSTOCK_METRICS_TARGETS"
"""The file of a `penstock node` that a run has started."""
SUFFIX = ".prometheus.json"


class MetricsTargets:
    """The file at `path`, of the services of `folder`."""

    def __init__(self, folder: RunFolder, path: Path | None = None) -> None:
        """Without `path`, where the environment says, else in the folder."""
        told = os.environ.get(TARGETS_VARIABLE)
        self.path = path or (Path(told) if told else folder.path / "prometheus.json")
        is_inside = self.path.parent == folder.path
        self._owner = folder.path.name if is_inside else self.path.name.removesuffix(SUFFIX)
        self._groups: dict[str, dict[str, object]] = {}
        self._held: dict[str, socket.socket] = {}
        # Services that were planned and never started are stopped by no one.
        weakref.finalize(self, _close, self._held)
        self._stated: dict[str, str] = {}

    def address_of(self, name: str, stated: str | None = None) -> str:
        """Where a service is to serve its metrics until it is removed, host:port.

        Args:
            name: Of the service.
            stated: What its settings say; of several that say the same, later ones get the next ports. None gives it a
                free port of loopback.
        """
        if stated is None:
            if name not in self._held:
                self._held[name] = held_port()
            return f"127.0.0.1:{self._held[name].getsockname()[1]}"
        host, _, first = stated.rpartition(":")
        taken = {address for other, address in self._stated.items() if other != name}
        ports = (f"{host}:{port}" for port in count(int(first)))
        self._stated[name] = next(address for address in ports if address not in taken)
        return self._stated[name]

    def add(self, name: str, kind: str, address: str, *, serves_tls: bool) -> None:
        """Name a service that is started. Raises OSError: the file cannot be written."""
        labels = {"job": f"penstock-{kind}", "instance": f"{self._owner}/{name}"}
        labels |= {"__scheme__": "https"} if serves_tls else {}
        self._groups[name] = {"targets": [local_endpoint(address).target], "labels": labels}
        self._write()

    def remove(self, names: Iterable[str]) -> None:
        """Forget services that were stopped. Raises OSError: the file cannot be written."""
        is_changed = False
        for name in names:
            self._stated.pop(name, None)
            if (held := self._held.pop(name, None)) is not None:
                held.close()
            is_changed |= self._groups.pop(name, None) is not None
        if is_changed:
            self._write()

    def clear(self) -> None:
        """Forget all of them. Raises OSError: the file cannot be deleted."""
        self.remove({*self._groups, *self._held})

    def _write(self) -> None:
        if self._groups:
            replace_file(self.path, json.dumps(list(self._groups.values()), indent=2) + "\n")
        else:
            self.path.unlink(missing_ok=True)


def _close(held: dict[str, socket.socket]) -> None:
    for each in held.values():
        each.close()


def run_targets(folder: RunFolder, node: str = "") -> Path:
    """The file of a run's services, or of those of a machine that the run starts, beside the run's folder."""
    return folder.path.with_name(f"{folder.path.name}{f'.{node}' if node else ''}{SUFFIX}")
