"""Provides typed asynchronous clients of the services, with deadlines, back-off and reconnects.

One file per subject. No service code and no bulk transfer of weights (see `penstock.downloads`). The names
below are for programs outside of Penstock: see docs/clients.md.
"""

from __future__ import annotations

from penstock.clients.broker import BrokerClient, TrainedGroup
from penstock.security import Security
from penstock.wire.trajectory_groups import Sample, make_group, make_prompt, samples_of

__all__ = ["BrokerClient", "Sample", "Security", "TrainedGroup", "make_group", "make_prompt", "samples_of"]
