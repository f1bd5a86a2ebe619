"""The section `page` of a run's configuration."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from penstock.config import StrictModel
from penstock.targets import checked_address


class PageSection(StrictModel):
    """The page on which a run is looked at, and what is kept for it."""

    serve: bool = True
    """Whether `penstock run` serves it while the run goes on."""
    listen: Annotated[str, AfterValidator(checked_address)] | None = None
    """Its address, host:port; if null, a free port of 127.0.0.1."""
    groups_per_step: int = Field(default=2, ge=0, le=1024)
    """Groups of each step whose samples are kept in samples.jsonl of the run folder, unless `record` keeps all of them;
    0 keeps none."""
    max_sample_bytes: int = Field(default=32 * 1024 * 1024, ge=1024 * 1024)
    """Most bytes of samples.jsonl, and of logprob_gaps.jsonl, by which the trainer's log-probs of recorded samples are
    known; at that size every second one of its older steps goes."""
