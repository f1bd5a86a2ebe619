"""Keeps those of a run's records that are not groups': tallies of steps, renewals of leases, agents' sessions. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeVar

from google.protobuf.message import Message

from services.broker.records_pb2 import RenewalRecord, SessionRecord, StepTally

_Key = TypeVar("_Key")
_Record = TypeVar("_Record")
_TALLY, _RENEWAL, _SESSION = "\t", "\v", "\f"
"""Prefixes of names; no group id begins with one, as they are not printable."""


def is_group(name: str) -> bool:
    """Whether a record's name is a group's, or a put's."""
    return not name.startswith((_TALLY, _RENEWAL, _SESSION))


def is_session(name: str) -> bool:
    """Whether a record's name is an agent's session's."""
    return name.startswith(_SESSION)


def tally_name(version: int) -> str:
    """The name of the tally of the step that made `version`."""
    return f"{_TALLY}{version}"


def renewal_name(holder_id: str) -> str:
    """The name of the last renewal of a generator's leases."""
    return f"{_RENEWAL}{holder_id}"


def session_name(session_id: str) -> str:
    """The name of an agent's session."""
    return f"{_SESSION}{session_id}"


def put_or_remove(records: dict[_Key, _Record], key: _Key, record: _Record | None) -> None:
    """Replace the record of a key, or remove it with None."""
    if record is None:
        records.pop(key, None)
    else:
        records[key] = record


class Sessions(dict[str, SessionRecord]):
    """Agents' sessions by id. Each turn asks for all bytes, each new session for those of its task: both are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.stored_bytes = 0
        """Of all sessions."""
        self._by_task: dict[str, dict[str, None]] = {}

    def put(self, session_id: str, record: SessionRecord | None) -> None:
        """Replace a session, or remove it with None. Nothing else may change them."""
        before = self.get(session_id)
        self.stored_bytes += (0 if record is None else record.stored_bytes) - (before.stored_bytes if before else 0)
        task_before, task = _named_task(before), _named_task(record)
        if task_before and task_before != task:
            others = self._by_task[task_before]
            del others[session_id]
            if not others:
                del self._by_task[task_before]
        if task:
            self._by_task.setdefault(task, {})[session_id] = None
        put_or_remove(self, session_id, record)

    def of_task(self, task: str) -> Collection[str]:
        """Ids of the sessions of a task that clients named, in the order in which they began."""
        return self._by_task.get(task, {})


def _named_task(record: SessionRecord | None) -> str:
    return record.session.task if record is not None and record.session.has_named_task else ""


class OtherRecords:
    """See the module. Only `RunState` changes anything here."""

    def __init__(self) -> None:
        self.tallies: dict[int, StepTally] = {}
        """By step."""
        self.renewals: dict[str, RenewalRecord] = {}
        """By generator."""
        self.sessions = Sessions()
        """By session id."""

    def serialized(self, name: str) -> bytes | None:
        """The record of this name; None if there is none."""
        key = name[1:]
        record: Message | None
        if name.startswith(_TALLY):
            record = self.tallies.get(int(key))
        elif name.startswith(_RENEWAL):
            record = self.renewals.get(key)
        else:
            record = self.sessions.get(key)
        return None if record is None else record.SerializeToString(deterministic=True)

    def replace(self, name: str, data: bytes | None) -> None:
        """Replace the record of this name, or remove it with None."""
        key = name[1:]
        if name.startswith(_TALLY):
            put_or_remove(self.tallies, int(key), None if data is None else StepTally.FromString(data))
        elif name.startswith(_SESSION):
            self.sessions.put(key, None if data is None else SessionRecord.FromString(data))
        else:
            put_or_remove(self.renewals, key, None if data is None else RenewalRecord.FromString(data))
