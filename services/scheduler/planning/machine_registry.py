"""Keeps the inventory: machines as they describe themselves, their links and measured rates.

Pure bookkeeping over times passed in from a monotonic clock: setting the wall clock declares no machine dead. A machine
counts as gone after three missed reports, and is forgotten only when it announces that it leaves, so that a plan can
name what is missing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from penstock.errors import PenstockError, QueueFullError, require
from penstock.names import check_run_id
from penstock.v1 import scheduler_pb2 as pb

MAX_NODES = 10_000
MAX_LINKS = 10_000
MAX_NAME_CHARACTERS = 128
MAX_ACCELERATORS = 64
MAX_RATES = 32
PER_SECOND = (0.0, 1e12)
"""Least and most tokens or samples per second."""
MAX_START_S = 1e6
TOKEN_S = (1e-6, 1e4)
"""Least and most seconds per token; measurements stay within, and values computed from them stay finite."""
CONCURRENT_SAMPLES = (1e-2, 1e6)
"""Least and most concurrent samples of a replica."""
MISSED_REPORTS = 3


class UnknownNodeError(PenstockError):
    """The machine is not registered; register it again."""

    code, reason = 5, "UNKNOWN_NODE"


@dataclass(slots=True)
class _Record:
    node: pb.Node
    reported_at_s: float
    rates: dict[int, list[pb.MeasuredRate]] = field(default_factory=dict)
    """Rates of the newest report that had any, by role."""
    generator_start_s: float | None = None
    trainer_move_s: float | None = None


class Inventory:
    """The currently known machines and links."""

    def __init__(self, *, heartbeat_interval_s: float) -> None:
        self._lifetime_s = MISSED_REPORTS * heartbeat_interval_s
        self._records: dict[str, _Record] = {}
        self._links: dict[tuple[str, str], pb.Link] = {}

    def register(self, node: pb.Node, links: list[pb.Link], *, now_s: float) -> None:
        """Add a machine, or replace its description. Raises InvalidFieldError, QueueFullError."""
        check_node(node)
        if node.node_id not in self._records and len(self._records) >= MAX_NODES:
            raise QueueFullError(f"{MAX_NODES} machines are registered; retire some", queue="nodes")
        known = self._records.get(node.node_id)
        self._records[node.node_id] = replace(known, node=node, reported_at_s=now_s) if known else _Record(node, now_s)
        for link in links:
            _check_link(link)
            if len(self._links) >= MAX_LINKS:
                raise QueueFullError(f"{MAX_LINKS} links are registered", queue="links")
            self._links[(link.from_site, link.to_site)] = link

    def report(self, request: pb.ReportNodeRequest, *, now_s: float) -> None:
        """Record a heartbeat and its measurements. Raises UnknownNodeError, InvalidFieldError."""
        node_id, rates = request.node_id, list(request.rates)
        record = self._records.get(node_id)
        if record is None:
            raise UnknownNodeError(f"node_id: {node_id!r} is not registered; call RegisterNode first", node_id=node_id)
        require(len(rates) <= MAX_RATES, "rates", len(rates), f"at most {MAX_RATES}")
        for rate in rates:
            _check_rate(rate)
        for name in ("generator_start_s", "trainer_move_s"):
            seconds = getattr(request, name)
            require(0 <= seconds <= MAX_START_S, name, seconds, f"0 to {MAX_START_S:g}")
        record.reported_at_s = now_s
        record.rates |= {role: [rate for rate in rates if rate.role == role] for role in {rate.role for rate in rates}}
        if request.HasField("generator_start_s"):
            record.generator_start_s = request.generator_start_s
        if request.HasField("trainer_move_s"):
            record.trainer_move_s = request.trainer_move_s
        if request.is_leaving:
            del self._records[node_id]

    def views(self, *, now_s: float, unix_s: float) -> list[pb.NodeView]:
        """Every machine, by name; `unix_s` is the same moment on the wall clock, for the times shown."""
        views = []
        for _, record in sorted(self._records.items()):
            age_s = now_s - record.reported_at_s
            rates = [rate for of_role in record.rates.values() for rate in of_role]
            view = pb.NodeView(node=record.node, rates=rates, is_alive=age_s <= self._lifetime_s)
            if record.generator_start_s is not None:
                view.generator_start_s = record.generator_start_s
            if record.trainer_move_s is not None:
                view.trainer_move_s = record.trainer_move_s
            view.report_time.FromMilliseconds(int((unix_s - age_s) * 1000))
            views.append(view)
        return views

    def links(self) -> list[pb.Link]:
        """All links."""
        return list(self._links.values())


def check_node(node: pb.Node) -> None:
    """Refuse an impossible machine. Raises InvalidFieldError."""
    _check_name("node.node_id", node.node_id, least=1)
    _check_name("node.site", node.site)
    _check_name("node.address", node.address)
    most_roles, num_kinds = len(pb.Role.values()), len(node.accelerators)
    require(len(node.roles) <= most_roles, "node.roles", len(node.roles), f"at most {most_roles}")
    expected = f"1 to {MAX_ACCELERATORS} kinds, each stated once with its count; one of kind cpu if there is no other"
    require(1 <= num_kinds <= MAX_ACCELERATORS, "node.accelerators", num_kinds, expected)
    for index, accelerator in enumerate(node.accelerators):
        field_name = f"node.accelerators[{index}]"
        _check_name(f"{field_name}.kind", accelerator.kind, least=1)
        require(1 <= accelerator.count <= MAX_NODES, f"{field_name}.count", accelerator.count, f"1 to {MAX_NODES}")
    if node.HasField("price_per_hour"):
        require(0 <= node.price_per_hour < math.inf, "node.price_per_hour", node.price_per_hour, "0 or more")


def _check_name(field_name: str, name: str, *, least: int = 0) -> None:
    is_good = least <= len(name) <= MAX_NAME_CHARACTERS
    require(is_good, field_name, name[: MAX_NAME_CHARACTERS + 1], f"{least} to {MAX_NAME_CHARACTERS} characters")


def _check_link(link: pb.Link) -> None:
    _check_name("links.from_site", link.from_site)
    _check_name("links.to_site", link.to_site)
    speed = link.bytes_per_second
    require(0 < speed < math.inf, "links.bytes_per_second", speed, "more than 0")


def _check_rate(rate: pb.MeasuredRate) -> None:
    require(rate.role != pb.ROLE_UNSPECIFIED, "rates.role", rate.role, "set")
    if rate.run_id:
        check_run_id(rate.run_id)
    bounds = {"tokens_per_second": PER_SECOND, "samples_per_second": PER_SECOND}
    if rate.HasField("token_s"):
        bounds |= {"token_s": TOKEN_S, "num_concurrent_samples": CONCURRENT_SAMPLES}
    for name, (least, most) in bounds.items():
        value = getattr(rate, name)
        require(least <= value <= most, f"rates.{name}", value, f"{least:g} to {most:g}")
