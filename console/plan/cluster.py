"""The cluster of a planning problem, from probes: GPU types, machines and links, as the problem's document states them.

Rates are the medians of machines with the same kind of devices. Nothing is made up: what no probe measured is reported
as missing, with the probe that would measure it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median
from typing import TypeVar

from console.probe.probe_file import MeasuredLink, Probe
from penstock.config import Document

SLOW_BELOW = 0.8
"""Share of the median matrix rate of its kind below which a machine is named in a note."""
_Key = TypeVar("_Key", bound=Hashable)


@dataclass(slots=True)
class Cluster:
    """Sections of a problem's document, what is missing in them, and what to know about them, one line each."""

    gpu_types: dict[str, Document] = field(default_factory=dict)
    nodes: list[Document] = field(default_factory=list)
    links: list[Document] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def cluster_of(probes: Sequence[Probe]) -> Cluster:
    """The cluster of these machines, whose names differ."""
    cluster = Cluster(notes=[_busy(probe) for probe in probes if probe.is_busy])
    for kind, alike in _grouped(probes, lambda probe: probe.accelerators.kind).items():
        cluster.gpu_types[kind] = _gpu_type(kind, alike, cluster.missing)
        cluster.notes += _slow_ones(alike)
    groups = _grouped(probes, lambda probe: (probe.accelerators.kind, probe.accelerators.count, probe.site))
    cluster.nodes = [_node_class(alike, probes) for alike in groups.values()]
    cluster.links = list(_links(probes, cluster.missing))
    if sum(probe.accelerators.count for probe in probes) == 1:
        more = "more machines" + (", or this one with --cpu-devices 2" if probes[0].accelerators.type == "cpu" else "")
        needed = "a plan needs one that generates and one that trains"
        cluster.missing.append(f"nodes: {probes[0].name} is one device, and {needed}; probe {more}")
    return cluster


def _grouped(probes: Sequence[Probe], key: Callable[[Probe], _Key]) -> Mapping[_Key, list[Probe]]:
    groups: dict[_Key, list[Probe]] = defaultdict(list)
    for probe in probes:
        groups[key(probe)].append(probe)
    return groups


def _busy(probe: Probe) -> str:
    return (
        f"{probe.name} was busy while it was probed ({'; '.join(probe.busy_because)}), so its rates may be too low; "
        f"run penstock probe --name {probe.name} on it again"
    )


def _gpu_type(kind: str, alike: Sequence[Probe], missing: list[str]) -> Document:
    found: Document = {"hbm_GB": min(probe.accelerators.memory_GB for probe in alike)}
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
    elif several := [probe for probe in alike if probe.accelerators.count > 1]:
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


def _node_class(alike: Sequence[Probe], probes: Sequence[Probe]) -> Document:
    """One entry for equal machines of a site."""
    first = alike[0]
    names = [probe.name for probe in alike]
    found: Document = {
        "name": first.name,
        "gpu": first.accelerators.kind,
        "gpus": first.accelerators.count,
        "count": len(names),
        "machines": names,
        "region": first.site,
    }
    inside = [_rate(link) for probe, link in _all_links(probes) if {first.site} == {probe.site, link.site}]
    if inside:
        found["nic_Gbps"] = max(inside)
    return found


def _links(probes: Sequence[Probe], missing: list[str]) -> Iterator[Document]:
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
    for one, other in combinations(sorted(set(sites.values())), 2):
        if links := found.get(frozenset((one, other))):
            yield {
                "a": one,
                "b": other,
                "bw_Gbps": max(map(_rate, links)),
                "latency_ms": min(link.round_trip_ms for link in links) / 2,
            }
        else:
            near, far = (next(probe.name for probe in probes if probe.site == site) for site in (one, other))
            missing.append(
                f"links: none is measured between sites {one} and {other}; run penstock probe --listen 0.0.0.0:7309 on "
                f"{near}, and penstock probe --name {far} --site {other} --with {near}:7309 on {far}"
            )


def _all_links(probes: Sequence[Probe]) -> Iterator[tuple[Probe, MeasuredLink]]:
    return ((probe, link) for probe in probes for link in probe.links)


def _rate(link: MeasuredLink) -> float:
    """Problems state one rate for both directions."""
    return min(link.send_Gbps, link.receive_Gbps)
