"""Tells records that a newer Penstock wrote: another broker of the run may be able to read them."""

from __future__ import annotations

from penstock.errors import ServiceUnavailableError


def check_format(what: str, *, run_id: str, stored: int, reads: int) -> None:
    """Return if records of the format `stored` can be read by what reads up to `reads`; `what` names them.

    Raises:
        ServiceUnavailableError: They cannot. Clients go on at the next broker of their list, which is how brokers are
            upgraded one by one.
    """
    if stored > reads:
        raise ServiceUnavailableError(
            f"{what} was written by a newer Penstock (format {stored}, this broker reads {reads}): "
            "upgrade this broker, too, or use a newer one",
            run_id=run_id,
        )
