"""Metrics of an environment server."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

SESSIONS = Gauge("penstock_environment_sessions", "Sessions that are open.")
CALLS = Counter(
    "penstock_environment_calls",
    "Calls of sessions, reset or step, by outcome: ok, failed (a turn without a usable answer) or refused (an error).",
    ["call", "outcome"],
)
CALL_S = Histogram(
    "penstock_environment_call_seconds", "Time that a call took, seconds, repeated ones included.", ["call"]
)
FULL = Counter(
    "penstock_environment_full",
    "Times that the server of another package had no room for a session, which was then asked for again.",
)
