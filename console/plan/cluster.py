"""The cluster of a planning problem, from probes: GPU types, machines, hosts and links, as the problem states them.

Rates are the medians of machines with the same kind of devices. Nothing is made up: what no probe measured is reported
as missing, with the probe that would measure it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median
from typing import TypeVar

from console.probe.probe_file import Accelerators, MeasuredLink, Probe
from console.probe.probe_text import clock_difference
from penstock.config import Document

SLOW_BELOW = 0.8
"""Share of the median matrix rate of its kind below which a machine is named in a note."""
_Key = TypeVar("_Key", bound=Hashable)
_Each = TypeVar("_Each")


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine with devices."""

    probe: Probe
    devices: Accelerators


@dataclass(slots=True)
class Cluster:
    """Sections of a problem's document, what is missing in them, and what to know about them, one line each."""

    gpu_types: dict[str, Document] = field(default_factory=dict)
    nodes: list[Document] = field(default_factory=list)
    hosts: list[Document] = field(default_factory=list)
    links: list[Document] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def cluster_of(probes: Sequence[Probe]) -> Cluster:
    """The cluster of these machines, whose names differ."""
    cluster = Cluster(notes=[_busy(probe) for probe in probes if probe.is_busy])
    differences = (clock_difference(probe.name, link) for probe, link in _all_links(probes))
    cluster.notes += [each for each in differences if each is not None]
    machines = [Machine(probe, probe.accelerators) for probe in probes if probe.accelerators is not None]
    for kind, alike in _grouped(machines, lambda each: each.devices.kind).items():
        cluster.gpu_types[kind] = _gpu_type(kind, alike, cluster.missing)
        cluster.notes += _slow_ones([each.probe for each in alike])
    groups = _grouped(machines, lambda each: (each.devices.kind, each.devices.count, each.probe.site))
    cluster.nodes = [_node_class(alike, probes) for alike in groups.values()]
    cluster.hosts = list(_hosts(probes, {each.probe.site for each in machines}, cluster.notes))
    cluster.links = list(_links([each.probe for each in machines], probes, cluster.missing))
    cluster.missing += _too_few(probes, machines)
    return cluster


def _too_few(probes: Sequence[Probe], machines: Sequence[Machine]) -> Iterator[str]:
    num_devices = sum(each.devices.count for each in machines)
    if num_devices == 0:
        yield (
            f"nodes: all {len(probes)} machines are hosts without GPUs; probe those with GPUs, or again with "
            "--cpu-devices 2 to train and generate on CPUs"
        )
    elif num_devices == 1:
        (one,) = machines
        more = "more machines" + (", or this one with --cpu-devices 2" if one.devices.type == "cpu" else "")
        needed = "a plan needs one that generates and one that trains"
        yield f"nodes: {one.probe.name} is one device, and {needed}; probe {more}"


def _hosts(probes: Sequence[Probe], sites: Collection[str], notes: list[str]) -> Iterator[Document]:
    """Machines without devices at these sites; plans take the first of a site, so those with most cores come first."""
    hosts = [probe for probe in probes if probe.accelerators is None]
    for probe in hosts:
        if probe.site not in sites:
            notes.append(f"{probe.name} is the only kind of machine at site {probe.site}: a host, and left out")
    usable = [probe for probe in hosts if probe.site in sites]
    usable.sort(key=lambda probe: (-(probe.cores or 1), 0.0 if probe.disk is None else -probe.disk.write_GBps))
    for (site, cores), alike in _grouped(usable, lambda probe: (probe.site, probe.cores)).items():
        found: Document = {
            "name": alike[0].name,
            "count": len(alike),
            "region": site,
            "machines": [each.name for each in alike],
        }
        if cores is not None:
            found["cores"] = cores
        if memories := [probe.memory_GB for probe in alike if probe.memory_GB is not None]:
            found["memory_GB"] = min(memories)
        yield found


def _grouped(every: Sequence[_Each], key: Callable[[_Each], _Key]) -> Mapping[_Key, list[_Each]]:
    groups: dict[_Key, list[_Each]] = defaultdict(list)
    for each in every:
        groups[key(each)].append(each)
    return groups


def _busy(probe: Probe) -> str:
    return (
        f"{probe.name} was busy while it was probed ({'; '.join(probe.busy_because)}), so its rates may be too low; "
        f"run penstock probe --name {probe.name} on it again"
    )


def _gpu_type(kind: str, machines: Sequence[Machine], missing: list[str]) -> Document:
    found: Document = {"hbm_GB": min(each.devices.memory_GB for each in machines)}
    alike = [each.probe for each in machines]
    for key, what, rates in (
        ("tflops_bf16", "matrix", [probe.matrix_tflops_bf16 for probe in alike]),
        ("hbm_GBps", "memory", [probe.memory_GBps for probe in alike]),
    ):
        if measured := [rate for rate in rates if rate is not None]:
            found[key] = median(measured)
        else:
            missing.append(_missing(f"gpu_types.{kind}.{key}", what, alike))
    if sums := [probe.allreduce for probe in alike if probe.allreduce is not None]:
        found["ar_bus_GBps"] = median(each.bus_GBps for each in sums)
        found["ar_latency_us"] = median(each.latency_us for each in sums)
    elif several := [each.probe for each in machines if each.devices.count > 1]:
        missing.append(_missing(f"gpu_types.{kind}.ar_bus_GBps", "allreduce", several))
    elif "hbm_GBps" in found:
        # Machines of one device sum up nothing inside: the value is required, and never used.
        found["ar_bus_GBps"] = found["hbm_GBps"]
    return found


def _missing(field_name: str, what: str, alike: Sequence[Probe]) -> str:
    first = alike[0]
    why = first.absent.get(what, "not measured")
    return f"{field_name}: {why} ({first.name}); run penstock probe on it again, without --skip {what}"


def _slow_ones(alike: Sequence[Probe]) -> Iterator[str]:
    rates = {probe.name: probe.matrix_tflops_bf16 for probe in alike if probe.matrix_tflops_bf16 is not None}
    usual = median(rates.values()) if rates else 0.0
    for name, rate in rates.items():
        if rate < SLOW_BELOW * usual:
            yield (
                f"{name} reached {rate / usual:.0%} of the matrix rate of machines like it, and is planned as one of "
                "them; see what slows it down, and probe it again"
            )


def _node_class(alike: Sequence[Machine], probes: Sequence[Probe]) -> Document:
    """One entry for equal machines of a site."""
    first, devices = alike[0].probe, alike[0].devices
    names = [each.probe.name for each in alike]
    found: Document = {
        "name": first.name,
        "gpu": devices.kind,
        "gpus": devices.count,
        "count": len(names),
        "machines": names,
        "region": first.site,
    }
    inside = [_rate(link) for probe, link in _all_links(probes) if {first.site} == {probe.site, link.site}]
    if inside:
        found["nic_Gbps"] = max(inside)
    memories = [each.probe.memory_GB for each in alike if each.probe.memory_GB is not None]
    # Devices that are CPUs have the main memory already.
    if memories and devices.type == "gpu":
        found["memory_GB"] = min(memories)
    return found


def _links(machines: Sequence[Probe], probes: Sequence[Probe], missing: list[str]) -> Iterator[Document]:
    """Between the sites of machines with devices, as any machine measured it."""
    sites = {probe.name: probe.site for probe in probes}
    found: dict[frozenset[str], list[MeasuredLink]] = defaultdict(list)
    for probe, link in _all_links(probes):
        stated = sites.get(link.machine, link.site)
        if stated != link.site:
            missing.append(
                f"links: {probe.name} measured one to {link.machine} of site {link.site}, which its own probe puts "
                f"into site {stated}; probe one of the two again"
            )
        found[frozenset((probe.site, link.site))].append(link)
    for one, other in combinations(sorted({probe.site for probe in machines}), 2):
        if links := found.get(frozenset((one, other))):
            yield {
                "a": one,
                "b": other,
                "bw_Gbps": max(map(_rate, links)),
                "latency_ms": min(link.round_trip_ms for link in links) / 2,
            }
        else:
            near, far = (next(probe.name for probe in machines if probe.site == site) for site in (one, other))
            missing.append(
                f"links: none is measured between sites {one} and {other}; run penstock probe --listen 0.0.0.0:7309 on "
                f"{near}, and penstock probe --name {far} --site {other} --with {near}:7309 on {far}"
            )


def _all_links(probes: Sequence[Probe]) -> Iterator[tuple[Probe, MeasuredLink]]:
    return ((probe, link) for probe in probes for link in probe.links)


def _rate(link: MeasuredLink) -> float:
    """Problems state one rate for both directions."""
    return min(link.send_Gbps, link.receive_Gbps)
