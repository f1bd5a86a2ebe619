"""The file that `penstock probe` writes for a machine, and a folder of such files.

Units are those of planning problems: GB and GBps are 10^9 bytes (per second), Gbps 10^9 bits per second. What was not
measured is null, and `absent` says why.
"""

# ruff: noqa: N815 - keys carry units as in planning problems.

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Literal

from pydantic import Field

from penstock.config import ConfigError, StrictModel, read_document, validate
from penstock.process.disk import is_full
from penstock.process.durable_files import replace_file

SCHEMA: Literal["penstock-probe/1"] = "penstock-probe/1"
_CHECKED_BYTES = 64 * 1024
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"

MachineName = Annotated[str, Field(min_length=1, max_length=128, pattern=NAME_PATTERN)]
Rate = Annotated[float, Field(gt=0, le=1e9)]
ShareOf = Annotated[float, Field(ge=0, le=1)]
Text = Annotated[str, Field(max_length=1000)]


class Accelerators(StrictModel):
    """The devices of the machine, all of one kind."""

    type: Literal["gpu", "cpu"]
    kind: str = Field(min_length=1, max_length=128)
    """GPU type as in planning problems (H100, A100-80), otherwise the product's name."""
    count: int = Field(ge=1, le=1024)
    memory_GB: Rate
    """Of each: a GPU's own, or an equal part of the machine's RAM."""


class AllReduce(StrictModel):
    """Sums over all devices of the machine."""

    backend: Literal["gloo", "nccl"]
    bus_GBps: Rate
    """Bus bandwidth of each device: 2 (n - 1) / n of the tensor's bytes, over the time."""
    latency_us: Rate
    """Of a sum of a few bytes."""


class Passes(StrictModel):
    """Passes of a model's layers over one sample, without its optimiser."""

    model: Text
    """Folder's name, or whose widths the probe took."""
    forward_tflops: Rate
    """10^12 FLOP/s of each device, with all devices at work."""
    forward_backward_tflops: Rate


class Disk(StrictModel):
    """One file, written and read in order."""

    write_GBps: Rate
    read_GBps: Rate


class DecodePoint(StrictModel):
    """A decode step with this many sequences."""

    batch: int = Field(ge=1, le=100_000)
    step_s: float = Field(gt=0, le=1e4)


class Decode(StrictModel):
    """Decode steps of the real engine on one device, with short contexts."""

    engine: Text
    """Name and version."""
    model: Text
    """Folder's name, or what the probe made."""
    params: float = Field(gt=0, le=1e15)
    layers: int = Field(ge=1, le=100_000)
    weight_bytes: float = Field(gt=0, le=16)
    """Bytes of each parameter as decoded."""
    points: tuple[DecodePoint, ...] = Field(min_length=1, max_length=64)


class MeasuredLink(StrictModel):
    """The network to another machine, by one bounded transfer each way."""

    machine: MachineName
    site: MachineName
    send_Gbps: Rate
    receive_Gbps: Rate
    round_trip_ms: float = Field(ge=0, le=1e6)
    clock_ahead_s: float | None = Field(default=None, ge=-1e10, le=1e10)
    """By how much the other machine's clock was ahead of this one's, to half a round trip; None if it did not say."""


class MeasuredReward(StrictModel):
    """How fast one reward worker of a run scores here."""

    model: Text
    """The rewards that were measured, as `reward_name` writes them."""
    samples_per_second: Rate
    """With as many calls under way as the run allows."""
    num_samples: int = Field(ge=1, le=1_000_000_000)
    """Scores behind the rate."""
    completions: Literal["recorded", "answers"]
    """What was scored: completions of a recording, or rows' reference answers in their place."""
    memory_GB: Rate
    """Most that the worker had, and its largest child process."""


class Load(StrictModel):
    """What else the machine did meanwhile."""

    load_average: float = Field(ge=0, le=1e6)
    """Runnable processes over the last minute, before the first measurement."""
    others: ShareOf
    """Share of all CPU time that other processes used during the measurements."""
    stolen: ShareOf
    """Share that the hypervisor gave to other guests."""


class Probe(StrictModel):
    """A machine as measured."""

    schema_: Literal["penstock-probe/1"] = Field(default=SCHEMA, alias="schema")
    name: MachineName
    """The machine's name, under which other machines reach it."""
    site: MachineName = "default"
    """Machines of one site share a fast network."""
    measured_at: datetime.datetime
    cores: int | None = Field(default=None, ge=1, le=100_000)
    """CPU cores that a process here may use."""
    memory_GB: Rate | None = None
    """Main memory of the machine, or of the container."""
    accelerators: Accelerators | None = None
    """None: a host, a machine without GPUs that is there for broker, Redis and scheduler."""
    matrix_tflops_bf16: Rate | None = None
    """10^12 FLOP/s of each device in a large bfloat16 matrix product, with all devices at work."""
    memory_GBps: Rate | None = None
    """Bytes read and written by a copy inside each device's memory, with all devices at work."""
    allreduce: AllReduce | None = None
    passes: Passes | None = None
    host_link_GBps: Rate | None = None
    """Between each GPU and the machine's memory in the slower direction, with all GPUs at work."""
    host_memory_GBps: Rate | None = None
    """Bytes read and written by copies inside the machine's memory, by processors for all GPUs at once."""
    disk: Disk | None = None
    decode: Decode | None = None
    reward: MeasuredReward | None = None
    links: tuple[MeasuredLink, ...] = Field(default=(), max_length=1000)
    absent: dict[str, Text] = Field(default_factory=dict, max_length=100)
    """Why a measurement is missing, by its name."""
    load: Load
    is_busy: bool = False
    """Whether other work took part of the machine meanwhile: its rates are then too low."""
    busy_because: tuple[Text, ...] = Field(default=(), max_length=100)
    versions: dict[str, Text] = Field(default_factory=dict, max_length=100)


def write_probe(folder: Path, probe: Probe) -> Path:
    """Write NAME.json into the folder, in place of an earlier one; returns its path. Raises ConfigError."""
    path = folder / f"{probe.name}.json"
    with _refused(path):
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(path, probe_json(probe) + "\n")
    return path


def check_folder(folder: Path) -> None:
    """Raise ConfigError for a folder that takes no file, before minutes of measuring are lost."""
    with _refused(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder, buffering=0) as file:
            file.write(bytes(_CHECKED_BYTES))
            os.fsync(file.fileno())


@contextmanager
def _refused(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        fix = "free some space, or name another folder" if is_full(error) else "name another folder"
        raise ConfigError(f"--out: {path} cannot be written: {error.strerror}; {fix}") from error


def probe_json(probe: Probe) -> str:
    """The file's text."""
    return json.dumps(probe.model_dump(mode="json", by_alias=True), indent=2)


def read_probe(path: Path) -> Probe:
    """A machine from its file. Raises ConfigError, one line per problem."""
    document = read_document(path)
    if (found := document.get("schema")) != SCHEMA:
        raise ConfigError(
            f"{path}: schema: {found!r:.60} is not {SCHEMA}, which this version reads; run penstock probe again with "
            "this version, or remove the file"
        )
    return validate(Probe, document, source=str(path))


def read_inventory(folder: Path) -> Mapping[Path, Probe]:
    """All machines of a folder, by file, in the order of their names. Raises ConfigError, one line per problem."""
    if not folder.is_dir():
        raise ConfigError(f"--inventory: {folder} is no folder; give the one that penstock probe --out wrote into")
    files = sorted(folder.glob("*.json"))
    if not files:
        raise ConfigError(f"--inventory: {folder} holds no probe; run penstock probe --out {folder} on each machine")
    problems: list[str] = []
    probes: dict[Path, Probe] = {}
    for path in files:
        try:
            probes[path] = read_probe(path)
        except ConfigError as error:
            problems.append(str(error))
    problems += _doubles(probes)
    if problems:
        raise ConfigError("\n".join(problems))
    return dict(sorted(probes.items(), key=lambda item: item[1].name))


def _doubles(probes: Mapping[Path, Probe]) -> Sequence[str]:
    files: dict[str, Path] = {}
    problems = []
    for path, probe in probes.items():
        first = files.setdefault(probe.name, path)
        if first != path:
            problems.append(
                f"{path}: name: {probe.name!r} is also the name in {first}; remove one of them, or probe one of the "
                "machines again with another --name"
            )
    return problems
