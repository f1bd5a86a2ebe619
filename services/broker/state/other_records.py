"""Keeps those of a run's records that are not groups': tallies of steps, renewals of leases, agents' sessions. Pure."""

from __future__ import annotations

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


class OtherRecords:
    """See the module. Only `RunState` changes anything here."""

    def __init__(self) -> None:
        self.tallies: dict[int, StepTally] = {}
        """By step."""
        self.renewals: dict[str, RenewalRecord] = {}
        """By generator."""
        self.sessions: dict[str, SessionRecord] = {}
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
            put_or_remove(self.sessions, key, None if data is None else SessionRecord.FromString(data))
        else:
            put_or_remove(self.renewals, key, None if data is None else RenewalRecord.FromString(data))
