"""Prometheus metrics of a critic process."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

PACKS = Counter("penstock_critic_packs", "Packs that went through the critic: evaluated, trained.", ["purpose"])
POLICY_VERSION = Gauge("penstock_critic_policy_version", "Policy version whose step the critic serves.")
REPEATED_STEPS = Counter("penstock_critic_repeated_steps", "Optimiser steps taken again from the journal.")
