"""Write the tables of metrics and alerts in docs/metrics.md, or check that they are current.

python scripts/metrics_page.py
python scripts/metrics_page.py --check
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "metrics.md"
ALERTS = ROOT / "deploy" / "observability" / "alerts.yml"
TITLES = {
    "invariant": "The broker's invariants",
    "broker": "Broker",
    "generator": "Generator",
    "reward": "Reward worker",
    "scorer": "Scorer",
    "critic": "Critic",
    "environment": "Environment server",
    "trainer": "Trainer",
    "scheduler": "Scheduler",
    "log": "Every process",
    "trace": "Every process",
}
"""By the second word of a metric's name, in the page's order."""


@dataclass(frozen=True, slots=True, order=True)
class Metric:
    """One row."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


class Recorder(CollectorRegistry):
    """Only remembers what is registered with it; classes may contain one another."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics: list[Metric] = []

    def register(self, collector: Collector) -> None:
        """See `CollectorRegistry`."""
        if isinstance(collector, MetricWrapperBase):
            self.metrics.append(_described(collector))


def _described(collector: MetricWrapperBase) -> Metric:
    [family] = collector.describe()
    name = f"{family.name}_total" if family.type == "counter" else family.name
    # There is no public way to the names of labels that no sample has yet.
    return Metric(name, family.type, tuple(collector._labelnames), family.documentation.rstrip("."))


def modules() -> Iterator[ModuleType]:
    """Those of the services that make metrics."""
    for folder in ("penstock", "services"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "prometheus_client" in path.read_text(encoding="utf-8"):
                yield importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


def metrics() -> list[Metric]:
    """Of all services: those that modules make when they are imported, and those of their classes."""
    found = Recorder()
    for module in modules():
        for value in list(vars(module).values()):
            if isinstance(value, MetricWrapperBase):
                found.metrics.append(_described(value))
            elif getattr(value, "__module__", "") == module.__name__ and _takes_a_registry(value):
                value(found)
    return sorted(set(found.metrics))


def _takes_a_registry(made: object) -> bool:
    is_maker = inspect.isclass(made) or inspect.isfunction(made)
    return is_maker and list(inspect.signature(made).parameters) == ["registry"]  # type: ignore[arg-type]


def tables() -> str:
    """The tables as Markdown."""
    rows: dict[str, list[Metric]] = {title: [] for title in TITLES.values()}
    for metric in metrics():
        rows[TITLES[metric.name.split("_")[1]]].append(metric)
    return "\n".join(_table(title, found) for title, found in rows.items())


def _table(title: str, found: list[Metric]) -> str:
    lines = [f"### {title}\n", "| metric | type | labels | |", "|---|---|---|---|"]
    for metric in found:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.text} |")
    return "\n".join(lines) + "\n"


def alerts() -> str:
    """The table of alerts as Markdown; labels are named as they are, without Prometheus's template syntax."""
    lines = ["| alert | severity | after | says | do |", "|---|---|---|---|---|"]
    [group] = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]:
        said = rule["annotations"]
        says = re.sub(r"{{ \$(?:labels\.)?(\w+)[^}]*}}", r"*\1*", f"{said['summary']}. {said['description']}")
        command = re.sub(r"{{ \$labels\.(\w+) }}", lambda found: found[1].upper(), said["command"])
        when = f"{rule['labels']['severity']} | {rule['for']}"
        more = f"[more]({said['page'].removeprefix('docs/')})"
        lines.append(f"| `{rule['alert']}` | {when} | {says} | `{command}`: {said['fix']} ({more}) |")
    return "\n".join(lines) + "\n"


def with_tables(page: str) -> str:
    """The page with the current tables."""
    for name, table in (("alerts", alerts()), ("metrics", tables())):
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        page = f"{before}{begin}\n{table}{end}{after}"
    return page


def main() -> int:
    """Write, or with --check compare; exit code 1 if the page is not current."""
    if sys.argv[1:] not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    page = PAGE.read_text(encoding="utf-8")
    current = with_tables(page)
    if not sys.argv[1:]:
        PAGE.write_text(current, encoding="utf-8")
        return 0
    if page != current:
        print(f"{PAGE.name}: its tables are not what the code exports; run `make metrics`", file=sys.stderr)
    return int(page != current)


if __name__ == "__main__":
    sys.exit(main())
