"""Lists the dispatch policies by their names in RunPolicy.dispatch. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from services.broker.dispatch.auto import Auto
from services.broker.dispatch.fifo import Fifo
from services.broker.dispatch.least_loaded import LeastLoaded
from services.broker.dispatch.lpt import LongestFirst
from services.broker.dispatch.situation import DispatchPolicy
from services.broker.dispatch.streamrl import StreamRl

DISPATCH_POLICIES: Mapping[str, Callable[[], DispatchPolicy]] = {
    policy.name: policy for policy in (Fifo, LeastLoaded, LongestFirst, StreamRl, Auto)
}


def make_policy(name: str, *, look_limit_s: float | None = None) -> DispatchPolicy:
    """A new policy of this name, with the budget of its look-aheads. Raises ValueError if there is none."""
    if name not in DISPATCH_POLICIES:
        raise ValueError(f"dispatch: no policy is called {name!r}; one of {', '.join(DISPATCH_POLICIES)}")
    return Auto(look_limit_s=look_limit_s) if name == Auto.name else DISPATCH_POLICIES[name]()
