"""Keeps the inventory: machines as they describe themselves, their links and measured rates.

Pure bookkeeping over times passed in from a monotonic clock: setting the wall clock declares no machine dead. A machine
counts as gone after three missed reports, and is forgotten only when it announces that it leaves, so that a plan can
name what is missing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from penstock.errors import InvalidFieldError, PenstockError, QueueFullError
from penstock.v1 import scheduler_pb2 as pb

MAX_NODES = 10_000
MAX_LINKS = 10_000
MAX_NAME_CHARACTERS = 128
MAX_ACCELERATORS = 64
MAX_RATES = 32
MAX_PER_SECOND = 1e12
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
        if len(rates) > MAX_RATES:
            raise InvalidFieldError(f"rates: {len(rates)} given, at most {MAX_RATES} are allowed", field="rates")
        for rate in rates:
            _check_rate(rate)
        start_s = request.generator_start_s
        if not 0 <= start_s <= MAX_START_S:
            raise InvalidFieldError(
                f"generator_start_s: must be 0 to {MAX_START_S:g}, got {start_s}", field="generator_start_s"
            )
        record.reported_at_s = now_s
        record.rates |= {role: [rate for rate in rates if rate.role == role] for role in {rate.role for rate in rates}}
        if request.HasField("generator_start_s"):
            record.generator_start_s = request.generator_start_s
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
            view.report_time.FromMilliseconds(int((unix_s - age_s) * 1000))
            views.append(view)
        return views

    def links(self) -> list[pb.Link]:
        """All links."""
        return list(self._links.values())


def check_node(node: pb.Node) -> None:
    """Refuse an impossible machine. Raises InvalidFieldError."""
    if not 1 <= len(node.node_id) <= MAX_NAME_CHARACTERS:
        raise InvalidFieldError(f"node.node_id: must have 1 to {MAX_NAME_CHARACTERS} characters", field="node.node_id")
    _check_name("node.site", node.site)
    if len(node.accelerators) > MAX_ACCELERATORS or len(node.roles) > len(pb.Role.values()):
        raise InvalidFieldError(
            f"node: {len(node.accelerators)} accelerators and {len(node.roles)} roles, at most {MAX_ACCELERATORS} and "
            f"{len(pb.Role.values())} are allowed; state accelerators of one kind once, with their count",
            field="node",
        )
    if not node.accelerators:
        raise InvalidFieldError("node.accelerators: empty; a machine without any states one of kind cpu", field="node")
    for index, accelerator in enumerate(node.accelerators):
        _check_name(f"node.accelerators[{index}].kind", accelerator.kind)
        if not accelerator.kind or not 1 <= accelerator.count <= MAX_NODES:
            raise InvalidFieldError(
                f"node.accelerators[{index}]: needs a kind and a count of 1 to {MAX_NODES}, "
                f"got {accelerator.kind!r} x {accelerator.count}",
                field="node.accelerators",
            )
    if node.HasField("price_per_hour") and not 0 <= node.price_per_hour < float("inf"):
        raise InvalidFieldError(f"node.price_per_hour: must be >= 0, got {node.price_per_hour}", field="node")


def _check_name(field_name: str, name: str) -> None:
    if len(name) > MAX_NAME_CHARACTERS:
        raise InvalidFieldError(f"{field_name}: at most {MAX_NAME_CHARACTERS} characters", field=field_name)


def _check_link(link: pb.Link) -> None:
    _check_name("links.from_site", link.from_site)
    _check_name("links.to_site", link.to_site)
    if not 0 < link.bytes_per_second < float("inf"):
        raise InvalidFieldError(f"links: bytes_per_second must be > 0, got {link.bytes_per_second}", field="links")


def _check_rate(rate: pb.MeasuredRate) -> None:
    if rate.role == pb.ROLE_UNSPECIFIED:
        raise InvalidFieldError("rates: role is not set", field="rates.role")
    for name in ("tokens_per_second", "samples_per_second"):
        if not 0 <= getattr(rate, name) <= MAX_PER_SECOND:
            raise InvalidFieldError(
                f"rates.{name}: must be 0 to {MAX_PER_SECOND:.0e}, got {getattr(rate, name)}", field=f"rates.{name}"
            )
    if not rate.HasField("token_s"):
        return
    for name, (least, most) in {"token_s": TOKEN_S, "num_concurrent_samples": CONCURRENT_SAMPLES}.items():
        if not least <= getattr(rate, name) <= most:
            raise InvalidFieldError(
                f"rates.{name}: must be {least:g} to {most:g}, got {getattr(rate, name)}", field=f"rates.{name}"
            )
