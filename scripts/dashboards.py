"""Write the Grafana dashboards of deploy/observability/grafana, or check that they are current.

python scripts/dashboards.py
python scripts/dashboards.py --check
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "deploy" / "observability" / "grafana" / "dashboards"
WIDTH, HEIGHT, COLUMNS = 8, 7, 3
"""Of a panel in Grafana's grid of 24 columns, and panels beside each other."""
_SOURCE = {"type": "prometheus", "uid": "${source}"}


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart over time.

    Args:
        title: What it shows.
        queries: PromQL by the legend of its series, in Grafana's form: `{{label}}`.
        unit: Grafana's name of it.
    """

    title: str
    queries: dict[str, str]
    unit: str = "short"


def _rate(metric: str, *labels: str) -> dict[str, str]:
    """Sums of a counter's rate, a series for each of those labels' values."""
    legend = " ".join(f"{{{{{label}}}}}" for label in labels) or "all"
    by = f" by ({', '.join(labels)})" if labels else ""
    return {legend: f"sum{by} (rate({metric}[5m]))"}


def _gauge(metric: str, *labels: str, of_run: bool = False) -> dict[str, str]:
    """A gauge as it is."""
    legend = " ".join(f"{{{{{label}}}}}" for label in labels or ("instance",))
    return {legend: metric + ('{run=~"$run"}' if of_run else "")}


def _quantiles(metric: str, unit_by: str = "") -> dict[str, str]:
    """Median and 95th percentile of a histogram over half an hour."""
    by = f"le, {unit_by}" if unit_by else "le"
    legend = f" {{{{{unit_by}}}}}" if unit_by else ""
    return {
        f"{name}{legend}": f"histogram_quantile({q}, sum by ({by}) (rate({metric}_bucket[30m])))"
        for name, q in (("median", 0.5), ("95 %", 0.95))
    }


DASHBOARDS: dict[str, tuple[str, list[Panel]]] = {
    "fleet": (
        "Penstock: fleet",
        [
            Panel("Services that answer", {"{{job}}": "sum by (job) (up)"}),
            Panel("Tokens decoded a second", _rate("penstock_generator_tokens_total", "instance")),
            Panel("Samples being decoded", _gauge("penstock_generator_running_samples")),
            Panel("Samples that ended", _rate("penstock_generator_samples_total", "outcome")),
            Panel("Engines that failed", _rate("penstock_generator_engine_failures_total", "how")),
            Panel("Leases that expired", _rate("penstock_broker_leases_expired_total", "kind")),
            Panel("Leases moved to idle generators", _rate("penstock_broker_leases_moved_total")),
            Panel("Tokens computed again under new weights", _rate("penstock_generator_recomputed_tokens_total")),
            Panel("Log lines lost", _rate("penstock_log_lines_lost_total", "instance")),
        ],
    ),
    "run": (
        "Penstock: one run",
        [
            Panel("Policy version", _gauge("penstock_broker_policy_version", "run", of_run=True)),
            Panel("Samples in flight, by state", _gauge("penstock_broker_samples_in_flight", "state", of_run=True)),
            Panel("Samples trained a second", _rate("penstock_trainer_samples_total")),
            Panel("What the trainer waits for", _rate("penstock_trainer_wait_seconds_total", "cause"), "percentunit"),
            Panel("Staleness of trained samples", _quantiles("penstock_trainer_staleness_versions")),
            Panel("Most staleness, and its bound", {
                "most": 'penstock_invariant_staleness_max_versions{run=~"$run"}',
                "bound": 'penstock_invariant_staleness_bound_versions{run=~"$run"}',
            }),
            Panel("Samples dropped, by reason", {
                "{{reason}}": 'sum by (reason) (penstock_broker_samples_dropped{run=~"$run"})'
            }),
            Panel("Share dropped, by length", {
                "up to {{max_tokens}} tokens": 'sum by (max_tokens) (penstock_broker_samples_dropped{run=~"$run"}) / '
                '(sum by (max_tokens) (penstock_broker_samples_dropped{run=~"$run"}) + '
                'sum by (max_tokens) (penstock_broker_samples_trained_by_length{run=~"$run"}))'
            }, "percentunit"),
            Panel("Longest wait", _gauge(
                "penstock_invariant_no_endless_wait_longest_seconds", "run", of_run=True
            ), "s"),
            Panel("Imbalance of the books", _gauge(
                "penstock_invariant_conservation_imbalance_samples", "run", of_run=True
            )),
            Panel("Mean reward, by source", _gauge("penstock_trainer_source_reward_mean", "source")),
            Panel("Pass rate, by source", _gauge("penstock_trainer_source_pass_rate", "source"), "percentunit"),
        ],
    ),
    "broker": (
        "Penstock: broker",
        [
            Panel("Load that intervals follow", _gauge("penstock_broker_load_ratio"), "percentunit"),
            Panel("Event loop held", _quantiles("penstock_broker_loop_stall_seconds"), "s"),
            Panel("Time between heartbeats", _quantiles("penstock_broker_heartbeat_gap_seconds"), "s"),
            Panel("Tokens stored a second", _rate("penstock_broker_tokens_accepted_total", "instance")),
            Panel("Chunks refused", _rate("penstock_broker_chunks_refused_total", "reason")),
            Panel("Repetitions recognised", _rate("penstock_invariant_exactly_once_duplicates_total", "kind")),
            Panel("How full queues are", _gauge("penstock_invariant_bounded_fill_ratio", "queue", of_run=True),
                  "percentunit"),
            Panel("Items refused by full queues", _rate("penstock_invariant_bounded_refusals_total", "queue")),
            Panel("Faults of Redis", _rate("penstock_broker_redis_faults_total", "kind")),
            Panel("Bytes in the store", _gauge("penstock_broker_stored_bytes", "kind", of_run=True), "bytes"),
            Panel("Commits another broker was before", _rate("penstock_broker_shard_commit_conflicts_total", "run")),
            Panel("Forecasts of lengths", _rate("penstock_broker_forecasts_total", "outcome")),
        ],
    ),
    "weights": (
        "Penstock: weights",
        [
            Panel("Version, by generator and trainer", {
                "{{instance}}": "penstock_generator_policy_version",
                "trainer": "penstock_trainer_policy_version",
            }),
            Panel("Step to offer", _gauge("penstock_trainer_offer_seconds"), "s"),
            Panel("Share of a step spent publishing", _gauge("penstock_trainer_publish_pause_share"), "percentunit"),
            Panel("How long a swap keeps decoding still", _quantiles("penstock_generator_swap_pause_seconds"), "s"),
            Panel("Bytes the trainer sends", _rate("penstock_trainer_weights_served_bytes_total"), "Bps"),
            Panel("Bytes that generators fetch, by source", _rate("penstock_generator_fetched_bytes_total", "source"),
                  "Bps"),
            Panel("Bytes that relays send", _rate("penstock_generator_relayed_bytes_total", "instance"), "Bps"),
            Panel("Fetches, by way", _rate("penstock_generator_weight_fetches_total", "way")),
            Panel("Broadcasts", _rate("penstock_trainer_broadcasts_total", "outcome")),
            Panel("Deltas that could not be used", _rate("penstock_generator_delta_fallbacks_total")),
            Panel("Weights refused for their digest", _rate("penstock_generator_weights_refused_total", "instance")),
            Panel("Checkpoints that storage refused", _rate("penstock_trainer_checkpoint_upload_failures_total")),
        ],
    ),
    "rewards": (
        "Penstock: rewards and environments",
        [
            Panel("Scores a second, by status", _rate("penstock_reward_scores_total", "model", "status")),
            Panel("Time of a batch", _quantiles("penstock_reward_batch_seconds", "model"), "s"),
            Panel("Samples that wait for their score", _gauge("penstock_reward_held_samples", "model")),
            Panel("Graders that hold samples back", {
                "{{model}} does not answer": "penstock_reward_is_holding_back",
                "{{model}} drifted": "penstock_reward_is_drifted",
            }),
            Panel("Calls tried again", _rate("penstock_reward_retries_total", "model")),
            Panel("Parts of a composite, by status", _rate("penstock_reward_part_scores_total", "part", "status")),
            Panel("Judges: requests", _rate("penstock_reward_judge_requests_total", "judge", "outcome")),
            Panel("Judges: cost an hour", {
                "{{judge}}": "3600 * sum by (judge) (rate(penstock_reward_judge_cost_total[30m]))"
            }),
            Panel("Judges: time of an answer", _quantiles("penstock_reward_judge_request_seconds", "judge"), "s"),
            Panel("Sessions with environments", _rate("penstock_generator_environment_sessions_total", "status")),
            Panel("Samples that wait for an environment", _gauge("penstock_generator_environment_waiting_samples")),
            Panel("Environments: sessions open", _gauge("penstock_environment_sessions", "instance")),
            Panel("Environments: calls, by outcome", _rate("penstock_environment_calls_total", "call", "outcome")),
            Panel("Environments: servers that were full", _rate("penstock_environment_full_total")),
            Panel("Environments: time of a call", _quantiles("penstock_environment_call_seconds", "call"), "s"),
            Panel("Sessions of agents", _rate("penstock_generator_openai_sessions_total", "outcome")),
        ],
    ),
    "plan": (
        "Penstock: plan against reality",
        [
            Panel("Completion tokens a second", {
                "planned": 'penstock_scheduler_plan_tokens_per_second{run=~"$run"}',
                "stored": "sum(rate(penstock_broker_tokens_accepted_total[5m]))",
            }),
            Panel("Measured over planned", {
                "{{run}}": "scalar(sum(rate(penstock_broker_tokens_accepted_total[15m]))) / "
                'penstock_scheduler_plan_tokens_per_second{run=~"$run"}'
            }, "percentunit"),
            Panel("Revisions of the plan", _gauge("penstock_scheduler_plan_revision", "run", of_run=True)),
            Panel("Planned dollars a million tokens", _gauge(
                "penstock_scheduler_plan_cost_per_million_tokens", "run", of_run=True
            ), "currencyUSD"),
            Panel("Share of the longest samples foreseen", _gauge(
                "penstock_scheduler_length_recall_ratio", "forecaster", "percent", of_run=True
            ), "percentunit"),
            Panel("Error of length forecasts, tokens", _gauge(
                "penstock_scheduler_length_mean_error_tokens", "forecaster", "test", of_run=True
            )),
        ],
    ),
}  # fmt: skip
"""Title and panels by the name of the file."""


def dashboard(name: str) -> dict[str, Any]:
    """A dashboard as Grafana's JSON."""
    title, panels = DASHBOARDS[name]
    return {
        "uid": f"penstock-{name}",
        "title": title,
        "tags": ["penstock"],
        "schemaVersion": 39,
        "editable": False,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
                {
                    "name": "run",
                    "type": "query",
                    "label": "Run",
                    "datasource": _SOURCE,
                    "query": "label_values(penstock_broker_policy_version, run)",
                    "refresh": 2,
                    "includeAll": True,
                    "multi": True,
                },
            ]
        },
        "panels": [_panel(index, panel) for index, panel in enumerate(panels)],
    }


def _panel(index: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(index, COLUMNS)
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": _SOURCE,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + number), "expr": query, "legendFormat": legend, "datasource": _SOURCE}
            for number, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def main() -> int:
    """Write, or with --check compare; exit code 1 if a file is not current."""
    if sys.argv[1:] not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    texts = {FOLDER / f"{name}.json": json.dumps(dashboard(name), indent=1) + "\n" for name in DASHBOARDS}
    if not sys.argv[1:]:
        FOLDER.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8")
        return 0
    stale = [path.name for path, text in texts.items() if not path.is_file() or path.read_text("utf-8") != text]
    if stale:
        print(f"{', '.join(stale)}: not what scripts/dashboards.py says; run `make metrics`", file=sys.stderr)
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
