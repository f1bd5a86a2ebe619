"""Upper bounds on the time each service takes to end after SIGTERM: its supervisor waits longer before it kills it.

Services take their own limits from here, the console its time between SIGTERM and SIGKILL, and so do the compose files
(`docker-compose.yml` by a test, those of `penstock plan --deploy` directly).
"""

from __future__ import annotations

from collections.abc import Mapping

LEAVE_S = 20.0
"""The generators of a machine that leaves, which may be switched off 30 s after it was announced: tokens and leases are
back within seconds, so an engine that takes longer to stop is killed."""
CHECKPOINT_S = 300.0
"""A trainer's last checkpoint, or one that a critic is writing, of a large model to a slow disk."""
ENGINE_STOP_S = 30.0
"""A generator's engine and what it started."""
DRAIN_S = 5.0
"""Calls of a reward model, or passes of a scorer, under way."""
SERVER_STOP_S = 5.0
"""gRPC calls under way, in every service."""

LAST_ACT_S: Mapping[str, float] = {
    "broker": SERVER_STOP_S,
    "critic": CHECKPOINT_S + SERVER_STOP_S,
    "environment": SERVER_STOP_S,
    "generator": ENGINE_STOP_S + SERVER_STOP_S,
    "reward": DRAIN_S + SERVER_STOP_S,
    "scheduler": SERVER_STOP_S,
    "scorer": DRAIN_S + SERVER_STOP_S,
    "trainer": CHECKPOINT_S + SERVER_STOP_S,
}
_MARGIN_S = 15.0

STOP_GRACE_S: Mapping[str, float] = {
    **{service: last_act_s + _MARGIN_S for service, last_act_s in LAST_ACT_S.items()},
    "node": LAST_ACT_S["generator"] + 2 * _MARGIN_S,
    "redis": 60.0,
    "run": CHECKPOINT_S + 4 * _MARGIN_S,
}
"""Seconds between SIGTERM and SIGKILL, by service. `node` is `penstock node` and `run` is `penstock run`, which wait
for what they started; `redis` writes its append-only file."""
