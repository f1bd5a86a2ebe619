"""Prometheus metrics of length forecasts."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from penstock.v1 import scheduler_pb2 as pb


class LengthMetrics:
    """The metrics in one registry; those of a run are removed when the run is forgotten."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.fits = Counter("penstock_scheduler_length_fits", "Fits, by outcome", ["outcome"], registry=registry)
        self.observations = Counter(
            "penstock_scheduler_lengths_observed", "Completion lengths reported", registry=registry
        )
        self.forecasts = Counter(
            "penstock_scheduler_lengths_forecast",
            "Prompts asked about, by forecaster",
            ["forecaster"],
            registry=registry,
        )

        def gauge(name: str, documentation: str, *labels: str) -> Gauge:
            return Gauge(f"penstock_scheduler_length_{name}", documentation, ["run", *labels], registry=registry)

        quality = ("forecaster", "test")
        self._version = gauge("model_version", "Version of the run's model")
        self._fit_s = gauge("fit_seconds", "Time the newest fit took")
        self._recall = gauge("recall_ratio", "Share of the longest samples found", *quality, "percent")
        self._spearman = gauge("spearman_ratio", "Rank correlation", *quality)
        self._error = gauge("mean_error_tokens", "Mean absolute error", *quality)
        self._coverage = gauge("coverage_ratio", "Share of samples in their interval", *quality)

    def observe(self, run_id: str, described: pb.GetLengthModelResponse) -> None:
        """Set the gauges of a run."""
        self._version.labels(run_id).set(described.model_version)
        self._fit_s.labels(run_id).set(described.fit_duration.ToNanoseconds() / 1e9)
        for quality in described.qualities:
            test = pb.LengthTest.Name(quality.test).removeprefix("LENGTH_TEST_").lower()
            labels = (run_id, quality.forecaster, test)
            for percent in (20, 10, 5):
                self._recall.labels(*labels, str(percent)).set(getattr(quality, f"recall_longest_{percent}_percent"))
            self._error.labels(*labels).set(quality.mean_absolute_error_tokens)
            if quality.HasField("spearman"):
                self._spearman.labels(*labels).set(quality.spearman)
            if quality.HasField("interval_coverage"):
                self._coverage.labels(*labels).set(quality.interval_coverage)

    def forget(self, run_id: str) -> None:
        """Remove a run's gauges."""
        for gauge in (self._version, self._fit_s, self._recall, self._spearman, self._error, self._coverage):
            gauge.remove_by_labels({"run": run_id})
