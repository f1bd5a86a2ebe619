"""Keeps those of a run's records that are not groups': tallies of steps, and renewals of generators' leases. Pure."""

from __future__ import annotations

from services.broker.records_pb2 import RenewalRecord, StepTally

_TALLY, _RENEWAL = "\t", "\v"
"""Prefixes of names; no group id begins with one, as they are not printable."""


def is_group(name: str) -> bool:
    """Whether a record's name is a group's, or a put's."""
    return not name.startswith((_TALLY, _RENEWAL))


def tally_name(version: int) -> str:
    """The name of the tally of the step that made `version`."""
    return f"{_TALLY}{version}"


def renewal_name(holder_id: str) -> str:
    """The name of the last renewal of a generator's leases."""
    return f"{_RENEWAL}{holder_id}"


class OtherRecords:
    """See the module. Only `RunState` changes anything here."""

    def __init__(self) -> None:
        self.tallies: dict[int, StepTally] = {}
        """By step."""
        self.renewals: dict[str, RenewalRecord] = {}
        """By generator."""

    def serialized(self, name: str) -> bytes | None:
        """The record of this name; None if there is none."""
        is_tally, key = name.startswith(_TALLY), name[1:]
        record = self.tallies.get(int(key)) if is_tally else self.renewals.get(key)
        return None if record is None else record.SerializeToString()

    def replace(self, name: str, data: bytes | None) -> None:
        """Replace the record of this name, or remove it with None."""
        key = name[1:]
        if name.startswith(_TALLY):
            self.tallies.pop(int(key), None)
            if data is not None:
                self.tallies[int(key)] = StepTally.FromString(data)
        else:
            self.renewals.pop(key, None)
            if data is not None:
                self.renewals[key] = RenewalRecord.FromString(data)
