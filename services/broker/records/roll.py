"""Says which brokers of one store live: each answers the roll twice a second, and one that is silent is struck off.

- All brokers see the same lists in the same order: a list has an *epoch*, which rises with every change and never goes
  back, not even when the store loses the roll. Of two lists the one with the higher epoch counts.
- With the roll stand the open runs whose tokens are in shards, and how many each has, so that every broker knows them.
- Brokers are known by name. A process that takes the name of one that was there before takes its place; two processes
  that keep answering by one name are rivals, and hear of it.

`lua/roll.lua` does the same as `StoredRoll`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

SILENT_S = 3.0
"""A broker that has not answered for this long is struck off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Broker:
    """A broker of the store."""

    name: str
    address: str
    """Where others reach it, host:port."""
    serves: frozenset[str] = frozenset()
    """The runs with shards whose trainers or reward workers have streams at it."""
    leases: frozenset[str] = frozenset()
    """Those whose generators have lease streams at it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roll:
    """The brokers that live."""

    epoch: int
    brokers: Mapping[str, Broker] = field(default_factory=dict)
    """By name."""
    sharded: Mapping[str, int] = field(default_factory=dict)
    """Shards of each run that has any."""
    rival: str = ""
    """Another process that answers by the caller's name; empty if there is none."""


@dataclass(slots=True)
class _Entry:
    broker: Broker
    process: str
    answered_s: float


@dataclass(slots=True)
class StoredRoll:
    """The roll as a store keeps it."""

    _epoch: int = 0
    _entries: dict[str, _Entry] = field(default_factory=dict)
    _sharded: dict[str, int] = field(default_factory=dict)

    def answer(self, broker: Broker, process: str, *, now_s: float, is_leaving: bool) -> Roll:
        """A broker says that it lives, or that it leaves; see `Store.answer_roll`."""
        before = {name: entry.broker for name, entry in self._entries.items()}
        known = self._entries.pop(broker.name, None)
        silent = [name for name, entry in self._entries.items() if now_s - entry.answered_s > SILENT_S]
        for name in silent:
            del self._entries[name]
        if not is_leaving:
            self._entries[broker.name] = _Entry(broker, process, now_s)
        elif known is not None and known.process != process:
            self._entries[broker.name] = known
        brokers = {name: entry.broker for name, entry in self._entries.items()}
        if brokers != before:
            self._epoch = max(self._epoch + 1, int(now_s * 1000))
        rival = known.process if known is not None and known.process != process else ""
        return Roll(epoch=self._epoch, brokers=brokers, sharded=dict(self._sharded), rival=rival)

    def note_shards(self, run_id: str, num_shards: int) -> None:
        """See `Store.note_shards`."""
        if num_shards:
            self._sharded[run_id] = num_shards
        else:
            self._sharded.pop(run_id, None)
