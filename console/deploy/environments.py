"""Where the machines of a deployment find the run's environment: a server that is there, or one that the head serves.

The head serves a class in a process that is shown a certificate of its own, of the role environment, and no credentials
of the cluster: what an environment runs is the user's, or the model's.
"""

from __future__ import annotations

from typing import Any

from penstock.config import Document
from penstock.rewards.score_messages import THIRD_PARTY

NAME = "environment"
"""Of the service, and of its certificate."""


def stated_environment(run: Document) -> dict[str, Any]:
    """The run's section `environment`; empty without one."""
    stated = run.get("environment")
    return {"target": stated} if isinstance(stated, str) else dict(stated or {})


def is_served(run: Document) -> bool:
    """Whether the deployment serves the environment, by the name of its class."""
    section = stated_environment(run)
    return bool(section) and not str(section.get("target", "")).startswith(THIRD_PARTY)


def reached_environment(run: Document, address: str) -> Document:
    """The keys that make a service find it: `environment`, at `address` if the deployment serves it; none without."""
    section = stated_environment(run)
    if not section:
        return {}
    return {"environment": {**section, "target": THIRD_PARTY + address} if is_served(run) else section}
