"""Says what a run costs: its GPUs by site with their prices, what was planned, and what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from console.config.run_folder import RunFolder
from console.page.files.metrics_table import MetricsTable
from console.page.files.values import Answer, count, mapping, number, read_json, text
from penstock.config import ConfigError
from services.scheduler.problem.problem import Problem, read_problem

MEASURED_STEPS = 20
MAX_PURCHASES = 20
PURCHASES = "next_purchases"
"""In a plan, what one more machine would bring."""
MACHINE = "machine"
"""In `prices`, the machine of a run without GPUs."""
_PLANNED = ("expected_tokens_per_second", "bound_tokens_per_second", "cost_per_million_tokens")


def cost(folder: RunFolder, config: Answer, summary: Answer, plan: Answer, steps: MetricsTable) -> Answer:
    """GPUs and dollars as far as they are known: from the problem that the run is planned by, else from `prices`.

    Args:
        folder: Of the run.
        config: Of the run, as a document.
        summary: Its summary.json, as far as there is one.
        plan: The plan followed last; empty without one.
        steps: metrics.jsonl.
    """
    problem = _problem_of(config)
    sites = list(_sites(problem, plan)) if problem is not None else _own_site(folder, mapping(config.get("prices")))
    prices = [each["dollars_per_hour"] for each in sites]
    dollars = sum(prices) if sites and all(price is not None for price in prices) else None
    measured = _measured(summary, steps)
    rate = measured["tokens_per_second"]
    if (per_million := _per_million(dollars, rate)) is not None:
        measured["cost_per_million_tokens"] = per_million
    return {
        "sites": sites,
        "dollars_per_hour": dollars,
        "dollars_per_million_tokens": per_million,
        "is_planned": problem is not None,
        "plan": _plan(plan),
        "measured": measured,
        "purchases": list(_purchases(plan, dollars, rate)),
        "advice": list(_advice(summary)),
    }


def _per_million(dollars: float | None, rate: float | None) -> float | None:
    return 1e6 * dollars / 3600 / rate if dollars is not None and rate else None


def _own_site(folder: RunFolder, prices: Mapping[str, Any]) -> list[Answer]:
    """The GPUs of the machine that started the run, or that machine; nothing where they were not recorded."""
    found = read_json(folder.devices)
    if not isinstance(found.get("gpus"), dict):
        return []
    gpus = {text(name, 128): num for name, each in found["gpus"].items() if (num := count(each))}
    paid = gpus or {MACHINE: 1}
    stated = {name: number(prices.get(name)) for name in paid}
    missing = [f"prices.{name}" for name, price in stated.items() if price is None]
    dollars = sum(num * (stated[name] or 0.0) for name, num in paid.items())
    return [
        {
            "site": text(found.get("site"), 128) or "this machine",
            "gpus": gpus,
            "dollars_per_hour": None if missing else dollars,
            "missing_prices": missing,
        }
    ]


def _purchases(plan: Answer, dollars: float | None, rate: float | None) -> Iterator[Answer]:
    """What one more machine would bring by the plan, and what a million tokens would then cost at the measured rate."""
    stated = plan.get(PURCHASES)
    for each in map(mapping, stated[:MAX_PURCHASES] if isinstance(stated, list) else ()):
        gain, num_gpus, price = number(each.get("gain")), count(each.get("num_gpus")), number(each.get("usd_per_hour"))
        if gain is None or not num_gpus:
            continue
        total = None if dollars is None or not price else dollars + price
        yield {
            "gpus": {text(each.get("gpu"), 128): num_gpus},
            "site": text(each.get("site"), 128),
            "dollars_per_hour": price or None,
            "gain": gain,
            "dollars_per_million_tokens": _per_million(total, None if rate is None else rate * (1 + gain)),
        }


def _measured(summary: Answer, steps: MetricsTable) -> Answer:
    """Over the whole run if it has ended, else over its newest steps."""
    tokens, samples = number(summary.get("response_tokens_per_second")), number(summary.get("samples_per_second"))
    lengths = steps.column("time/step_s")[-MEASURED_STEPS:]
    total_s = float(lengths.sum()) if len(lengths) and not np.isnan(lengths).any() else 0.0
    if tokens is None and total_s > 0:
        tokens = _total(steps, "step/response_tokens") / total_s
        samples = _total(steps, "step/samples") / total_s
    return {
        "tokens_per_second": tokens,
        "samples_per_second": samples,
        "generator_idle_ratio": number(summary.get("generator_idle_ratio")),
        "trainer_idle_ratio": number(summary.get("trainer_idle_ratio")),
        "over": "the run" if number(summary.get("response_tokens_per_second")) is not None else "the newest steps",
    }


def _total(steps: MetricsTable, name: str) -> float:
    values = steps.column(name)[-MEASURED_STEPS:]
    return float(np.nansum(values))


def _plan(plan: Answer) -> Answer | None:
    if not plan:
        return None
    found: Answer = {name: value for name in _PLANNED if (value := number(plan.get(name))) is not None}
    found |= {name: text(plan.get(name), 128) for name in ("revision", "solver")}
    return found | {"explanation": text(plan.get("explanation"), 5000)}


def _advice(summary: Answer) -> Iterator[str]:
    advice = summary.get("advice")
    for each in advice[:10] if isinstance(advice, list) else ():
        yield text(mapping(each).get("text") or each, 1000)


def _sites(problem: Problem, plan: Answer) -> Iterator[Answer]:
    """The GPUs that the plan uses; without one all of the problem."""
    used = _used_gpus(plan)
    by_site: dict[str, Answer] = {}
    for node in problem.nodes:
        for index in range(node.count):
            num_gpus = node.gpus if used is None else used.get(node.machine(index), 0)
            if not num_gpus:
                continue
            site = by_site.setdefault(node.region, {"site": node.region, "gpus": {}, "dollars_per_hour": 0.0})
            site["gpus"][node.gpu] = site["gpus"].get(node.gpu, 0) + num_gpus
            # A price of 0 in a problem means that none is stated.
            is_known = node.price_per_gpu_hour > 0 and site["dollars_per_hour"] is not None
            site["dollars_per_hour"] = (
                site["dollars_per_hour"] + num_gpus * node.price_per_gpu_hour if is_known else None
            )
    yield from by_site.values()


def _used_gpus(plan: Answer) -> Mapping[str, int] | None:
    assignments = plan.get("assignments")
    if not isinstance(assignments, list):
        return None
    used: dict[str, set[Any] | None] = {}
    for each in map(mapping, assignments):
        indices = each.get("accelerator_indices")
        name = text(each.get("node_id"), 200)
        if isinstance(indices, list) and indices:
            known = used.setdefault(name, set())
            if known is not None:
                known.update(index for index in indices if count(index) is not None)
            continue
        width = (count(each.get("tensor_parallel")) or 1) * (count(each.get("pipeline_parallel")) or 1)
        known = used.setdefault(name, set())
        if known is not None and each.get("role") == "ROLE_GENERATOR":
            num = width * (count(each.get("num_replicas")) or 1)
            known.update((name, len(known) + extra) for extra in range(num))
    return {name: len(known or ()) for name, known in used.items()}


def _problem_of(config: Answer) -> Problem | None:
    path = mapping(config.get("scheduler")).get("problem")
    if not isinstance(path, str):
        return None
    try:
        return _read(path, Path(path).stat().st_mtime_ns)
    except (OSError, ConfigError):
        return None


@lru_cache(maxsize=4)
def _read(path: str, _changed_ns: int) -> Problem:
    return read_problem(Path(path))
