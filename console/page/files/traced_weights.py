"""What traces tell of weights: publications by version, the newest update of each machine, the bytes of each link."""

from __future__ import annotations

from collections import Counter

from console.page.files.span import PUBLISH, UPDATE, Span
from console.page.files.values import count

MAX_VERSIONS, MAX_MACHINES = 2000, 1000


class TracedWeights:
    """Sums over all spans, in whatever order they are read."""

    def __init__(self) -> None:
        self.publications: dict[int, Span] = {}
        """By version; beyond `MAX_VERSIONS` the oldest are forgotten."""
        self.installed: dict[str, Span] = {}
        """The newest update of each machine, by the name of its lane; beyond `MAX_MACHINES` others are passed over."""
        self.link_bytes: Counter[tuple[str, str]] = Counter()
        """By origin, which is `trainer` or `its site`, and machine."""

    def add(self, span: Span) -> None:
        """Take in a publication or an update; other spans are passed over."""
        version = count(span.attributes.get("rl.policy.version"))
        if span.name == PUBLISH and version is not None:
            self._publish(version, span)
        elif span.name == UPDATE:
            self._update(version, span)

    def _publish(self, version: int, span: Span) -> None:
        known = self.publications.get(version)
        if known is None or span.end_s >= known.end_s:
            self.publications[version] = span
        if len(self.publications) > MAX_VERSIONS:
            for oldest in sorted(self.publications)[: MAX_VERSIONS // 8]:
                del self.publications[oldest]

    def _update(self, version: int | None, span: Span) -> None:
        name = span.lane[1]
        known = self.installed.get(name)
        if version is None or (known is None and len(self.installed) >= MAX_MACHINES):
            return
        if known is None or span.end_s >= known.end_s:
            self.installed[name] = span
        size = count(span.attributes.get("rl.weights.bytes")) or 0
        from_trainer = min(size, count(span.attributes.get("rl.weights.origin_bytes")) or 0)
        for source, part in (("trainer", from_trainer), ("its site", size - from_trainer)):
            if part:
                self.link_bytes[source, name] += part
