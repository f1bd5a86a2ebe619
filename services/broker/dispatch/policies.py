"""Lists the dispatch policies by their names in RunPolicy.dispatch. Pure."""

from __future__ import annotations

from services.broker.dispatch.auto import Auto
from services.broker.dispatch.fifo import Fifo
from services.broker.dispatch.least_loaded import LeastLoaded
from services.broker.dispatch.lpt import LongestFirst
from services.broker.dispatch.situation import DispatchPolicy
from services.broker.dispatch.streamrl import StreamRl


def make_policy(name: str) -> DispatchPolicy:
    """A new policy of this name. Raises ValueError if there is none."""
    match name:
        case "fifo":
            return Fifo()
        case "least_loaded":
            return LeastLoaded()
        case "lpt":
            return LongestFirst()
        case "streamrl":
            return StreamRl()
        case "auto":
            return Auto()
        case _:
            raise ValueError(f"dispatch: no policy is called {name!r}")
