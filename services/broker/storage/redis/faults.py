"""Classifies Redis' failures: refusals and time-outs by kind, whether to retry each, and when to try again.

Pure: the caller passes the errors and the time.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    MaxConnectionsError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

REDIS_ERRORS = (RedisError, RedisClusterException, OSError)
"""All errors that redis-py raises; the second is no subclass of the first."""
FIRST_DELAY_S = 0.1
MAX_DELAY_S = 2.0
"""Longest time until a broker notices that Redis is back."""


class TooFewReplicasError(RedisError):
    """A change is on the master but not on as many replicas as requested."""


class RedisFault(StrEnum):
    """Why Redis did not execute a request."""

    advice: str
    """The remedy."""

    def __new__(cls, value: str, advice: str) -> Self:
        """A kind of fault, with its remedy."""
        fault = str.__new__(cls, value)
        fault._value_, fault.advice = value, advice
        return fault

    UNREACHABLE = "unreachable", "start it, or correct redis_url; the broker resumes by itself when it is back"
    TIMEOUT = "timeout", "it hangs or is overloaded: look for slow commands and a full disk"
    LOADING = "loading", "it reads its data after a restart; the broker resumes by itself"
    READ_ONLY = "read_only", "it is a replica: name the master, or use a redis+sentinel:// URL that follows it"
    OUT_OF_MEMORY = "out_of_memory", "raise its maxmemory or let consumers catch up; what was accepted is kept"
    NOT_PERSISTED = (
        "not_persisted",
        "it cannot write to its disk: free space or repair the disk; what was accepted is kept",
    )
    CLUSTER_DOWN = "cluster_down", "some slots of the Cluster have no master: bring its nodes back"
    TOO_FEW_REPLICAS = "too_few_replicas", "bring replicas back, or ask for fewer with redis_wait_replicas"
    NO_ACCESS = "no_access", "correct user and password in redis_url, and the user's rights"
    REFUSED = "refused", "see the broker's log"

    @property
    def is_brief(self) -> bool:
        """Whether it often passes within a second or two, so that retrying within the call is worthwhile."""
        return self in (RedisFault.UNREACHABLE, RedisFault.LOADING, RedisFault.READ_ONLY, RedisFault.CLUSTER_DOWN)

    @property
    def concerns_writes_only(self) -> bool:
        """Whether reads still work."""
        return self in (
            RedisFault.READ_ONLY,
            RedisFault.OUT_OF_MEMORY,
            RedisFault.NOT_PERSISTED,
            RedisFault.TOO_FEW_REPLICAS,
        )


_BY_CLASS: tuple[tuple[type[Exception], RedisFault], ...] = (
    # The first match counts: some of these are subclasses of others.
    (TooFewReplicasError, RedisFault.TOO_FEW_REPLICAS),
    (BusyLoadingError, RedisFault.LOADING),
    (AuthenticationError, RedisFault.NO_ACCESS),
    (NoPermissionError, RedisFault.NO_ACCESS),
    (MaxConnectionsError, RedisFault.TIMEOUT),
    (ReadOnlyError, RedisFault.READ_ONLY),
    (OutOfMemoryError, RedisFault.OUT_OF_MEMORY),
    (ClusterDownError, RedisFault.CLUSTER_DOWN),
    (TryAgainError, RedisFault.CLUSTER_DOWN),
    (RedisTimeoutError, RedisFault.TIMEOUT),
    (TimeoutError, RedisFault.TIMEOUT),
    (RedisConnectionError, RedisFault.UNREACHABLE),
    (OSError, RedisFault.UNREACHABLE),
)
# An error inside a script has the failed command's code in the middle of its text.
_BY_CODE = {
    "READONLY": RedisFault.READ_ONLY,
    "OOM": RedisFault.OUT_OF_MEMORY,
    "MISCONF": RedisFault.NOT_PERSISTED,
    "NOREPLICAS": RedisFault.TOO_FEW_REPLICAS,
    "CLUSTERDOWN": RedisFault.CLUSTER_DOWN,
    "LOADING": RedisFault.LOADING,
    "NOAUTH": RedisFault.NO_ACCESS,
    "NOPERM": RedisFault.NO_ACCESS,
}


def classify(error: Exception) -> RedisFault:
    """The kind of an error of redis-py."""
    for kind, fault in _BY_CLASS:
        if isinstance(error, kind):
            return fault
    text = str(error)
    if isinstance(error, ResponseError):
        words = text.replace("-", " ").replace(":", " ").split()
        return next((fault for code, fault in _BY_CODE.items() if code in words), RedisFault.REFUSED)
    # Raised by a Cluster's client if it knows no node that serves a slot.
    return RedisFault.CLUSTER_DOWN if "slot" in text.lower() else RedisFault.UNREACHABLE


@dataclass(slots=True)
class Outage:
    """A lasting fault: what, since when, and when one call may try again.

    Between two attempts every call is refused at once, so that a long outage costs almost nothing at any load.
    """

    fault: RedisFault
    message: str
    since_s: float
    next_try_s: float
    delay_s: float = FIRST_DELAY_S

    @classmethod
    def begin(cls, fault: RedisFault, message: str, now_s: float) -> Outage:
        """An outage noticed now."""
        return cls(fault, message, since_s=now_s, next_try_s=now_s + FIRST_DELAY_S)

    def may_try(self, now_s: float) -> bool:
        """Whether this call may try; the next attempt follows after a delay that doubles up to MAX_DELAY_S."""
        if now_s < self.next_try_s:
            return False
        self.delay_s = min(MAX_DELAY_S, 2 * self.delay_s)
        self.next_try_s = now_s + self.delay_s * random.uniform(0.5, 1.0)
        return True

    def describe(self, now_s: float) -> str:
        """A readable summary: what, since when, and what to do."""
        return f"Redis is away ({self.fault}) since {now_s - self.since_s:.0f} s: {self.message}; {self.fault.advice}"
